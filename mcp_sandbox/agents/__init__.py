"""Coding agents that work inside a chat's sandbox, and how they reach their model.

A *connector* is a model service with its key; the key stays in this process. For each run a
*gateway* takes the program's requests, which name a token of the run, and passes on those that
may go. What comes from inside is hostile, every byte of it. This room knows no MCP.
"""
