"""What a skill needs, found by reading its scripts: imports, commands, hosts, variables.

    findings    the needs of a whole skill, and what of them a sandbox lacks
    uses        what the readers of the languages write down
    python      reads Python
    shell       reads shell and JavaScript

Nothing is run, and no sandbox is known here: what one has comes as an inventory.
"""
