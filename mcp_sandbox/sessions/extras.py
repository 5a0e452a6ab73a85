"""What chats have besides their own files."""

from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.sessions.skills import Skills
from mcp_sandbox.skills.library import Library
from mcp_sandbox.workspace.projects import Projects, no_projects


@dataclass(frozen=True)
class Extras:
    """The folders of the clients, and the skills."""

    projects: Projects
    skills: Skills


def no_extras(data_root: Path) -> Extras:
    """Neither shows nor teaches anything."""
    library = Library(SkillsConfig(enabled=False), data_root)
    return Extras(no_projects(data_root), Skills(library))
