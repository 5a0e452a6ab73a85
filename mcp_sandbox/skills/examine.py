"""Looks at one skill's folder as a whole: can it be used, and what is wrong with it. Blocking."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mcp_sandbox.errors import Busy, TooLarge
from mcp_sandbox.skills import problems
from mcp_sandbox.skills.contents import gather
from mcp_sandbox.skills.files import read_whole
from mcp_sandbox.skills.judge import judge
from mcp_sandbox.skills.models import Diagnostic, FrontMatter
from mcp_sandbox.skills.parse import parse
from mcp_sandbox.skills.roots import opened
from mcp_sandbox.skills.strict import verdict
from mcp_sandbox.skills.uris import DOCUMENT, document_among


@dataclass(frozen=True)
class Examined:
    """A skill's folder. `front` is None where it cannot be used; `files` by their paths in it."""

    folder: Path
    front: FrontMatter | None
    diagnostics: tuple[Diagnostic, ...]
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)

    @property
    def name(self) -> str:
        return self.front.name if self.front else self.folder.name

    @property
    def faulty(self) -> bool:
        """Whether an error was found."""
        return any(each.level == "error" for each in self.diagnostics)


def examine(folder: Path, *, strictly: bool = False) -> Examined:
    """Look at the skill in a folder; `strictly` as the reference tool does, too."""
    folder = folder.absolute()
    try:
        document = document_among(place.name for place in folder.iterdir())
        files, left_out = _read(folder, document)
    except OSError as exc:
        return Examined(folder, None, (problems.unreadable(exc),))
    except (TooLarge, Busy) as exc:
        fix = "Make its files small enough, and leave them alone for a moment."
        return Examined(folder, None, (Diagnostic("unreadable", "error", str(exc), fix),))
    found = examine_files(files, folder.name, document, strictly=strictly)
    return replace(found, folder=folder, diagnostics=(*found.diagnostics, *left_out))


def examine_files(
    files: Mapping[str, bytes],
    folder_name: str,
    document: str = DOCUMENT,
    *,
    strictly: bool = False,
) -> Examined:
    """Look at a skill's files, which lie in a folder of that name or shall do so. Pure."""
    data = files[DOCUMENT]
    parsed = parse(data, folder_name, document)
    found = (*parsed.diagnostics, *judge(files))
    if strictly:
        refused = verdict(data, folder_name, document)
        codes = {each.code for each in refused}
        found = (*refused, *(each for each in found if each.code not in codes))
    return Examined(Path(folder_name), parsed.front, found, files)


def _read(folder: Path, document: str) -> tuple[dict[str, bytes], tuple[Diagnostic, ...]]:
    contents = gather(folder, document).contents
    with opened(folder, None) as directory:
        files = {
            file.path: read_whole(directory, document if file.path == DOCUMENT else file.path).data
            for file in contents.files
        }
    return files, contents.diagnostics
