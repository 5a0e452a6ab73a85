"""The operator's code that runs before and after each run of an assistant.

async def create(ctx, messages, options) -> messages    before it; an exception refuses the run
async def next(ctx, payload, options) -> None | payload  after it, also if it failed
"""

import inspect
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio

from mcp_sandbox.agents.events import Completion
from mcp_sandbox.durable import check_trusted
from mcp_sandbox.errors import Busy, ConfigError, NotPermitted, TooLarge
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import UseTimes

LIMIT_S = 60.0
_MOST_MEMORY = 64 << 10
_LOGGER = logging.getLogger(__name__)
_T = TypeVar("_T")
Messages = Sequence[Mapping[str, Any]]
Options = Mapping[str, Any]


@dataclass(frozen=True)
class FileInfo:
    """An entry of a folder; `mod_time` in seconds since the epoch."""

    name: str
    size: int
    is_dir: bool
    mod_time: float


@dataclass(frozen=True)
class Computer:
    """The sandbox for a hook: `read_file`, `write_file`, `list_dir` and `exec` of its agent.

    Relative paths start at the workspace, `workdir`.
    """

    _read: Callable[[str], Awaitable[bytes]]
    write_file: Callable[[str, bytes | str], Awaitable[None]]
    list_dir: Callable[..., Awaitable[list[FileInfo]]]
    exec: Callable[[Sequence[str]], Awaitable[str]]
    workdir: ClassVar[str] = "/workspace"

    async def read_file(self, path: str) -> str:
        return (await self._read(path)).decode("utf-8", "replace")


class HookMemory:
    """The data that the hooks of a chat keep in its record, and locks of its conversations."""

    def __init__(self, ledger: UseTimes, chat: ChatId) -> None:
        self._ledger, self._chat = ledger, chat

    async def load(self) -> dict[str, Any]:
        """Return what was kept. A run without a sandbox is a use of its chat, too."""
        self._ledger.note_use(self._chat)
        await self._ledger.write()
        return dict(await self._ledger.records.kept(self._chat, "memory") or {})

    async def save(self, memory: Mapping[str, Any]) -> None:
        """Keep it as JSON. Raises TooLarge, ValueError, TypeError, OperatorError."""
        text, now_s = json.dumps(memory), self._ledger.clock().wall_s
        if len(text) > _MOST_MEMORY:
            raise TooLarge(f"ctx.memory has {len(text):,} bytes; at most {_MOST_MEMORY:,} are kept")
        await self._ledger.records.keep(self._chat, "memory", lambda _: json.loads(text), now_s)

    @asynccontextmanager
    async def hold(self, conversation: str) -> AsyncGenerator[None]:
        """Go on with a conversation. Raises Busy: a run does already, in whatever process."""
        name = ChatId(self._chat.user, conversation)
        async with self._ledger.records.hold(name, at_once=True) as free:
            if not free:
                raise Busy("the conversation is in use by another run: wait for its end")
            yield


@dataclass
class Context:
    """A run as a hook sees it; `memory` is kept for the chat, as JSON of at most 64 KiB.

    `sandbox` is None if the assistant has none. `progress` shows a text that replaces the one
    before; "" removes it.
    """

    chat: ChatId
    progress: Callable[[str], Awaitable[None]]
    sandbox: Computer | None
    memory: dict[str, Any]
    log: logging.Logger = _LOGGER


@dataclass(frozen=True)
class Payload:
    """How a run ended: its completion, and the error if it is one."""

    completion: Completion
    error: str = ""


@dataclass(frozen=True)
class Hooks:
    """The hooks of an assistant or of the embedding program."""

    create: Callable[[Context, Messages, Options], Awaitable[Messages]] | None = None
    next: Callable[[Context, Payload, Options], Awaitable[Payload | None]] | None = None

    def __post_init__(self) -> None:
        for name, hook in vars(self).items():
            if hook and not inspect.iscoroutinefunction(hook):
                raise ConfigError(f"the hook {name} must be an async function")

    async def before(self, ctx: Context, messages: Messages, options: Options) -> Messages:
        """Return the messages with which the run begins.

        Raises NotPermitted: the hook refuses the run, fails, or takes too long.
        """
        if not self.create:
            return messages
        try:
            return await _within_limit(self.create(ctx, messages, options))
        except Exception as exc:
            raise NotPermitted(f"the request was refused: {exc or type(exc).__name__}") from exc

    async def after(
        self, ctx: Context, completion: Completion, options: Options
    ) -> tuple[Completion, str]:
        """Return the completion that the hook made of it, and the hook's error, "" if none."""
        payload = Payload(completion, completion.reason)
        try:
            changed = await _within_limit(self.next(ctx, payload, options)) if self.next else None
        except Exception as exc:
            ctx.log.exception("the hook next failed")
            return completion, f"the hook next failed: {exc or type(exc).__name__}"
        return (changed or payload).completion, ""


async def account_for(
    completion: Completion, on_end: Callable[[Completion], Awaitable[None]]
) -> None:
    """Tell of a run, though its caller may have left; a failure is logged."""
    try:
        with anyio.CancelScope(shield=True):
            await _within_limit(on_end(completion))
    except Exception:
        _LOGGER.exception("on_end failed: a run is not accounted for")


async def _within_limit(hook: Awaitable[_T]) -> _T:
    with anyio.move_on_after(LIMIT_S):
        return await hook
    raise TimeoutError(f"it took over {LIMIT_S:g} s")


def load_hooks(file: Path | None) -> Hooks:
    """Load the hooks of the operator's file; none if it is None. Raises ConfigError."""
    spec = spec_from_file_location("hooks", file) if file else None
    if not (file and spec and spec.loader):
        return Hooks()
    module = module_from_spec(spec)
    try:
        check_trusted(file)
        spec.loader.exec_module(module)
    except Exception as exc:
        raise ConfigError(f"{file} cannot be loaded: {type(exc).__name__}: {exc}") from exc
    return Hooks(getattr(module, "create", None), getattr(module, "next", None))
