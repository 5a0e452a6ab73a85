"""Composition root: turns a configuration into a running application.

The only file that names concrete backends. They are imported late, so that nobody pays for the
libraries of a backend that is not used.
"""

from dataclasses import dataclass

from mcp_sandbox.backends.base import Backend
from mcp_sandbox.config import Config
from mcp_sandbox.errors import BackendUnavailable, ImageMissing
from mcp_sandbox.models import BackendName

_AUTOMATIC: tuple[BackendName, ...] = ("docker", "bubblewrap")


@dataclass(frozen=True)
class Choice:
    """A backend, and one sentence that says why it was chosen."""

    backend: Backend
    reason: str


def make_backend(name: BackendName, config: Config) -> Backend:
    """Return the backend of that name, without asking whether it works."""
    if name == "docker":
        from mcp_sandbox.backends.docker.backend import DockerBackend

        return DockerBackend(config.docker, config.data_dir)
    if name == "bubblewrap":
        from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend

        return BubblewrapBackend(config.data_dir)
    from mcp_sandbox.backends.unsafe_local import UnsafeLocalBackend

    return UnsafeLocalBackend(config.data_dir)


async def choose_backend(config: Config) -> Choice:
    """Return the configured backend, or with `auto` the first that isolates here.

    Raises:
        BackendUnavailable: `auto` found none that works; the message says what to install.
    """
    if config.backend != "auto":
        return Choice(make_backend(config.backend, config), "the configuration names it")
    failures: list[str] = []
    for name in _AUTOMATIC:
        backend = make_backend(name, config)
        try:
            found = await backend.probe()
        except (BackendUnavailable, ImageMissing) as exc:
            failures.append(f"{name}: {exc}")
        else:
            return Choice(backend, "; ".join((found, *failures)))
    raise BackendUnavailable(
        "no backend isolates on this machine. Install and start Docker and run `mcp-sandbox "
        "images build`, or install bubblewrap. " + " ".join(failures)
    )
