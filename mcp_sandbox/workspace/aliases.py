"""Plans further paths under which a chat finds the same files. Does no I/O.

An alias is written "/path" (the workspace) or "/path=name" (the directory `name` in it), with
{user} and {chat} replaced. How it is made differs:

- The workspace elsewhere is a mount of the workspace: only the server can change its host path.
- A directory of the workspace elsewhere is a link in a small read-only mounted folder.
  It must not be a mount: user code can swap that directory for a link to anywhere, and an engine
  that mounts by path would follow it on the host.
- Anything beneath /workspace is a relative link in the workspace. A mount there would leave
  mount points, owned by root, in the user's tree and show every file twice.
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId, Mount

WORKSPACE = "/workspace"
_COMPONENT = re.compile(r"[A-Za-z0-9._-]{1,255}")
_SYSTEM = re.compile(
    r"bin|boot|dev|etc|home|lib|lib32|lib64|libx32|lost\+found|opt|proc|root|run|sbin|sys|tmp|usr|var"
)


@dataclass(frozen=True)
class Alias:
    """`target` is a path in the sandbox, `directory` a name in the workspace, "" for all of it."""

    target: str
    directory: str = ""


@dataclass(frozen=True)
class LinkFolder:
    """A read-only folder of links, mounted at `target`: (name, link text) each.

    `mount_points` are the names in it where other mounts go.
    """

    target: str
    links: tuple[tuple[str, str], ...]
    mount_points: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A name on the host that stands for exactly this content, so that it never changes."""
        return hashlib.sha256(repr((self.links, self.mount_points)).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class AliasPlan:
    """What to make for the aliases of one chat."""

    directories: tuple[str, ...]
    """Names in the workspace that must be there."""
    inner_links: tuple[tuple[str, str], ...]
    """(path beneath the workspace, link text)."""
    folders: tuple[LinkFolder, ...]
    mounts: tuple[str, ...]
    """Where the workspace is mounted again."""


def parse_aliases(templates: Iterable[str]) -> tuple[Alias, ...]:
    """Parse aliases, keeping placeholders; ConfigError says which cannot be used and why."""
    aliases = tuple(_parse(template) for template in templates)
    sample = ChatId("user", "chat")
    targets = [PurePosixPath(_fill(alias.target, sample)) for alias in aliases]
    for index, target in enumerate(targets):
        for other in targets[:index]:
            if target.is_relative_to(other) or other.is_relative_to(target):
                raise ConfigError(
                    f"aliases {str(other)!r} and {str(target)!r} lie in one another: drop one"
                )
    return aliases


def plan(chat: ChatId, templates: Iterable[str]) -> AliasPlan:
    """Return what to make for this chat's aliases."""
    inner_links: list[tuple[str, str]] = []
    mounts: list[str] = []
    links: dict[str, list[tuple[str, str]]] = {}
    aliases = parse_aliases(templates)
    for alias in aliases:
        target = _fill(alias.target, chat)
        parent, _, name = target.rpartition("/")
        if target.startswith(WORKSPACE + "/"):
            path = target.removeprefix(WORKSPACE + "/")
            up = [".."] * path.count("/")
            inner_links.append(
                (path, "/".join([*up, alias.directory] if alias.directory else up or ["."]))
            )
        elif alias.directory:
            links.setdefault(parent, []).append((name, f"{WORKSPACE}/{alias.directory}"))
        else:
            mounts.append(target)
    return AliasPlan(
        directories=tuple(sorted({alias.directory for alias in aliases if alias.directory})),
        inner_links=tuple(inner_links),
        folders=tuple(
            LinkFolder(parent, tuple(sorted(found)), _children(parent, mounts))
            for parent, found in sorted(links.items())
        ),
        mounts=tuple(mounts),
    )


def alias_mounts(planned: AliasPlan, workspace: Path, folders: Path) -> tuple[Mount, ...]:
    """Return the mounts, parents first; `folders` is the host directory of the link folders."""
    mounts = [Mount(folders / each.name, each.target, read_only=True) for each in planned.folders]
    mounts += [Mount(workspace, target) for target in planned.mounts]
    return tuple(sorted(mounts, key=lambda mount: mount.target.count("/")))


def _parse(template: str) -> Alias:
    target, _, directory = template.partition("=")
    parts, why = target.split("/"), ""
    if parts[0] or len(parts) < 2 or not all(_is_plain(part) for part in parts[1:]):
        why = (
            'a path begins with "/" and has no empty, "." or ".." parts, only letters, '
            'digits, ".", "_", "-", {user} and {chat}'
        )
    elif _SYSTEM.fullmatch(parts[1]) or "{" in parts[1] or target == WORKSPACE:
        why = "it would cover a part of the system: try one beneath /mnt"
    elif "=" in template and not (_COMPONENT.fullmatch(directory) and directory not in (".", "..")):
        why = 'after "=" comes the name of one directory in the workspace'
    elif directory and len(parts) < 3:
        why = "an alias of a directory needs a parent: try one beneath /mnt"
    if why:
        raise ConfigError(f"workspace alias {template!r} cannot be used: {why}")
    return Alias(target, directory)


def _is_plain(part: str) -> bool:
    filled = part.replace("{user}", "u").replace("{chat}", "c")
    return bool(_COMPONENT.fullmatch(filled)) and filled not in (".", "..")


def _fill(target: str, chat: ChatId) -> str:
    return target.replace("{user}", chat.user).replace("{chat}", chat.chat)


def _children(parent: str, targets: Iterable[str]) -> tuple[str, ...]:
    """Return the first component beneath `parent` of each target that lies there."""
    inside = (each for each in targets if each.startswith(parent + "/"))
    return tuple(sorted({each.removeprefix(parent + "/").partition("/")[0] for each in inside}))
