"""One process that owns the sandboxes of a data root, and its unix socket.

    claim      locks: one daemon per data root, one listener per socket
    door       accepts clients and reads their first line
    daemon     the daemon's life from start to end, and its control commands
    chats, agents, copying    further commands: about chats, coding agents, and files
    client     the command line's side of the socket
    tokens     bearer tokens for users who connect over HTTP

A chat client's messages are passed on unread: this package knows no MCP.
"""
