"""Sandboxes of unprivileged namespaces, made with the program bwrap; no engine and no image.

backend.py makes, finds and ends them. host.py looks once at what the machine offers (program.py,
cgroups.py); arguments.py and seccomp.py say what a sandbox holds and which system calls it may
make; launch.py starts bwrap as the sandbox's user and holds it until its limits are set; verify.py
looks at the result from outside and refuses what is weaker than promised.

Inside are /usr and a small /etc, both read-only, and the mounts of the spec: never the host's
root. A sandbox outlives its server until it is idle; any server of the data root can attach.
The backend unsafe-local shows all of the host instead.
"""
