"""Coding agents that work inside a chat's sandbox, and how they reach their model.

An *executor* knows one agent program: how it is started, and what the lines that it prints mean. A
*run* is one request to it, told as *events*, the last of which is its *completion*.

    assistants    how an agent behaves: a folder of the operator's; `hooks` is its code around a run
    run           prepares, starts, listens to, bounds and cleans up a run; `events` are its lines
    messages      the messages of a request, checked
    executors/    one file for each agent program
    connectors    the model services and their keys
    gateway       the way of one run to its model

A *connector* is a model service with its key; the key stays in this process. For each run a
*gateway* takes the program's requests, which name a token of the run, and passes on those that
may go. What comes from inside is hostile, every byte of it. This room knows no MCP.
"""
