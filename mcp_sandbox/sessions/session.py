"""One chat's computer: every call of every tool, of a person's shell and of a program.

Its processes outlive the call that started them.
"""

import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from anyio import CancelScope, Lock, to_thread

from mcp_sandbox.config.values import DAY_S
from mcp_sandbox.egress.ways_out import Way
from mcp_sandbox.errors import (
    CallerError,
    CommandFailed,
    InvalidArgument,
    NotFound,
    SandboxError,
    SandboxGone,
    Unreachable,
    Unsupported,
)
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
    ProcessRow,
    SandboxFacts,
    TerminalEnd,
    WorkspaceUsage,
    WriteResult,
)
from mcp_sandbox.reading.shell import drop_returns
from mcp_sandbox.runner.wire.protocol import VERSION
from mcp_sandbox.runtime.doors import Handler
from mcp_sandbox.runtime.runtime import NAME, OnOutput, Runtime, Show
from mcp_sandbox.sessions.approvals import USER
from mcp_sandbox.sessions.gate import Action, AdmittedCall, Gate
from mcp_sandbox.sessions.previews import Previews
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
from mcp_sandbox.sessions.sandbox.context import explain_limit
from mcp_sandbox.sessions.skills import ChatSkills

Run = Callable[..., Awaitable[ExecResult]]
_FIGURES_READ = 10
# In which Python names the encoding of a file; code comes as text, and is a file of UTF-8.
_ENCODING = re.compile(r"\A((?:[ \t\f]*(?:#.*)?\n)??[ \t\f]*#.*?coding[:=][ \t]*)[-\w.]+", re.A)
_RETURNS = (
    "carriage returns at ends of lines were left out: bash would take them for parts of words"
)
# One line "name version" for each program found; all are asked at once, with a time limit each.
_ASK = r"""
ask() {
  command -v "$1" >/dev/null || return
  v=$(timeout 5 "$@" 2>&1 </dev/null | grep -oE '[0-9]+(\.[0-9]+)+' | head -n1)
  echo "$1 ${v:-present}"
}
for p in python3 node git rg jq sqlite3 curl make gcc; do ask "$p" --version & done
# These take long to say their version.
for p in pip npm uv; do command -v "$p" >/dev/null && echo "$p present"; done
echo "bash $BASH_VERSION"
wait
"""


_SHOWN_CHARS = 500


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
            with CancelScope(shield=True), suppress(NotFound, SandboxGone, Unreachable):
                await process.stop(grace_s=1)

    async def list(self) -> Sequence[ProcessRow]:
        """Return what runs, and what has ended lately, the newest last."""
        async with self._enter("list") as entered:
            return await entered.runtime.processes.list()

    async def wait(  # noqa: PLR0913 - what can be waited for
        self,
        process: str,
        *,
        wait_s: float | None = None,
        until: str | None = None,
        whole: bool = False,
        typed: tuple[str, str | None] | None = None,
        on_output: OnOutput | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Wait for its end, for `wait_s`, or until it prints `until` anew; return its state then.

        With its output since the last answer about it, or the `whole` output as far as it is
        stored. With a text and a key to be `typed` before, wait for what comes behind their echo,
        without `until` for a screen that rests. A cancellation ends the wait only.

        Raises:
            NotFound: there is no such process; the message names those there are.
        """
        action = {"action": "input", "text": typed[0]} if typed else {"action": "wait"}
        async with self._enter(name=process, leave=leave, **action) as entered:
            leave = entered.leaving(wait_s)
            result = await entered.runtime.processes.wait(
                process, until=until, whole=whole, typed=typed, on_output=on_output, leave=leave
            )
            return await with_figures(entered.runtime, result)

    async def stop(self, process: str, how: str = "TERM", *, grace_s: float = 5.0) -> ExecResult:
        """Signal its process group, after the grace kill its whole tree; return how it ended."""
        async with self._enter("stop", process) as entered:
            return await entered.runtime.processes.stop(process, how, grace_s=grace_s)

    def _enter(
        self, action: str, name: str | None = None, leave: CancelScope | None = None, **typed: str
    ) -> AbstractAsyncContextManager[AdmittedCall]:
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

    async def type(
        self, text: str = "", key: str | None = None, *, until: str | None = None
    ) -> ExecResult:
        return self._ended or await self._processes.wait(self.id, typed=(text, key), until=until)

    async def stop(self, how: str = "TERM", *, grace_s: float = 5.0) -> ExecResult:
        return self._ended or await self._processes.stop(self.id, how, grace_s=grace_s)


async def with_figures(runtime: Runtime, result: ExecResult) -> ExecResult:
    """Return the result with the data of its first figures, where their files can be read."""
    figures = list(result.figures)
    for at, path in enumerate(each.path for each in result.figures[:_FIGURES_READ]):
        with suppress(CallerError):
            content = await runtime.files.read_lines(path, limit=1, max_bytes=1)
            figures[at] = replace(content, path=path)
    return replace(result, figures=tuple(figures))


@dataclass(frozen=True, kw_only=True)
class SandboxReport(SandboxFacts):
    """The answer of `sandbox_info`. `programs` maps a name to its version.

    `project` says whether and how the folder of the chat's client is shown; `previews` maps a port
    to its address.
    """

    chat: ChatId
    programs: Mapping[str, str]
    previews: Mapping[int, str]
    project: str
    usage: WorkspaceUsage
    versions: Mapping[str, str]


class Session:
    """The computer of one chat. Paths are relative to its workspace, or absolute inside.

    Any number of tasks may call at once.

    Any call may raise SandboxGone (the sandbox died; the next call gets a new one on the same
    files), OperatorError (no sandbox can be made) and CallerError (the call cannot be done).
    """

    def __init__(
        self,
        hold: ChatSandbox,
        gate: Gate,
        skills: ChatSkills,
        previews: Previews,
        *,
        judged: bool = False,
    ) -> None:
        """`judged`: the policy decides about what is run."""
        self._hold = hold
        self._gate = gate
        self._judged = judged
        # Takes a text that the agent gets with the next result.
        self.tell_news = hold.tell_agent
        self.chat: ChatId = hold.chat
        self.backend: BackendName = hold.backend
        self.skills = skills
        self.previews = previews

    @property
    def processes(self) -> Processes:
        """What outlives its call. Made anew: kept here it would keep the session alive."""
        return Processes(self.chat, self._gate, self.exec, judged=self._judged)

    @property
    def is_open(self) -> bool:
        """False while its sandbox is being made."""
        return not self._hold.use().starting

    @property
    def has_sandbox(self) -> bool:
        """Whether there is one now; if not, the next call makes it."""
        return self._hold.use().open

    async def take_notices(self) -> list[str]:
        """Return what happened to the sandbox since the last call; each text is returned once."""
        return await self._hold.take_notices()

    async def run_code(  # noqa: PLR0913 - what code can be given
        self,
        code: str,
        language: Language = "python",
        *,
        notebook: str | None = None,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        memory_mb: float | None = None,
        output_mb: float | None = None,
        on_output: OnOutput | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Run code in a new process, or Python in a `notebook`, which keeps its variables.

        The other arguments are those of `exec`.
        """
        if notebook is not None:
            _check_notebook(notebook, language)
        code, remarks = await _plain(code, language)
        given = {"code": code, "language": language, "notebook": notebook}
        turn = self._hold.notebook_turns.setdefault(notebook, Lock()) if notebook else Lock()
        async with turn, self._enter("run_code", 0, leave, **given) as entered:
            result = await entered.runtime.capped(memory_mb, output_mb).run_code(
                code,
                language,
                notebook=notebook,
                env=await self._hold.variables(),
                timeout_s=self._limit_s(timeout_s, wait_s, self._hold.calls.code_timeout),
                on_output=on_output,
                leave=entered.leaving(wait_s),
            )
            return await _ended(entered, result, remarks)

    async def exec(  # noqa: PLR0913 - what a command can be given
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | bytes | None = None,
        shell: str | None = None,
        tty: bool = False,
        timeout_s: float | None = None,
        wait_s: float | None = None,
        memory_mb: float | None = None,
        output_mb: float | None = None,
        until: str | None = None,
        check: bool = False,
        on_output: OnOutput | None = None,
        take: Show | None = None,
        leave: CancelScope | None = None,
    ) -> ExecResult:
        """Run a bash command line, or a list of program and arguments without a shell.

        Commands in a `shell` of the same name find directory, variables, functions and options as
        the one before left them. After `timeout_s` it is killed, as it is within a moment when its
        processes hold over `memory_mb`; `output_mb` of its output are kept. After `wait_s`, when
        `until` is in its output, or when `leave` is cancelled, the result has the output so far,
        and the command goes on as `result.process`. `on_output` gets ("stdout" | "stderr", bytes)
        while it runs. `tty`: run it on a terminal. `take` gets all of stdout; see runtime.

        Raises:
            CommandFailed: with `check`, it did not succeed.
        """
        command, said = await _plain(command, "bash") if isinstance(command, str) else (command, ())
        given = stdin.encode() if isinstance(stdin, str) else stdin or b""
        told = {"command": command, "cwd": cwd, "env": env, "stdin": stdin, "shell": shell}
        # A command whose stdout is taken is waited for until it ends.
        stays = take is not None and wait_s is None and leave is None
        async with self._enter("exec", 0, leave, **told) as entered:
            result = await entered.runtime.capped(memory_mb, output_mb).exec(
                command,
                cwd=cwd,
                env={**await self._hold.variables(), **(env or {})},
                stdin=given,
                shell=shell,
                timeout_s=self._limit_s(timeout_s, wait_s, self._hold.calls.timeout),
                until=until,
                tty=tty,
                on_output=on_output,
                take=take,
                leave=None if stays else entered.leaving(wait_s),
            )
            result = await _ended(entered, result, said)
        if check and not (result.success or result.running):
            ended = f"signal {result.signal}" if result.signal else f"exit code {result.exit_code}"
            why = "its time limit" if result.timed_out else ended
            printed = (result.stderr or result.stdout).strip()[-_SHOWN_CHARS:]
            raise CommandFailed(f"{str(command)[:200]!r} ended with {why}: {printed}", result)
        return result

    @staticmethod
    def _limit_s(timeout_s: float | None, wait_s: float | None, default_s: float) -> float | None:
        """Return the time limit; None, the life of the sandbox, for a start in the background."""
        if timeout_s is not None and not timeout_s >= 0:
            raise InvalidArgument("timeout_s must be a number of seconds, 0 or more")
        return None if timeout_s is None and wait_s == 0 else timeout_s or default_s

    async def shell(
        self, frames: AsyncIterable[bytes], show: Show, *, args: Mapping[str, Any], room: int = 0
    ) -> TerminalEnd:
        """Let a person use a shell that needs `room` bytes of disk; what it started ends with it.

        See runtime.
        """
        async with self._enter("shell", room, command=args.get("command")) as entered:
            env = {**await self._hold.variables(), **args.get("env", {})}
            ended = await entered.runtime.terminal(frames, show, args={**args, "env": env})
            entered.record.exit_code = ended.exit_code
            return ended

    @asynccontextmanager
    async def door(self, handler: Handler | Way, *, at: int | str = 0) -> AsyncGenerator[int | str]:
        """Let programs inside connect to `handler` while the block lasts, on any network.

        Yields the port on their 127.0.0.1, a free one if `at` is 0, or `at`, the path of a unix
        socket. The sandbox stays for the block; if it dies, the handlers end. On bubblewrap with
        an open network the port is one of this machine: ask each client for a secret.

        Raises:
            Busy: a program or another block listens there, or there are too many.
        """
        async with (
            self._enter("door", at=at) as entered,
            entered.held.open_door(handler, at) as place,
        ):
            yield place

    async def read_file(self, path: str, *, offset: int = 1, limit: int = 2000) -> FileContent:
        """Return lines of a text file from `offset` on, an image, or a binary file's beginning."""
        async with self._enter("read_file", path=path) as entered:
            return await entered.runtime.files.read_lines(path, offset=offset, limit=limit)

    async def read_to(self, path: str, take: Show) -> int:
        """Give the bytes of a regular file of any size to `take`; return how many there were."""
        async with self._enter("read_file", path=path) as entered:
            return await entered.runtime.files.read_to(path, take)

    async def write_file(
        self,
        path: str,
        data: bytes | str | AsyncIterable[bytes],
        *,
        append: bool = False,
        size: int = 0,
    ) -> WriteResult:
        """Create or replace a file as a whole, or append to it; text is written as UTF-8.

        `size`: how many bytes a stream is said to have; there must be room for more as it comes.
        """
        data = data.encode() if isinstance(data, str) else data
        if isinstance(data, bytes):
            async with self._enter("write_file", len(data), path=path, content=data) as entered:
                return await entered.runtime.files.write(path, data, append=append)
        async with (
            self._enter("write_file", size, path=path, size=size) as entered,
            aclosing(self._let_in(data, size)) as pieces,
        ):
            return await entered.runtime.files.write(path, pieces, append=append)

    async def _let_in(self, data: AsyncIterable[bytes], size: int) -> AsyncGenerator[bytes]:
        came = 0
        async for piece in data:
            if came + len(piece) > size:
                await self._hold.meter.check_room(len(piece), unseen=came)
            came += len(piece)
            yield piece

    async def edit_file(
        self, path: str, old: str, new: str, *, replace_all: bool = False, dry_run: bool = False
    ) -> EditResult:
        """Replace text in a file."""
        how = {"replace_all": replace_all, "dry_run": dry_run}
        async with self._enter(
            "edit_file", len(new), path=path, old=old, new=new, **how
        ) as entered:
            return await entered.runtime.files.edit(path, old, new, **how)

    async def list_files(
        self,
        path: str = ".",
        *,
        depth: int = 1,
        limit: int = 500,
        hidden: bool = True,
        missing_ok: bool = False,
    ) -> Listing:
        """Return the entries of a directory, `depth` levels deep; `missing_ok`: it may be none."""
        async with self._enter("list_files", path=path) as entered:
            files = entered.runtime.files
            try:
                return await files.list(path, depth=depth, limit=limit, hidden=hidden)
            except NotFound:
                if not missing_ok:
                    raise
                return Listing(path, (), 0, truncated=False)

    async def glob(self, pattern: str, path: str = ".", *, limit: int = 500) -> GlobResult:
        """Return the paths that match, newest first."""
        async with self._enter("glob", pattern=pattern, path=path) as entered:
            return await entered.runtime.files.glob(pattern, path, limit=limit)

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
        """Return the lines that match a regular expression."""
        async with self._enter("grep", pattern=pattern, path=path, glob=glob) as entered:
            return await entered.runtime.files.grep(
                pattern, path, glob=glob, ignore_case=ignore_case, context=context, limit=limit
            )

    async def delete_file(self, path: str, *, recursive: bool = False) -> DeleteResult:
        """Delete a file, or with `recursive` a directory."""
        async with self._enter("delete_file", path=path, recursive=recursive) as entered:
            result = await entered.runtime.files.delete(path, recursive=recursive)
        self._hold.meter.note_change()
        return result

    async def move_file(
        self, source: str, destination: str, *, overwrite: bool = False
    ) -> MoveResult:
        """Move or rename a file or directory."""
        async with self._enter("move_file", source=source, destination=destination) as entered:
            return await entered.runtime.files.move(source, destination, overwrite=overwrite)

    async def info(self) -> SandboxReport:
        """Return the programs, limits, disk usage and network of the sandbox."""
        async with self._enter("sandbox_info") as entered:
            usage = await self._hold.meter.usage()
            result = await entered.runtime.exec(_ASK, timeout_s=15)
            pairs = (line.partition(" ") for line in sorted(result.stdout.splitlines()))
            facts = entered.held.sandbox.facts
            if egress := self._hold.egress:
                facts = replace(facts, network=await egress.describe_network(self.chat))
            return SandboxReport(
                **vars(facts),
                chat=self.chat,
                programs={name: version for name, _, version in pairs},
                previews=entered.held.previews,
                project=entered.held.project.notice,
                usage=usage,
                versions={"runner": VERSION, "python": entered.held.runtime.hello.python},
            )

    async def share(self, path: str, *, expires_s: float = 3600) -> str:
        """Return an address by which anybody can download a copy of a file for this long.

        Raises:
            InvalidArgument: `expires_s` is over a day.
            Unsupported: this server has no object store.
        """
        if not 0 < expires_s <= DAY_S:
            raise InvalidArgument(f"expires_s must be over 0 and at most {DAY_S}, a day")
        if (saving := self._hold.saving) is None:
            raise Unsupported("files cannot be shared: no object store is configured (storage)")
        async with self._enter("share", path=path) as entered:
            return await saving.share(self.chat, path, entered.runtime.files, expires_s)

    async def reset(self, *, keep_files: bool = True) -> str:
        """Replace the sandbox; without `keep_files` also empty the workspace. Say what was done."""
        given = {"keep_files": keep_files}
        async with self._gate.passed(Action(self.chat, "sandbox_reset", given)):
            await self._hold.end("keep" if keep_files else "discard")
        if keep_files:
            return "The sandbox was replaced; files in /workspace and the home are kept."
        self.skills.forget()
        return (
            "The sandbox was replaced and /workspace is empty; no skill is active. For 24 hours, "
            "or until the next such reset, the user can bring the old files back by `mcp-sandbox "
            f"trash restore {self.chat}`. The home directory is kept."
        )

    async def network_access(
        self, hosts: Sequence[str], reason: str, *, write: bool = False
    ) -> str:
        """Let the chat reach public hosts, only to read unless it may `write`; say which.

        Raises:
            ConsentNeeded, NotPermitted: as for a command that needs the user's consent.
            Unsupported: this server has no list of allowed hosts.
        """
        if (egress := self._hold.egress) is None:
            raise Unsupported("nothing to add to: this server has no `network: allowlist`")
        missing = await egress.find_missing(self.chat, hosts, read=not write)
        if not missing:
            return f"{', '.join(hosts)}: allowed already; connect again"
        given = {"hosts": missing, "reason": reason, "write": write}
        wanted = Action(self.chat, "network_access", given, judged=self._judged)
        async with self._gate.passed(wanted):
            for host in missing:
                for_s = self._hold.lifetime_s
                await egress.allow(self.chat, host, read=not write, by=USER, for_s=for_s)
        how = "to read and write" if write else "to read"
        return f"the user allows {', '.join(missing)} {how}: connect again"

    @asynccontextmanager
    async def _enter(
        self, what: str, size: int = 0, leave: CancelScope | None = None, /, **arguments: object
    ) -> AsyncGenerator[AdmittedCall]:
        action = Action(self.chat, what, arguments, size, leave or CancelScope(), self._judged)
        async with self._gate.enter(action) as entered:
            explain = partial(entered.held.project.explain, arguments.values())
            try:
                yield entered
            except CallerError as exc:
                exc.args = (f"{exc}; {explain()}".removesuffix("; "), *exc.args[1:])
                raise
            if entered.record.exit_code and (where := explain()):
                self.tell_news(where)


async def _plain(code: str, language: Language) -> tuple[str, tuple[str, ...]]:
    """Return code as its interpreter should get it, and what is to be said of that."""
    code = code.removeprefix("\ufeff")
    if language != "bash" or "\r" not in code:
        return _ENCODING.sub(r"\1utf-8", code) if language == "python" else code, ()
    plain = await to_thread.run_sync(drop_returns, code)
    return plain, (_RETURNS,) * (plain != code)


async def _ended(entered: AdmittedCall, result: ExecResult, remarks: tuple[str, ...]) -> ExecResult:
    """Return the result of a command with its figures, limits met and lines of trouble."""
    held, full = entered.held, entered.full
    entered.grew = result.changed_files != ()
    entered.record.exit_code = result.exit_code
    entered.record.output_bytes = result.stdout_bytes + result.stderr_bytes
    entered.record.changed = result.changed_files or None
    if (kept := result.output_file) and not result.running:
        look = entered.runtime.bounded(entered.stop, may_grow=False)
        result = replace(result, trouble_lines=await _troubles(look, kept))
    result = await with_figures(entered.runtime, result)
    offline = held.doors is None and held.sandbox.facts.network.startswith("none")
    backend, shell = entered.record.backend or "", (*remarks, *result.shell)
    result = replace(result, offline=offline, backend=backend, shell=shell)
    if result.running:
        return result
    if entered.stop.cancelled_caught:
        return replace(result, killed_because=str(held.guard.problem))
    if result.success:
        return result
    met = explain_limit(result, held.sandbox.facts.limits, proxied=held.doors is not None)
    return replace(result, limit=str(full or met))


def _check_notebook(name: str, language: Language) -> None:
    if not NAME.fullmatch(name):
        raise InvalidArgument("notebook must be 1 to 32 of A-Z a-z 0-9 . _ -, such as a")
    if language != "python":
        way = "exec tty=true command=node" if language == "javascript" else "exec shell=NAME"
        raise InvalidArgument(
            f"notebook keeps variables of Python only; what keeps those of {language}: {way}"
        )


async def _troubles(runtime: Runtime, kept: str) -> int:
    """Count the lines of the kept output that report trouble; 0 if that cannot be told in time."""
    with suppress(SandboxError, ValueError):
        look = ["/bin/grep", "-caiE", TROUBLE, kept]
        return int((await runtime.exec(look, env={"LC_ALL": "C"}, timeout_s=2)).stdout[:9])
    return 0
