"""The host side of the runner: typed calls over one multiplexed channel per sandbox.

channel.py speaks frames and trusts no byte of the other side; runtime.py (code and commands)
and files.py (file operations) turn calls into frames and replies into values. This room knows
no chats, no policy and no MCP.
"""
