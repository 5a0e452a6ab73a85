"""Sandboxes of unprivileged namespaces, made with the program bwrap; no engine and no image.

backend.py makes, finds and ends them. host.py looks once at what the machine offers (program.py,
cgroups.py, etc.py); arguments.py and seccomp.py say, as pure functions, what a sandbox holds and
which system calls it may make; stage.py and launch.py start bwrap as the sandbox's user and hold
it until its limits are set (rlimits.py); verify.py looks at the result from outside and refuses
what is weaker than promised; remedies.py says what to do where it does not work.

Inside are /usr and a small /etc, both read-only, and the mounts of the spec: never the host's
root. A sandbox outlives its server until it is idle; any server of the data root can attach.
"""
