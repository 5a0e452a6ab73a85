"""The one way into a sandbox, for an agent's call, a person's shell and a program alike.

What the active skills leave -> what the policy lets run, or a person -> no call while the server
ends -> a place among the open sandboxes -> room on the disk -> the call. How it ended is recorded
once, for the log, figures and spans.
"""

import hashlib
import json
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import anyio

from mcp_sandbox.audit import Audit
from mcp_sandbox.errors import Draining, NotPermitted, SandboxError
from mcp_sandbox.models import ChatId, Network
from mcp_sandbox.policy import Decision, Match, Profile, Rules, assess_aside, decide
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.approvals import Approval, Approvals
from mcp_sandbox.sessions.hold import Hold
from mcp_sandbox.sessions.recording import IN_ADDRESS, RecordedCall, refused
from mcp_sandbox.sessions.rooms import Held
from mcp_sandbox.telemetry.calls import CallRecord, Count, recorded

Narrowed = Callable[[ChatId, str, Mapping[str, object]], None]

# A call that is not named here changes nothing, or only deletes.
_ACCESS = {
    "write_file": "write",
    "edit_file": "write",
    "move_file": "write",
    "run_code": "run",
    "exec": "run",
    "shell": "run",
}
# They take as long as a person likes.
_ENDLESS = ("shell", "preview", "door")
_LANGUAGE_OF = {"bash": "shell"}
_MOST_TARGET, _MOST_PART, _MOST_TEXT, _MOST_PATTERNS = 200, 400, 20_000, 20
_STDIN = "END_OF_STDIN"


@dataclass(frozen=True)
class Action:
    """What is wanted of a chat's sandbox: `what` is the name of a tool, or "shell".

    `arguments` are as the caller gave them; `size` is how many bytes are to be written. Cancelling
    `leave` has the call answered before its end, if that can be. `judged`: the policy decides
    about it, as about all that agents do; what a program of the user does is the user's.
    """

    chat: ChatId
    what: str
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    size: int = 0
    leave: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    judged: bool = False


@dataclass
class Entered:
    """An open sandbox during one call; `runtime` has the limits of this call.

    `full`: why nothing may be written. `stop` is cancelled when the call has written too much.
    `grew` is False once it is known that the call has changed no file. `leave` is the action's.
    """

    held: Held
    runtime: Runtime
    record: CallRecord
    leave: anyio.CancelScope
    full: SandboxError | None = None
    stop: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    grew: bool = True

    def leaving(self, wait_s: float | None) -> anyio.CancelScope:
        """The scope whose end has a call answered: after `wait_s`, or when it is cancelled."""
        if wait_s is not None:
            self.leave.deadline = anyio.current_time() + wait_s
        return self.leave


@dataclass(frozen=True)
class Judge:
    """Decides by the policy about what is to be run, and has a person asked where that says so.

    `mask` hides the values of secrets in what the person sees.
    """

    rules: Rules
    profile: Profile
    network: Network
    approvals: Approvals
    mask: Callable[[str], str] = str

    async def check(
        self, action: Action, tool: str, given: Mapping[str, object], record: CallRecord
    ) -> None:
        """Return if it may run; `record` gets the grade and what was decided.

        Raises:
            NotPermitted: it may not, or a person has said no.
            ConsentNeeded, Busy: a person has to be asked, or is being asked about another call.
        """
        if tool == "network_access":
            hosts = cast("Sequence[str]", given["hosts"])
            way = "Reach, and write to," if given["write"] else "Read from"
            asked = [f"{tool} {host}" for host in hosts]
            effect, part = f"{way} {', '.join(hosts)}?", f"for: {given['reason']}"
        else:
            code, language = _code(tool, given)
            decided = await self._decided(code, language, given, record)
            if not decided.asks:
                return
            asked = [f"{each.rule} {each.target}" for each in decided.asks]
            effect, part = _effect(decided), _part(code, decided.asks[0])
        record.decision = "ask"
        await self.approvals.check(action.chat, self._question(action, asked, effect, part))
        record.decision = "granted"

    async def _decided(
        self, code: str, language: str, given: Mapping[str, object], record: CallRecord
    ) -> Decision:
        if not language:
            return Decision("allow")
        found = await assess_aside(code, language, given, self.rules)
        decided = decide(found, self.profile, self.network, language)
        record.level, record.decision = found.level, decided.verdict
        record.rule = decided.match.rule if decided.match else None
        record.patterns = [
            {"rule": each.rule, "level": each.level, "reason": str(each)}
            for each in found.patterns[:_MOST_PATTERNS]
        ]
        if decided.verdict == "deny":
            raise NotPermitted(f"this was refused, and nothing was run: {decided.sentence}")
        return decided

    def _question(self, action: Action, about: Sequence[str], effect: str, part: str) -> Approval:
        """What a person is asked; the same for the same call."""
        given = {name: each for name, each in action.arguments.items() if each is not None}
        written = json.dumps([action.what, given], sort_keys=True, default=str)
        digest = hashlib.sha256(written.encode()).hexdigest()
        # More than is kept of it: of a secret that is cut, what is left would not be found.
        text = "\n".join(f"{name}: {str(each)[:_MOST_TEXT]}" for name, each in given.items())
        # Of so many, or of one so long, the grade tells a part: a word is for this very call alone.
        if len(about) >= _MOST_PATTERNS or max(map(len, about)) > _MOST_TARGET:
            about = [digest]
        effect, part, text, *about = map(self._shown, (effect, part, text, *about))
        return Approval(action.what, about, digest, effect, part, text)

    def _shown(self, text: str) -> str:
        text = text.encode("utf-8", "backslashreplace").decode()
        return self.mask(IN_ADDRESS.sub("***", text))


class Gate:
    """Lets calls in to the sandboxes of one manager, until it is closed."""

    def __init__(
        self,
        hold_of: Callable[[ChatId], Hold],
        narrow: Narrowed,
        judge: Judge,
        audit: Audit,
        count: Count | None = None,
    ) -> None:
        """`narrow` raises for what a chat's skills leave out; `count` gets every call's record."""
        self._hold_of = hold_of
        self._narrow = narrow
        self._judge = judge
        self._audit = audit
        self._count = count
        self._calls = 0
        self._ended = anyio.Event()
        self._leaves: set[anyio.CancelScope] = set()
        self._closed: str | None = None
        self.closing = anyio.Event()

    def close(self, why: str) -> None:
        """Let no call in from now on; the first reason is the one that callers are told."""
        self._closed = self._closed or why
        self.closing.set()

    def let_go(self) -> None:
        """Have those calls answered that wait for a process; it goes on."""
        for leave in self._leaves:
            leave.cancel()

    async def wait_empty(self) -> None:
        """Return when all calls have ended that were let in."""
        while self._calls:
            self._ended = anyio.Event()
            await self._ended.wait()

    @asynccontextmanager
    async def enter(self, action: Action) -> AsyncGenerator[Entered]:
        """The chat's sandbox for one call, opened if need be.

        Raises:
            NotPermitted: the active skills leave no such call, or the policy refuses it.
            ConsentNeeded, Busy: it waits for a person's word, or another call does.
            OperatorError: no sandbox can be made, or the server ends.
            WorkspaceFull, StorageUnavailable: there is no room for what is to be written.
            SandboxGone: it died; the message says of what.
        """
        hold = self._hold_of(action.chat)
        async with self.passed(action) as record:
            endless, keeps = action.what in _ENDLESS, action.what == "door"
            async with hold.open_sandbox(endless=endless, keeps=keeps) as held:
                record.sandbox = held.sandbox.id
                entered = Entered(held, held.runtime, record, action.leave)
                match _ACCESS.get(action.what, "read"):
                    case "read":
                        yield entered
                    case "write":
                        await hold.meter.check_room(action.size)
                        with held.guard.call():
                            yield entered
                    case "run":
                        if action.size:
                            await hold.meter.check_room(action.size)
                        # A command may grow files; in a full workspace it can look and delete, but
                        # not write.
                        full = entered.full = await hold.meter.problem()
                        answers = action.what != "shell"
                        try:
                            with held.guard.call(may_end=full is None, answers=answers) as stop:
                                entered.stop = stop
                                entered.runtime = held.runtime.bounded(
                                    stop if answers else None, may_grow=full is None
                                )
                                yield entered
                        finally:
                            hold.meter.note_change(grew=entered.grew)

    @asynccontextmanager
    async def passed(self, action: Action) -> AsyncGenerator[CallRecord]:
        """The same for what needs no open sandbox."""
        with recorded(action.what, self._count) as record:
            record.chat, record.backend = action.chat, self._hold_of(action.chat).backend
            tool, given = _as_tool(action)
            try:
                self._narrow(action.chat, tool, given)
                if action.judged:
                    await self._judge.check(action, tool, given, record)
            except NotPermitted as exc:
                await refused(self._audit, action.arguments, record, exc)
                raise
            if self._closed:
                raise Draining(self._closed)
            self._calls += 1
            self._leaves.add(action.leave)
            try:
                async with RecordedCall(self._audit, action.arguments, record):
                    yield record
            finally:
                self._leaves.discard(action.leave)
                self._calls -= 1
                self._ended.set()


def _as_tool(action: Action) -> tuple[str, Mapping[str, object]]:
    """The tool that does what an action does, with its arguments, a command as one line."""
    tool, given = action.what, action.arguments
    if tool == "process" and given.get("text"):
        # What is typed can be a command.
        given = {"command": given["text"]}
    command = given.get("command")
    if isinstance(command, list | tuple):
        given = {**given, "command": shlex.join(map(str, command))}
    return ("exec" if "command" in given else tool), given


def _code(tool: str, given: Mapping[str, object]) -> tuple[str, str]:
    """What a call runs, and in which language; nothing, if it runs nothing."""
    if tool == "run_code":
        language = str(given.get("language"))
        return str(given.get("code")), _LANGUAGE_OF.get(language, language)
    if tool != "exec":
        return "", ""
    command, stdin = str(given.get("command")), given.get("stdin")
    if isinstance(stdin, bytes):
        stdin = stdin.decode("utf-8", "replace")
    # A program that reads code there gets it as from a here-document.
    return f"{command} <<'{_STDIN}'\n{stdin}\n{_STDIN}\n" if stdin else command, "shell"


def _effect(decided: Decision) -> str:
    """What a call does, as a question."""
    reason, others = decided.sentence, len(decided.asks) - 1
    more = f", and {others} more" if others else ""
    return f"{reason[:1].upper()}{reason[1:]}{more}?"


def _part(code: str, asked: Match) -> str:
    """The line of a piece of code in which the target is, or its first one."""
    lines, target = code.strip().splitlines(), asked.target.split()[:1]
    found = (line for line in lines if target and target[0] in line)
    return next(found, "".join(lines[:1])).strip()[:_MOST_PART]
