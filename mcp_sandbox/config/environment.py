"""What is read from the process environment; but for the relay no other file looks there."""

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

# What the relay goes by, which may not import this package, holds for all.
from mcp_sandbox.relay import place

PREFIX = "MCP_SANDBOX_"
_PROXY_NAMES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")


def setting_variables() -> Mapping[str, str]:
    """Return every `MCP_SANDBOX_*` variable."""
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}


def docker_variables() -> Mapping[str, str]:
    """Return the variables by which the docker command line chooses its engine."""
    chosen = ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG")
    return _present((*chosen, "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH"))


def proxy_variables() -> Mapping[str, str]:
    """Return the proxy variables, which an image build passes on as build arguments."""
    return _present((*_PROXY_NAMES, *(name.upper() for name in _PROXY_NAMES)))


def git_variables() -> Mapping[str, str]:
    """Return what git needs to reach its servers as this user, and nothing that steers git."""
    own = ("PATH", "HOME", "XDG_CONFIG_HOME", "SSH_AUTH_SOCK", "TMPDIR")
    trusted = ("SSL_CERT_FILE", "SSL_CERT_DIR", "GIT_SSL_CAINFO", "CURL_CA_BUNDLE")
    return {**_present((*own, *trusted)), **proxy_variables()}


def server_variables() -> Mapping[str, str]:
    """Return what a server process that we start must inherit to see the same configuration."""
    others = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR", "S3_ENDPOINT", "KUBECONFIG")
    noted = place.noted_variables(place.default_socket())
    return {**setting_variables(), **docker_variables(), **_present(others), **noted}


def search_path() -> str:
    """Return PATH, where programs of the host are looked for."""
    return os.environ.get("PATH", os.defpath)


def default_data_dir() -> Path:
    """Return the XDG data folder of this program."""
    return Path(place.base_folder("XDG_DATA_HOME", ".local/share"))


def default_config_file() -> Path:
    """Return the place of the configuration file in the XDG config folder."""
    return Path(place.base_folder("XDG_CONFIG_HOME", ".config"), "mcp-sandbox.yaml")


def state_folder() -> Path:
    """Return the XDG state folder of this program: logs, and what can be done without."""
    return Path(place.state_folder())


def own_folders() -> tuple[Path, ...]:
    """Return the folders of this program beside its data: who can change them controls it."""
    return default_config_file().parent, state_folder(), default_socket().parent


def variable(name: str) -> str:
    """Return a variable by which another program goes, "" if it is not set."""
    return os.environ.get(name, "")


@contextmanager
def having_variables(more: Mapping[str, str]) -> Generator[None]:
    """Give this process more variables, or other values of them, in the block."""
    before = dict(os.environ)
    os.environ.update(more)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def default_socket() -> Path:
    """Return where the daemon listens: the same place for every client."""
    return Path(place.default_socket())


def home() -> Path:
    """Return the home folder of the user that runs us."""
    return Path(place.home())


def _present(names: tuple[str, ...]) -> Mapping[str, str]:
    return {name: os.environ[name] for name in names if os.environ.get(name)}
