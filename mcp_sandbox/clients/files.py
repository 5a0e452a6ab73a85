"""The file and the entry of each client, and how such a file is changed.

A change is shown as a diff, written as a whole, and taken back by a copy of what was there before.
The file may hold keys of other servers, so only its owner can read the copy.
"""

import contextlib
import difflib
import hashlib
import json
import re
import stat
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mcp_sandbox.config.environment import home, state_folder, variable
from mcp_sandbox.daemon.acceptor import chat_of_project
from mcp_sandbox.durable import make_folder, write_file, write_note
from mcp_sandbox.errors import ConfigError

NAME = "sandbox"
"""How the server is called in every client; its tools are then `mcp__sandbox__exec` and so on."""

TOKEN_VARIABLE = "SANDBOX_TOKEN"  # noqa: S105 - its name
"""Where clients find the token of `mcp-sandbox token add`: files of a project must not hold it."""

CHAT_HEADER = "Mcp-Sandbox-Chat"

Entry = Mapping[str, object]

_INSPECT = "npx @modelcontextprotocol/inspector@2.12.0 --cli --server sandbox --method tools/list"
_INSPECTOR = "inspector"
_OF_PROJECT = {
    "claude": (".mcp.json", "mcpServers"),
    "cursor": (".cursor/mcp.json", "mcpServers"),
    "vscode": (".vscode/mcp.json", "servers"),
}
_NEXT = {
    "claude": ("start", "`claude` in this folder and approve the server `sandbox`."),
    "cursor": ("open", "this folder in Cursor and switch `sandbox` on under Settings > Tools."),
    "vscode": ("open", "this folder in VS Code, run `MCP: List Servers` and start `sandbox`."),
}
# Keys of an entry that are set here; others are the user's, and stay.
_OURS = frozenset({"type", "command", "args", "url", "headers"})
# Beside strings, which stay: comments, and the byte-order mark with which some editors begin.
_COMMENT = re.compile(r'("(?:[^"\\]|\\.)*")|//[^\n]*|/\*.*?\*/|^\ufeff', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[}\]])', re.DOTALL)
_TOKEN = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:\s*)?|[{}\[\]]')


@dataclass(frozen=True)
class EntryPlace:
    """The place of our entry: object `section` of the JSON file `path`, under NAME.

    `private`: a new file is readable by its owner only. `next_step` is one line for the user.
    """

    path: Path
    section: str
    entry: Entry
    next_step: str
    private: bool = False


def of_project(client: str, address: str | None) -> EntryPlace:
    """Return the file of Claude Code, Cursor or VS Code in the project of this folder.

    Claude tells the server its conversation by the environment, so its entry names no chat. Over
    HTTP, at `address`, it does not, and editors never do: there the project is a chat.

    Raises ConfigError: the address cannot be used.
    """
    (file, section), (verb, rest) = _OF_PROJECT[client], _NEXT[client]
    project, claude = Path.cwd(), client == "claude"
    if address:
        token = f"${{{TOKEN_VARIABLE}}}" if claude else f"${{env:{TOKEN_VARIABLE}}}"
        entry = _http_entry(address, chat=chat_of_project(project), token=token)
        first = f"Set {TOKEN_VARIABLE}, then {verb}"
    else:
        entry = _stdio_entry(*(() if claude else ("--project", "${workspaceFolder}")))
        first = verb.capitalize()
    return EntryPlace(project / file, section, entry, f"{first} {rest}")


def claude_of_user() -> EntryPlace:
    """Return Claude Code's own settings file, for all projects of this user."""
    return EntryPlace(
        path=Path(variable("CLAUDE_CONFIG_DIR") or home()) / ".claude.json",
        section="mcpServers",
        entry=_stdio_entry(),
        next_step="Start `claude` in any folder; `/mcp` shows the server `sandbox`.",
        private=True,
    )


def inspector(address: str | None) -> EntryPlace:
    """Return the file of servers that MCP Inspector's page, terminal and command line share.

    Its calls all belong to one chat. Raises ConfigError as `of_project`.
    """
    # It expands no variables, so the token is given on its command line; headers there replace all
    # of the file's, so the chat is named again.
    by_http = address and _http_entry(address, chat=_INSPECTOR, token=None)
    headers = (f"Authorization: Bearer ${TOKEN_VARIABLE}", f"{CHAT_HEADER}: {_INSPECTOR}")
    given = "".join(f' --header "{each}"' for each in headers) if address else ""
    return EntryPlace(
        path=home() / ".mcp-inspector" / "mcp.json",
        section="mcpServers",
        entry={**(by_http or _stdio_entry("--chat", _INSPECTOR)), "protocolEra": "auto"},
        next_step=f"Run `{_INSPECT}{given}`.",
        private=True,
    )


def _stdio_entry(*options: str) -> Entry:
    """Return the entry that starts the relay, by absolute paths.

    Desktop programs do not have the PATH of a shell, so the program is named in full.
    """
    program, arguments = Path(sys.executable).with_name("mcp-sandbox"), ["connect", *options]
    if not program.is_file():
        program, arguments = Path(sys.executable), ["-m", "mcp_sandbox", *arguments]
    return {"type": "stdio", "command": str(program), "args": arguments}


def _http_entry(address: str, *, chat: str, token: str | None) -> Entry:
    """Return the entry of a server at an address; `token` is what the client expands to it."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{address!r} is no address: give one like http://127.0.0.1:8080/mcp")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("give the address alone: the token belongs in " + TOKEN_VARIABLE)
    url = urlunsplit(parts._replace(path=parts.path if parts.path not in ("", "/") else "/mcp"))
    sent = {"Authorization": f"Bearer {token}"} if token else {}
    return {"type": "http", "url": url, "headers": {**sent, CHAT_HEADER: chat}}


@dataclass(frozen=True)
class _Backup:
    """A file's text before the first change (None: there was no file) and a hash of the last.

    `made`: folders that were made for it, the innermost first.
    """

    path: str
    before: str | None
    after: str
    made: tuple[str, ...] = ()


@dataclass(frozen=True)
class EntryChange:
    """A file's text before and after; None: no file. `undo`: the backup is restored."""

    path: Path
    before: str | None
    after: str | None
    backup: _Backup
    private: bool
    undo: bool

    @property
    def is_none(self) -> bool:
        return self.before == self.after

    def diff(self) -> Iterator[str]:
        old, new = ((text or "").splitlines() for text in (self.before, self.after))
        source, result = (
            str(self.path) if text is not None else "/dev/null"
            for text in (self.before, self.after)
        )
        return difflib.unified_diff(old, new, source, result, lineterm="")

    def apply(self) -> None:
        """Write it; raises ConfigError if it cannot be, and then the file is as before."""
        if self.is_none and not self.undo:
            return
        if _read_text(self.path) != self.before:
            raise ConfigError(f"{self.path} was changed by another program just now: try again")
        place = _place(self.path)
        try:
            if not self.undo:
                made = _make_folders(self.path.parent)
                make_folder(place.parent)
                # Before the file is written: a backup too many is harmless, one too few is not.
                backup = replace(self.backup, made=self.backup.made or made)
                write_note(place, asdict(backup))
            if self.after is None:
                self.path.unlink(missing_ok=True)
                for folder in self.backup.made:
                    # Another program may have put something there meanwhile.
                    with contextlib.suppress(OSError):
                        Path(folder).rmdir()
            else:
                old = self.path.stat() if self.before is not None else None
                mode = 0o600 if self.private else 0o666
                write_file(self.path, self.after.encode(), mode=mode, like=old)
            if self.undo:
                place.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be written: {exc.strerror}") from exc


def plan_change(target: EntryPlace, *, undo: bool) -> EntryChange:
    """Return the change that adds, updates or removes the entry.

    Removing restores the file exactly, if no other program wrote since.

    Raises ConfigError: the file cannot be changed without harm, or there is nothing to undo.
    """
    path = _follow_links(target.path)
    before, old = _read_text(path), _backup(path)
    if undo and old is None:
        raise ConfigError(f"there is nothing to undo: {path} was not written by `init`")
    with _unharmed(path):
        after = None if undo else _with_entry(before, target, ours=old is not None)
        original = _without_entry(before, old, target.section) if old else before
    if undo and old:
        return EntryChange(path, before, original, old, target.private, undo)
    backup = _Backup(str(path), original, _digest(after or ""), old.made if old else ())
    return EntryChange(path, before, after, backup, target.private, undo)


@contextlib.contextmanager
def _unharmed(path: Path) -> Generator[None]:
    """Refuse a file that is not understood."""
    try:
        yield
    except (ValueError, RecursionError) as exc:
        why = str(exc)
        if isinstance(exc, json.JSONDecodeError):
            why = f"line {exc.lineno} is no JSON ({exc.msg.lower()})"
        elif isinstance(exc, RecursionError):
            why = "it is nested too deeply"
        raise ConfigError(
            f"{path} cannot be changed without harm: {why}. It is as it was; correct it and try "
            "again, or add the lines that --print shows yourself"
        ) from exc


def _with_entry(text: str | None, target: EntryPlace, *, ours: bool) -> str:
    """Return the text with the entry; an entry of another author is replaced as a whole.

    It could set the environment in which our program starts.
    """
    document = _parsed(text)
    servers = _servers(document, target.section)
    old = servers.get(NAME)
    entry: Entry = target.entry
    if ours and isinstance(old, dict):
        entry = {**entry, **{name: old[name] for name in old if name not in _OURS}}
    if text is not None and old == entry:
        return text
    document[target.section] = {**servers, NAME: entry}
    return _edited(text or "", document, target.section)


def _without_entry(now: str | None, backup: _Backup, section: str) -> str | None:
    if now is None or _digest(now) == backup.after:
        return None if now is None else backup.before
    document = _parsed(now)
    servers = _servers(document, section)
    if NAME not in servers:
        return now
    before = _parsed(backup.before)
    first = _servers(before, section)
    document[section] = {name: servers[name] for name in servers if name != NAME}
    if NAME in first:
        document[section] = {**servers, NAME: first[NAME]}
    elif backup.before is None and not document[section]:
        del document[section]
    if backup.before is None and not document:
        return None
    if backup.before is not None and document == before:
        return backup.before
    return _edited(now, document, section)


def _parsed(text: str | None) -> dict[str, Any]:
    body = _plain(text or "")
    found = json.loads(body if body.strip() else "{}", object_pairs_hook=_unique)
    if not isinstance(found, dict):
        raise ValueError("it holds no JSON object")  # noqa: TRY004 - told as all that is in files
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("it has two values of the same name")
    return found


def _servers(document: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    found = document.get(section, {})
    if not isinstance(found, dict):
        raise ValueError("it holds something else where its servers should be listed")  # noqa: TRY004
    return found


def _plain(text: str) -> str:
    """Return JSON with blanks for what editors also take: comments, and commas before an end."""
    for each in (_COMMENT, _LAST_COMMA):
        text = each.sub(lambda found: found[1] or re.sub(r"\S", " ", found[0]), text)
    return text


def _edited(text: str, wanted: Mapping[str, Any], section: str) -> str:
    """Return a file that holds what is wanted; all else stays as it is written."""
    if not _plain(text).strip():
        text = f"{text}\n{{}}\n".lstrip()
    for each in _edits(text, section, wanted.get(section, {}).get(NAME)):
        with contextlib.suppress(ValueError):
            if _parsed(each) == wanted:
                return each
    raise ValueError(f"there is no telling where {NAME} belongs in it")


def _edits(text: str, section: str, entry: Entry | None) -> Iterator[str]:
    """Yield the text with the entry wherever it could belong, or, if it is None, without one."""
    plain, indented = _plain(text), re.search(r"\n([ \t]+)\S", text)
    indent = indented[1] if indented else "  " if "\n" in text else ""
    end = "\r\n" if "\r\n" in text else "\n"

    def show(value: object, depth: int) -> str:
        lines = json.dumps(value, indent=indent or None, ensure_ascii=text.isascii())
        return lines.replace("\n", end + indent * depth)

    keys = [*_find_keys(plain, (section, NAME))]
    for found in keys:
        with contextlib.suppress(ValueError):
            _, after = json.JSONDecoder().raw_decode(plain, found.end())
            head, rest = text[: found.start()], text[after:]
            if entry:
                yield text[: found.end()] + show(entry, 2) + rest
            yield head + rest.partition(",")[2].lstrip()
            yield head.rstrip().removesuffix(",") + rest
    sections = (at.end() for at in keys if at[1] == section and plain.startswith("{", at.end()))
    into = [(at + 1, NAME, entry, 2) for at in sections]
    for at, name, value, depth in (*into, (plain.index("{") + 1, section, {NAME: entry}, 1)):
        line, rest = (end + indent * depth if indent else ""), text[at:]
        new = f'{text[:at]}{line}"{name}": {show(value, depth)}'
        yield new + line.removesuffix(indent) + rest.lstrip()
        yield f"{new},{'' if line else ' '}{rest}"


def _find_keys(plain: str, names: tuple[str, str]) -> Iterator[re.Match[str]]:
    """Yield where these are keys of the document, or of an object in it: deeper ones are many."""
    depth = 0
    for found in _TOKEN.finditer(plain):
        depth += (found[0] in "{[") - (found[0] in "}]")
        if found[2] and found[1] in names and depth <= len(names):
            yield found


def _follow_links(path: Path) -> Path:
    try:
        if path.is_symlink() and not path.exists():
            raise ConfigError(f"{path} is a link to nothing: make its file or remove the link")
        real = path.resolve()
        mode = real.stat().st_mode if real.exists() else None
    except (OSError, RuntimeError) as exc:
        raise ConfigError(f"{path} cannot be used: {exc}; correct the path") from exc
    if mode is not None and not stat.S_ISREG(mode):
        raise ConfigError(f"{real} is not a file: move it away, then try again")
    if mode is not None and not mode & 0o222:
        raise ConfigError(f"{real} is read-only: `chmod u+w` it, or add the lines of --print")
    return real


def _read_text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path} is not UTF-8 text: convert it first") from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc


def _make_folders(folder: Path) -> tuple[str, ...]:
    """Create the missing folders; return them, the innermost first. Raises OSError."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    for place in reversed(missing):
        place.mkdir()
    return tuple(map(str, missing))


def _backup(path: Path) -> _Backup | None:
    place = _place(path)
    text = _read_text(place)
    if text is None:
        return None
    try:
        return _Backup(**json.loads(text))
    except (ValueError, TypeError) as exc:
        raise ConfigError(
            f"{place} is damaged, which says what {path} was before: look into both, then remove it"
        ) from exc


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _place(path: Path) -> Path:
    return state_folder() / "init" / f"{_digest(str(path))[:32]}.json"
