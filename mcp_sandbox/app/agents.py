"""What `open_agent` is made of: an assistant, a chat's computer, and the ways out of it."""

import json
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox.agents.assistants import Assistant, SandboxOptions, read_assistant
from mcp_sandbox.agents.connectors import Connector, find_connector
from mcp_sandbox.agents.events import Completion, Usage
from mcp_sandbox.agents.executors import find_executor
from mcp_sandbox.agents.executors.base import Executor, ModelAccess
from mcp_sandbox.agents.executors.direct import Direct
from mcp_sandbox.agents.gateway import Gateway, open_gateway
from mcp_sandbox.agents.hooks import HookMemory, Hooks, load_hooks
from mcp_sandbox.agents.run import Agent, Tell
from mcp_sandbox.app.chats import open_manager, open_ways_out
from mcp_sandbox.audit import open_audit
from mcp_sandbox.config import Config, load_config
from mcp_sandbox.config.values import MIB
from mcp_sandbox.egress.ways_out import WaysOut
from mcp_sandbox.errors import Busy, InvalidArgument
from mcp_sandbox.models import RELAY, ChatId
from mcp_sandbox.server.bridge import ToolBridge, open_bridge
from mcp_sandbox.sessions.chat_records import AssistantSpec, ChatRecords, UseTimes, system_clock
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.skills.library import SkillLibrary

logger = logging.getLogger(__name__)


@asynccontextmanager
async def open_agent(  # noqa: PLR0913 - what an agent can be given
    assistant: str = "",
    chat: str = "demo",
    *,
    user: str = "local",
    connector: str = "",
    command: str = "",
    arguments: Mapping[str, Any] | None = None,
    timeout_s: float | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    hooks: Hooks | None = None,
    on_end: Callable[[Completion], Awaitable[None]] | None = None,
    config: Config | None = None,
    manager: Callable[[], Awaitable[SessionManager]] | None = None,
    ways_out: WaysOut | None = None,
) -> AsyncGenerator[Agent]:
    """Open a coding agent in the computer of a chat, whose files stay.

    Its sandbox ends with the block, but for one of a `manager`, which has the same `config`. It
    reaches its model by these `ways_out`, or those of its manager, or its own.
    The `assistant`, a folder in `agents.folders`, says how it behaves; what is given here goes
    before it. The program `command` with its `arguments` reaches its model by the `connector`, as
    NAME or NAME/MODEL; each run may take `timeout_s`, may call the functions `tools` of this
    process, and is told to `on_end`. What is not given the configuration says.

    Raises:
        InvalidArgument: there is no such assistant, connector, program or argument.
        OperatorError: no sandbox can be made here, or the configuration is wrong.
    """
    if config is None:
        config = (await to_thread.run_sync(load_config)).config
    settings, chat_id = config.agents, ChatId(user, chat)
    usual = command or settings.command
    found = await to_thread.run_sync(read_assistant, settings.folders, assistant, user, usual)
    options = found.sandbox or SandboxOptions(command=Direct.name)
    executor = find_executor(command or options.command or usual)
    # A model that is named with the connector goes before the assistant's.
    unsaid = {"model": None} if "/" in connector and "model" in options.arguments else {}
    given = {**options.arguments, **unsaid, **(arguments or {})}
    make = partial(executor.read, given, f"the arguments of {executor.name}")
    make()
    service = find_connector(config.connectors, connector or found.connector, settings.connector)
    protocol = service.settings.protocol
    if protocol not in executor.protocols:
        raise InvalidArgument(
            f"{executor.name} speaks the protocol {executor.protocols[0]}, and connector "
            f"{service.name} {protocol}: name another connector, or another command"
        )
    # Before anything is started.
    await service.key()
    if on_end is None and settings.usage_log:
        on_end = partial(_log_usage, settings.usage_log, chat_id, found.name, service.name)
    if hooks is None:
        hooks = await to_thread.run_sync(load_hooks, found.hooks)
    bridge = config.bridge.model_copy(
        update={"servers": {**config.bridge.servers, **found.servers}}
    )
    async with (
        _placed(chat_id, found, config, executor, manager) as (session, memory, own),
        nullcontext(known) if (known := ways_out or own) else open_ways_out(config) as reached,
        nullcontext()
        if session
        else open_audit(config.data_dir / "sandbox" / "audit", config.audit) as audit,
    ):
        opening = partial(open_bridge, bridge, found.tools, tools)
        gateway = partial(
            open_gateway, service, chat=chat_id, limits=settings.run, ways_out=reached
        )
        way = partial(_way, session, service, config, gateway, opening)
        limit_s = timeout_s or options.timeout or settings.run.timeout
        agent = Agent(chat_id, session, found, make, way, limit_s, hooks, memory, on_end, audit)
        async with agent.opened():
            yield agent


@asynccontextmanager
async def _placed(
    chat: ChatId,
    found: Assistant,
    config: Config,
    executor: type[Executor],
    manager: Callable[[], Awaitable[SessionManager]] | None,
) -> AsyncGenerator[tuple[Session | None, HookMemory, WaysOut | None]]:
    """Open the chat's session, if anything is to run in it, what its hooks keep, and ways out."""
    if executor is Direct:
        yield None, HookMemory(UseTimes(ChatRecords(config.data_dir), system_clock), chat), None
        return
    spec = read_spec(found, config, executor)
    async with nullcontext(await manager()) if manager else open_manager(config) as chats:
        session = await chats.session(chat, spec)
        if found.skills:
            folders = {"folders": (found.skills, *config.skills.folders)}
            skills = config.skills.model_copy(update=folders)
            session.skills.library = SkillLibrary(skills, config.data_dir)
        yield session, HookMemory(chats.use_times, chat), chats.ways_out


def read_spec(
    found: Assistant, config: Config, executor: type[Executor] | None = None
) -> AssistantSpec:
    """Return what the sandboxes of an assistant's chats are made from.

    `executor` is that of its program. Raises InvalidArgument: there is no such program.
    """
    options = found.sandbox or SandboxOptions()
    executor = executor or find_executor(options.command or config.agents.command)
    limits = {"memory_mb": (options.max_memory or 0) // MIB, "cpus": options.max_cpu}
    place = config.kubernetes if config.backend == "kubernetes" else config.docker
    is_ours = not config.agents.programs and "image" not in place.model_fields_set
    image = options.image or (executor.image if is_ours else "")
    used = {name: value for name, value in limits.items() if value}
    return AssistantSpec(found.name, image, used, names_image=bool(options.image))


async def _log_usage(
    file: Path, chat: ChatId, assistant: str, connector: str, completion: Completion
) -> None:
    fields = asdict(completion)
    usage = {
        name: fields[name] for name in ("usage", "cost_usd", "turns", "duration_ms", "is_error")
    }
    of = {"user": chat.user, "chat": chat.chat, "assistant": assistant, "connector": connector}
    line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="seconds"), **of, **usage})
    try:
        async with await anyio.open_file(file, "a", encoding="utf-8") as log:
            await log.write(f"{line}\n")
    except OSError:
        logger.exception("agents.usage_log cannot be written")


@asynccontextmanager
async def _way(
    session: Session | None,
    service: Connector,
    config: Config,
    gateways: Callable[[], AbstractAsyncContextManager[Gateway]],
    opening: Callable[..., AbstractAsyncContextManager[ToolBridge]],
    tell: Tell,
) -> AsyncGenerator[ModelAccess]:
    """Open what one run finds inside: a door to its model, and one to the host's tools."""
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(gateways())

        def used() -> Usage:
            given, made = gateway.counts.input_tokens, gateway.counts.output_tokens
            return Usage(given, made, given + made, gateway.counts.cached_tokens)

        speaks = service.settings.protocol
        way = ModelAccess("", gateway.token, service.model, speaks, gateway.ask, usage=used)
        if not session:
            yield way
            return
        port = await stack.enter_async_context(session.door(gateway.way))
        bridge = await stack.enter_async_context(opening(of=str(session.chat), tell=tell))
        tools: dict[str, object] = {}
        if bridge.names:
            # Another run of the chat may have the place.
            at: int | str = config.bridge.path
            try:
                at = await stack.enter_async_context(session.door(bridge.handle, at=at))
            except Busy:
                at = f"{at}.{secrets.token_hex(4)}"
                at = await stack.enter_async_context(session.door(bridge.handle, at=at))
            tools = {"command": "python3", "args": ["-I", "-S", RELAY, at]}
        url = f"http://127.0.0.1:{port}"
        online = config.network != "none"
        yield replace(way, url=url, tools=tools, tool_names=bridge.names, online=online)
