"""What the agent sees: tools, results, errors. The only room that knows MCP.

    server        builds the server
    tools/        the tools, one file per family; a tool finds the session, makes one call, returns
    tool          checks the arguments, finds the session, turns every failure into text
    results       values into MCP content; `text` keeps it short, `errors`, `screen` of a terminal
    identity      which chat calls, and what its client does differently
    consent       asks the user of a chat about a call
    transports    one JSON object a line, over stdin and stdout or any byte stream
    bridge        the tools of the host that a program inside may call
    skills/       skills as resources, prompts and instructions

A tool decides nothing. This room knows no engine, no container and no file of the host.
"""
