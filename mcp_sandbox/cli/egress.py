"""`egress`: what leaves sandboxes, and what a person allows to one chat."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from mcp_sandbox.cli.control import Chat, answer
from mcp_sandbox.cli.options import (
    AsJson,
    Socket,
    Yes,
    by_person,
    console,
    flag,
    given,
    lifetime,
    printable,
    show_bytes,
    table,
    tell,
    utc,
)

group = typer.Typer(no_args_is_help=True, help="See and change which hosts a chat may reach.")
Host = Annotated[str, typer.Argument(metavar="HOST[:PORT]", help="Without a port: 80 and 443.")]
_DAY_S = 86_400.0


@group.command(name="list")
def list_(chat: Chat, as_json: AsJson = False, socket: Socket = None) -> None:
    """Show the rules and grants of a chat, what it reached, and what was refused to it."""
    found = answer(socket, "egress", {"do": "list", "chat": chat})
    rows = [*((f"never {row['host']}", row["by"]) for row in found["denied"])]
    rows += ((row["host"], row["by"]) for row in found["rules"])
    tell(found, table("allowed", "by", rows=rows), as_json=as_json)
    if (places := found["places"]) and not as_json:
        columns = ("host", "allowed", "refused", "sent", "received", "refused because")
        console().print(table(*columns, rows=map(_place, reversed(places))))


def _place(place: Mapping[str, Any]) -> tuple[str, ...]:
    counts = str(place["allowed"]), str(place["refused"])
    sizes = show_bytes(place["sent"]), show_bytes(place["received"])
    return printable(place["name"]), *counts, *sizes, printable(place["why"])


@group.command()
def allow(
    chat: Chat,
    host: Host,
    read: Annotated[bool, flag("Only requests that read.", "--read")] = False,
    for_s: Annotated[
        float, given("--for", "TIME", "For how long.", parser=lifetime, show_default="1d")
    ] = _DAY_S,
    yes: Yes = False,
    socket: Socket = None,
) -> None:
    """Allow a chat a public host, from its next connection on."""
    arguments = {"chat": chat, "host": host, "read": read, "by": by_person(yes), "for_s": for_s}
    done = answer(socket, "egress", {"do": "allow", **arguments})
    print(f"{done['chat']}: {done['rule']} is allowed until {utc(done['until_s'])}")


@group.command()
def deny(chat: Chat, host: Host, socket: Socket = None) -> None:
    """Take back what `allow` has allowed to a chat."""
    done = answer(socket, "egress", {"do": "deny", "chat": chat, "host": host})
    print(f"{done['chat']}: {host} is allowed no more; what is connected goes on")


@group.command()
def check(
    host: Host,
    chat: Annotated[str | None, given("--chat", "CHAT", "With the grants of this chat.")] = None,
    as_json: AsJson = False,
    socket: Socket = None,
) -> None:
    """Say whether a connection would be let out, and which rule decides; exit code 1 if not."""
    found = answer(socket, "egress", {"do": "check", "host": host, "chat": chat})
    word = "allowed" if found["allowed"] else "refused"
    tell(found, f"{found['target']} is {word}: {found['why']}", as_json=as_json)
    raise typer.Exit(0 if found["allowed"] else 1)
