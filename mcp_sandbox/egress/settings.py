"""Reads the rules of the configuration, what a person types for one, and whom to trust outside."""

import re
import ssl
from collections.abc import Sequence
from pathlib import Path

import certifi
import idna
import yaml

from mcp_sandbox.config import AllowConfig, EgressConfig
from mcp_sandbox.egress.rules import PORTS, EgressRule, EgressRules
from mcp_sandbox.egress.targets import RefusedError, parse_target
from mcp_sandbox.errors import ConfigError, InvalidArgument

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----[\s\w+/=]+-----END CERTIFICATE-----")
BUNDLE = "ca-certificates.crt"
_PRESETS = Path(__file__).with_name("presets.yaml")


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


def load_trusted(ca_bundle: Path | None) -> bytes:
    """Return the certificates to trust when connecting to servers. Raises ConfigError."""
    paths = ssl.get_default_verify_paths()
    # Python on Debian knows only the folder of the bundle.
    files = [Path(paths.cafile or ""), Path(paths.capath or "", BUNDLE), Path(certifi.where())]
    found = list[bytes]()
    for file in filter(None, (next(file for file in files if file.is_file()), ca_bundle)):
        try:
            # Bundles have comments between the certificates.
            certificates = _CERTIFICATE.findall(file.read_bytes())
        except OSError as exc:
            raise ConfigError(f"the bundle {file} cannot be read: {exc.strerror}") from exc
        if not certificates:
            raise ConfigError(f"the bundle {file} holds no certificates in PEM form: name another")
        found += certificates
    return b"\n".join([*found, b""])
