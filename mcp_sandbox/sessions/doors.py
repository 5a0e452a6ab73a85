"""Connections of chats to allowed hosts: the grants of each chat, and notices of refusals.

`egress` judges a connection, and `runtime` carries it; this module knows of which chat it is.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, get_args

from mcp_sandbox.audit import Audit
from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.egress.rules import PORTS, EgressRule, write_rule
from mcp_sandbox.egress.secrets import Keys
from mcp_sandbox.egress.settings import parse_rule
from mcp_sandbox.egress.targets import HERE, Refusal, RefusedError, Target, parse_target
from mcp_sandbox.egress.ways_out import Door, Way, WaysOut
from mcp_sandbox.errors import InvalidArgument, NotFound, NotPermitted, StorageUnavailable
from mcp_sandbox.models import CERTIFICATES, ChatId, Mount
from mcp_sandbox.runtime.call import JsonObject
from mcp_sandbox.runtime.doors import PORT
from mcp_sandbox.sessions.chat_records import UseTimes
from mcp_sandbox.telemetry.logs import event

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
_BUNDLE, _PROXY = f"{CERTIFICATES}/ca-certificates.crt", f"http://127.0.0.1:{PORT}"
_VARIABLES = {
    # For plain HTTP curl reads the lower-case name alone.
    **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _PROXY),
    **dict.fromkeys(("NO_PROXY", "no_proxy"), "localhost,127.0.0.1,::1"),
    **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"), _BUNDLE),
    "NODE_USE_ENV_PROXY": "1",
}
_WORDS = ("allowed", *get_args(Refusal))
_NOTED = "egress"  # The key of a chat's record for its grants.
_MOST_CHATS, _MOST_PLACES, _MOST_TOLD, _MOST = 1000, 100, 5, 128


@dataclass(frozen=True)
class Grant:
    """A public host that the user has allowed to a chat; `until_s` is in seconds of the epoch."""

    host: str
    read: bool
    by: str
    until_s: float

    @cached_property
    def until(self) -> str:
        return datetime.fromtimestamp(self.until_s, UTC).strftime("%Y-%m-%d %H:%M UTC")

    @cached_property
    def rule(self) -> EgressRule:
        return parse_rule(
            self.host, read=self.read, source=f"grant of {self.by} until {self.until}"
        )


@dataclass
class HostTraffic:
    """What a chat has exchanged with a host and port since this server began."""

    allowed: int = 0
    refused: int = 0
    untold: int = 0
    why: str = ""
    sent: int = 0
    received: int = 0


class Egress:
    """The way out of the sandboxes of one manager, which all have the `mount`.

    `counts` has its connections by verdict.
    """

    def __init__(
        self,
        ways_out: WaysOut,
        certificates: Path,
        keys: Keys,
        ledger: UseTimes,
        audit: Audit,
    ) -> None:
        self.counts = Counter[str]()
        self._audit = audit
        keys.secrets.used = self._used
        self.mount = Mount(certificates, CERTIFICATES, read_only=True)
        self._ways_out, self._keys = ways_out, keys
        self._rules, self._secrets = keys.rules, keys.secrets
        self._records, self._clock = ledger.records, ledger.clock
        self._places: dict[ChatId, dict[Target | None, HostTraffic]] = {}

    def make_door(self, chat: ChatId, sandbox: Sandbox, tell: Tell) -> Door:
        """Return the door for an open sandbox of the chat; `tell` takes notices for the agent."""
        said = {
            "chat": [chat.user, chat.chat],
            "bound": [*map(write_rule, self._secrets.bound(chat))],
        }
        told, asked = partial(self._told, chat), partial(self._answer, chat)
        way = Way("egress", said, told, asked)
        of = sandbox.open_channel, sandbox.token, tell
        return Door(self._ways_out, way, *of, at=PORT, most=_MOST, shared=True)

    async def keep_open(self, door: Door) -> None:
        """Keep a door open until it is closed."""
        async with self._ways_out.open(door.way):
            await door.run()

    def variables(self, chat: ChatId) -> Mapping[str, str]:
        """Return the environment variables of every call of a chat."""
        return {**_VARIABLES, **self._secrets.placeholders(chat)}

    async def describe_network(self, chat: ChatId) -> str:
        """Return a description of the network of a chat's sandbox, in a few words."""
        rules = [*self._rules.allow, *await self._granted(chat)]
        names = dict.fromkeys(
            f"{each.source} (read only)" if each.source.startswith("preset") else str(each)
            for each in rules
        )
        secrets = (
            f"; {each.name} is a placeholder, which becomes the secret on its way in the header "
            f"{each.header} of HTTPS requests to {', '.join(each.hosts)}"
            for each in self._secrets.states(chat.user)
        )
        return (
            f"allowed hosts alone: {', '.join(names) or 'none'}; by HTTP_PROXY and HTTPS_PROXY, "
            f"which some programs do not know, such as Node.js before 22.21{''.join(secrets)}"
        )

    async def grants(self, chat: ChatId) -> Sequence[Grant]:
        """Return the grants of the chat that have not ended."""
        return self._current(await self._records.kept(chat, _NOTED))

    def _current(self, noted: Any) -> Sequence[Grant]:  # noqa: ANN401 - JSON of any version
        # Entries that only a newer version understands are ignored.
        with suppress(TypeError, InvalidArgument):
            grants = [Grant(**each) for each in noted or ()]
            return [each for each in grants if each.rule and each.until_s > self._clock().wall_s]
        return []

    async def _granted(self, chat: ChatId) -> Sequence[EgressRule]:
        return [grant.rule for grant in await self.grants(chat)]

    async def find_missing(self, chat: ChatId, hosts: Sequence[str], *, read: bool) -> list[str]:
        """Return those of the hosts that a chat may not yet read from, or without `read` write to.

        Raises:
            NotPermitted: no grant could help.
            InvalidArgument: one is no single public host.
        """
        grants, missing = await self._granted(chat), dict[str, None]()
        for text in hosts:
            wanted = parse_rule(text)
            if wanted.host == HERE or wanted.host.startswith("*"):
                raise InvalidArgument(f"{text!r}: name single hosts, and public ones")
            for target in (Target(wanted.host, port) for port in wanted.ports):
                rule, why = self._rules.judge(target, [wanted])
                if rule is None:
                    raise NotPermitted(f"{target} stays refused, whatever the user says: {why}")
                rule, _ = self._rules.judge(target, grants)
                if rule is None or (rule.read and not read):
                    missing[str(wanted)] = None
        return [*missing]

    async def allow(self, chat: ChatId, host: str, *, read: bool, by: str, for_s: float) -> Grant:
        """Allow HOST[:PORT] from the next connection on; this replaces an earlier grant of it.

        Raises:
            InvalidArgument: it is no public host.
        """
        grant = Grant(host, read, by, self._clock().wall_s + for_s)
        if grant.rule.host == HERE:
            raise InvalidArgument(
                f"{HERE} is this machine itself: only a rule of egress.allow with private: true "
                "and a port reaches it"
            )
        told = {"host": str(grant.rule), "read": read, "by": by, "until": grant.until}
        await self._audit.write("grant", user=chat.user, chat=chat.chat, **told)
        await self._replace(chat, grant.rule, grant)
        return grant

    async def deny(self, chat: ChatId, host: str) -> None:
        """Take a grant back, from the next connection on.

        Raises:
            NotFound: the chat has none of this host.
        """
        rule = parse_rule(host)
        if not await self._replace(chat, rule):
            raise NotFound(
                f"chat {chat} has no grant of {rule}: `mcp-sandbox egress list {_name(chat)}` "
                "shows what it has; what the configuration allows ends by egress.deny there"
            )
        told = {"host": str(rule), "what": "taken back"}
        await self._audit.write("grant", user=chat.user, chat=chat.chat, **told)

    async def _replace(self, chat: ChatId, rule: EgressRule, *new: Grant) -> bool:
        """Replace the grants of the same hosts and ports; return whether there were any."""
        same, had = (rule.host, rule.ports), False

        def replaced(noted: object) -> object:
            nonlocal had
            before = self._current(noted)
            kept = [each for each in before if (each.rule.host, each.rule.ports) != same]
            had = len(kept) < len(before)
            return [asdict(grant) for grant in (*kept, *new)]

        await self._records.keep(chat, _NOTED, replaced, self._clock().wall_s)
        return had

    async def check(self, text: str, chat: ChatId | None) -> Mapping[str, Any]:
        """Return which rule decides about HOST[:PORT] for a chat, or without grants, and why.

        Raises:
            InvalidArgument: it is no host.
        """
        grants = await self._granted(chat) if chat else []
        try:
            target = parse_target(text.encode(), 443)
        except RefusedError as exc:
            raise InvalidArgument(f"{text[:80]!r} is refused to every chat: {exc}") from exc
        rule, why = self._rules.judge(target, grants)
        return {"target": str(target), "allowed": bool(rule), "why": why}

    async def describe_traffic(self, chat: ChatId) -> Mapping[str, Any]:
        """Return the rules and grants of a chat, and its connections by host, the latest last."""
        rules = [*self._rules.allow, *await self._granted(chat)]
        places = self._places.get(chat, {}).items()
        return {
            "denied": [{"host": rule.host, "by": rule.source} for rule in self._rules.deny],
            "rules": [{"host": str(rule), "by": rule.source} for rule in rules],
            "places": [{"name": str(target or "?"), **asdict(each)} for target, each in places],
        }

    def take_notices(self, chat: ChatId) -> list[str]:
        """Return what was refused to the chat since the last time this was asked."""
        self._ways_out.take_news()
        untold = [each for each in self._places.get(chat, {}).items() if each[1].untold]
        news = [self._sentence(chat, *each) for each in untold[-_MOST_TOLD:]]
        if more := len(untold) - len(news):
            news.append(f"network: refused {more} more: mcp-sandbox egress list {_name(chat)}")
        for _, place in untold:
            place.untold = 0
        return news

    def _sentence(self, chat: ChatId, target: Target | None, place: HostTraffic) -> str:
        """Return the notice of a refusal, in the words that the client inside got."""
        times = f", {place.untold} times" if place.untold > 1 else ""
        said = f"network: refused {target or 'a request'}{times}: {place.why}"
        if target and not self._rules.judge(target)[0]:
            host = target.host if target.port in PORTS else str(target)
            with suppress(InvalidArgument):
                # Name the way to a grant only where one would help.
                if self._rules.judge(target, [parse_rule(host)])[0]:
                    # A grant to read is there where only writing was refused.
                    read = "" if "only reading" in place.why else " --read"
                    way = f"mcp-sandbox egress allow {_name(chat)} {host}{read}"
                    said += f". network_access asks the user for it, who can also type: {way}"
        return said

    def forget(self, chat: ChatId) -> None:
        """Forget the connections of a chat, which was emptied or removed."""
        self._places.pop(chat, None)

    async def _answer(self, chat: ChatId, said: JsonObject) -> JsonObject:
        """Answer what the process of the ways out asks of a chat."""
        grants: Sequence[EgressRule] = ()
        # Without the grants less is allowed.
        with suppress(StorageUnavailable):
            grants = await self._granted(chat)
        return await self._keys.answer(chat, grants, said)

    def _told(self, chat: ChatId, said: JsonObject, *_: object) -> None:
        """Count and log a connection; the latest places of the latest chats are kept."""
        # It comes from the process that strangers talk to: none of it may grow without end.
        target = Target(str(said["to"][0])[:253], int(said["to"][1])) if said["to"] else None
        why = str(said["why"])[:500].encode("utf-8", "replace").decode()
        word = _WORDS[_WORDS.index(said["word"])]
        sent, received, duration_ms = map(int, said["sums"])
        places = self._places[chat] = self._places.pop(chat, {})
        place = places[target] = places.pop(target, HostTraffic())
        if len(places) > _MOST_PLACES:
            del places[next(iter(places))]
        if len(self._places) > _MOST_CHATS:
            del self._places[next(iter(self._places))]
        place.sent, place.received = place.sent + sent, place.received + received
        self.counts[word] += 1
        to = vars(target) if target else {}
        sizes = {"sent": sent, "received": received, "duration_ms": duration_ms}
        if word == "allowed":
            place.allowed += 1
            event(logger, "connection", chat=str(chat), **to, verdict=word, rule=why, **sizes)
            return
        place.why, place.refused, place.untold = why, place.refused + 1, place.untold + 1
        self._audit.note("egress", chat, target=str(target or "?"), why=why)
        if word == "failed":
            self._ways_out.renew_soon()

    def _used(self, chat: ChatId, name: str, target: Target) -> None:
        self._audit.note("secret", chat, name=name, target=str(target))


def _name(chat: ChatId) -> str:
    """Return the chat's name as it is typed on the command line."""
    return chat.chat if chat.user == "local" else str(chat)
