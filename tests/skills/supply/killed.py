"""Changes of installed skills, and how to be killed in the middle of one without a last word."""

import os
import signal
import sys

from mcp_sandbox.skills.supply.installed import InstalledSkills
from mcp_sandbox.skills.supply.tree import SourceFile, Tree

USER = "local"
NAME = "pdf"


def version(number: int) -> Tree:
    """Return the files of a skill, which all say which version they are of."""
    text = f"---\nname: pdf\ndescription: Version {number}.\n---\n".encode()
    return {"SKILL.md": SourceFile(text), f"scripts/{number}.sh": SourceFile(text, executable=True)}


def put(installed: InstalledSkills, number: int) -> None:
    before = {state.name: state.tree for state in installed.states()}.get(NAME)
    installed.put(NAME, version(number), f"./{number}", instead_of=before)


def change(installed: InstalledSkills, what: str) -> None:
    if what == "remove":
        installed.remove(NAME)
    else:
        put(installed, int(what))


def change_and_die(installed: InstalledSkills, what: str, after: int) -> None:
    """Begin a change and be killed at so many-th event (files opened, renamed, removed …) of it."""
    left = after

    def count(event: str, _arguments: object) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    change(installed, what)
