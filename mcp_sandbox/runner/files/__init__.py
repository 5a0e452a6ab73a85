"""File operations, as a worker does them: one process, one operation, killed when cancelled.

operations.py is the table of all of them. Each takes a Call (call.py: checked arguments, and pipes
for the bodies) and returns a small result or raises OpError; problems.py turns what the kernel says
into words. paths.py says what a path means; walk.py goes through hostile trees by descriptors.

It runs as the sandbox user inside the sandbox, so a planted link reaches nothing that the user's
own code could not reach.
"""
