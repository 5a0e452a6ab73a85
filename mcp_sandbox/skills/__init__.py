"""What the agent can be taught: folders with a `SKILL.md` (agentskills.io).

Loading is lenient and judging is strict: what can be used is used, everything that is wrong with
it is a diagnostic, and no folder with a `SKILL.md` in any spelling vanishes in silence. Skills
come from people who may not mean well: their bytes are bounded before they are parsed, their
files are opened beneath their folder, and nothing of them runs outside a sandbox.

This room knows no chats' sandboxes and no MCP. `models` has the words, `library` the way in.

    finding     library: scan over the roots
    a SKILL.md  parse by front_matter
    its files   contents; uris; pins are the copies that a chat sees
    offering    catalogue, overview; finder; allowed_tools
    judging     examine, with the reference tool
    mending     repair
    its needs   findings by scripts/; preflight: what is lacking; examples
    installing  supply/
"""
