"""The docker backend: a hardened container per sandbox.

engine.py finds the engine as the docker command line does; client.py talks to it and is the only
file that imports its library; dial.py and exec_stream.py reach the runner where its socket cannot
be mounted. spec.py says what a container looks like, verify.py whether it came out that way,
seccomp.py which system calls it may make. images.py builds what containers start from.

It knows no chats, no files and no tools: a spec comes in, a byte channel goes out.
"""
