"""Finds the rule for a target: first deny, then the narrowest that allows it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import idna
import yaml

from mcp_sandbox.config import AllowConfig, EgressConfig
from mcp_sandbox.egress.targets import RefusedError, Target, parse_target
from mcp_sandbox.errors import ConfigError, InvalidArgument

PORTS = frozenset({80, 443})
"""The ports of a rule that names none."""
_PRESETS = Path(__file__).with_name("presets.yaml")


@dataclass(frozen=True)
class EgressRule:
    """A host, or `*.` and a name for its subdomains at any depth, and ports; none = every port.

    `read`: only requests that read may pass. `private`: its addresses need not be public. `source`
    says who made the rule.
    """

    host: str
    ports: frozenset[int] = PORTS
    read: bool = False
    private: bool = False
    source: str = "egress.allow"

    def __str__(self) -> str:
        port = f":{min(self.ports)}" if len(self.ports) == 1 else ""
        return f"{self.host}{port}{' (read only)' if self.read else ''}"

    def names(self, host: str) -> bool:
        return host.endswith(self.host[1:]) if self.host.startswith("*") else host == self.host

    def covers(self, target: Target) -> bool:
        """Return whether the rule names this host and port."""
        return self.names(target.host) and (not self.ports or target.port in self.ports)

    @property
    def width(self) -> tuple[bool, int, int]:
        """A sort key: of two rules for one target the narrower has the smaller key."""
        return self.host.startswith("*"), -self.host.count("."), len(self.ports) or 1 << 16


@dataclass(frozen=True)
class EgressRules:
    """The operator's rules; of two for the same target, the first counts."""

    allow: tuple[EgressRule, ...] = ()
    deny: tuple[EgressRule, ...] = ()

    def judge(
        self, target: Target, grants: Sequence[EgressRule] = ()
    ) -> tuple[EgressRule | None, str]:
        """Return the rule that allows a target to a chat with these grants, or None, and why."""
        for rule in self.deny:
            if rule.covers(target):
                return None, f"{rule.source} names {rule}"
        known = [*grants, *self.allow]
        if found := [rule for rule in known if rule.covers(target)]:
            # Only an operator's rule allows private addresses, so a grant must not hide it.
            rule = min(found, key=lambda rule: (rule.width, not rule.private))
            return rule, f"{rule.source} names {rule}"
        if any(rule.names(target.host) for rule in known):
            return None, f"no rule allows port {target.port} of this host"
        return None, "no rule allows it"


def read_egress_rules(settings: EgressConfig) -> EgressRules:
    """Return the rules of the settings, then those of presets.

    Raises ConfigError: a rule cannot be understood, or contradicts another.
    """
    presets = _presets()
    own, listed = list[EgressRule](), list[EgressRule]()
    try:
        for entry in settings.allow:
            if isinstance(entry, AllowConfig):
                text = f"{entry.host}:{entry.port}" if entry.port else entry.host
                own.append(parse_rule(text, read=entry.read, private=entry.private))
            elif entry in presets:
                source = f"preset {entry}"
                listed += [parse_rule(host, source, read=True) for host in presets[entry]]
            else:
                own.append(parse_rule(entry))
        deny = [parse_rule(text, "egress.deny", ports=frozenset()) for text in settings.deny]
        _contradiction(own, deny)
    except ValueError as exc:
        raise ConfigError(f"egress: {exc}") from exc
    return EgressRules((*own, *listed), tuple(deny))


def parse_rule(
    text: str,
    source: str = "egress.allow",
    *,
    ports: frozenset[int] = PORTS,
    read: bool = False,
    private: bool = False,
) -> EgressRule:
    """Return the rule for HOST[:PORT]; `ports` are used if the text names none.

    Raises InvalidArgument: the text cannot be a rule.
    """
    name, colon, _ = text.partition(":")
    star = "*." if name.startswith("*.") else ""
    try:
        host = name.removeprefix(star)
        ascii_host = host.encode() if host.isascii() else idna.encode(host, uts46=True)
        target = parse_target(ascii_host + text[len(name) :].encode(), 443)
    except (RefusedError, UnicodeError) as exc:
        how = "write HOST, HOST:PORT or *.HOST, such as *.example.org"
        raise InvalidArgument(f"{text!r} is no host for a rule: {exc}; {how}") from exc
    if star and "." not in target.host:
        raise InvalidArgument(f"{text!r} is too wide: write two labels or more after the *.")
    if private and (star or not colon):
        raise InvalidArgument(f"{text!r} is private: write its one host and its port")
    if "." not in target.host and not private:
        presets = ", ".join(_presets())
        raise InvalidArgument(f"{text!r} is no preset here ({presets}) and has no dot: correct it")
    ports = frozenset({target.port}) if colon else ports
    return EgressRule(star + target.host, ports, read, private, source)


def _contradiction(allow: Sequence[EgressRule], deny: Sequence[EgressRule]) -> None:
    for at, rule in enumerate(allow):
        if any(other.host == rule.host and other.ports & rule.ports for other in allow[:at]):
            raise ValueError(f"allow has {rule.host} twice for one port: keep one")
        for each in deny:
            if each.names(rule.host) and (not each.ports or rule.ports <= each.ports):
                raise ValueError(f"allow has {rule}, which deny refuses by {each}: remove one")


def _presets() -> dict[str, list[str]]:
    try:
        found: dict[str, list[str]] = yaml.safe_load(_PRESETS.read_text(encoding="ascii"))
    except (OSError, UnicodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"cannot read {_PRESETS}: {exc}; install mcp-sandbox again") from exc
    return found
