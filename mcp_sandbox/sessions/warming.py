"""Makes one warm sandbox, gives it to a chat, removes it. How many and when is the pool's.

From the first step to the last, a kill of this process leaves either a sandbox that its label
("pool") and its trees in the pool tell to be nobody's, or a chat with its files:

    label it as the chat's -> home becomes the chat's -> workspace becomes the chat's -> use it
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Backend, Sandbox
from mcp_sandbox.errors import OperatorError, SandboxError, SandboxGone
from mcp_sandbox.models import ChatId, SandboxId, SandboxSpec
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.connect import connect
from mcp_sandbox.sessions.spec import SPEC, marked
from mcp_sandbox.workspace.directory import ChatDirectories
from mcp_sandbox.workspace.pool import PoolFolder, WarmTrees

logger = logging.getLogger(__name__)

MakeSpec = Callable[[ChatDirectories, Mapping[str, str]], SandboxSpec]

_LABEL = "pool"
_LOOK_S = 10.0
_ANSWER_S = 1.0
# Ending a sandbox takes the engine up to some seconds; a stuck engine must not hold us longer.
_DROP_S = 20.0


@dataclass(frozen=True, eq=False)
class Warm:
    """A sandbox in which nobody has run anything, with the connection to its runner."""

    sandbox: Sandbox
    runtime: Runtime
    trees: WarmTrees


class Warmer:
    """The warm sandboxes of one process, one at a time."""

    def __init__(
        self,
        backend: Backend,
        folder: PoolFolder,
        make_spec: MakeSpec,
        *,
        keep_bytes: int,
        look_s: float = _LOOK_S,
    ) -> None:
        """`look_s`: how often each is looked after."""
        self._backend = backend
        self._folder = folder
        self._make_spec = make_spec
        self._keep_bytes = keep_bytes
        self._look_s = look_s

    @property
    def usable(self) -> bool:
        """Whether what is made before its chat is known can be what the chat asks for."""
        return self._folder.usable

    async def open(self) -> None:
        """Make room, after ending what the pools of killed processes left.

        Raises:
            OperatorError: the engine or the data root cannot be used.
        """
        # What runs is listed first: who is dead afterwards did not start any of it meanwhile.
        running = await self._backend.running()
        abandoned = self._folder.abandoned
        dead = await to_thread.run_sync(abandoned.processes)
        for info in running:
            label = info.labels.get(_LABEL, "")
            left = label.partition("/")[0] in dead
            if left and await to_thread.run_sync(abandoned.keeps, label):
                await self._backend.destroy(info.id)
                logger.info("removed warm sandbox %s: its server is gone", info.id)
        for process in dead:
            await to_thread.run_sync(abandoned.remove, process)
        await self._folder.open()

    async def aclose(self) -> None:
        """Remove what is left; no warm sandbox may be running."""
        try:
            await self._folder.aclose()
        except OperatorError:
            logger.exception("cannot remove this server's part of the pool; the next one will")

    async def make(self, tasks: TaskGroup) -> Warm:
        """Start a sandbox on empty trees; its connection is read in `tasks`.

        Raises:
            SandboxError: it cannot be made, or mounts here do not follow a directory's rename.
        """
        trees = await self._folder.prepare()
        try:
            sandbox = await self._backend.create(await self._spec(trees))
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._folder.discard(trees)
            raise
        try:
            trees = await self._folder.settle(trees)
            runtime = await connect(sandbox, trees.directories, tasks, self._keep_bytes)
        except BaseException:
            await self._remove(sandbox.id, trees)
            raise
        return Warm(sandbox, runtime, trees)

    async def _spec(self, trees: WarmTrees) -> SandboxSpec:
        spec = self._make_spec(trees.directories, {_LABEL: trees.label})
        return marked(spec, await self._backend.origin(), trees.directories)

    async def adopt(self, warm: Warm, chat: ChatId) -> None:
        """Make it the chat's; whoever calls has the chat to itself.

        Raises:
            SandboxError: it is gone, or the chat has files by now.
        """
        labels = {**warm.sandbox.labels, "user": chat.user, "chat": chat.chat}
        await self._backend.relabel(warm.sandbox.id, labels)
        await self._folder.adopt(warm.trees, chat)

    async def stay_with(self, warm: Warm) -> None:
        """Return when it is of no more use: it has ended, is stuck, or would be made otherwise."""
        while not warm.runtime.broken:
            with anyio.move_on_after(self._look_s):
                await warm.runtime.wait_broken()
            try:
                await warm.runtime.status(timeout_s=_ANSWER_S)
                wanted = (await self._spec(warm.trees)).labels[SPEC]
            except (SandboxGone, OperatorError) as exc:
                logger.warning("warm sandbox %s is given up: %s", warm.sandbox.id, exc)
                return
            if warm.sandbox.labels.get(SPEC) != wanted:
                logger.info("warm sandbox %s is outdated: the image has changed", warm.sandbox.id)
                return

    async def forget(self, warm: Warm) -> None:
        """Remove what the pool has left of an adopted one."""
        try:
            await self._folder.discard(warm.trees)
        except SandboxError:
            logger.exception("cannot remove %s from the pool", warm.trees.label)

    async def drop(self, warm: Warm) -> None:
        """End one that no chat has adopted."""
        with anyio.move_on_after(_DROP_S, shield=True):
            await warm.runtime.aclose()
        await self._remove(warm.sandbox.id, warm.trees)

    async def _remove(self, sandbox_id: SandboxId, trees: WarmTrees) -> None:
        with anyio.move_on_after(_DROP_S, shield=True) as limit:
            try:
                await self._backend.destroy(sandbox_id)
                await self._folder.discard(trees)
            except OperatorError:
                # It ends itself when nobody is connected; its trees go with this process's folder.
                logger.exception("warm sandbox %s could not be removed", sandbox_id)
        if limit.cancelled_caught:
            logger.error("warm sandbox %s could not be removed in time", sandbox_id)
