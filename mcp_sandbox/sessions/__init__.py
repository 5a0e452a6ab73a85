"""Which chat holds which sandbox, and how long.

    manager         all chats of one data root; finds the session of one
    session         one chat's computer, as a caller sees it
    gate            the one way into a sandbox: judged, limited, recorded
    approvals       what persons allow and refuse
    doors           what leaves sandboxes, by which grants; `previews`: what a browser reaches
    skills          what a chat is offered to learn; `skill_pins`: the versions that it sees
    chat_records    what is remembered of a chat, and the lock that keeps other servers out
    settings        what the operator sets
    saving          when files of chats are saved to an object store, and when they come back
    cleaning        removes old files, trash, left sandboxes and unused ones
    sandbox/        one chat's sandbox: opened at the first call, replaced when it has died

This room knows no MCP and no engine.
"""
