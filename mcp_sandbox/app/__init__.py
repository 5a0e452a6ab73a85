"""Composition: turns a configuration into a running application.

    chats          the manager of sessions over a backend; `open_session`; stdio
    daemon         `mcp-sandbox serve`: one MCP server for all clients of a socket, and over HTTP
    control        the HTTP API of platforms, when it is enabled
    agents         `open_agent`: an assistant, a chat's computer, and the ways out of it
    demo           `mcp-sandbox demo`

The only room that names concrete backends, and the only one that chooses a module at run time:
libraries of what is not used are not loaded. It decides nothing else.
"""
