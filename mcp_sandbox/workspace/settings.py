"""What an operator can set about workspaces."""

from pydantic import BaseModel, ConfigDict, Field, field_validator

from mcp_sandbox.workspace.aliases import parse_aliases


class WorkspaceConfig(BaseModel, frozen=True):
    """Limits and layout of a chat's trees."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    size_limit_bytes: int = Field(default=5 * 1024**3, ge=1024**2)
    """What workspace and home of one chat may occupy on disk together."""

    max_files: int = Field(default=1_000_000, ge=100)
    """How many files and directories one chat may have."""

    min_free_bytes: int = Field(default=1024**3, ge=0)
    """What stays free on the disk of the data root; calls that write are refused below it."""

    subdirectories: bool = False
    """Give a new workspace the directories code, data, output, artifacts, temp and .memory."""

    aliases: tuple[str, ...] = ()
    """Further paths of the same files: "/some/path" for the workspace, "/some/path=name" for one
    of its directories; {user} and {chat} are replaced."""

    @field_validator("aliases")
    @classmethod
    def _usable(cls, aliases: tuple[str, ...]) -> tuple[str, ...]:
        parse_aliases(aliases)
        return aliases
