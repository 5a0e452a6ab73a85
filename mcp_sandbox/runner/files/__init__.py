"""File operations, as a worker does them: one process, one operation, killed when cancelled.

operations.py is the table of them; each takes a Call and returns a small result or raises OpError.
It runs as the sandbox user inside the sandbox, so a planted link reaches nothing that the user's
own code could not reach.
"""
