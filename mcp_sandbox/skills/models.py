"""What a skill is made of, once it has been read. No behaviour, no I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
Level = Literal["error", "warning", "note"]
FileKind = Literal["text", "binary"]
Need = Literal["command", "python", "node", "interpreter", "network"]


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something that is wrong with a skill, and what to do about it.

    level: "error": the skill cannot be used. "warning": it is used all the same; a stricter reader
    may refuse it. "note": worth knowing. `code` is a stable word such as "name-mismatch"; `file` is
    relative to the skill's folder, `line` counts from 1.
    """

    code: str
    level: Level
    reason: str
    fix: str
    line: int | None = None
    file: str = "SKILL.md"


@dataclass(frozen=True, slots=True)
class FrontMatter:
    """What stands between the two lines of dashes of a `SKILL.md`.

    `fields` has every field in the file's order: scalars are the text that the file has, whatever
    YAML would make of them; `core_schema.as_json` says what hosts make of them. The others are
    read from it.
    """

    name: str
    description: str
    fields: Mapping[str, Json]
    license: str = ""
    compatibility: str = ""
    metadata: Mapping[str, Json] = field(default_factory=dict[str, Json])
    allowed_tools: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    argument_hint: str = ""
    user_invocable: bool = True
    model_invocable: bool = True


@dataclass(frozen=True, slots=True)
class Skill:
    """A skill that can be used.

    `uri` is its identity: `skill://{root}/{further folders}/{name}/SKILL.md`. `folder` is where it
    lies on the host, `document` how its `SKILL.md` is spelled there, `body_at` the byte at
    which the text after the front matter begins. `shadowed_by` is the uri of the skill that
    its bare name means instead.
    """

    uri: str
    root: str
    folder: Path
    front: FrontMatter
    document: str = "SKILL.md"
    body_at: int = 0
    diagnostics: tuple[Diagnostic, ...] = ()
    shadowed_by: str | None = None

    @property
    def name(self) -> str:
        return self.front.name


@dataclass(frozen=True)
class Problem:
    """A folder that has something of a skill and offers none, or one that could not be searched."""

    root: str
    folder: Path
    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True)
class Change:
    """Which skills came, went or were edited, by their uris; all that one burst of edits did."""

    added: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    edited: frozenset[str] = frozenset()

    @property
    def uris(self) -> frozenset[str]:
        return self.added | self.removed | self.edited

    def __bool__(self) -> bool:
        return bool(self.uris)


@dataclass(frozen=True)
class SkillFile:
    """A file of a skill: its path in the folder, bytes, and "sha256:…" of its raw bytes."""

    path: str
    size: int
    digest: str
    mime: str
    kind: FileKind


@dataclass(frozen=True)
class Contents:
    """All files of a skill, by path; `digest` ("sha256:…") changes with any byte of any of them.

    `diagnostics` say which files are left out, and why.
    """

    files: tuple[SkillFile, ...]
    digest: str
    diagnostics: tuple[Diagnostic, ...] = ()


@dataclass(frozen=True)
class Unmet:
    """What a script needs and the chat's sandbox lacks.

    `needed_by` are files of the skill. `layer` names the layer for images that has it, None if
    none has; `fix` says in a few words what a person can do. `always` is False where only some of
    what the files do needs it.
    """

    need: Need
    name: str
    needed_by: tuple[str, ...]
    layer: str | None = None
    fix: str = ""
    always: bool = True


@dataclass(frozen=True)
class Findings:
    """What the bundled scripts seem to use, found by reading and not by running them.

    `packages` are those of Python and Node.js by the names that pip and npm know. `writes` are
    paths outside of the working folder. `unread` are scripts that are too large to be read,
    `inline` those that declare their packages themselves (PEP 723).
    """

    hosts: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    inline: tuple[str, ...] = ()
