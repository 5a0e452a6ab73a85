"""Values that requests to their hosts get on the way out, and the placeholders that are inside.

A value is in this process's memory alone: no repr, error or log line shows it, nor what a command
writes beside it.
"""

import base64
import binascii
import errno
import hmac
import os
import re
import shlex
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from subprocess import DEVNULL

import anyio
from anyio import to_thread

from mcp_sandbox.config import SecretConfig
from mcp_sandbox.connect.starting import daemon_variables
from mcp_sandbox.egress.masking import Mask
from mcp_sandbox.egress.rules import rule_of
from mcp_sandbox.egress.targets import RefusedError, Target
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId

Header = tuple[bytes, bytes]

SHORTEST, LONGEST = 12, 4096
SOURCE_S, KEPT_S = 10.0, 300.0
# What asks for an answer in a form in which no value can be found.
_PARTS = frozenset({b"accept-encoding", b"te", b"range", b"if-range"})
_HEADER_TEXT = re.compile(rb"[!-~](?:[ -~]*[!-~])?")


@dataclass(frozen=True)
class SecretState:
    """What people may know of a secret: how long its value is in bytes, or the problem with it."""

    name: str
    hosts: tuple[str, ...]
    header: str
    users: tuple[str, ...]
    length: int | None = None
    problem: str = ""


class Source:
    """Where a value comes from: `file:PATH`, or `command: PROGRAM ARGS`, which no shell reads.

    A file that is `private` must be this user's alone. Raises ValueError: the command cannot be
    split.
    """

    def __init__(self, where: str, *, private: bool = False) -> None:
        kind, _, place = where.partition(":")
        self._path, self._private = place if kind == "file" else "", private
        self._command = shlex.split(place) if kind == "command" else []
        self.known = b""  # The last value that it has given.
        self.problem = ""  # Why it gave none when it was asked last.
        self._asked_at = -KEPT_S
        self._asking = anyio.Lock()

    async def value(self) -> bytes:
        """Return the value; who waits while the source is asked gets the same answer.

        Raises:
            RefusedError: it gives none that can be used; the message is its `problem`.
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
        """Ask for the value; return what is wrong, if anything is."""
        try:
            with anyio.fail_after(SOURCE_S):
                if self._command:
                    said = await _output(self._command)
                else:
                    read = partial(_contents, self._path, private=self._private)
                    said = await to_thread.run_sync(read, abandon_on_cancel=True)
        except TimeoutError:
            return f"its source did not answer within {SOURCE_S:g} s"
        except OSError as exc:
            # Without the name, which may be a value in a wrong place.
            return f"its source cannot be used: {exc.strerror}"
        value = said.removesuffix(b"\n")
        if not SHORTEST <= len(value) <= LONGEST:
            size = f"over {LONGEST}" if len(value) > LONGEST else len(value)
            return f"its value has {size} bytes, and only {SHORTEST} to {LONGEST} can be masked"
        if not _HEADER_TEXT.fullmatch(value):
            return "its value is not one line of printable ASCII without spaces around it"
        self.known = value
        return ""


class BoundSecret:
    """A secret: where its value comes from, and which requests may carry it."""

    def __init__(self, name: str, settings: SecretConfig) -> None:
        self.name, self.users, self.header = name, settings.users, settings.header.lower()
        try:
            # A value goes over TLS alone.
            self._rules = [rule_of(each, ports=frozenset({443})) for each in settings.hosts]
            self.source = Source(settings.source)
        except ValueError as exc:
            raise ConfigError(f"secrets.{name}: {exc}") from None
        if any(rule.ports == {80} for rule in self._rules):
            raise ConfigError(f"secrets.{name}: a value goes over TLS alone, and not to port 80")

    @property
    def state(self) -> SecretState:
        """What is known by now."""
        known, problem = self.source.known, self.source.problem
        length = len(known) if known and not problem else None
        hosts = tuple(map(str, self._rules))
        return SecretState(self.name, hosts, self.header, self.users, length, problem)

    def serves(self, chat: ChatId, target: Target) -> bool:
        """Whether requests of this chat to the target may carry it."""
        return chat.user in self.users and any(rule.covers(target) for rule in self._rules)


class Secrets:
    """The operator's secrets; `seed` keeps placeholders the same, and unlike anybody else's.

    Raises:
        ConfigError: a host or a command cannot be understood.
    """

    def __init__(self, settings: Mapping[str, SecretConfig], seed: bytes) -> None:
        self._all = [BoundSecret(name, each) for name, each in settings.items()]
        self._seed = seed
        # Told of every request that gets a value.
        self.used: Callable[[ChatId, str, Target], object] = lambda *_used: None

    def placeholders(self, chat: ChatId) -> dict[str, str]:
        """Return the variables that a chat's calls get: its secrets' names and placeholders."""
        return {each.name: self._placeholder(chat, each.name) for each in self.states(chat.user)}

    def _placeholder(self, chat: ChatId, name: str) -> str:
        said = "\0".join((chat.user, chat.chat, name)).encode()
        return f"mcps_{name}_{hmac.digest(self._seed, said, 'sha256')[:16].hex()}"

    def bound(self, chat: ChatId, target: Target) -> tuple[BoundSecret, ...]:
        """Return the secrets that a chat's requests to this target may carry."""
        return tuple(each for each in self._all if each.serves(chat, target))

    async def fill(
        self, chat: ChatId, target: Target, headers: Sequence[Header]
    ) -> tuple[list[Header], Mask | None]:
        """Return the headers with values for placeholders, and the mask for the answer.

        Where a secret is bound to the target, they ask for a whole answer that is not compressed;
        else the mask is None.

        Raises:
            RefusedError: the source of a value that is needed fails.
        """
        if not (bound := self.bound(chat, target)):
            return list(headers), None
        filled = [each for each in headers if each[0].lower() not in _PARTS]
        for secret in bound:
            placeholder, source = self._placeholder(chat, secret.name).encode(), secret.source
            for at, (name, text) in enumerate(filled):
                scheme, plain = _decoded(text)
                if name.lower() == secret.header.encode() and placeholder in plain:
                    try:
                        plain = plain.replace(placeholder, await source.value())
                    except RefusedError as exc:
                        what = f"the secret {secret.name} cannot be had: {exc}"
                        how = "A person must look: mcp-sandbox secrets check"
                        raise RefusedError(f"{what}. {how}", "secret") from exc
                    self.used(chat, secret.name, target)
                    filled[at] = name, scheme + base64.b64encode(plain) if scheme else plain
            if not (source.known or source.problem):
                # An answer is masked, whether or not its request carries the value.
                with suppress(RefusedError):
                    await source.value()
        return [*filled, (b"Accept-Encoding", b"identity")], _mask(bound)

    def states(self, user: str = "") -> list[SecretState]:
        """Return what is known by now, of one user's or of all secrets."""
        return [each.state for each in self._all if user in ("", *each.users)]

    async def check(self) -> list[SecretState]:
        """Ask every source, one after another, as each may ask a person."""
        for each in self._all:
            with suppress(RefusedError):
                await each.source.value()
        return self.states()

    def masked(self, line: str) -> str:
        """Return a log line with filler for every value that is known by now."""
        told = _mask(self._all).text(line.encode("utf-8", "surrogatepass"))
        return told.decode("utf-8", "surrogatepass")


def _mask(secrets: Sequence[BoundSecret]) -> Mask:
    return Mask(each.source.known for each in secrets if each.source.known)


def _decoded(text: bytes) -> tuple[bytes, bytes]:
    """Return "Basic " and the credentials that a header's text holds; else nothing and the text."""
    scheme, space, digits = text.partition(b" ")
    with suppress(binascii.Error):
        if scheme.lower() == b"basic":
            return scheme + space, base64.b64decode(digits.strip(), validate=True)
    return b"", text


def _contents(path: str, *, private: bool) -> bytes:
    """Return the beginning of a file, longer than a value may be; a pipe is not waited for."""
    with open(path, "rb", opener=lambda name, how: os.open(name, how | os.O_NONBLOCK)) as file:
        found, place = os.fstat(file.fileno()), shlex.quote(path)
        if private and (found.st_uid != os.geteuid() or found.st_mode & 0o077):
            remedy = f"chown {os.geteuid()} {place} && chmod 600 {place}"
            raise PermissionError(errno.EPERM, f"others can read or change it: run `{remedy}`")
        return file.read(LONGEST + 2) or b""


async def _output(command: Sequence[str]) -> bytes:
    """Return what a program writes, longer than a value may be at most; then it ends, or failed.

    It has a daemon's variables and folder, so for a person it does the same. Raises OSError.
    """
    said, env = b"", daemon_variables()
    async with await anyio.open_process(
        command, stdin=DEVNULL, stderr=DEVNULL, cwd="/", env=env, start_new_session=True
    ) as process:
        try:
            with suppress(anyio.EndOfStream):
                while process.stdout and len(said) <= LONGEST + 1:
                    said += await process.stdout.receive()
                return said
            code = await process.wait()
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if code:
        raise OSError(errno.EIO, f"it ended with {code}; run it in a terminal to see why")
    return said
