"""The calls that a runner answers, as its pid 1 sees them.

command           commands and code, killed as whole trees
table             the commands by id, and the callers that wait for one
output            what a command prints: both ends of it, and the file that keeps the whole
operation         a file operation, or a person's shell, run by a worker
plain             output without what steers a terminal, and the search for a text in it
shell             the bash text by which a shell remembers
terminal          a shell or command on a terminal, frames in and out
terminal_input    what is typed at a command's terminal, and when its screen rests
doors             connections to ports inside, and from places inside to the host
"""
