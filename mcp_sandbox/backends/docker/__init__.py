"""The docker backend: a hardened container per sandbox.

backend        makes, finds and removes them
engine         finds the engine as the docker command line does
client         talks to it: the only file that imports its library
exec_stream    reaches the runner over an exec where its socket cannot be mounted
spec           what a container looks like, and whether it came out that way
images         builds what containers start from
"""
