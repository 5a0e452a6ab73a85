"""The HTTP API by which a platform steers chats and works in their sandboxes.

    lifecycle   the application: prepare, pause, resume, terminate, and what is known of sessions
    work        commands, files and previews of one session

Decides nothing that the session manager decides. Knows no MCP; the guard of `web` lets in to it.
"""
