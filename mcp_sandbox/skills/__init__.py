"""What the agent can be taught: folders with a `SKILL.md` (agentskills.io).

Loading is lenient and judging is strict: what can be used is used, everything that is wrong with
it is a diagnostic, and no folder with a `SKILL.md` in any spelling vanishes in silence. Skills
come from people who may not mean well: their bytes are bounded before they are parsed, their
files are opened beneath their folder, and nothing of them runs outside a sandbox.

    skill                  the words: a skill, its uris, what is wrong with it
    library                the way in; `scan` looks through the roots
    parse, front_matter    a SKILL.md; `contents`: all files of a skill
    catalogue, search      what is offered, as text and by words
    validate               what is wrong with a whole folder
    declared               what a skill says that it needs, and what of that is missing
    supply/                where skills come from, and how they are installed

This room knows no chats' sandboxes and no MCP.
"""
