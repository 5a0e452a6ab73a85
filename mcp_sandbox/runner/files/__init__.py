"""File operations, as a worker does them: one process, one operation, killed when cancelled.

    operations    the table of them; each takes a Call and returns a small result or raises OpError
    call, paths   checked arguments, and which file a path means
    reading, writing, moving, search, walk
    archive       a chat's files, packed into one stream and unpacked from it
    nearest       which lines come nearest to a text that is not there
    kept          what the runner itself keeps, in a place that code inside owns

It runs as the sandbox user inside the sandbox, so a planted link reaches nothing that the user's
own code could not reach. It knows no commands, and of the protocol its error alone.
"""
