"""The relay's two ends: standard input and output here, a unix socket there.

    connect         `mcp-sandbox connect`, from the first instruction to the copying of bytes
    place           where the daemon is, and the greeting
    start_daemon    starts one where there is none, or one of another version
    copying         whole lines both ways, through one daemon after another
    inside          the program in a sandbox that joins its standard streams to a socket

`mcp-sandbox connect` is what clients start, once for every session, so it is up in the time of a
bare interpreter: standard library only, nothing else of this package, and what is not always
needed is imported late. It remembers which requests are open: when the daemon goes, they are
answered with what happened, and the next request finds or starts another daemon. No call is ever
sent twice. This room understands of MCP only ids, method names and the older era's handshake.
"""
