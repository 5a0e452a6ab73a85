"""`approvals`: the calls of agents that wait for a person's word."""

from typing import Annotated

import typer

from mcp_sandbox.cli.control import answer
from mcp_sandbox.cli.options import (
    LEADS,
    AsJson,
    Group,
    Yes,
    by_person,
    flag,
    printable,
    table,
    tell,
    utc,
)

group = Group("See and answer what agents need your consent for.", *LEADS)
Id = Annotated[str, typer.Argument(metavar="ID", help="Its four letters and digits.")]
_STATES = {"open": "waits", "once": "allowed once", "chat": "allowed in this chat", "no": "refused"}


@group.command(name="list")
def list_(as_json: AsJson = False) -> None:
    """List what waits for an answer, and the answers that hold."""
    found = answer("approvals", {"do": "list"})["approvals"]
    rows = (
        (
            row["id"],
            row["chat"],
            _STATES.get(row["state"], row["state"]),
            utc(row["until_s"]),
            printable(row["effect"], ""),
        )
        for row in reversed(found)
    )
    output = table("id", "chat", "state", "until", "what", rows=rows)
    tell(found, output, as_json=as_json, none="nothing waits")


@group.command()
def show(approval: Id, as_json: AsJson = False) -> None:
    """Show all of one call."""
    found = answer("approvals", {"do": "show", "id": approval})
    head = f"{found['chat']} {_STATES.get(found['state'], '')} until {utc(found['until_s'])}"
    lines = (head, printable(found["effect"], ""), f"{found['what']}:", printable(found["text"]))
    tell(found, "\n".join(lines), as_json=as_json)


@group.command()
def allow(
    approval: Id,
    for_chat: Annotated[bool, flag("Also every other call like it in its chat.", "--chat")] = False,
    yes: Yes = False,
) -> None:
    """Allow a call; the agent makes it again."""
    _answer(approval, "chat" if for_chat else "once", yes)


@group.command()
def deny(approval: Id, yes: Yes = False) -> None:
    """Refuse a call, and what is like it for ten minutes."""
    _answer(approval, "no", yes)


def _answer(approval: str, word: str, yes: bool) -> None:
    given = {"do": "answer", "id": approval, "word": word, "by": by_person(yes)}
    done = answer("approvals", given)
    print(f"{done['chat']}: {_STATES[done['state']]} until {utc(done['until_s'])}")
