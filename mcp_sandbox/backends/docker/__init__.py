"""The docker backend: a hardened container per sandbox.

backend.py creates, finds and removes sandboxes. engine.py finds the engine as the docker command
line does and explains its errors; client.py, the only user of Docker's library, talks to it;
exec_stream.py reaches the runner where its socket cannot be mounted; spec.py makes the request for
a container, verify.py compares the result with it; images.py builds and checks images.
"""
