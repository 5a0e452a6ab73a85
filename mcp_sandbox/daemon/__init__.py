"""One process that owns the sandboxes of a data root, and the way to talk to it.

    lock              one daemon per data root, one listener per socket
    acceptor          lets clients in, who greet first
    daemon            its life, from listening to the ending, and what a person may ask of it
    chats             commands about chats, a shell, files in and out, coding agents at work
    control_client    the command line's side of that

What a client of a chat says is handed on unread: this room knows no MCP.
"""
