"""Options that several commands have, and what is meant by them."""

import difflib
import sys
from pathlib import Path
from typing import Annotated

import anyio
import typer

from mcp_sandbox.config import Config
from mcp_sandbox.errors import InvalidArgument, UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills import models
from mcp_sandbox.skills.catalogue import Catalogue

User = Annotated[str, typer.Option("--user", metavar="USER", help="Whose skills.")]
Skill = Annotated[str, typer.Argument(metavar="NAME", help="A skill: its name, or ROOT/NAME.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
NoSandbox = Annotated[
    bool, typer.Option("--no-sandbox", help="Do not ask a sandbox what it lacks.")
]
Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH…", help="A skill's folder, its SKILL.md, or a folder of skills."),
]


def checked_user(user: str) -> str:
    """Return the user, or end with a word about how it is used."""
    try:
        return ChatId(user, "any").user
    except InvalidArgument as exc:
        raise typer.BadParameter(str(exc)) from exc


def find(known: Catalogue, name: str) -> models.Skill:
    """Return the skill of that name.

    Raises:
        UnknownSkill: there is none; the message names the nearest.
    """
    try:
        return known.find(name)
    except UnknownSkill as exc:
        near = difflib.get_close_matches(name[:64], [skill.name for skill in known.skills], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UnknownSkill(
            f"there is no skill {name[:100]!r}: {hint}`mcp-sandbox skills list` shows all"
        ) from exc


def catalogue(config: Config, user: str) -> Catalogue:
    """Return what is offered to all chats of a user; what one has in its own files is not."""
    from mcp_sandbox.skills.library import Library

    return anyio.run(Library(config.skills, config.data_dir).catalogue, checked_user(user))


def agreed(yes: bool, question: str, done: str) -> None:
    """Ask, unless `yes`; without consent end, and say that nothing was `done`."""
    try:
        if yes or typer.confirm(question, err=True):
            return
    except typer.Abort:
        print(file=sys.stderr)  # The question is still on its line.
    print(f"nothing was {done}; --yes does it without asking", file=sys.stderr)
    raise typer.Exit(1)
