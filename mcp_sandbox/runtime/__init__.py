"""The host side of the runner: typed calls over one multiplexed channel per sandbox.

    runtime      code, commands and shells
    files        file operations
    processes    commands by their ids
    doors        connections that programs inside make to places there
    channel      frames to and from one runner; `call` is one that is under way

It trusts no byte of the other side, and knows no chats, no policy and no MCP.
"""
