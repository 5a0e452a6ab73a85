"""One process that owns the sandboxes of a data root, and the way to talk to it.

    claim      one daemon per data root, one listener per socket
    door       lets clients in, who greet first
    daemon     its life, from listening to the ending, and what a person may ask of it: chats
    agents     coding agents at work in chats
    copying    files that a person sends into a chat
    client     the command line's side of that
    tokens     who may come over HTTP

What a client of a chat says is handed on unread: this room knows no MCP.
"""
