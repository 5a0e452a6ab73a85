"""Makes folders of skills for tests."""

from pathlib import Path

import pytest

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.models import ChatId
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.library import RefreshPace, SkillLibrary
from mcp_sandbox.skills.scan import Scanner

CHAT = ChatId("local", "chat")


def write_skill(
    folder: Path,
    name: str | None = None,
    description: str = "Does it.",
    *,
    body: str = "Do it.\n",
    document: str = "SKILL.md",
) -> Path:
    """A skill in that folder, named like it unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    name = folder.name if name is None else name
    text = f"---\nname: {name}\ndescription: {description}\n---\n{body}"
    (folder / document).write_text(text)
    return folder


def library(
    data: Path, *folders: Path, workspace: bool = False, shipped: bool = False
) -> SkillLibrary:
    settings = SkillsConfig(folders=folders, workspace=workspace, shipped=shipped)
    return SkillLibrary(settings, data, pace=RefreshPace(poll_s=0.05, settle_s=0.2, patience_s=1))


def looks_counted(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list that grows by one whenever a root is looked through, from now on."""
    looks: list[None] = []

    def counting(scanner: Scanner) -> Catalogue:
        looks.append(None)
        return scan(scanner)

    scan = Scanner.scan
    monkeypatch.setattr(Scanner, "scan", counting)
    return looks


def codes(catalogue: Catalogue) -> dict[str, list[str]]:
    """The codes of the problems, by the names of their folders."""
    found: dict[str, list[str]] = {}
    for problem in catalogue.problems:
        names = [each.code for each in problem.diagnostics]
        found.setdefault(problem.folder.name, []).extend(names)
    return found
