"""Sandboxes of unprivileged namespaces, made with the program bwrap; no engine and no image.

backend.py creates, finds and ends them; host.py finds out once what the machine offers: programs
(program.py) and control groups (cgroups.py); arguments.py and seccomp.py make a sandbox's files and
system call filter; launch.py starts bwrap as the sandbox's user and holds it until its limits are
set; verify.py checks the result from outside and refuses what is weaker than requested.

Inside are /usr and a small /etc, both read-only, and the mounts of the spec: never the host's
root. A sandbox outlives its server until it is idle; any server of the data root can attach.
Without its walls (isolation) this is the backend unsafe-local, which shows all of the host.
"""
