"""What the agent can be taught: folders with a `SKILL.md` (agentskills.io).

Loading is lenient and judging is strict: what can be used is used, everything that is wrong with
it is a diagnostic, and no folder with a `SKILL.md` in any spelling vanishes in silence. Skills
come from people who may not mean well: their bytes are bounded before they are parsed, their
files are opened beneath their folder, and nothing of them runs outside a sandbox.

This room knows no chats' sandboxes and no MCP. `models` has the words, `library` the way in.

    finding     library: watch, shelves, scan, sweep over the roots; listing, links, stamps
    a SKILL.md  parse by front_matter and rules; quoting and core_schema for its YAML
    its files   contents by files, junk and media; uris; snapshots and pins are copies of them
    offering    catalogue, overview; finder by search, words, outline; pages; allowed_tools
    judging     examine by judge and references; strict is the reference tool's view; sarif
    mending     repair, which writes by block_yaml
    its needs   findings by scripts/; layers, inventory and preflight: what is lacking; examples
    installing  supply/
"""
