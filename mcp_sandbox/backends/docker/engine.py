"""Finds the engine, interprets its description of itself, and explains its errors.

The engine is chosen as by the docker command line: the configured address, else DOCKER_HOST, else
DOCKER_CONTEXT, else the current context, else the default socket. This file opens no connection.
"""

import hashlib
import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ConfigError,
    ImageMissing,
    OperatorError,
    StorageUnavailable,
    Unreachable,
)
from mcp_sandbox.models import SandboxFacts

# Runtimes whose containers share the host's kernel, so that the host can connect to their sockets.
SHARED_KERNEL = ("", "runc", "crun", "io.containerd.runc.v2")
_MIB = 1024 * 1024
_NETWORK = {
    "none": "none: loopback only",
    "open": (
        "open: the internet, private networks that the host reaches, and services of the host "
        "that listen on all interfaces; not other sandboxes"
    ),
}
BUILD = "run: mcp-sandbox images build"
_OURS = re.compile(r"mcp-sandbox/([\w-]+):latest")
_REFUSALS: tuple[tuple[str, type[OperatorError], str], ...] = (
    ("no such image", ImageMissing, BUILD),
    (
        "bind source path does not exist",
        BackendUnavailable,
        "a remote engine needs the data directory under the same path on its own machine",
    ),
    ("unknown runtime", BackendUnavailable, "register it in the engine's daemon.json, or unset it"),
    ("unknown or invalid runtime", BackendUnavailable, "register it in the engine's daemon.json"),
    ("address pool", CapacityReached, "close sandboxes, or add default-address-pools to it"),
    ("no space left", StorageUnavailable, "free disk space on the engine's machine"),
    ("pull access denied", ImageMissing, "no registry has it: add --from-packages"),
    ("invalid reference format", ConfigError, "write it as name:tag, in lower-case letters"),
    ("seccomp", BackendUnavailable, "the engine must support seccomp profiles"),
)
# What the engine says when it cannot pull.
_UNREACHABLE = (
    *("no such host", "i/o timeout", "connection refused", "network is unreachable"),
    *("no route to host", "server misbehaving", "tls handshake timeout", "client.timeout exceeded"),
    *("certificate signed by unknown authority", "request canceled while waiting"),
)
_SILENCES = (
    ("permission denied", "permission denied; add this user to the docker group, and log in again"),
    ("no such file", "its socket does not exist; install and start Docker, or set DOCKER_HOST"),
    ("connection refused", "nothing listens there; start it (`systemctl start docker`)"),
    ("timed out", "it did not answer in time; check the machine's load, then restart the engine"),
    ("paramiko", "ssh needs one more package; run: pip install 'mcp-sandbox[ssh]'"),
    ("certificate", "its TLS certificate is not accepted; check DOCKER_CERT_PATH"),
)
_PASSES = ("no such file", "connection refused", "timed out")
# What an engine answers that begins or ends, and a proxy before one that is away.
AWAY = (502, 503, 504)


class EngineHangs(Unreachable):
    """It takes connections, or does not refuse them, and answers nothing."""


@dataclass(frozen=True)
class Tls:
    """Certificate files of a connection; without `verify` the engine's name is not checked."""

    ca: Path | None
    certificate: Path | None
    key: Path | None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
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
    def is_local(self) -> bool:
        """Whether it shares this machine's directories: assumed of a unix socket only."""
        return self.url.startswith("unix:")


def find_engine(host: str | None, variables: Mapping[str, str], home: Path) -> Engine:
    """Return the engine that the configuration or the environment names; raise ConfigError."""
    folder = Path(variables.get("DOCKER_CONFIG") or home / ".docker")
    address = host or variables.get("DOCKER_HOST")
    if address:
        given, verify = variables.get("DOCKER_CERT_PATH"), bool(variables.get("DOCKER_TLS_VERIFY"))
        encrypted = (given or verify) and not address.startswith(("unix:", "ssh:"))
        tls = _tls(Path(given or folder), verify=verify) if encrypted else None
        return _checked(Engine(address, tls))
    name = variables.get("DOCKER_CONTEXT")
    name = name or _read_json(folder / "config.json").get("currentContext")
    if not isinstance(name, str) or name in ("", "default"):
        return Engine("unix:///var/run/docker.sock")
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


def _tls(folder: Path, *, verify: bool) -> Tls:
    names = ("ca.pem", "cert.pem", "key.pem")
    ca, certificate, key = (path if (path := folder / name).exists() else None for name in names)
    if (certificate is None) != (key is None):
        raise ConfigError(f"{folder} needs both cert.pem and key.pem: add the missing file")
    return Tls(ca, certificate, key, verify)


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


def security_options(info: Mapping[str, Any]) -> list[str]:
    """Return names such as seccomp, from entries such as `name=seccomp,profile=default`."""
    entries = info.get("SecurityOptions") or []
    return [str(entry).partition(",")[0].removeprefix("name=") for entry in entries]


def refuse_unusable(info: dict[str, Any]) -> None:
    """Raise BackendUnavailable for an engine that cannot provide what a sandbox needs."""
    options = security_options(info)
    if info.get("OSType") != "linux":
        raise BackendUnavailable("the Docker engine runs Windows containers: switch it to Linux")
    if "seccomp" not in options:
        raise BackendUnavailable(
            "the Docker engine's kernel has no seccomp filters: use a kernel with "
            "CONFIG_SECCOMP_FILTER"
        )
    if "rootless" in options or "userns" in options:
        raise BackendUnavailable(
            "the Docker engine maps user ids (rootless or userns-remap), so the sandbox user could "
            "not use its workspace: use an engine without that, or the bubblewrap backend"
        )
    for limit, controller in (("MemoryLimit", "memory"), ("PidsLimit", "pids")):
        # Older engines do not report PidsLimit; the container is inspected for it later.
        if info.get(limit, True) is False:
            raise BackendUnavailable(
                f"the Docker engine's kernel has no {controller} cgroup: enable it "
                f"(for memory: boot with cgroup_enable=memory)"
            )


def shares_sockets(engine: Engine, info: dict[str, Any], runtime: str) -> bool:
    """Return whether this server can connect to a socket made in a mounted directory."""
    in_virtual_machine = "Docker Desktop" in str(info.get("OperatingSystem"))
    chosen = runtime or info.get("DefaultRuntime", "")
    return engine.is_local and not in_virtual_machine and chosen in SHARED_KERNEL


def is_gvisor(info: dict[str, Any], runtime: str) -> bool:
    """Return whether containers of a runtime ("": the default one) run on gVisor's kernel."""
    chosen = runtime or str(info.get("DefaultRuntime", ""))
    entry = (info.get("Runtimes") or {}).get(chosen) or {}
    program = str(entry.get("path") or entry.get("runtimeType") or "").rpartition("/")[2]
    return any(word in name for name in (chosen, program) for word in ("runsc", "gvisor"))


def processors(info: dict[str, Any]) -> int | None:
    """Return how many processors the engine can give to a container; None if unknown."""
    return int(info.get("NCPU") or 0) or None


def facts_of(image: str, inspected: dict[str, Any], info: dict[str, Any]) -> SandboxFacts:
    """Return the facts of a container of an image called `image`; `info` is the engine's."""
    host_config = inspected["HostConfig"]
    network = "none" if host_config["NetworkMode"] == "none" else "open"
    runtime = host_config.get("Runtime") or "default runtime"
    # Another kernel, such as gVisor's, filters system calls itself and takes no profile.
    filtered = ", own seccomp profile" if runtime in SHARED_KERNEL else ", a kernel of its own"
    return SandboxFacts(
        backend="docker",
        image=image,
        isolation=f"container ({runtime}), uid {inspected['Config']['User']}, no capabilities"
        f"{filtered}, read-only root",
        network=_NETWORK[network],
        limits=_limits(host_config, info),
    )


def _limits(host_config: dict[str, Any], info: dict[str, Any]) -> dict[str, str]:
    memory = host_config["Memory"]
    swap = "swap included" if host_config["MemorySwap"] == memory else "swap is not limited"
    cpus = host_config["NanoCpus"] / 1e9
    whole = ", all that the engine has" if cpus == processors(info) else ""
    gvisor = is_gvisor(info, host_config.get("Runtime") or "")
    threads = ", gVisor's own threads among them" if gvisor else ""
    ulimits = {limit["Name"]: limit["Hard"] for limit in host_config["Ulimits"]}
    tmp = host_config["Tmpfs"]["/tmp"].split(",")  # noqa: S108 - inside the sandbox
    tmp_size = next(option for option in tmp if option.startswith("size="))
    return {
        "memory": f"{memory // _MIB} MiB, {swap} (cgroup)"
        + "; `free` shows the host's" * (not gvisor),
        "cpus": f"{cpus:g} (cgroup){whole}",
        "pids": f"{host_config['PidsLimit']} (cgroup){threads}",
        "shm": f"{host_config['ShmSize'] // _MIB} MiB",
        "tmp": f"{tmp_size.removeprefix('size=').removesuffix('m')} MiB, counted as memory",
        "open_files": f"{ulimits['nofile']} a process",
        "file_size": f"{ulimits['fsize'] // _MIB} MiB a file",
    }


def build_again(image: str) -> str:
    """Return what to do about an image that is absent, outdated or broken."""
    if ours := _OURS.fullmatch(image):
        return BUILD if ours[1] == "base" else f"{BUILD} {ours[1]}"
    return f"{BUILD}, and then build {image} on top of it"


def explain_refusal(status: int, text: str) -> OperatorError:
    """Return the error for a request that the engine answered with an HTTP error."""
    lowered = text.lower()
    for sign, error, remedy in _REFUSALS:
        if sign in lowered:
            return error(f"the Docker engine says: {text}; {remedy}")
    return (Unreachable if status in AWAY else BackendUnavailable)(
        f"the Docker engine refused ({status}): {text or 'no reason given'}; "
        "see its log (`journalctl -u docker`), and run `mcp-sandbox doctor`"
    )


def explain_build(text: str) -> OperatorError:
    """Return the error for a build that failed at a step, or did not get its base image."""
    lowered = text.lower()
    failed_command = "returned a non-zero code" in lowered
    if not failed_command and any(sign in lowered for sign in _UNREACHABLE):
        return BackendUnavailable(
            f"building the image failed: {text}; the engine cannot reach the image registry: "
            "repair its network, proxy or certificates, or make the Debian base image on "
            "this machine: mcp-sandbox images build --from-packages"
        )
    return explain_refusal(0, f"building the image failed: {text}")


def explain_silence(url: str, reason: str) -> BackendUnavailable:
    """Return the error for an engine that could not be reached or did not answer."""
    lowered = reason.lower()
    for sign, remedy in _SILENCES:
        if sign in lowered:
            kind = Unreachable if sign in _PASSES else BackendUnavailable
            return kind(f"no Docker engine at {url}: {remedy}")
    return Unreachable(
        f"the Docker engine at {url} does not answer ({reason}): check it with `docker info`"
    )
