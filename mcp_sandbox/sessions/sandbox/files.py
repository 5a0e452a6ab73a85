"""Where the files of chats are: what is done with them as their sandboxes come and go.

On this host they outlive every sandbox. The other place is in `sandbox_files`.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import ChatId
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.chat_records import ChatRecord
from mcp_sandbox.sessions.sandbox.warm_pool import connect
from mcp_sandbox.workspace.directory import ChatDirectories

if TYPE_CHECKING:
    from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
    from mcp_sandbox.sessions.sandbox.context import OpenSandbox, SessionContext


# A lease ends seconds later: until then nothing may run any more.
PAUSE_S = 3.0


class HostFiles:
    """Files in folders of this host, which sandboxes show; callers have the chat's lock."""

    # Whether a sandbox may have the only copy of files, so that one is saved before it ends.
    lost_with_sandbox = False

    def __init__(self, context: "SessionContext") -> None:
        self._context = context

    async def prepare(self, chat: ChatId, record: ChatRecord | None, *, runs: bool = False) -> bool:
        """Get ready for a sandbox to open; False if one that `runs` already has older files.

        Raises BackendUnavailable: the files are in the object store alone, which does not answer.
        """
        saving = self._context.saving
        return saving is None or await saving.prepare(chat, record, runs=runs)

    def note_gone(self, chat: ChatId) -> None:
        """Note that a sandbox was destroyed, with what it alone had."""

    def describe(self, chat: ChatId, record: ChatRecord | None) -> Mapping[str, Any]:
        """Return what is `further` stored of a chat whose sandbox is open."""
        if self._context.saving:
            return self._context.saving.describe(chat, record)
        return record.further if record else {}

    async def connect(
        self,
        chat: ChatId,  # noqa: ARG002 - the directories are the chat's
        sandbox: Sandbox,
        directories: ChatDirectories,
    ) -> Runtime:
        """Connect to a sandbox of the chat.

        Elsewhere None is returned if its newest files are not there, so that it may end, and
        BackendUnavailable raised if it is to be left alone for its files. Raises SandboxGone.
        """
        return await connect(sandbox, directories, self._context.tasks, self._context.settings)

    # To a new one, which then has the chat's newest files.
    connect_new = connect

    def is_saved(self, chat: ChatId) -> bool:  # noqa: ARG002 - in any case
        """Return whether the chat's open sandbox may end."""
        return True

    async def save_before_end(self, chat: ChatId, runtime: Runtime) -> None:
        """Save what would be lost with a sandbox. Raises Unsaved."""

    async def empty(self, sandbox: "ChatSandbox") -> None:
        """Delete what is in the workspace where only its sandbox can; needs no lock."""

    async def leave(self, held: "OpenSandbox", *, lost: bool) -> bool:
        """Pause a sandbox that may be another server's now, or is if it is `lost`.

        Return False if it is to be ended.
        """
        # The runner ends its calls then, at once: an engine may take long to pause.
        await held.runtime.aclose()
        is_paused = False
        with suppress(SandboxError), anyio.move_on_after(PAUSE_S):
            is_paused = not lost and await held.sandbox.pause()
        return is_paused
