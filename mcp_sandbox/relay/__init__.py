"""The relay on the host: an MCP client on stdin and stdout, the daemon on a unix socket.

`mcp-sandbox connect` is what clients start, once for every session, so it is up in the time of a
bare interpreter: standard library only, nothing else of ours, and what is not always needed is
imported late. It finds the daemon and greets it (place.py), starts one where there is none or it is
of another version (starting.py), and copies whole lines both ways (copying.py). It remembers which
requests are open: when the daemon goes, they are answered with what happened, and the next request
finds or starts another daemon. No call is ever sent twice. This room understands of MCP only ids,
method names and the older era's handshake.
"""
