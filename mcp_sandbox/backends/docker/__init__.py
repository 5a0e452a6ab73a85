"""The docker backend: a hardened container per sandbox.

engine.py finds the engine as the docker command line does; client.py talks to it and is the only
file that imports its library; exec_stream.py reaches the runner, over an exec where its socket
cannot be mounted. spec.py says what a container looks like and which system calls it may make,
verify.py whether it came out that way. images.py builds what containers start from.
"""
