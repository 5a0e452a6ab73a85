"""Remembers what a client's file was before us, so that `--undo` brings it back.

    {state folder}/init/{hash of the file's path}.json    readable by its owner only

Such a file may hold keys of other servers, so the copy is kept as close as they are.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from mcp_sandbox.clients import files
from mcp_sandbox.config import state_folder
from mcp_sandbox.errors import ConfigError


@dataclass(frozen=True)
class Record:
    """A file's text before our first change (None: there was none) and a hash of ours.

    `made`: folders that were made for it, the innermost first.
    """

    path: str
    before: str | None
    after: str
    made: tuple[str, ...] = ()


def load(path: Path) -> Record | None:
    """Return what is remembered of this file.

    Raises:
        ConfigError: the record is damaged.
    """
    text = files.read(_place(path))
    if text is None:
        return None
    try:
        kept = json.loads(text)
        return Record(kept["path"], kept["before"], kept["after"], tuple(kept["made"]))
    except (ValueError, KeyError, TypeError) as exc:
        raise ConfigError(
            f"{_place(path)} is damaged, which says what {path} was before: look into both, then "
            "remove it"
        ) from exc


def save(path: Path, record: Record) -> None:
    """Remember it."""
    place = _place(path)
    files.make_folders(place.parent, private=True)
    files.replace(place, json.dumps(asdict(record)), expected=files.read(place), private=True)


def forget(path: Path) -> None:
    """Remember nothing of this file any more."""
    _place(path).unlink(missing_ok=True)


def digest(text: str | None) -> str:
    """Return what tells one content from another."""
    return "" if text is None else hashlib.sha256(text.encode()).hexdigest()


def _place(path: Path) -> Path:
    name = hashlib.sha256(str(path).encode()).hexdigest()[:32]
    return state_folder() / "init" / f"{name}.json"
