"""Which rule decides about a target: deny first, then the narrowest that allows it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_sandbox.config import EgressConfig
from mcp_sandbox.egress.targets import Target

PORTS = frozenset({80, 443})
"""What a rule without a port means."""


@dataclass(frozen=True)
class Rule:
    """A host, or `*.` and a name for its subdomains at any depth, and ports; none = every port.

    `read`: only what reads may pass. `private`: its addresses need not be public. `source` says
    who made it.
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
        """Whether the host is meant, at some port."""
        return host.endswith(self.host[1:]) if self.host.startswith("*") else host == self.host

    def covers(self, target: Target) -> bool:
        """Whether the target is meant."""
        return self.names(target.host) and (not self.ports or target.port in self.ports)

    @property
    def width(self) -> tuple[bool, int, int]:
        """How much it means: the narrower of two rules for one target is less."""
        return self.host.startswith("*"), -self.host.count("."), len(self.ports) or 1 << 16


@dataclass(frozen=True)
class Verdict:
    """The rule by which a target may pass, or None, and why, in a clause."""

    rule: Rule | None
    reason: str


@dataclass(frozen=True)
class Rules:
    """The operator's; of two for the same, the first counts."""

    allow: tuple[Rule, ...] = ()
    deny: tuple[Rule, ...] = ()

    def judge(self, target: Target, grants: Sequence[Rule] = ()) -> Verdict:
        """Return what decides about a target for a chat that has these grants."""
        for rule in self.deny:
            if rule.covers(target):
                return Verdict(None, f"{rule.source} names {rule}")
        # A private address is reached by the operator's rule alone, so a grant does not hide it.
        private = [rule for rule in self.allow if rule.private]
        known = [*private, *grants, *self.allow]
        if found := [rule for rule in known if rule.covers(target)]:
            rule = min(found, key=lambda rule: rule.width)
            return Verdict(rule, f"{rule.source} names {rule}")
        if any(rule.names(target.host) for rule in known):
            return Verdict(None, f"no rule allows port {target.port} of this host")
        return Verdict(None, "no rule allows it")


def rules_of(settings: EgressConfig) -> Rules:
    """Return the rules of the settings, those of presets after the rest.

    Raises:
        ConfigError: a rule cannot be understood, or contradicts another.
    """
    raise NotImplementedError


def grant_of(text: str, *, read: bool, source: str) -> Rule:
    """Return the rule for HOST[:PORT] as a person types it; its hosts are public.

    Raises:
        InvalidArgument: it is none.
    """
    raise NotImplementedError
