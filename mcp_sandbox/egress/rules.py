"""Finds the rule for a target: first deny, then the narrowest that allows it. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcp_sandbox.egress.targets import Target

PORTS = frozenset({80, 443})
"""The ports of a rule that names none."""


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


def write_rule(rule: EgressRule) -> dict[str, Any]:
    """Return a rule as JSON can have it."""
    return {**asdict(rule), "ports": [*rule.ports]}


def read_rule(fields: dict[str, Any]) -> EgressRule:
    """Return the rule that was written so."""
    return EgressRule(**{**fields, "ports": frozenset(fields["ports"])})
