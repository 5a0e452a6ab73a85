"""`cp`: files and folders between this machine and a chat's sandbox.

What comes out of a sandbox may be anything: only plain files and folders are made of it, below a
folder that is new, and nothing has its name before it is whole.
"""

import io
import json
import os
import re
import secrets
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Self

import typer
from rich.console import Console

from mcp_sandbox.cli.options import flag, started
from mcp_sandbox.daemon.control_client import ControlCall, open_control_call
from mcp_sandbox.errors import NoDaemon, OperatorError
from mcp_sandbox.runner.wire import terminal_frames as wire
from mcp_sandbox.workspace import beneath

_IN_CHAT = re.compile(r"[A-Za-z0-9][^:]*:.*", re.DOTALL)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DEEPEST = 200  # What is nested deeper could not be removed again.
_MOST_SAID = 2000
_SOURCE = "CHAT:PATH, also with * and ?, a path here, or - for what is piped in."


def cp(
    sources: Annotated[list[str], typer.Argument(metavar="SOURCE", help=_SOURCE)],
    target: Annotated[str, typer.Argument(help="CHAT:PATH, a path here, or - to print a file.")],
    force: Annotated[bool, flag("Replace what is there, also folders.", "--force", "-f")] = False,
    _whole: Annotated[
        bool, flag("Is taken, for folders always are whole.", "-r", "-R", "-a")
    ] = False,
) -> None:
    """Copy files and folders into the sandbox of a chat, out of it, or from one to another."""
    into = _IN_CHAT.fullmatch(target) is not None
    if not (into or all(map(_IN_CHAT.fullmatch, sources))):
        raise typer.BadParameter("one side is CHAT:PATH; a path here with a colon begins with ./")
    # Being ended runs clean-ups, as Ctrl-C does. Several sources need a folder to go into.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        with started() as daemon:
            found = [each for source in sources for each in _match(daemon, source)]
            if len(found) > 1 and target != "-":
                # After the colon of a chat nothing means its files, not the root.
                target += "./" if into and target.endswith(":") else "/"
            for each in found:
                _copy(daemon, each, target, force=force)
    except OSError as exc:
        where = f"{os.fsdecode(exc.filename)}: " if exc.filename else ""
        raise OperatorError(f"{where}{exc.strerror or exc}") from exc


def _match(daemon: Path, source: str) -> list[str]:
    """Return what matches a pattern in a chat; what is no pattern is returned as it is."""
    if not (_IN_CHAT.fullmatch(source) and set("*?[") & set(source)):
        return [source]
    with _begun(daemon, source, None, match=True) as stream:
        names = os.fsdecode(stream.readall()).split("\0")
    if not any(names):
        raise OperatorError(f"nothing in the sandbox matches {source}")
    return [f"{source.partition(':')[0]}:{name}" for name in names if name]


def _copy(daemon: Path, source: str, target: str, *, force: bool) -> None:
    """Copy one file or folder; between chats, and for a pipe, by way of a folder here."""
    into, real, left_out = _IN_CHAT.fullmatch(target), Path(source), 0
    with TemporaryDirectory(prefix="mcp-sandbox-") as between:
        if source == "-":
            real = Path(between, "stdin")
            with real.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        elif _IN_CHAT.fullmatch(source):
            there = between if into or target == "-" else target
            real, left_out = _copy_out(daemon, source, there, force=force)
        if into:
            _copy_in(daemon, real, target, force=force)
        elif target == "-" and real.is_dir():
            raise OperatorError(f"{source} is a folder: name one here to copy it into")
        elif target == "-":
            with real.open("rb") as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
    if left_out:
        print(f"{source}: left out {left_out} links and such", file=sys.stderr)


def _copy_in(daemon: Path, source: Path, target: str, *, force: bool) -> None:
    real, gnu = source.resolve(), tarfile.GNU_FORMAT
    if not (real.is_file() or real.is_dir()):
        raise OperatorError(f"there is no file or folder {source}")
    size = sum(1024 + each.lstat().st_size for each in (real, *real.rglob("*")))
    # Where the other side takes no more, it says why.
    with (
        _begun(daemon, target, size, name=source.absolute().name, force=force) as stream,
        suppress(ConnectionError),
        tarfile.open(mode="w|", fileobj=stream, bufsize=wire.MAX_BYTES, format=gnu) as tar,
    ):
        tar.add(real, "x", filter=lambda each: None if each.isdev() else each)


def _copy_out(daemon: Path, source: str, target: str, *, force: bool) -> tuple[Path, int]:
    """Return what was made, and how much was left out."""
    chat, _, path = source.partition(":")
    final, draft = Path(target), f".~mcp-{secrets.token_hex(8)}".encode()
    if target.endswith("/") or final.is_dir():
        name = PurePosixPath(path).name
        final /= name if name.strip(".~") else PurePosixPath(chat).name
    if os.path.lexists(final) and not force:
        raise OperatorError(f"{final} is there: --force replaces it")
    final.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as undo:
        parent = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        undo.callback(os.close, parent)
        undo.callback(shutil.rmtree, draft, ignore_errors=True, dir_fd=parent)
        root, _ = beneath.make_directory(parent, draft)
        undo.callback(os.close, root)
        with _begun(daemon, source, None) as stream:
            left_out = _unpack(stream, root)
        if force and not final.is_dir():
            os.replace(b"x", os.fsencode(final.name), src_dir_fd=root, dst_dir_fd=parent)
        else:
            rename = beneath.exchange if force else beneath.rename_new
            rename(root, b"x", parent, os.fsencode(final.name))
    return final, left_out


class _Tar(io.RawIOBase):
    """A tar on its way to the sandbox, or from there."""

    def __init__(self, talk: ControlCall, advance: Callable[[int], None]) -> None:
        self._talk, self._advance, self._pieces = talk, advance, self._received()

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - as there
        self._talk.connection.sendall(b"".join(wire.frames(data)) or wire.frame(wire.DATA, b""))
        self._advance(len(data))
        return len(data)

    def read(self, _size: int = -1, /) -> bytes:
        data = next(filter(None, self._pieces), b"")
        self._advance(len(data))
        return data

    def _received(self) -> Generator[bytes]:
        heard, data, errors = wire.Frames(), bytes(self._talk.rest), ""
        while True:
            for kind, content in heard.feed(data):
                if kind == wire.DATA:
                    yield content
                elif kind != wire.END:
                    errors = (errors + content.decode("utf-8", "replace"))[:_MOST_SAID]
                elif json.loads(content)["exit_code"] == 0:
                    return
                if kind in {wire.END, wire.ERROR}:
                    raise OperatorError(errors.strip() or "tar in the sandbox was ended")
            data = self._talk.connection.recv(wire.MAX_BYTES)
            if not data:
                raise NoDaemon("the daemon ended, and the copy with it")


@contextmanager
def _begun(daemon: Path, at: str, size: int | None, **command: object) -> Generator[_Tar]:
    """Talk to the daemon to the end of what it says; a terminal shows a bar."""
    from rich import progress

    columns = progress.BarColumn(), progress.DownloadColumn(), progress.TransferSpeedColumn()
    terminal, (chat, _, path) = Console(stderr=True), at.partition(":")
    hidden = "match" in command or not terminal.is_terminal
    given = {"chat": chat, "path": path, "room": size, **command}
    with (
        open_control_call(daemon, "copy", given) as talk,
        progress.Progress(*columns, console=terminal, disable=hidden) as bar,
    ):
        talk.receive()
        tar = _Tar(talk, partial(bar.advance, bar.add_task("", total=size)))
        yield tar
        with suppress(ConnectionError):
            tar.write(b"")
        while tar.read():
            pass


class _Member(tarfile.TarInfo):
    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        """Return the head of a member, unless it says itself how much memory it takes."""
        made = super().frombuf(buf, encoding, errors)
        most = beneath.PATH_MAX if made.type in {b"L", b"K"} else sys.maxsize
        if made.type not in b"\x0001234567LK" or not 0 <= made.size <= most:
            raise OperatorError("the sandbox sent a kind of tar that is not taken")
        return made


def _unpack(stream: _Tar, root: int) -> int:
    """Make `x` in `root` of a tar's first member, the others below it; return how many are not."""
    left_out, first = 0, True
    try:
        with tarfile.open(
            mode="r|", fileobj=stream, bufsize=wire.MAX_BYTES, tarinfo=_Member
        ) as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]
                name = "x/" + member.name.removeprefix("./").rstrip("/")
                parts = [b"x"] if first else os.fsencode(name).split(b"/")
                left_out, first = left_out + (not _make_entry(root, parts, tar, member)), False
    except (tarfile.TarError, RecursionError) as exc:
        raise OperatorError(f"what the sandbox sent is no whole tar: {exc}") from exc
    return left_out


def _make_entry(
    root: int, parts: list[bytes], tar: tarfile.TarFile, member: tarfile.TarInfo
) -> bool:
    if len(parts) > _DEEPEST or {b"", b".", b".."}.intersection(parts):
        return False
    with suppress(FileExistsError, FileNotFoundError, NotADirectoryError), ExitStack() as opened:
        parent = beneath.open_directory(root, b"/".join(parts[:-1]) or b".")
        opened.callback(os.close, parent)
        if member.isdir():
            folder, new = beneath.make_directory(parent, parts[-1])
            opened.callback(os.close, folder)
            if new:
                os.fchmod(folder, member.mode & 0o777 | 0o700)
            return new
        if member.isreg() and (content := tar.extractfile(member)):
            made = os.open(parts[-1], _NEW, 0o600, dir_fd=parent)
            with os.fdopen(made, "wb") as file:
                shutil.copyfileobj(content, file)
                os.fchmod(made, member.mode & 0o777)
            return True
    return False
