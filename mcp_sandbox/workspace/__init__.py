"""What survives every sandbox: the trees of a chat on the host.

The data root holds, for each chat, a *workspace* (mounted at /workspace) and a *home* (mounted at
the sandbox user's home).

    directory       the way in: `Workspaces`, with the trash
    layout          makes and checks the directories, and adds paths to them
    beneath         opens by directory file descriptor, and refuses what leads outside
    meter           walks and measures trees; `DiskUsage` is that of one chat
    retention       which files are due to go. Pure
    projects        shows the folder that a client works in; `project_copy` as a copy
    pool            trees of warm sandboxes
    users           who the trees of each chat belong to

Everything below a workspace is hostile: names, types, links, depth, and all of it may change
between two system calls. So host code never hands a path below a workspace to the kernel as one
string. For the same reason nothing below a workspace is ever the source of a mount (see `layout`).

It knows no sandboxes, no backends and no tools, and never reads or executes a chat's files.
"""
