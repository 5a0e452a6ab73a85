"""The runner as a server, and the frames that both ends speak.

server             listens, starts calls, ends itself when it is of no more use
connection         the proof of the token, then frames into calls and replies
protocol           the frames; the host uses the same file
terminal_frames    the frames of a terminal, from a person's keyboard to the shell
"""
