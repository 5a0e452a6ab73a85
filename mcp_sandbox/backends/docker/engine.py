"""Which engine to talk to, chosen as the docker command line chooses it.

The configured address, else DOCKER_HOST, else DOCKER_CONTEXT, else the current context, else the
default socket. An unknown context is an error, never a silent default. Nothing is connected here.
"""

import hashlib
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mcp_sandbox.errors import ConfigError

DEFAULT_URL = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class Tls:
    """Certificate files of a connection; without `verify` the engine's name is not checked."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """A client context that uses these files."""
        context = ssl.create_default_context(cafile=str(self.ca) if self.ca else None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key)
        return context


@dataclass(frozen=True)
class Engine:
    """An engine's address: unix://, tcp:// or ssh://."""

    url: str
    tls: Tls | None = None

    @property
    def scheme(self) -> str:
        return urlsplit(self.url).scheme

    @property
    def is_local(self) -> bool:
        """Whether it shares this machine's directories: only a unix socket says so."""
        return self.scheme == "unix"


def find_engine(host: str | None, variables: Mapping[str, str], home: Path) -> Engine:
    """The engine that the configuration or the environment names.

    Raises:
        ConfigError: the address or the context cannot be used.
    """
    folder = Path(variables.get("DOCKER_CONFIG") or home / ".docker")
    address = host or variables.get("DOCKER_HOST")
    if address:
        return _checked(Engine(address, _tls_from_variables(address, variables, folder)))
    name = variables.get("DOCKER_CONTEXT") or _current_context(folder)
    if name == "default":
        return Engine(DEFAULT_URL)
    return _checked(_context(name, folder))


def _checked(engine: Engine) -> Engine:
    # http:// and https:// are the spellings that some tools use for tcp.
    scheme, _, rest = engine.url.partition("://")
    url = f"tcp://{rest}" if scheme in ("http", "https") else engine.url
    if scheme not in ("unix", "tcp", "http", "https", "ssh") or not rest:
        raise ConfigError(
            f"the Docker engine address {engine.url!r} cannot be used: "
            "write unix:///path, tcp://host:port or ssh://user@host"
        )
    return Engine(url, engine.tls)


def _tls_from_variables(address: str, variables: Mapping[str, str], folder: Path) -> Tls | None:
    folder_given = variables.get("DOCKER_CERT_PATH")
    verify = bool(variables.get("DOCKER_TLS_VERIFY"))
    if address.startswith(("unix:", "ssh:")) or not (folder_given or verify):
        return None
    return _tls(Path(folder_given) if folder_given else folder, verify=verify)


def _tls(folder: Path, *, verify: bool) -> Tls:
    ca, certificate, key = (folder / name for name in ("ca.pem", "cert.pem", "key.pem"))
    if certificate.exists() != key.exists():
        raise ConfigError(f"{folder} needs both cert.pem and key.pem: add the missing file")
    return Tls(
        ca=ca if ca.exists() else None,
        certificate=certificate if certificate.exists() else None,
        key=key if key.exists() else None,
        verify=verify,
    )


def _current_context(folder: Path) -> str:
    name = _read_json(folder / "config.json").get("currentContext")
    return name if isinstance(name, str) and name else "default"


def _context(name: str, folder: Path) -> Engine:
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = _read_json(folder / "contexts" / "meta" / digest / "meta.json")
    endpoint = meta.get("Endpoints", {}).get("docker", {})
    url = endpoint.get("Host")
    if not isinstance(url, str) or not url:
        raise ConfigError(
            f"the Docker context {name!r} does not exist: `docker context ls` shows the contexts, "
            "`docker context use` chooses one, DOCKER_HOST overrides them"
        )
    files = folder / "contexts" / "tls" / digest / "docker"
    if not files.is_dir():
        return Engine(url)
    return Engine(url, _tls(files, verify=not endpoint.get("SkipTLSVerify")))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; repair or remove it") from exc
    return value if isinstance(value, dict) else {}
