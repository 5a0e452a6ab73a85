"""What an engine's complaint means and what to do about it: from text to an error of ours."""

from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ConfigError,
    ImageMissing,
    OperatorError,
    StorageUnavailable,
)

BUILD = "run: mcp-sandbox images build"
_OURS = "mcp-sandbox/base:latest"


def build_again(image: str) -> str:
    """What to do about an image that is absent, outdated or broken."""
    return BUILD if image == _OURS else f"{BUILD}, and then build {image} on top of it"


def explain_refusal(status: int, text: str) -> OperatorError:
    """The error for a request that the engine answered with an HTTP error."""
    lowered = text.lower()
    for sign, error, remedy in _REFUSALS:
        if sign in lowered:
            return error(f"the Docker engine says: {text}; {remedy}")
    return BackendUnavailable(
        f"the Docker engine refused ({status}): {text or 'no reason given'}; "
        "see its log (`journalctl -u docker`), and `mcp-sandbox doctor`"
    )


def explain_build(text: str) -> OperatorError:
    """The error for a build that failed at a step, or before the first for want of its base."""
    lowered = text.lower()
    failed_command = "returned a non-zero code" in lowered
    if not failed_command and any(sign in lowered for sign in _UNREACHABLE):
        return BackendUnavailable(
            f"building the image failed: {text}; the engine cannot reach the image registry: "
            "repair its network, proxy or certificates, or make the Debian below the image on "
            "this machine: mcp-sandbox images build --from-packages"
        )
    return explain_refusal(0, f"building the image failed: {text}")


def explain_silence(url: str, reason: str) -> BackendUnavailable:
    """The error for an engine that could not be reached or did not answer."""
    lowered = reason.lower()
    for sign, remedy in _SILENCES:
        if sign in lowered:
            return BackendUnavailable(f"no Docker engine at {url}: {remedy}")
    return BackendUnavailable(
        f"the Docker engine at {url} does not answer ({reason}): check it with `docker info`"
    )


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
    "no such host",
    "i/o timeout",
    "connection refused",
    "network is unreachable",
    "no route to host",
    "server misbehaving",
    "tls handshake timeout",
    "certificate signed by unknown authority",
    "client.timeout exceeded",
    "request canceled while waiting",
)
_SILENCES = (
    (
        "permission denied",
        "permission denied; add this user to the docker group, and log in again",
    ),
    ("no such file", "its socket does not exist; install and start Docker, or set DOCKER_HOST"),
    ("filenotfound", "its socket does not exist; install and start Docker, or set DOCKER_HOST"),
    ("connection refused", "nothing listens there; start it (`systemctl start docker`)"),
    ("timed out", "it did not answer in time; check the machine's load, then restart the engine"),
    ("paramiko", "ssh needs one more package; run: pip install 'mcp-sandbox[ssh]'"),
    ("certificate", "its TLS certificate is not accepted; check DOCKER_CERT_PATH"),
)
