"""The one way into a sandbox, for an agent's call, a person's shell and a program alike.

What the audit gets of a call goes there before it runs, and before its answer is sent.

Checked in this order: the policy and the user's consent, whether the server is ending, the limit on
open sandboxes, room on the disk. How the call ended is recorded once, for log, metrics and spans.
"""

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from time import perf_counter
from typing import cast

import anyio
from anyio import to_thread

from mcp_sandbox.audit import Audit
from mcp_sandbox.errors import (
    ConsentNeeded,
    Draining,
    NotPermitted,
    SandboxError,
    StorageUnavailable,
)
from mcp_sandbox.models import ChatId, Network
from mcp_sandbox.policy import Decision, Profile, RuleMatch, Rules, assess_aside, decide
from mcp_sandbox.policy.rules import UNKNOWN, escape_unseen
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.sessions.approvals import Approval, Approvals
from mcp_sandbox.sessions.sandbox.chat_sandbox import ChatSandbox
from mcp_sandbox.sessions.sandbox.context import OpenSandbox
from mcp_sandbox.telemetry.calls import CallRecord, Count, recorded
from mcp_sandbox.workspace.layout import WORKSPACE

Arguments = Mapping[str, object]
# A password or token in an address.
IN_ADDRESS = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")

# How many characters of the arguments are recorded, and how many are searched for secrets: more,
# so that the longest secret, percent-encoded, is found even if it begins at the cut.
_SHOWN, _SEARCHED = 2048, 2048 + 3 * 4096
_LARGE = 1 << 16

# A call that is not named here changes nothing, or only deletes.
_ACCESS = {
    "write_file": "write",
    "edit_file": "write",
    "move_file": "write",
    "run_code": "run",
    "exec": "run",
    "shell": "run",
}
# A call that is named here leaves nothing to save.
_LOOKS = ("read_file", "list_files", "glob", "grep", "sandbox_info", "share", "prepare")
# They last as long as a person likes.
_ENDLESS = ("shell", "preview", "door")
_LANGUAGE_OF = {"bash": "shell"}
_MOST_TARGET, _MOST_PART, _MOST_TEXT, _MOST_PATTERNS = 200, 400, 20_000, 20
_STDIN = "END_OF_STDIN"


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


_encoded = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=_text).encode


async def record_refusal(
    audit: Audit, arguments: Arguments, record: CallRecord, why: NotPermitted
) -> None:
    """Record a call that does not run, or not before the user has allowed it."""
    kind = "asked" if isinstance(why, ConsentNeeded) else "refused"
    if audit.enabled:
        told = await _told(audit, arguments, record)
        await audit.write(kind, **_whose(record), **told, why=audit.mask(str(why)[:_SHOWN]))


class RecordedCall:
    """Record a call that runs in the block. Its last line has `of`, the number of its first.

    Raises:
        StorageUnavailable: it cannot be recorded, so it must not run or not be answered.
    """

    def __init__(self, audit: Audit, arguments: Arguments, record: CallRecord) -> None:
        self._audit, self._arguments, self._record = audit, arguments, record
        self._number, self._began_s = 0, 0.0

    async def __aenter__(self) -> None:
        if self._audit.enabled:
            told = await _told(self._audit, self._arguments, self._record)
            self._number = await self._audit.write("begun", **_whose(self._record), **told)
            self._began_s = perf_counter()

    async def __aexit__(
        self, kind: type[BaseException] | None, _value: object, _trace: object
    ) -> None:
        record, outcome = self._record, kind.__name__ if kind else "ok"
        if kind and issubclass(kind, anyio.get_cancelled_exc_class()):
            outcome = "cancelled"
        try:
            await self._audit.write(
                "ended",
                of=self._number,
                **_whose(record),
                outcome=outcome,
                exit=record.exit_code,
                ms=round(1000 * (perf_counter() - self._began_s), 1),
                bytes=record.output_bytes,
                changed=record.changed,
                sandbox=record.sandbox,
            )
        except StorageUnavailable as exc:
            # A failed call raises its own error rather than this one.
            if not kind:
                raise StorageUnavailable(f"the call has run, but {exc}") from exc


def _whose(record: CallRecord) -> dict[str, object]:
    chat = record.chat
    return {"user": chat and chat.user, "chat": chat and chat.chat, "tool": record.what}


async def _told(audit: Audit, arguments: Arguments, record: CallRecord) -> dict[str, object]:
    given = {name: value for name, value in arguments.items() if value is not None}
    large = sum(len(each) for each in given.values() if isinstance(each, str | bytes)) > _LARGE
    digested = to_thread.run_sync(_digested, given) if large else None
    text, digest = await digested if digested else _digested(given)
    return {
        "client": record.client,
        "digest": digest,
        "arguments": audit.mask(IN_ADDRESS.sub("***", text))[:_SHOWN],
        "level": record.level,
        "decision": record.decision,
        "rule": record.rule,
        "backend": record.backend,
    }


def _digested(given: Arguments) -> tuple[str, str]:
    """Return the beginning of the arguments as JSON, and the SHA-256 of all of it in UTF-8."""
    text = _encoded(given)
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if isinstance(env := given.get("env"), Mapping):
        # Values in an environment are often keys.
        text = _encoded({**given, "env": sorted(map(str, env))})
    # What is no character is written so that it can be printed.
    return text[:_SEARCHED].encode("utf-8", "backslashreplace").decode(), digest


@dataclass(frozen=True)
class Action:
    """What a caller wants of a chat's sandbox: `what` is the name of a tool, or "shell".

    `arguments` are as the caller gave them; `size` is how many bytes are to be written. Cancelling
    `leave` has the call answered before its end, if possible. `judged`: the policy decides about
    it, as about all calls of agents; it does not about calls of the user's own programs.
    """

    chat: ChatId
    what: str
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    size: int = 0
    leave: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    judged: bool = False


@dataclass
class AdmittedCall:
    """An open sandbox during one call; `runtime` has the limits of this call.

    `full`: why nothing may be written. `stop` is cancelled when the call has written too much.
    `grew` is False once it is known that the call has changed no file. `leave` is the action's.
    """

    held: OpenSandbox
    runtime: Runtime
    record: CallRecord
    leave: anyio.CancelScope
    full: SandboxError | None = None
    stop: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    grew: bool = True

    def leaving(self, wait_s: float | None) -> anyio.CancelScope:
        """Return the scope that ends the wait for a call, after `wait_s` or when cancelled."""
        if wait_s is not None:
            self.leave.deadline = anyio.current_time() + wait_s
        return self.leave


@dataclass(frozen=True)
class PolicyCheck:
    """Decides by the policy what may run, and has the user asked where the policy says so.

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
        """Return if it may run; `record` gets the level and the decision.

        Raises:
            NotPermitted: it may not, or the user has said no.
            ConsentNeeded, Busy: the user has to be asked, or is being asked about another call.
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
            began, join = _folder(given) or UNKNOWN, posixpath.join
            asked = [f"{e.rule} {e.target} in {join(began, e.folder)}" for e in decided.asks]
            effect, part = _effect(decided), _part(code, decided.asks[0])
        record.decision = "ask"
        await self.approvals.check(action.chat, self._question(action, asked, effect, part))
        record.decision = "granted"

    async def _decided(
        self, code: str, language: str, given: Mapping[str, object], record: CallRecord
    ) -> Decision:
        if not language:
            return Decision("allow")
        found = await assess_aside(code, language, {"cwd": _folder(given)}, self.rules)
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
        """Return the question to the user; the same for the same call."""
        given = {name: each for name, each in action.arguments.items() if each is not None}
        written = json.dumps([action.what, given], sort_keys=True, default=str)
        digest = hashlib.sha256(written.encode()).hexdigest()
        # Longer than what is stored of it: a secret that is cut could not be found and masked.
        text = "\n".join(f"{name}: {str(each)[:_MOST_TEXT]}" for name, each in given.items())
        # Too many, too long or not known: the answer holds for this very call alone.
        unknown = any(UNKNOWN in each for each in about)
        if unknown or len(about) >= _MOST_PATTERNS or max(map(len, about)) > _MOST_TARGET:
            about = [digest]
        effect, part, text, *about = map(self._shown, (effect, part, text, *about))
        return Approval(action.what, about, digest, effect, part, text)

    def _shown(self, text: str) -> str:
        text = text.encode("utf-8", "backslashreplace").decode()
        return escape_unseen(self.mask(IN_ADDRESS.sub("***", text)))


class Gate:
    """Lets calls in to the sandboxes of one manager, until it is closed."""

    def __init__(
        self,
        hold_of: Callable[[ChatId], ChatSandbox],
        judge: PolicyCheck,
        audit: Audit,
        count: Count | None = None,
    ) -> None:
        """`count` gets the record of each call."""
        self._hold_of = hold_of
        self._judge = judge
        self._audit = audit
        self._count = count
        self._calls = 0
        self._ended = anyio.Event()
        self._leaves: set[anyio.CancelScope] = set()
        self._closed: str | None = None
        self.closing = anyio.Event()

    def close(self, why: str) -> None:
        """Refuse every call from now on; callers are told the first reason given."""
        self._closed = self._closed or why
        self.closing.set()

    def answer_waiting(self) -> None:
        """Answer the calls that wait for a process, which goes on running."""
        for leave in self._leaves:
            leave.cancel()

    async def wait_empty(self) -> None:
        """Return when all calls under way have ended."""
        while self._calls:
            self._ended = anyio.Event()
            await self._ended.wait()

    @asynccontextmanager
    async def enter(self, action: Action) -> AsyncGenerator[AdmittedCall]:
        """Yield the chat's sandbox for one call, opened if need be.

        Raises:
            NotPermitted: the policy does not allow it.
            ConsentNeeded, Busy: it needs the user's consent, or another call waits for it.
            OperatorError: no sandbox can be made, or the server is ending.
            WorkspaceFull, StorageUnavailable: there is no room for what is to be written.
            SandboxGone: it died; the message says of what.
        """
        hold = self._hold_of(action.chat)
        async with self.passed(action) as record:
            endless, keeps = action.what in _ENDLESS, action.what == "door"
            changes = action.what not in _LOOKS
            async with hold.open_sandbox(endless=endless, keeps=keeps, changes=changes) as held:
                record.sandbox = held.sandbox.id
                entered = AdmittedCall(held, held.runtime, record, action.leave)
                match _ACCESS.get(action.what, "read"):
                    case "read":
                        yield entered
                    case "write":
                        await hold.meter.check_room(action.size)
                        with held.guard.guard_call():
                            yield entered
                    case "run":
                        if action.size:
                            await hold.meter.check_room(action.size)
                        # A command may grow files; in a full workspace it can look and delete, but
                        # not write.
                        full = entered.full = await hold.meter.find_problem()
                        answers = action.what != "shell"
                        try:
                            with held.guard.guard_call(
                                may_end=full is None, answers=answers
                            ) as stop:
                                entered.stop = stop
                                entered.runtime = held.runtime.bounded(
                                    stop if answers else None, may_grow=full is None
                                )
                                yield entered
                        finally:
                            hold.meter.note_change(grew=entered.grew)

    @asynccontextmanager
    async def passed(self, action: Action) -> AsyncGenerator[CallRecord]:
        """Check and record a call that needs no open sandbox; raises as `enter` does."""
        with recorded(action.what, self._count) as record:
            record.chat, record.backend = action.chat, self._hold_of(action.chat).backend
            await self._audit.wait_for_room(action.chat)
            try:
                if action.judged:
                    await self._judge.check(action, *_as_tool(action), record)
            except NotPermitted as exc:
                await record_refusal(self._audit, action.arguments, record, exc)
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
    """Return the tool that does the same as an action, and its arguments, a command as one line."""
    tool, given = action.what, action.arguments
    if tool == "process" and given.get("text"):
        # The text typed can be a command.
        given = {"command": given["text"], "shell": "of the process"}
    command = given.get("command")
    if isinstance(command, list | tuple):
        given = {**given, "command": shlex.join(map(str, command))}
    return ("exec" if "command" in given else tool), given


def _code(tool: str, given: Mapping[str, object]) -> tuple[str, str]:
    """Return what a call runs, and in which language; both empty if it runs nothing."""
    if tool == "run_code":
        language = str(given.get("language"))
        return str(given.get("code")), _LANGUAGE_OF.get(language, language)
    if tool != "exec":
        return "", ""
    command, stdin = str(given.get("command")), given.get("stdin")
    if isinstance(stdin, bytes):
        stdin = stdin.decode("utf-8", "replace")
    # A program that reads code from stdin is judged as if it came from a here-document.
    return f"{command} <<'{_STDIN}'\n{stdin}\n{_STDIN}\n" if stdin else command, "shell"


def _folder(given: Mapping[str, object]) -> str:
    """Return the folder in which code begins to run; empty if only a named shell knows it."""
    cwd = str(given.get("cwd") or "")
    known = cwd[:1] == "~" or (given.get("shell") and not cwd)
    return cwd if known else posixpath.join(WORKSPACE, cwd)


def _effect(decided: Decision) -> str:
    """Return what a call does, as a question."""
    reason, others = decided.sentence, len(decided.asks) - 1
    more = f", and {others} more" if others else ""
    return f"{reason[:1].upper()}{reason[1:]}{more}?"


def _part(code: str, asked: RuleMatch) -> str:
    """Return the line of a piece of code that names the target, or its first line."""
    lines, target = code.strip().splitlines(), asked.target.split()[:1]
    found = (line for line in lines if target and target[0] in line)
    return next(found, "".join(lines[:1])).strip()[:_MOST_PART]
