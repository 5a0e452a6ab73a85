r"""Which file a caller's path means, and how a path is shown.

Relative paths are under the workspace, absolute ones anywhere, `~` is the home; quotes around one,
`file://` and `$HOME` count unless a name has them, and a name that is not there means the only one
that looks the same. Paths are text, undecodable bytes in them lone
surrogates. Shown paths have control characters, undecodable bytes and invisible direction marks as
\xNN of their UTF-8 bytes; a path may be given in the shown form.
Everything here happens inside the sandbox: the kernel confines it, not this file.
"""

from __future__ import annotations

import os
import os.path

from mcp_sandbox.runner.wire.protocol import OpError

MAX_PATH = 4095
TEMPORARY = ".~mcp-"
# In the home: what is kept of output. Earlier versions had it in the workspace.
KEPT = ".mcp-sandbox/output"
# Line and paragraph separators and marks that change the direction of what follows.
_INVISIBLE = frozenset(
    "\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)
# What stands in names for a space, an apostrophe, quotes and a hyphen.
_PLAIN = str.maketrans(
    "\u00a0\u2007\u202f\u2018\u2019\u02bc\u201c\u201d\u2010\u2011", "   '''\"\"--"
)


def workspace() -> str:
    """Return the directory of relative paths."""
    return os.environ.get("MCP_SANDBOX_WORKSPACE", "/workspace")


def home() -> str:
    """Return the directory that `~` means."""
    return os.environ.get("MCP_SANDBOX_HOME", "/home/sandbox")


def show(path: str) -> str:
    """Return the path as safe text on one line."""
    if path.isascii() and path.isprintable():
        return path
    return "".join(map(_show_character, path))


def _show_character(char: str) -> str:
    code = ord(char)
    if code >= 0xA0 and not 0xD800 <= code < 0xE000 and char not in _INVISIBLE:
        return char
    if 0x20 <= code < 0x7F:
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def relativize(path: str) -> str:
    """Return the shown path, relative to the workspace if it is in it, else absolute."""
    base = workspace()
    if path == base:
        return "."
    return show(path[len(base) + 1 :] if path.startswith(base + "/") else path)


def resolve(given: str, *, new: bool = False) -> str:
    """Return the absolute path that a caller means, or raise OpError. Links stay for the kernel.

    One that is to be `new` means no other that looks the same.
    """
    path = _absolute(_checked(given))
    if not os.path.lexists(path):
        path = _absolute(_checked(guess_path(given)))
    if "\\x" in path and not os.path.lexists(path):
        readable = _unshow(path)
        path = readable if os.path.lexists(readable) else path
    if f"/{KEPT}/" in path and not os.path.lexists(path):
        path = path.replace(f"{workspace()}/{KEPT}", f"{home()}/{KEPT}", 1)
    if not new and not os.path.lexists(path):
        path = _alike(path)
    if ".." in path.split("/"):
        # Only the kernel knows where ".." leads after a link.
        head, tail = os.path.split(path.rstrip("/"))
        path = os.path.realpath(path if tail == ".." else head)
        path = path if tail == ".." else os.path.join(path, tail)
    # POSIX leaves a leading "//" to the system; on Linux it is "/".
    return "/" + os.path.normpath(path).lstrip("/")


def _checked(given: str) -> str:
    if not given or "\0" in given:
        raise OpError("invalid", "the path is empty or holds a NUL byte: give a usable path")
    try:
        size = len(os.fsencode(given))
    except UnicodeEncodeError as exc:
        raise OpError("invalid", "the path is not valid text: check its characters") from exc
    if size > MAX_PATH:
        raise OpError("invalid", f"the path is longer than {MAX_PATH} bytes: give a shorter one")
    return given


def guess_path(given: str) -> str:
    """Return the path in quotes, in a `file:` URI, or after `$HOME`."""
    text = given.strip()
    if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"`":
        text = text[1:-1]
    if text.startswith("file:/"):
        # Rarely needed, and it takes some milliseconds to import.
        from urllib.parse import unquote  # noqa: PLC0415

        text = text[5:].removeprefix("//localhost").removeprefix("//")
        text = unquote(text, errors="surrogateescape")
    for name in ("$HOME", "${HOME}"):
        if text == name or text.startswith(name + "/"):
            text = "~" + text[len(name) :]
    return text


def _absolute(given: str) -> str:
    if given == "~" or given.startswith("~/"):
        return home() + given[1:]
    return os.path.join(workspace(), given)


def _alike(path: str) -> str:
    """Return the only path that looks like this one, which is not there; else this one."""
    # Rarely needed, and it takes some milliseconds to import.
    from unicodedata import normalize  # noqa: PLC0415

    folder, name = os.path.split(path)
    if folder != path and not os.path.lexists(folder):
        folder = _alike(folder)
    try:
        names = [each for each in os.listdir(folder) if not (each + name).isascii()]
    except OSError:
        return path
    plain, *others = (normalize("NFC", each.translate(_PLAIN)) for each in (name, *names))
    alike = [each for each, other in zip(names, others) if other == plain]
    return os.path.join(folder, alike[0] if len(alike) == 1 else name)


def _unshow(path: str) -> str:
    first, *rest = os.fsencode(path).split(b"\\x")
    parts = [first]
    for part in rest:
        try:
            byte = bytes.fromhex(part[:2].decode("ascii")) if len(part) > 1 else b""
        except ValueError:
            byte = b""
        plain = byte in (b"", b"\0", b"/") or 0x20 <= byte[0] < 0x7F
        parts.append(b"\\x" + part if plain else byte + part[2:])
    return os.fsdecode(b"".join(parts))


def protect(path: str, doing: str) -> None:
    """Raise OpError if the path is or contains the workspace, the home or the root."""
    head, tail = os.path.split(path)
    holds = os.path.join(os.path.realpath(head), tail) + "/"
    for root in (workspace(), home()):
        real = os.path.realpath(root)
        there = os.path.lexists(path) and os.path.lexists(real)
        same = there and os.path.samestat(os.lstat(path), os.lstat(real))
        if path == "/" or same or (real + "/").startswith(holds):
            raise OpError(
                "invalid",
                f"{show(path)} cannot be {doing}: name something inside it instead",
            )
