"""Our values -> structured content, for tools whose answer is data.

Clients show a model only the JSON, so everything it needs is in these models.
"""

from datetime import UTC, datetime

from mcp.types import CallToolResult, TextContent
from pydantic import BaseModel, ConfigDict

from mcp_sandbox.models import Entry, EntryKind, Listing
from mcp_sandbox.server.text import MAX_TEXT_BYTES, byte_length, clip, show_name
from mcp_sandbox.sessions.report import SandboxReport

_ENTRIES_BYTES = MAX_TEXT_BYTES - 1_000


class ListedEntry(BaseModel):
    """One entry; `name` is a path that the other tools take, `modified` is in UTC."""

    model_config = ConfigDict(frozen=True)

    name: str
    type: EntryKind
    size: int
    modified: str
    link_target: str | None = None


class ListedFiles(BaseModel):
    """What list_files answers."""

    model_config = ConfigDict(frozen=True)

    path: str
    entries: list[ListedEntry]
    total: int
    truncated: bool
    note: str | None = None


class WorkspaceReport(BaseModel):
    """Where the files are and how much room they take."""

    model_config = ConfigDict(frozen=True)

    path: str
    used_bytes: int
    limit_bytes: int
    files: int
    exact: bool


class SandboxInfoReport(BaseModel):
    """What sandbox_info answers; `programs` maps a name to its version."""

    model_config = ConfigDict(frozen=True)

    chat: str
    backend: str
    image: str | None = None
    state: str
    isolation: str
    network: str
    limits: dict[str, str]
    programs: dict[str, str]
    workspace: WorkspaceReport
    project: str
    versions: dict[str, str]


def listed_files(listing: Listing) -> CallToolResult:
    """The entries that fit in one result, with a note on how to see the rest."""
    entries, used = [], 0
    for entry in map(_listed, listing.entries):
        used += byte_length(_json(entry)) + 1
        if used > _ENTRIES_BYTES:
            break
        entries.append(entry)
    truncated = listing.truncated or len(entries) < len(listing.entries)
    note = f"{len(entries)} shown: list a subdirectory, or use glob" if truncated else None
    return structured(
        ListedFiles(
            path=show_name(listing.path),
            entries=entries,
            total=listing.total,
            truncated=truncated,
            note=note,
        )
    )


def _listed(entry: Entry) -> ListedEntry:
    return ListedEntry(
        name=show_name(entry.path),
        type=entry.kind,
        size=entry.size,
        modified=_utc(entry.modified),
        link_target=None if entry.target is None else show_name(entry.target),
    )


def _utc(seconds: float) -> str:
    # A sandbox can set any time on its files, also one that no calendar has.
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"@{seconds:.0f}"


def sandbox_report(report: SandboxReport) -> CallToolResult:
    """Everything `sandbox_info` knows."""
    usage = report.usage
    return structured(
        SandboxInfoReport(
            chat=str(report.chat),
            backend=report.backend,
            image=report.image,
            state=report.state,
            isolation=report.isolation,
            network=report.network,
            limits=dict(report.limits),
            # Whatever the sandbox says of itself is as hostile as any output.
            programs={
                clip(show_name(name), 60): clip(show_name(version), 60)
                for name, version in [*report.programs.items()][:50]
            },
            project=report.project,
            workspace=WorkspaceReport(
                path=report.workspace,
                used_bytes=usage.used_bytes,
                limit_bytes=usage.limit_bytes,
                files=usage.files,
                exact=usage.exact,
            ),
            versions={name: clip(show_name(v), 60) for name, v in report.versions.items()},
        )
    )


def structured(answer: BaseModel) -> CallToolResult:
    """Data, and the same as text."""
    text = TextContent(text=_json(answer), type="text")
    return CallToolResult(
        content=[text], structured_content=answer.model_dump(mode="json", exclude_none=True)
    )


def _json(answer: BaseModel) -> str:
    return answer.model_dump_json(exclude_none=True)
