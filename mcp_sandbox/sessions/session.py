"""One chat's computer: every call of every tool goes through here."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from mcp_sandbox.errors import SandboxError
from mcp_sandbox.models import (
    TROUBLE,
    BackendName,
    ChatId,
    DeleteResult,
    EditResult,
    ExecResult,
    FileContent,
    GlobResult,
    GrepResult,
    Language,
    Listing,
    MoveResult,
    WriteResult,
)
from mcp_sandbox.runtime.files import Files
from mcp_sandbox.runtime.runtime import OnOutput, Runtime
from mcp_sandbox.sessions.growth import limit_met
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.report import SandboxReport, ask_programs, report_on
from mcp_sandbox.sessions.shell import Shell
from mcp_sandbox.sessions.skills import ChatSkills


class Session:
    """The computer of one chat. Paths are relative to its workspace, or absolute inside.

    Any call may raise SandboxGone (the sandbox died; the next call gets a new one on the same
    files), OperatorError (no sandbox can be made) and CallerError (the call cannot be done).
    """

    def __init__(self, hold: Hold, skills: ChatSkills) -> None:
        self._hold = hold
        self.shell = Shell(hold)
        self.skills = skills

    @property
    def chat(self) -> ChatId:
        return self._hold.chat

    @property
    def backend(self) -> BackendName:
        return self._hold.backend

    def take_news(self) -> list[str]:
        """What became of the sandbox between the calls, for the next result; told once."""
        return [*self._hold.take_news(), *self.skills.take_warnings()]

    async def run_code(
        self, code: str, language: Language = "python", *, timeout_s: float = 30.0
    ) -> ExecResult:
        """Run code in a fresh process of its language."""
        env = await self._hold.pinning.variables()
        return await self._watched(
            lambda runtime: runtime.run_code(code, language, env=env, timeout_s=timeout_s)
        )

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        timeout_s: float = 120.0,
        on_output: OnOutput | None = None,
    ) -> ExecResult:
        """Run a bash command line, or a list of program and arguments without a shell.

        `on_output` gets ("stdout" | "stderr", bytes) while it runs.
        """
        given = stdin.encode() if isinstance(stdin, str) else stdin or b""
        variables = {**await self._hold.pinning.variables(), **(env or {})}
        return await self._watched(
            lambda runtime: runtime.exec(
                command,
                cwd=cwd,
                env=variables,
                stdin=given,
                timeout_s=timeout_s,
                on_output=on_output,
            )
        )

    async def read_file(self, path: str, *, offset: int = 1, limit: int = 2000) -> FileContent:
        """Lines of a text file from line `offset` on, an image, or a binary file's beginning."""
        async with self._files() as files:
            return await files.read_lines(path, offset=offset, limit=limit)

    async def write_file(self, path: str, data: bytes, *, append: bool = False) -> WriteResult:
        """Create or replace a file as a whole, or append to it."""
        async with self._writing(len(data)) as files:
            return await files.write(path, data, append=append)

    async def edit_file(
        self, path: str, old: str, new: str, *, replace_all: bool = False, dry_run: bool = False
    ) -> EditResult:
        """Replace text in a file."""
        async with self._writing(len(new)) as files:
            return await files.edit(path, old, new, replace_all=replace_all, dry_run=dry_run)

    async def list_files(
        self, path: str = ".", *, depth: int = 1, limit: int = 500, hidden: bool = True
    ) -> Listing:
        """The entries of a directory, `depth` levels deep."""
        async with self._files() as files:
            return await files.list(path, depth=depth, limit=limit, hidden=hidden)

    async def glob(self, pattern: str, path: str = ".", *, limit: int = 500) -> GlobResult:
        """Paths that match, newest first."""
        async with self._files() as files:
            return await files.glob(pattern, path, limit=limit)

    async def grep(
        self,
        pattern: str,
        path: str = ".",
        *,
        glob: str | None = None,
        ignore_case: bool = False,
        context: int = 0,
        limit: int = 200,
    ) -> GrepResult:
        """Lines that match a regular expression."""
        async with self._files() as files:
            return await files.grep(
                pattern, path, glob=glob, ignore_case=ignore_case, context=context, limit=limit
            )

    async def delete_file(self, path: str, *, recursive: bool = False) -> DeleteResult:
        """Delete a file, or with `recursive` a directory."""
        async with self._files() as files:
            result = await files.delete(path, recursive=recursive)
        self._hold.meter.note_change()
        return result

    async def move_file(
        self, source: str, destination: str, *, overwrite: bool = False
    ) -> MoveResult:
        """Move or rename a file or directory."""
        async with self._writing(0) as files:
            return await files.move(source, destination, overwrite=overwrite)

    async def info(self) -> SandboxReport:
        """What this computer is and has."""
        usage = await self._hold.meter.usage()
        async with self._hold.call() as held:
            return report_on(self.chat, held, await ask_programs(held), usage)

    async def reset(self, *, keep_files: bool = True) -> str:
        """A new sandbox; without `keep_files` also an empty workspace. Says what was done."""
        if keep_files:
            await self._hold.end()
            return "The sandbox was replaced; files in /workspace and the home are kept."
        await self._hold.end("discard")
        self.skills.forget()
        return (
            "The sandbox was replaced and /workspace is empty; no skill is active. The operator "
            "can restore the old files for 24 hours, or until the next such reset. The home "
            "directory is kept."
        )

    @asynccontextmanager
    async def _files(self) -> AsyncGenerator[Files]:
        async with self._hold.call() as held:
            yield held.runtime.files

    @asynccontextmanager
    async def _writing(self, size: int) -> AsyncGenerator[Files]:
        await self._hold.meter.check_room(size)
        async with self._hold.call() as held:
            with held.guard.call():
                yield held.runtime.files

    async def _watched(self, run: Callable[[Runtime], Awaitable[ExecResult]]) -> ExecResult:
        """Run, and kill it when the workspace grows over its limit meanwhile.

        In a full workspace it runs all the same, to look and to delete, but cannot write.
        """
        full = await self._hold.meter.problem()
        async with self._hold.call() as held:
            changed = True
            try:
                # In a full workspace it cannot write, and may be just the one that cleans up.
                with held.guard.call(may_end=full is None, answers=True) as stop:
                    result = await run(held.runtime.bounded(stop, may_grow=full is None))
                changed = result.changed_files != ()
                if kept := result.output_file:
                    look = held.runtime.bounded(stop, may_grow=False)
                    result = replace(result, trouble_lines=await _troubles(look, kept))
            finally:
                self._hold.meter.note_change(grew=changed)
        result = replace(result, offline=held.facts.network.startswith("none"))
        if stop.cancelled_caught:
            return replace(result, killed_because=str(held.guard.problem))
        if result.success:
            return result
        return replace(result, limit=str(full or limit_met(result, held.facts.limits)))


async def _troubles(runtime: Runtime, kept: str) -> int:
    """How many lines of the kept output speak of trouble; 0 where that cannot be told soon."""
    with suppress(SandboxError, ValueError):
        look = ["/bin/grep", "-caiE", TROUBLE, kept]
        return int((await runtime.exec(look, env={"LC_ALL": "C"}, timeout_s=2)).stdout[:9])
    return 0
