"""Reads a small text file and replaces it as a whole, keeping its mode and owner."""

import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from mcp_sandbox.errors import ConfigError

_LARGEST = 64 << 20


def resolve(path: Path) -> Path:
    """Return the file behind links, which is the one that is changed.

    Raises:
        ConfigError: a link leads nowhere, or it is not a file of ours to change.
    """
    try:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} is a link to nothing: make its file or remove the link")
        real = path.resolve()
        mode = real.stat().st_mode if real.exists() else None
    except (OSError, RuntimeError) as exc:
        raise ConfigError(f"{path} cannot be used: {exc}; correct the path") from exc
    if mode is not None and not stat.S_ISREG(mode):
        raise ConfigError(f"{real} is not a file: move it away, then try again")
    if mode is not None and not mode & 0o222:
        raise ConfigError(f"{real} is read-only: `chmod u+w` it, or add the lines of --print")
    return real


def read(path: Path) -> str | None:
    """Return the text exactly as it is, None if there is no file.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 text, or is too large to be what we look for.
    """
    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
        if len(data) > _LARGEST:
            raise ConfigError(f"{path} is larger than 64 MiB: look what it is")
        return data.decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text: convert it first") from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def replace(path: Path, text: str, *, expected: str | None, private: bool = False) -> None:
    """Write the whole text at once; mode and owner of an existing file stay.

    Raises:
        ConfigError: it cannot be written, or it is no longer what `expected` says.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        old = path.stat() if expected is not None else None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        mode = 0o600 if private or old else 0o666
        with os.fdopen(os.open(beside, flags, mode), "wb") as stream:
            stream.write(text.encode())
            if old is not None:
                _keep(stream.fileno(), old)
            stream.flush()
            os.fsync(stream.fileno())
        if read(path) != expected:
            raise ConfigError(f"{path} was changed by somebody else just now: try again")
        beside.replace(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
    finally:
        beside.unlink(missing_ok=True)


def _keep(descriptor: int, old: os.stat_result) -> None:
    if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
        os.fchown(descriptor, old.st_uid, old.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def remove(path: Path, *, expected: str | None) -> None:
    """Remove a file that is still what `expected` says; none is fine.

    Raises:
        ConfigError: it cannot be removed, or somebody changed it.
    """
    if read(path) != expected:
        raise ConfigError(f"{path} was changed by somebody else just now: try again")
    try:
        path.unlink(missing_ok=True)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be removed: {exc.strerror}") from exc


def make_folders(folder: Path, *, private: bool = False) -> Sequence[Path]:
    """Make a folder and what is missing above it; returns what was made, the innermost first.

    Raises:
        ConfigError: it cannot be made.
    """
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        for place in reversed(missing):
            place.mkdir(mode=0o700 if private else 0o777)
    except OSError as exc:
        raise ConfigError(f"the folder {folder} cannot be made: {exc.strerror}") from exc
    return missing
