"""What the control API is made of: who may have a sandbox, and where it is told that it is made."""

import inspect
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

import anyio
from anyio import to_thread
from starlette.types import ASGIApp, Scope

from mcp_sandbox.agents.assistants import read_assistant
from mcp_sandbox.app.agents import read_spec
from mcp_sandbox.config import Config
from mcp_sandbox.control.lifecycle import Control, OpenAgent, Prepare, make_app
from mcp_sandbox.errors import ConfigError, InvalidArgument, NotPermitted, OperatorError
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import CALLER
from mcp_sandbox.sessions.chat_records import AssistantSpec
from mcp_sandbox.sessions.manager import SessionManager

if TYPE_CHECKING:
    from mcp_sandbox.web.passing_on import Passing

logger = logging.getLogger(__name__)

_Hook = Callable[..., object]
_ABOUT = re.compile(r"/api/sandbox/(by-chat/(?P<chat>[^/]+)|(?P<id>[0-9a-f]{12,24})/.+)")


@asynccontextmanager
async def open_control(
    config: Config,
    manager: Callable[[], Awaitable[SessionManager]],
    open_agent: OpenAgent,
    passing: "Passing | None" = None,
) -> AsyncGenerator[ASGIApp]:
    """Open the control API; the sandboxes that it has begun to make end with the block.

    `passing` has requests answered by the servers of their chats.

    Raises ConfigError: `control.access_check` or `fleet.redis` cannot be used.
    """
    hook = await to_thread.run_sync(_load_hook, config.control.access_check)
    bridge = None
    if config.fleet.redis:
        await to_thread.run_sync(import_module, "mcp_sandbox.storage.redis")
        from mcp_sandbox.storage.redis import SandboxBoard

        bridge = SandboxBoard(config.fleet.redis)
    check = partial(_check_access, config, hook)
    closing = aclosing(bridge) if bridge else nullcontext()
    async with closing, anyio.create_task_group() as tasks:
        control = Control(manager, tasks, check, open_agent, bridge)
        app = make_app(control)
        yield passing(app, partial(_find_chat, control)) if passing else app
        tasks.cancel_scope.cancel()


async def _find_chat(control: Control, scope: Scope, body: bytes) -> ChatId | None:
    """Return the chat that a request is about; what is not valid is about none."""
    user, path = scope[CALLER].user, scope["path"]
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if path.endswith(("/prepare", "/prepare-invoke")):
            return control.remember(ChatId(user, json.loads(body)["chatSessionId"]))
        if path.startswith("/api/agent/"):
            given = json.loads(body)
            if given.get("sandbox_mode", "cloud") != "cloud":
                return None
            return await control.find_chat(user, given["sandbox_session_id"])
        if found := _ABOUT.fullmatch(path):
            named = found["chat"]
            return ChatId(user, named) if named else await control.find_chat(user, found["id"])
    return None


def _load_hook(place: str) -> _Hook | None:
    try:
        return cast("_Hook", resolve_name(place)) if place else None
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"control.access_check: {place} cannot be used: {exc}") from exc


async def _check_access(
    config: Config, hook: _Hook | None, chat: ChatId, given: Prepare
) -> AssistantSpec | None:
    """Return what the sandbox is made from; raises NotPermitted, InvalidArgument."""
    expert = given.expert_identifier or ""
    if hook and not await _allows(hook, chat.user, chat.chat, expert, given.project_id):
        raise NotPermitted(f"{chat.user} may not have a sandbox for {expert or 'this chat'}")
    if not expert:
        return None
    folders, usual = config.agents.folders, config.agents.command
    try:
        found = await to_thread.run_sync(read_assistant, folders, expert, chat.user, usual)
    except InvalidArgument as exc:
        raise NotPermitted(str(exc)) from exc
    return read_spec(found, config)


async def _allows(hook: _Hook, *given: str | None) -> bool:
    try:
        # A plain function may block: it asks a database.
        said = await to_thread.run_sync(hook, *given)
        return bool(await said if inspect.isawaitable(said) else said)
    except Exception as exc:
        logger.exception("control.access_check has failed")
        raise OperatorError("who may have a sandbox cannot be checked: see the log") from exc
