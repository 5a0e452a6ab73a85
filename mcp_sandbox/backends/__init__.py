"""Where a sandbox lives: backends start a runner in isolation and open byte channels to it.

    base               the two protocols that each backend meets
    docker/            a hardened container per sandbox
    bubblewrap/        unprivileged namespaces, no engine needed; with its walls off: unsafe-local
    sandbox_records    what is kept on disk of a sandbox on this machine
    local_socket       connects to a runner whose directory is shared with this machine
    runner_copy        the runner as sandboxes get it
    skill_copy         skills as sandboxes without mounts get them

A backend knows no chats, no files, no tools and no other backend.
"""
