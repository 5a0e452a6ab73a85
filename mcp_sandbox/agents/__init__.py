"""Coding agents that work inside a chat's sandbox, and how they reach their model.

An *executor* knows one agent program: how it is started, and what the lines that it prints mean. A
*run* is one request to it, told as *events*, the last of which is its *completion*.

A *connector* is a model service with its key; the key stays in this process. For each run a
*gateway* takes the program's requests, which name a token of the run, and passes on those that
may go. What comes from inside is hostile, every byte of it. This room knows no MCP.
"""
