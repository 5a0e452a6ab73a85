"""Which chat holds which sandbox, and how long.

session.py is one chat's computer and the one place where limits of a chat apply; manager.py
gets or creates it, once per chat. This room knows no MCP and no engine.
"""
