"""The runner: pid 1 inside every sandbox. Standard library only, Python 3.9 or newer.

    wire/       the server on a unix socket: proof of the token, frames into calls and replies
    kernel/     what the standard library loads too slowly or lacks: signals, processes, the loop
    calls/      commands and their output, shells, terminals, connections through the runner
    workers/    the processes that do one job at a time: files, Python, notebooks
    files/      the file operations

Each call goes to a worker: a forked process that does one job, as the subreaper of whatever the
job starts, so that no descendant can hide. A warm interpreter forks for each piece of Python.

The modules that load before the first call get by without `typing` (TYPE_CHECKING is a plain
constant there): it would be a third of the start-up time. No folder here imports anything when it
is imported itself. The runner imports nothing else of this package, and trusts user code with
nothing.
"""
