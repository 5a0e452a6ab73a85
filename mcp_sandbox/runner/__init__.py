"""The runner: pid 1 inside every sandbox. Standard library only, Python 3.9 or newer.

server.py is a small epoll server on a unix socket; connection.py proves a token to each client;
each call goes to a worker. worker.py is a forked process that does one job at a time, as the
subreaper of whatever the job starts, so that no descendant can hide. python.py keeps a warm
interpreter that forks for each piece of Python. files/ holds the file operations;
dial.py connects to ports inside, doors.py listens there for the host. protocol.py holds the frames,
the same file for both ends.

The modules that load before the first call do without `typing` (TYPE_CHECKING is a plain
constant there): it would be a third of the start-up time.

It imports nothing else of the project, and trusts nothing that user code writes.
"""
