"""Sandboxes of unprivileged namespaces, made with the program bwrap; no engine and no image.

    backend               makes, finds and ends them
    host                  looks once at what the machine offers
    arguments, seccomp    what a sandbox holds, and which system calls it may make
    launch                starts bwrap and holds it until its limits are set
    cgroups               bounds on memory, processes and processor time
    verify                looks from outside and refuses what is weaker than promised

Inside are /usr and a small /etc, both read-only, and the mounts of the spec: never the host's
root. A sandbox outlives its server until it is idle; any server of the data root can attach.
The backend unsafe-local shows all of the host instead.
"""
