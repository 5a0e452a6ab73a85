"""Skills: folders with a `SKILL.md` that teach an agent something (agentskills.io).

Loading is lenient: a skill that can be used is used, everything wrong with it is a diagnostic, and
no folder with a `SKILL.md` in any spelling is left out silently. Skills are untrusted: their bytes
are bounded before they are parsed, and nothing of them runs outside a sandbox. This package knows
no chats' sandboxes and no MCP. Its types are in `models`; callers begin with `library`.

    find        library: polls the roots by scan
    parse       parse, front_matter: a SKILL.md
    files       contents, uris; pins: the copies that a chat sees
    offer       catalogue, overview; finder: search; allowed_tools
    check       examine, also by the reference tool; repair
    needs       findings by scripts/; preflight: what is missing; examples: what to try out
    install     supply/
"""
