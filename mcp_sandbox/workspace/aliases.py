"""Further paths under which a chat finds the same files. Decides only; does no I/O.

An alias is written "/path" (the workspace) or "/path=name" (the directory `name` in it), with
{user} and {chat} replaced. How it is made differs:

- The workspace elsewhere is a mount of the workspace: its host path is ours alone.
- A directory of the workspace elsewhere is a link in a small read-only mounted folder of ours.
  It must not be a mount: user code can swap that directory for a link to anywhere, and an engine
  that mounts by path would follow it on the host.
- Anything beneath /workspace is a relative link in the workspace. A mount there would leave
  mount points, owned by root, in the user's tree and show every file twice.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
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
        content = repr((self.links, self.mount_points)).encode()
        return hashlib.sha256(content).hexdigest()[:32]


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
    """The aliases, placeholders still in them.

    Raises:
        ConfigError: one of them cannot be used; the message says why and what to write.
    """
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
    """What to make for this chat."""
    aliases = [
        Alias(_fill(alias.target, chat), alias.directory) for alias in parse_aliases(templates)
    ]
    inner = [alias for alias in aliases if _is_inside(alias.target)]
    outer = [alias for alias in aliases if not _is_inside(alias.target)]
    mounts = tuple(alias.target for alias in outer if not alias.directory)
    return AliasPlan(
        directories=tuple(sorted({alias.directory for alias in aliases if alias.directory})),
        inner_links=tuple(_inner_link(alias) for alias in inner),
        folders=_folders([alias for alias in outer if alias.directory], mounts),
        mounts=mounts,
    )


def alias_mounts(planned: AliasPlan, workspace: Path, folders: Path) -> tuple[Mount, ...]:
    """The mounts, parents first; `folders` is the host directory that holds the link folders."""
    mounts = [Mount(folders / each.name, each.target, read_only=True) for each in planned.folders]
    mounts += [Mount(workspace, target) for target in planned.mounts]
    return tuple(sorted(mounts, key=lambda mount: mount.target.count("/")))


def _parse(template: str) -> Alias:
    target, _, directory = template.partition("=")
    parts = target.split("/")
    if parts[0] or len(parts) < 2 or not all(_is_plain(part) for part in parts[1:]):
        raise _unusable(
            template,
            'a path begins with "/" and has no empty, "." or ".." parts, only letters, '
            'digits, ".", "_", "-", {user} and {chat}',
        )
    if _SYSTEM.fullmatch(parts[1]) or "{" in parts[1] or target == WORKSPACE:
        raise _unusable(template, "it would cover a part of the system: try one beneath /mnt")
    if PurePosixPath(target).is_relative_to(f"{WORKSPACE}/.claude"):
        raise _unusable(template, "the sandbox shows skills there: try another directory")
    if "=" in template and not (_COMPONENT.fullmatch(directory) and directory not in (".", "..")):
        raise _unusable(template, 'after "=" comes the name of one directory in the workspace')
    if directory and len(parts) < 3:
        raise _unusable(template, "an alias of a directory needs a parent: try one beneath /mnt")
    return Alias(target, directory)


def _is_plain(part: str) -> bool:
    filled = part.replace("{user}", "u").replace("{chat}", "c")
    return bool(_COMPONENT.fullmatch(filled)) and filled not in (".", "..")


def _unusable(template: str, why: str) -> ConfigError:
    return ConfigError(f"workspace alias {template!r} cannot be used: {why}")


def _fill(target: str, chat: ChatId) -> str:
    return target.replace("{user}", chat.user).replace("{chat}", chat.chat)


def _is_inside(target: str) -> bool:
    return target.startswith(WORKSPACE + "/")


def _inner_link(alias: Alias) -> tuple[str, str]:
    path = alias.target.removeprefix(WORKSPACE + "/")
    up = [".."] * path.count("/")
    return path, "/".join([*up, alias.directory] if alias.directory else up or ["."])


def _folders(aliases: Sequence[Alias], mounts: Sequence[str]) -> tuple[LinkFolder, ...]:
    links: dict[str, list[tuple[str, str]]] = {}
    for alias in aliases:
        parent, _, name = alias.target.rpartition("/")
        links.setdefault(parent, []).append((name, f"{WORKSPACE}/{alias.directory}"))
    return tuple(
        LinkFolder(parent, tuple(sorted(found)), tuple(sorted(_children(parent, mounts))))
        for parent, found in sorted(links.items())
    )


def _children(parent: str, targets: Iterable[str]) -> set[str]:
    """The first component beneath `parent` of each target that lies there."""
    inside = (
        target.removeprefix(parent + "/") for target in targets if target.startswith(parent + "/")
    )
    return {path.partition("/")[0] for path in inside}
