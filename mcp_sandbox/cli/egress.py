"""`egress` and `secrets`: what leaves sandboxes, what a person allows, which values go along."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import typer

from mcp_sandbox.cli.control import Chat, answer
from mcp_sandbox.cli.options import (
    LEADS,
    AsJson,
    Group,
    Yes,
    by_person,
    console,
    flag,
    given,
    lifetime,
    load,
    printable,
    show_bytes,
    table,
    tell,
    utc,
)
from mcp_sandbox.config.values import DAY_S

if TYPE_CHECKING:
    from mcp_sandbox.egress.secrets import Secrets, SecretState

egress_commands = Group("See and change which hosts a chat may reach.", *LEADS)
Host = Annotated[str, typer.Argument(metavar="HOST[:PORT]", help="Without a port: 80 and 443.")]
secret_commands = Group("See the secrets that hosts get, and sandboxes do not.", "config")


@egress_commands.command(name="list")
def list_(chat: Chat, as_json: AsJson = False) -> None:
    """Show the rules and grants of a chat, what it reached, and what was refused to it."""
    found = answer("egress", {"do": "list", "chat": chat})
    rows = [*((f"never {row['host']}", row["by"]) for row in found["denied"])]
    rows += ((row["host"], row["by"]) for row in found["rules"])
    tell(found, table("allowed", "by", rows=rows), as_json=as_json, none="no host is allowed")
    if (places := found["places"]) and not as_json:
        columns = ("host", "allowed", "refused", "sent", "received", "refused because")
        console().print(table(*columns, rows=map(_place, reversed(places))))


def _place(place: Mapping[str, Any]) -> tuple[str, ...]:
    counts = str(place["allowed"]), str(place["refused"])
    sizes = show_bytes(place["sent"]), show_bytes(place["received"])
    return printable(place["name"]), *counts, *sizes, printable(place["why"])


@egress_commands.command()
def allow(
    chat: Chat,
    host: Host,
    read: Annotated[bool, flag("Only requests that read.", "--read")] = False,
    for_s: Annotated[
        float, given("--for", "TIME", "For how long.", parser=lifetime, show_default="1d")
    ] = float(DAY_S),
    yes: Yes = False,
) -> None:
    """Allow a chat a public host, from its next connection on."""
    arguments = {"chat": chat, "host": host, "read": read, "by": by_person(yes), "for_s": for_s}
    done = answer("egress", {"do": "allow", **arguments})
    print(f"{done['chat']}: {done['rule']} is allowed until {utc(done['until_s'])}")


@egress_commands.command()
def deny(chat: Chat, host: Host) -> None:
    """Take back what `allow` has allowed to a chat."""
    done = answer("egress", {"do": "deny", "chat": chat, "host": host})
    print(f"{done['chat']}: {host} is allowed no more; what is connected goes on")


@egress_commands.command()
def check(
    host: Host,
    chat: Annotated[str | None, given("--chat", "CHAT", "With the grants of this chat.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a connection would be let out, and which rule decides; exit code 1 if not."""
    found = answer("egress", {"do": "check", "host": host, "chat": chat})
    word = "allowed" if found["allowed"] else "refused"
    tell(found, f"{found['target']} is {word}: {found['why']}", as_json=as_json)
    raise typer.Exit(0 if found["allowed"] else 1)


@secret_commands.command(name="list")
def list_secrets(as_json: AsJson = False) -> None:
    """List the secrets: the hosts that get them, in which header, for whose chats."""
    _tell(_secrets().states(), as_json=as_json)


@secret_commands.command(name="check")
def check_secrets(as_json: AsJson = False) -> None:
    """Ask each source as a running server would, and tell how long the value is, never the value.

    Ends with 1 if one of them does not give a value that can be used.
    """
    states = anyio.run(_secrets().check)
    _tell(states, as_json=as_json)
    raise typer.Exit(1 if any(state.problem for state in states) else 0)


def _secrets() -> "Secrets":
    from mcp_sandbox.egress.secrets import Secrets

    return Secrets(load().config.secrets, seed=b"")


def _tell(states: "Sequence[SecretState]", *, as_json: bool) -> None:
    rows = (
        (state.name, ", ".join(state.hosts), state.header, ", ".join(state.users), value)
        for state in states
        for value in [state.problem or (f"{state.length} bytes" if state.length else "not asked")]
    )
    output = table("secret", "hosts", "header", "users", "value", rows=rows)
    none = "there are no secrets in the configuration"
    tell([asdict(state) for state in states], output, as_json=as_json, none=none)
