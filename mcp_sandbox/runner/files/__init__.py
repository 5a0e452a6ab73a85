"""File operations, as a worker runs them: one process, one operation, killed when cancelled.

operations.py lists them by name; each takes a Call and returns a small result or raises OpError.
They run as the sandbox user inside the sandbox, so a planted link reaches nothing that the user's
own code could not reach.
"""
