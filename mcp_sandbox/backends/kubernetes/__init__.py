"""The kubernetes backend: a sandbox is an object of a cluster that is there already.

backend        makes, finds, pauses and removes them
watch          one watch of each kind
objects        what is sent for a sandbox: a Sandbox of agents.x-k8s.io, a claim of a warm pool, or
               a Pod and its volume
verify         the operator's template, and whether a live pod is weaker than asked for
network        NetworkPolicies, and whether the cluster enforces them
manifests      what a cluster gets once: a Role, a server, a quota, a warm pool
client         talks to the API server: the only file that imports its library
exec_stream    reaches the runner over an exec's WebSocket

A sandbox is the object that keeps its files, or is asked for them; its pod comes and goes. The
secret of its channel is derived from a key of this data root and the pod, and given to it by an
exec.
"""
