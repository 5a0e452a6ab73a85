"""One process that owns the sandboxes of a data root, and the way to talk to it.

    lock       one daemon per data root and per socket
    listener   the unix socket; door lets clients in, who greet first (greeting)
    daemon     its life, from listening to the ending
    control    what a person may ask of it: chats, terminal (`shell`), recent_log
    client     the command line's side of that
    tokens     who may come over HTTP

What a client of a chat says is handed on unread: this room knows no MCP.
"""
