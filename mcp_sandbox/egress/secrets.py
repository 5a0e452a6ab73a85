"""Values that requests to their hosts get on the way out, and the placeholders that are inside.

A value is only in the memory of this process, and of the one that sends it: no repr, error or log
line shows it, nor anything else that a source's command writes.
"""

import base64
import binascii
import errno
import hmac
import os
import re
import shlex
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox.config import SecretConfig
from mcp_sandbox.durable import check_trusted
from mcp_sandbox.egress.process.keeper import read_headers, write_headers
from mcp_sandbox.egress.process.mask import Header, Mask
from mcp_sandbox.egress.rules import EgressRule, EgressRules, write_rule
from mcp_sandbox.egress.settings import parse_rule
from mcp_sandbox.egress.targets import Refusal, RefusedError, Target
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId
from mcp_sandbox.relay.start_daemon import daemon_variables

SHORTEST, LONGEST = 12, 4096
SOURCE_S, KEPT_S = 10.0, 300.0
# Headers that ask for an answer in which values cannot be found.
_PARTS = frozenset({b"accept-encoding", b"te", b"range", b"if-range"})
_HEADER_TEXT = re.compile(rb"[!-~](?:[ -~]*[!-~])?")


@dataclass(frozen=True)
class SecretState:
    """What people may see of a secret: the length of its value in bytes, or its problem."""

    name: str
    hosts: tuple[str, ...]
    header: str
    users: tuple[str, ...]
    length: int | None = None
    problem: str = ""


class SecretSource:
    """Where a value comes from: `file:PATH`, or `command: PROGRAM ARGS`, run without a shell.

    With `private`, only this user may be able to read or change the file. Raises ValueError: the
    command cannot be split.
    """

    def __init__(self, where: str, *, private: bool = False) -> None:
        kind, _, place = where.partition(":")
        self._path, self._private = place if kind == "file" else "", private
        self._command = shlex.split(place) if kind == "command" else []
        self.known = b""  # The last value read.
        self.problem = ""  # Why the last attempt gave no value.
        self._asked_at = -KEPT_S
        self._asking = anyio.Lock()

    async def value(self) -> bytes:
        """Return the value; concurrent callers share one reading of the source.

        Raises RefusedError: the source gives no usable value; the message is its `problem`.
        """
        came = anyio.current_time()
        async with self._asking:
            kept_s = KEPT_S if self._command and not self.problem else 0
            if self._asked_at + kept_s < came:
                self.problem = await self._ask()
                self._asked_at = anyio.current_time()
        if self.problem:
            raise RefusedError(self.problem, "secret")
        return self.known

    async def _ask(self) -> str:
        """Read the value; return what is wrong, or ""."""
        kind = "command" if self._command else "file"
        try:
            with anyio.fail_after(SOURCE_S):
                if self._command:
                    output = await _output(self._command)
                else:
                    read = partial(_contents, self._path, private=self._private)
                    output = await to_thread.run_sync(read, abandon_on_cancel=True)
        except TimeoutError:
            return f"its {kind} did not answer within {SOURCE_S:g} s"
        except OSError as exc:
            # The name is left out: someone may have put the value itself there.
            return f"its {kind} cannot be used: {exc.strerror}"
        value = output.removesuffix(b"\n")
        if not SHORTEST <= len(value) <= LONGEST:
            size = f"over {LONGEST}" if len(value) > LONGEST else len(value)
            return f"its value has {size} bytes, and only {SHORTEST} to {LONGEST} can be masked"
        if not _HEADER_TEXT.fullmatch(value):
            return "its value is not one line of printable ASCII without spaces around it"
        self.known = value
        return ""


class BoundSecret:
    """A secret: the source of its value, and which requests may carry it."""

    def __init__(self, name: str, settings: SecretConfig) -> None:
        self.name, self.users, self.header = name, settings.users, settings.header.lower()
        try:
            # A value is only sent over TLS.
            self.rules = [parse_rule(each, ports=frozenset({443})) for each in settings.hosts]
            self.source = SecretSource(settings.source)
        except ValueError as exc:
            raise ConfigError(f"secrets.{name}: {exc}") from None
        if any(rule.ports == {80} for rule in self.rules):
            raise ConfigError(f"secrets.{name}: values are only sent over TLS: remove port 80")

    @property
    def state(self) -> SecretState:
        """What people may see of it now."""
        known, problem = self.source.known, self.source.problem
        length = len(known) if known and not problem else None
        hosts = tuple(map(str, self.rules))
        return SecretState(self.name, hosts, self.header, self.users, length, problem)

    def serves(self, chat: ChatId, target: Target) -> bool:
        """Return whether requests of this chat to the target may carry it."""
        return chat.user in self.users and any(rule.covers(target) for rule in self.rules)


class Secrets:
    """The operator's secrets; `seed` makes placeholders stable, and unique to this data root.

    Raises ConfigError: a host or a command cannot be understood.
    """

    def __init__(self, settings: Mapping[str, SecretConfig], seed: bytes) -> None:
        self._all = [BoundSecret(name, each) for name, each in settings.items()]
        self._seed = seed
        # Called for every request that gets a value.
        self.used: Callable[[ChatId, str, Target], object] = lambda *_used: None

    def placeholders(self, chat: ChatId) -> dict[str, str]:
        """Return the variables that a chat's calls get: its secrets' names and placeholders."""
        return {each.name: self._placeholder(chat, each.name) for each in self.states(chat.user)}

    def _placeholder(self, chat: ChatId, name: str) -> str:
        subject = "\0".join((chat.user, chat.chat, name)).encode()
        return f"mcps_{name}_{hmac.digest(self._seed, subject, 'sha256')[:16].hex()}"

    def bound(self, chat: ChatId) -> list[EgressRule]:
        """Return the hosts to which some requests of a chat may carry a secret."""
        return [rule for each in self._all if chat.user in each.users for rule in each.rules]

    async def fill(
        self, chat: ChatId, target: Target, headers: Sequence[Header]
    ) -> tuple[list[Header], list[bytes]]:
        """Return the headers with values in place of placeholders, and what the answer may not say.

        Where a secret is bound to the target, they ask for a complete, uncompressed answer.

        Raises RefusedError: the source of a needed value fails.
        """
        if not (bound := [each for each in self._all if each.serves(chat, target)]):
            return list(headers), []
        filled = [each for each in headers if each[0].lower() not in _PARTS]
        for secret in bound:
            placeholder, source = self._placeholder(chat, secret.name).encode(), secret.source
            for at, (name, text) in enumerate(filled):
                scheme, plain = _decoded(text)
                if name.lower() == secret.header.encode() and placeholder in plain:
                    try:
                        plain = plain.replace(placeholder, await source.value())
                    except RefusedError as exc:
                        what = f"the secret {secret.name} cannot be read: {exc}"
                        how = "A person must look: mcp-sandbox secrets check"
                        raise RefusedError(f"{what}. {how}", "secret") from exc
                    self.used(chat, secret.name, target)
                    filled[at] = name, scheme + base64.b64encode(plain) if scheme else plain
            if not (source.known or source.problem):
                # Answers are masked even if the request does not carry the value.
                with suppress(RefusedError):
                    await source.value()
        return [*filled, (b"Accept-Encoding", b"identity")], _known(bound)

    def states(self, user: str = "") -> list[SecretState]:
        """Return what people may see of one user's secrets, or of all."""
        return [each.state for each in self._all if user in ("", *each.users)]

    async def check(self) -> list[SecretState]:
        """Read every source, one after another, as each may prompt a person."""
        for each in self._all:
            with suppress(RefusedError):
                await each.source.value()
        return self.states()

    def masked(self, line: str) -> str:
        """Return a log line in which every value known so far is replaced by filler."""
        masked = Mask(_known(self._all)).text(line.encode("utf-8", "surrogatepass"))
        return masked.decode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Keys:
    """What the process that serves connections asks for: it has no key, and no secret."""

    rules: EgressRules
    leaf: Callable[[str], Awaitable[bytes]]
    secrets: Secrets

    async def answer(
        self, chat: ChatId, grants: Sequence[EgressRule], said: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Answer what it asks of a chat with these grants; nothing of hosts without a rule."""
        if said["t"] == "grants":
            return {"grants": [*map(write_rule, grants)]}
        target = Target(str(said["host"]), int(said["port"]))
        try:
            rule, why = self.rules.judge(target, grants)
            return await self._give(chat, target, said) if rule else _refuse(why, "rule")
        except RefusedError as exc:
            return _refuse(str(exc), exc.verdict)
        except OSError as exc:
            return _refuse(f"no certificate can be made: {exc.strerror}", "failed")

    async def _give(self, chat: ChatId, target: Target, said: Mapping[str, Any]) -> dict[str, Any]:
        if said["t"] == "leaf":
            return {"leaf": (await self.leaf(target.host)).decode("ascii")}
        headers, values = await self.secrets.fill(chat, target, read_headers(said["headers"]))
        told = [value.decode("latin-1") for value in values]
        return {"headers": write_headers(headers), "values": told}


def _refuse(why: str, verdict: Refusal) -> dict[str, Any]:
    return {"refused": why, "verdict": verdict}


def _known(secrets: Sequence[BoundSecret]) -> list[bytes]:
    return [each.source.known for each in secrets if each.source.known]


def _decoded(text: bytes) -> tuple[bytes, bytes]:
    """Return "Basic " and the decoded credentials of a header; else nothing and its text."""
    scheme, space, digits = text.partition(b" ")
    with suppress(binascii.Error):
        if scheme.lower() == b"basic":
            return scheme + space, base64.b64decode(digits.strip(), validate=True)
    return b"", text


def _contents(path: str, *, private: bool) -> bytes:
    """Return a file's beginning, enough to see that it is too long; do not wait for a pipe."""
    if private:
        check_trusted(Path(path), private=True)
    with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
        return file.read(LONGEST + 2) or b""


async def _output(command: Sequence[str]) -> bytes:
    """Return a program's output, enough to see that it is too long; then kill it. Raises OSError.

    It runs with a daemon's variables and folder, so that a check by a person gives the same.
    """
    output, env = b"", daemon_variables()
    async with await anyio.open_process(
        command, stdin=DEVNULL, stderr=DEVNULL, cwd="/", env=env, start_new_session=True
    ) as process:
        try:
            with suppress(anyio.EndOfStream):
                while process.stdout and len(output) <= LONGEST + 1:
                    output += await process.stdout.receive()
                return output
            code = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise OSError(errno.EIO, f"it ended with {code}; run it in a terminal to see why")
    return output
