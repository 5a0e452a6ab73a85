"""What a backend is: it makes, finds and removes sandboxes and opens byte channels to them.

A backend knows no chats, no files and no tools. It refuses to create a sandbox that is weaker
than the spec asks for.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, runtime_checkable

from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.errors import BackendUnavailable, SandboxGone


class Sandbox(Protocol):
    """A running sandbox, seen from the host."""

    @property
    def id(self) -> models.SandboxId: ...
    @property
    def token(self) -> bytes:
        """The secret that both ends of every channel prove to know; user code cannot read it."""

    @property
    def facts(self) -> models.SandboxFacts: ...
    @property
    def labels(self) -> Mapping[str, str]: ...
    async def open_channel(self) -> ByteStream:
        """Connect to the runner inside; raises SandboxGone if that does not listen.

        As in what follows, Unreachable is raised where nobody answers, and it may go on.
        """

    async def pause(self) -> bool:
        """Stop all that runs in it until one attaches; False where that would save nothing.

        Raises SandboxGone, and BackendUnavailable if it cannot be done now.
        """

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        """Return why it ended; None if it still runs after `within_s` seconds."""


@runtime_checkable
class ShowsSkills(Protocol):
    """A sandbox without mounts: its backend puts skills where code inside cannot write."""

    async def show_skill(self, name: str, files: Mapping[str, bytes]) -> None:
        """Have a folder of /opt/skills hold these files; raises SandboxGone, BackendUnavailable."""


class Backend(Protocol):
    """A place where sandboxes live."""

    @property
    def name(self) -> models.BackendName: ...
    @property
    def holds_files(self) -> bool:
        """True where sandboxes have no mounts, but places of their own that outlive a pause.

        /workspace and /home/sandbox are empty at first and the sandbox user's; skills are shown by
        `ShowsSkills`. `attach` starts their runner again where it has ended and they have not.
        """

    @property
    def keeps_paused_files(self) -> bool:
        """True where a paused sandbox has no processes and costs little, but keeps its files.

        An idle one is paused then, in place of being saved and ended.
        """

    @property
    def takes_images(self) -> bool:
        """True where sandboxes are made from an image, or what is like one, that can be named."""

    async def probe(self) -> str:
        """Return one line that says what works here, after really trying it.

        Raises:
            BackendUnavailable: it cannot isolate here; the message names the failing step
                and the remedy.
            ImageMissing: the sandbox image is absent or outdated.
        """

    async def origin(self, image: str = "") -> str:
        """Return an identity of what sandboxes of this `image` are made from. OperatorError."""

    async def create(self, spec: models.SandboxSpec) -> Sandbox:
        """Make and start a sandbox; returns once its runner accepts connections.

        Raises:
            BackendUnavailable: the engine does not answer or refuses.
            ImageMissing: the sandbox image is absent or outdated.
            InsecureSandbox: it came out weaker than asked for.
            CapacityReached: the engine has no network left.
            StorageUnavailable: the data root cannot be written.
        """

    async def attach(self, sandbox_id: models.SandboxId) -> Sandbox:
        """Find a running sandbox of any server; a paused one goes on. Raises SandboxGone.

        Whoever is told that ends what is left of it.
        """

    async def running(self) -> Sequence[models.SandboxInfo]:
        """Return the sandboxes of this data root."""

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        """Stop and remove it with everything that runs in it; gone already is not an error.

        Raises BackendUnavailable if the engine or the kernel does not let go of it.
        """


@runtime_checkable
class Pooled(Backend, Protocol):
    """A backend that can make sandboxes before their chats are known."""

    async def relabel(self, sandbox_id: models.SandboxId, labels: Mapping[str, str]) -> None:
        """Give a sandbox other labels; raises SandboxGone, StorageUnavailable."""


class NoopBackend:
    """A backend that makes no sandboxes: sessions exist, and work in them is refused in words."""

    name: models.BackendName = "noop"
    holds_files, keeps_paused_files, takes_images = False, False, True

    async def probe(self) -> str:
        return "no sandboxes are made here"

    async def origin(self, image: str = "") -> str:
        return image

    async def create(self, spec: models.SandboxSpec) -> NoReturn:  # noqa: ARG002 - as others have it
        """Raise BackendUnavailable."""
        raise BackendUnavailable(
            "this server makes no sandboxes (backend: noop), so nothing can run here and there are "
            "no files: go on without them, or have the operator name another backend"
        )

    async def attach(self, sandbox_id: models.SandboxId) -> NoReturn:
        """Raise SandboxGone."""
        raise SandboxGone(f"there is no sandbox {sandbox_id}: backend noop has none")

    async def running(self) -> Sequence[models.SandboxInfo]:
        return ()

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        """Do nothing: none is there."""
