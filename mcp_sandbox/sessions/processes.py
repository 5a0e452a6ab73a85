"""The processes of one chat: what outlives the call that started it."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace

from anyio import CancelScope

from mcp_sandbox.errors import CallerError, NotFound, SandboxGone
from mcp_sandbox.models import ChatId, ExecResult, ProcessRow
from mcp_sandbox.runtime.processes import Key, Stop
from mcp_sandbox.runtime.runtime import OnOutput, Runtime
from mcp_sandbox.sessions.gate import Action, Entered, Gate

Run = Callable[..., Awaitable[ExecResult]]
_FIGURES_READ = 10


class Processes:
    """The processes of one chat, by the ids in results. Raises what a session's calls raise."""

    def __init__(self, chat: ChatId, gate: Gate, run: Run, *, judged: bool = False) -> None:
        """`run` is the session's `exec`."""
        self._chat = chat
        self._judged = judged
        self._gate = gate
        self._run = run

    @asynccontextmanager
    async def start(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        tty: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncGenerator["Process"]:
        """Start a command that runs beside the block, and ends with it."""
        how = {"cwd": cwd, "env": env, "tty": tty, "timeout_s": timeout_s, "wait_s": 0}
        process = Process(self, await self._run(command, **how))
        try:
            yield process
        finally:
            with CancelScope(shield=True), suppress(NotFound, SandboxGone):
                await process.stop(grace_s=1)

    async def list(self) -> Sequence[ProcessRow]:
        """Return what runs, and what has ended lately, the newest last."""
        async with self._enter("list") as entered:
            return await entered.runtime.processes.list()

    async def wait(
        self,
        process: str,
        *,
        wait_s: float | None = None,
        until: str | None = None,
        whole: bool = False,
        on_output: OnOutput | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Wait for its end, for `wait_s`, or until it prints `until`; return its state then.

        With its output since the last answer about it, or the `whole` output as far as it is
        stored. A cancellation ends the wait only.

        Raises:
            NotFound: there is no such process; the message names those there are.
        """
        async with self._enter("wait", process, leave) as entered:
            leave = entered.leaving(wait_s)
            result = await entered.runtime.processes.wait(
                process, until=until, whole=whole, on_output=on_output, leave=leave
            )
            return await with_figures(entered.runtime, result)

    async def stop(self, process: str, how: Stop = "TERM", *, grace_s: float = 5.0) -> ExecResult:
        """Signal its process group, after the grace kill its whole tree; return how it ended."""
        async with self._enter("stop", process) as entered:
            return await entered.runtime.processes.stop(process, how, grace_s=grace_s)

    async def type(self, process: str, text: str = "", key: Key | None = None) -> ExecResult:
        """Type a text, then a key, on its terminal; return its state and output after that."""
        async with self._enter("input", process, text=text) as entered:
            return await entered.runtime.processes.type(process, text, key)

    def _enter(
        self, action: str, name: str | None = None, leave: CancelScope | None = None, **typed: str
    ) -> AbstractAsyncContextManager[Entered]:
        arguments = {"action": action, "id": name, **typed}
        leave = leave or CancelScope()
        wanted = Action(self._chat, "process", arguments, leave=leave, judged=self._judged)
        return self._gate.enter(wanted)


class Process:
    """A command that was started by `start`, and is ended with its block; see `Processes`."""

    def __init__(self, processes: Processes, started: ExecResult) -> None:
        self.id = started.process or ""
        self._processes = processes
        # It may have ended before `start` returned.
        self._ended = None if started.running else started

    async def wait(self, *, wait_s: float | None = None, until: str | None = None) -> ExecResult:
        return self._ended or await self._processes.wait(self.id, wait_s=wait_s, until=until)

    async def type(self, text: str = "", key: Key | None = None) -> ExecResult:
        return self._ended or await self._processes.type(self.id, text, key)

    async def stop(self, how: Stop = "TERM", *, grace_s: float = 5.0) -> ExecResult:
        return self._ended or await self._processes.stop(self.id, how, grace_s=grace_s)


async def with_figures(runtime: Runtime, result: ExecResult) -> ExecResult:
    """Return the result with the data of its first figures, where their files can be read."""
    figures = list(result.figures)
    for at, path in enumerate(each.path for each in result.figures[:_FIGURES_READ]):
        with suppress(CallerError):
            content = await runtime.files.read_lines(path, limit=1, max_bytes=1)
            figures[at] = replace(content, path=path)
    return replace(result, figures=tuple(figures))
