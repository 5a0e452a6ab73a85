"""`skills …`: what agents can be taught, where it comes from, and what is wrong with it.

`check` looks at skills; `install` changes which there are.
Exit codes: 0 fine, 1 problems were found or nothing was done, 2 wrong usage.
"""

from mcp_sandbox.cli.options import Group
from mcp_sandbox.cli.skills import check, install

group = Group("See, check and install skills: folders with a SKILL.md.", "data", "config")
group.command(name="list")(check.list_skills)
group.command()(check.show)
group.command(leads=())(check.validate)
group.command()(check.doctor)
group.command()(install.add)
group.command()(install.remove)
group.command()(install.update)
group.command()(install.lock)
