"""Which skills of a user were installed, from where, and the digest of each of their files.

    {data}/skills/{user}/skills-lock.json    replaced by rename, never rewritten

A skill that was put there by hand has no entry until `lock` gives it one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.skills.contents import digest_of
from mcp_sandbox.skills.supply.tree import Tree
from mcp_sandbox.workspace.whole_file import replace

NAME = "skills-lock.json"
_LARGEST = 64 << 20


_Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class Version(BaseModel):
    """One state of an installed skill. `commit` is empty unless it came from git.

    `source` is what `update` asks for again; empty for what was put there by hand. `installed_at`
    is in UTC, as ISO 8601 writes it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    commit: str = ""
    digest: _Digest
    files: dict[str, _Digest]
    installed_at: str


class Entry(Version):
    """An installed skill, and the version before it, which `update --undo` brings back."""

    former: Version | None = None


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = Field(default=1, ge=1, le=1)
    skills: dict[str, Entry] = {}


@dataclass(frozen=True)
class Drift:
    """How a skill's files differ from its entry; `missing_skill`: its folder is gone."""

    changed: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    missing_skill: bool = False

    def __bool__(self) -> bool:
        return bool(self.changed or self.added or self.missing or self.missing_skill)


def read(folder: Path) -> Mapping[str, Entry]:
    """Return the entries by the skills' names; without a file there are none.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / NAME
    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST + 1)
    except FileNotFoundError:
        return {}
    try:
        return _Content.model_validate_json(data[:_LARGEST]).skills
    except ValidationError as exc:
        raise ConfigError(
            f"{path} is damaged: move it away; `mcp-sandbox skills lock` writes it anew from the "
            "files that are there, but not where they came from"
        ) from exc


def write(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Replace the file as a whole. Raises OSError."""
    content = _Content(skills=dict(sorted(entries.items()))).model_dump(mode="json")
    replace(folder / NAME, json.dumps(content, indent=1, ensure_ascii=False).encode() + b"\n")


def file_digests(tree: Tree) -> dict[str, str]:
    """Return each file's digest by its path."""
    return {path: digest_of(file.data) for path, file in tree.items()}


def drift(entry: Version, files: Mapping[str, str] | None) -> Drift:
    """Compare an entry with the files that are there; None: the skill is gone."""
    if files is None:
        return Drift(missing_skill=True)
    return Drift(
        changed=tuple(
            path for path in entry.files if files.get(path, entry.files[path]) != entry.files[path]
        ),
        added=tuple(path for path in files if path not in entry.files),
        missing=tuple(path for path in entry.files if path not in files),
    )
