"""An agent of one chat, and its runs: prepared, started, listened to, bounded and cleaned up."""

import math
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from typing import Self
from uuid import NAMESPACE_OID, uuid5

import anyio
from anyio.abc import TaskGroup

from mcp_sandbox import errors
from mcp_sandbox.agents.assistants import Assistant
from mcp_sandbox.agents.events import Completion, Event, LineDecoder, Notice, Progress, Text, Usage
from mcp_sandbox.agents.executors.base import Executor, ModelAccess, Program, Run
from mcp_sandbox.agents.hooks import (
    Computer,
    Context,
    FileInfo,
    HookMemory,
    Hooks,
    Messages,
    account_for,
)
from mcp_sandbox.agents.messages import Conversation, read_conversation
from mcp_sandbox.audit import Audit
from mcp_sandbox.models import ChatId, ExecResult
from mcp_sandbox.runtime.channel import own_tasks
from mcp_sandbox.sessions.gate import RecordedCall
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.telemetry.calls import CallRecord

# How long after its time limit a run that does not end by itself is given up; and for tidying up.
_LATE_S, _TIDY_S = 5.0, 5.0
# Of output: a piece full of small lines keeps others waiting for some milliseconds.
_AT_ONCE = 16 << 10
# In bytes, entries and characters; the last of what a program says of its end.
_MOST_OUTPUT, _MOST_NAMES, _MOST_TEXT, _SHOWN_CHARS = 256 << 20, 10_000, 1 << 20, 2000
_FOLDER = '[ -z "$2" ] || mkdir -m 700 "$2" || exit\n'
_ANEW = "no record of an earlier conversation is left: it begins anew"
Tell = Callable[[list[Event]], Awaitable[None]]


@dataclass(eq=False, repr=False)
class Agent:
    """Does what it is asked in a chat's computer, at once too; raises what a session raises.

    `sandbox` is the chat's session, or None. Each run has an `executor` and a `way` of its own,
    which may tell events of the run. `on_end` gets each completion, as the hooks leave it, and
    what was used by a run that is cut off. `memory` is where the chat is kept. Runs without a
    session are recorded in the `audit`, as the gate does the others.
    """

    chat: ChatId
    sandbox: Session | None
    assistant: Assistant
    executor: Callable[[], Executor]
    way: Callable[[Tell], AbstractAsyncContextManager[ModelAccess]]
    timeout_s: float
    hooks: Hooks = field(default_factory=Hooks)
    memory: HookMemory | None = None
    on_end: Callable[[Completion], Awaitable[None]] | None = None
    audit: Audit | None = None
    _tasks: TaskGroup | None = field(default=None, init=False)
    _runs: "set[_Listener]" = field(default_factory=set["_Listener"], init=False)

    @property
    def session(self) -> Session:
        """The chat's. Raises Unsupported: the agent has no sandbox."""
        if not self.sandbox:
            raise errors.Unsupported("the agent has no sandbox: add `sandbox: {}` to its assistant")
        return self.sandbox

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[Self]:
        """Let it work while the block lasts."""
        async with own_tasks() as self._tasks:
            try:
                yield self
            finally:
                await self.close()

    async def close(self) -> None:
        """End what runs; returns when nothing of it is left. It does nothing any more."""
        self._tasks = None
        for each in [*self._runs]:
            each.error = errors.Draining("the agent was closed during the run")
            await each.stop()

    async def execute(self, messages: Messages, *, resume: bool = False) -> Completion:
        """Do what the messages ask for; see `stream`."""
        events = self.stream(messages, resume=resume)
        (completion,) = [event async for event in events if isinstance(event, Completion)]
        return completion

    async def stream(self, messages: Messages, *, resume: bool = False) -> AsyncGenerator[Event]:
        """Do what the messages ask for, and yield what happens; a Completion comes last.

        With `resume` the program goes on with the chat's last such conversation, and is given the
        last message alone. A program that fails is no error. One whose events are not taken waits;
        when the generator is closed, or its caller cancelled, it is killed with all it has started.

        Raises:
            InvalidArgument, TooLarge: the messages cannot be used.
            NotPermitted: a hook refuses them; a sandbox that was made for this run has ended.
            Busy: another run goes on with the conversation.
            Unsupported: the sandbox does not have the program.
            OperatorError: no model can be reached, or no sandbox be made.
        """
        read_conversation(messages)
        executor = self.executor()
        if resume and not self.sandbox:
            raise errors.InvalidArgument(
                "without a sandbox nothing is resumed: give the earlier messages"
            )
        conversation = str(uuid5(NAMESPACE_OID, f"mcp-sandbox {self.chat} {self.assistant.name}"))
        async with self.memory.hold(conversation) if resume and self.memory else nullcontext():
            if self._tasks is None:
                raise errors.Draining("the agent is closed: open it again")
            run = _Listener(executor, conversation, resume)
            self._runs.add(run)
            self._tasks.start_soon(self._run, run, messages)
            try:
                async for events in run.told:
                    for event in events:
                        yield event
            finally:
                await run.stop()
                run.told.close()
                self._runs.discard(run)
        if run.error:
            raise run.error

    async def check(self) -> dict[str, str]:
        """Say what a run would have: its program, model service, and tools of the host.

        Raises as `stream`, and OperatorError: the service does not answer, or not with this key.
        """
        executor, version = self.executor(), "none"

        async def leave(_: object) -> None:
            """Ignore it: nothing is told yet."""

        async with self.way(leave) as way:
            if self.sandbox:
                await _ready(executor, self.sandbox)
                version = await self.exec([executor.name, "--version"])
            # The service need not have a list of models.
            status, error = await way.ask("GET /v1/models", b"", leave)
        if status in (401, 403) or status >= 500:
            why = f"the model service answers {status}: {error}"
            raise errors.OperatorError(f"{why}: correct its url or key in connectors")
        tools = ", ".join(way.tool_names) or "none"
        return {"program": version.strip(), "model": f"answers {status}", "tools": tools}

    async def _run(self, run: "_Listener", messages: Messages) -> None:
        made = self.sandbox is not None and not self.sandbox.has_sandbox
        try:
            with run.telling, run.scope:
                if made:
                    await run.progress("Creating the sandbox")
                    await self.session.exec(["true"])
                    await run.tell([Progress("Sandbox ready"), Progress("")])
                await self._run_between_hooks(run, messages)
        except errors.SandboxError as exc:
            run.error = exc
            if made and isinstance(exc, errors.NotPermitted) and self.session.has_sandbox:
                await self.session.reset()
        finally:
            if self.on_end and (run.done or run.usage().total):
                why = f"failed: {run.error}" if run.error else "cancelled: its caller has left"
                await account_for(run.done or run.completion(why), self.on_end)
            run.ended.set()

    async def _run_between_hooks(self, run: "_Listener", messages: Messages) -> None:
        options = {"assistant": self.assistant.name, "resume": run.resume}
        known = await self.memory.load() if self.memory else {}
        calls = self.read_file, self.write_file, self.list_dir, self.exec
        computer = Computer(*calls) if self.sandbox else None
        context = Context(self.chat, run.progress, computer, deepcopy(known))
        messages = await self.hooks.before(context, messages, options)
        conversation = read_conversation([*self.assistant.prompts, *messages])
        completion = await self._completion(run, conversation)
        run.done, problem = await self.hooks.after(context, completion, options)
        try:
            if self.memory and context.memory != known:
                await self.memory.save(context.memory)
        except (errors.SandboxError, TypeError, ValueError) as exc:
            problem += f" What ctx.memory holds is not kept: {exc}"
        await run.tell([*([Notice(problem)] if problem else ()), run.done])

    async def _completion(self, run: "_Listener", conversation: Conversation) -> Completion:
        ended = "timeout: its time was over"
        try:
            with anyio.move_on_after(self.timeout_s + (_LATE_S if self.sandbox else 0)):
                for name in self.assistant.taught:
                    await self.session.skills.activate(name, by_user=True)
                async with self.way(run.tell) as way:
                    run.usage = way.usage
                    ended = await self._start(run, way, conversation)
                    await run.take(b"\n")
        except (errors.SandboxGone, errors.Unreachable) as exc:
            ended = f"sandbox: {exc}"
        return run.completion(ended)

    async def _start(
        self, listener: "_Listener", way: ModelAccess, conversation: Conversation
    ) -> str:
        """Return how the program ended, in words; nothing of it is left."""
        if not self.sandbox:
            program = listener.executor.command(Run("", conversation, way))
            request = " ".join(program.argv)
            async with self._recorded({"request": request, "stdin": program.stdin}):
                status, error = await way.ask(request, program.stdin, listener.take)
            why = "broke off its answer" if status == 200 else f"answers {status}: {error}"
            return f"api_error: the model service {why}"
        until_s = anyio.current_time() + self.timeout_s
        folder = f"/tmp/mcp-sandbox-run-{secrets.token_hex(8)}"  # noqa: S108 - inside
        try:
            run = Run(folder, conversation, way, listener.kept_as)
            program = await _prepare_program(listener, run, self.sandbox)
            result = await self.session.exec(
                program.argv,
                env=program.env,
                stdin=program.stdin,
                timeout_s=max(0.1, until_s - anyio.current_time()),
                take=listener.take,
            )
            return _explain_end(result)
        finally:
            with anyio.move_on_after(_TIDY_S, shield=True), suppress(errors.SandboxError):
                if self.sandbox.has_sandbox:
                    await self.session.exec(["rm", "-rf", folder])

    def _recorded(self, request: Mapping[str, object]) -> AbstractAsyncContextManager[None]:
        record = CallRecord("direct", chat=self.chat)
        return RecordedCall(self.audit, request, record) if self.audit else nullcontext()

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file."""
        return await self._output(["cat", "--", path])

    async def write_file(self, path: str, data: bytes | str) -> None:
        """Create or replace a file."""
        await self.session.write_file(path, data)

    async def list_dir(self, path: str = ".") -> list[FileInfo]:
        """Return what a folder holds, by name."""
        listing = await self.session.list_files(path, limit=_MOST_NAMES)
        if listing.truncated:
            raise errors.TooLarge(f"{path} has {listing.total:,} entries, over {_MOST_NAMES:,}")
        return [
            FileInfo(Path(each.path).name, each.size, each.kind == "directory", each.modified)
            for each in listing.entries
        ]

    async def exec(self, command: Sequence[str]) -> str:
        """Run a program and return what it prints; CommandFailed has its exit code and output."""
        return (await self._output(command)).decode("utf-8", "replace")

    async def _output(self, command: Sequence[str]) -> bytes:
        output = bytearray()

        async def take(data: bytes) -> None:
            output.extend(data)
            if len(output) > _MOST_OUTPUT:
                raise errors.TooLarge(f"over {_MOST_OUTPUT:,} bytes: take a part of it")

        await self.session.exec(command, take=take, check=True)
        return bytes(output)


class _Listener:
    """Hears one run of an executor, and tells its events to their receiver."""

    def __init__(self, executor: Executor, kept_as: str, resume: bool) -> None:
        self.executor, self.kept_as, self.resume = executor, kept_as, resume
        self.telling, self.told = anyio.create_memory_object_stream[list[Event]]()
        self.scope, self.ended = anyio.CancelScope(), anyio.Event()
        self.error: errors.SandboxError | None = None
        self.usage: Callable[[], Usage] = Usage
        self.done: Completion | None = None
        self._began_s = anyio.current_time()
        self._lines = LineDecoder()
        self._last: Completion | None = None
        self._text = StringIO()

    async def stop(self) -> None:
        """End the run; returns when nothing of it is left."""
        self.scope.cancel()
        with anyio.CancelScope(shield=True):
            await self.ended.wait()

    async def tell(self, events: list[Event]) -> None:
        if events:
            await self.telling.send(events)

    async def progress(self, text: str) -> None:
        await self.tell([Progress(text)])

    async def take(self, data: bytes) -> None:
        """Tell what this piece of the program's output means."""
        for start in range(0, len(data), _AT_ONCE):
            lines = self._lines.feed(data[start : start + _AT_ONCE])
            await self.tell([event for line in lines for event in self._read(line)])

    def _read(self, line: bytes | Notice) -> Iterator[Event]:
        for event in [line] if isinstance(line, Notice) else self.executor.events(line):
            if isinstance(event, Completion):
                self._last = event
                continue
            if isinstance(event, Text) and self._text.tell() < _MOST_TEXT:
                self._text.write(event.text[:_MOST_TEXT])
            yield event

    def completion(self, ended: str) -> Completion:
        """Return the program's own, or what there was when it `ended` without one."""
        # Who writes the program must not write the bill: tokens and time are not taken from it.
        last = self._last or Completion("", is_error=True, reason=ended)
        return replace(
            last,
            content=last.content or self._text.getvalue(),
            usage=self.usage(),
            cost_usd=last.cost_usd if 0 <= (last.cost_usd or 0) < math.inf else None,
            turns=max(0, last.turns),
            duration_ms=round((anyio.current_time() - self._began_s) * 1000),
        )


async def _ready(executor: Executor, session: Session, kept_as: str = "", folder: str = "") -> str:
    """Make the sandbox ready for the program; the conversation's last record, if there is one."""
    name, image = executor.name, executor.image
    script = f"command -v {name} >/dev/null || exit 127\n{_FOLDER}{executor.prepare}"
    result = await session.exec(["/bin/sh", "-c", script, "sh", kept_as, folder], timeout_s=60)
    if result.success:
        return result.stdout.strip()
    why = result.stderr.strip() or f"sh ended with {result.exit_code}"
    if result.exit_code == 127:
        build = f"`mcp-sandbox images build {name}` makes {image} for the backend's image, or "
        why = f"there is no program {name} in the sandbox: {build if image else ''}"
        why += f"set agents.programs to a folder that has bin/{name}"
    raise errors.Unsupported(why)


async def _prepare_program(listener: _Listener, run: Run, session: Session) -> Program:
    try:
        record = await _ready(listener.executor, session, run.kept_as, run.folder)
        if listener.resume and record:
            last = replace(run.conversation, turns=run.conversation.turns[-1:])
            run = replace(run, record=record, conversation=last)
        elif listener.resume:
            await listener.tell([Notice(_ANEW)])
        program = listener.executor.command(run)
        for name, data in program.files.items():
            if data:
                await session.write_file(f"{run.folder}/{name}", data)
    except errors.CallerError as exc:
        exc.args = (f"failed to prepare environment: {exc}", *exc.args[1:])
        raise
    return program


def _explain_end(result: ExecResult) -> str:
    why = f"exit: it ended with exit code {result.exit_code} and without a result"
    if result.timed_out:
        why = "timeout: its time was over"
    elif result.out_of_memory:
        why = "memory: no memory was left"
    elif result.killed_because or result.signal:
        why = f"killed: {result.killed_because or f'by {result.signal}'}"
    stderr = result.stderr.strip()[-_SHOWN_CHARS:]
    return f"{why}; it said: {stderr}" if stderr else why
