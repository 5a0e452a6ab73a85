"""What Linux offers, as the runner uses it.

native       the C halves of `signal`, `socket` and `json`
processes    what the kernel tells of processes, and how a whole tree of them ends
loop         a small epoll loop: descriptors, timers, SIGCHLD

Knows no calls and no frames: nothing else of the runner is imported here.
"""
