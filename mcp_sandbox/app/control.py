"""What the control API is made of: who may have a sandbox, and where it is told that it is made."""

import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module

from anyio import to_thread
from anyio.abc import TaskGroup
from fastapi import FastAPI

from mcp_sandbox.agents.assistants import read_assistant
from mcp_sandbox.config import Config
from mcp_sandbox.config.units import MIB
from mcp_sandbox.control.lifecycle import Control, Prepare, make_app
from mcp_sandbox.errors import ConfigError, InvalidArgument, NotPermitted
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import AssistantSpec
from mcp_sandbox.sessions.manager import SessionManager

_Hook = Callable[..., object]


def make_control(
    config: Config, manager: Callable[[], Awaitable[SessionManager]], tasks: TaskGroup
) -> FastAPI:
    """Return the application of the control API.

    Raises ConfigError: `control.access_check` or `fleet.redis` cannot be used.
    """
    hook = load_access_check(config.control.access_check)
    publish = None
    if config.fleet.redis:
        from mcp_sandbox.storage.redis import Bridge

        publish = Bridge(config.fleet.redis).put
    return make_app(Control(manager, tasks, partial(_check_access, config, hook), publish))


def load_access_check(place: str) -> _Hook | None:
    """Return the operator's function MODULE:FUNCTION. Raises ConfigError."""
    if not place:
        return None
    module, _, name = place.partition(":")
    try:
        found: _Hook = getattr(import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"control.access_check: {place} cannot be used: {exc}") from exc
    return found


async def _check_access(
    config: Config, hook: _Hook | None, chat: ChatId, given: Prepare
) -> AssistantSpec | None:
    """Return what the sandbox is made from; raises NotPermitted, InvalidArgument."""
    expert = given.expert_identifier or ""
    if hook is not None:
        said = hook(chat.user, chat.chat, expert, given.project_id)
        if not (await said if inspect.isawaitable(said) else said):
            raise NotPermitted(f"{chat.user} may not have a sandbox for {expert or 'this chat'}")
    if not expert:
        return None
    usual = config.agents.command
    try:
        found = await to_thread.run_sync(
            read_assistant, config.agents.folders, expert, chat.user, usual
        )
    except InvalidArgument as exc:
        raise NotPermitted(str(exc)) from exc
    options = found.sandbox
    if options is None:
        return AssistantSpec(found.name)
    limits = {"memory_mb": (options.max_memory or 0) // MIB, "cpus": options.max_cpu}
    used = {name: value for name, value in limits.items() if value}
    return AssistantSpec(found.name, options.image, used)
