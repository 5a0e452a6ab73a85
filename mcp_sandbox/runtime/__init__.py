"""The host side of the runner: typed calls over one multiplexed channel per sandbox.

channel: frames both ways, trusting no byte from inside; calls: the state of each call. runtime:
code, commands, shells; processes: commands by id; files: file operations; doors: connections that
programs inside make to the host. This package knows no chats, no policy and no MCP.
"""
