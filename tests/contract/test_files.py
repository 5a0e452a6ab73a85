"""Every file tool and every row of its errors, the same on every backend; one sandbox a table."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest

from mcp_sandbox import errors
from mcp_sandbox.sessions.session import Session

_MADE = """
set -e
mkdir -p dir/inner empty full/sub shut
printf 'one\\ntwo\\nthree\\n' > file; printf 'x\\nx\\n' > twice; printf 'a\\r\\nb\\r\\n' > dos
echo content > full/sub/leaf; echo hidden > .hidden; printf '\\0\\1' > binary
ln -s file link; ln -s loop loop; ln -s /nowhere broken; mkfifo fifo
chmod 0444 file; cp file locked; chmod 0644 file; chmod 0 shut
truncate -s 33M large; yes | head -c 200004 > many
"""
_STATE = "find . -printf '%p %y %m %s %T@ %l\\n' | sort; find . -type f -exec sha256sum {} +"
Call = Callable[[Session], Awaitable[Any]]
_LONG, _NAME = "d/" * 2100, "n" * 300

_REFUSED: dict[str, tuple[Call, type[errors.CallerError], str]] = {
    "read a missing file": (lambda s: s.read_file("fil"), errors.NotFound, "such as|file"),
    "read a directory": (lambda s: s.read_file("dir"), errors.WrongKind, "list_files"),
    "read a pipe": (lambda s: s.read_file("fifo"), errors.WrongKind, "use exec"),
    "read past the end": (
        lambda s: s.read_file("file", offset=9),
        errors.InvalidArgument,
        "has 3 lines",
    ),
    "read beneath a file": (
        lambda s: s.read_file("file/x"),
        errors.WrongKind,
        "directory is needed",
    ),
    "read a loop of links": (lambda s: s.read_file("loop"), errors.InvalidArgument, "loop"),
    "read what is shut": (lambda s: s.read_file("shut/x"), errors.NotPermitted, "ls -la"),
    "read no path": (lambda s: s.read_file(""), errors.InvalidArgument, "empty"),
    "read a NUL": (lambda s: s.read_file("a\0b"), errors.InvalidArgument, "NUL"),
    "read no text": (lambda s: s.read_file("\ud800"), errors.InvalidArgument, "not valid text"),
    "read too long a path": (lambda s: s.read_file(_LONG), errors.InvalidArgument, "longer than"),
    "read too long a name": (lambda s: s.read_file(_NAME), errors.InvalidArgument, "255 bytes"),
    "write a directory": (
        lambda s: s.write_file("dir", b""),
        errors.WrongKind,
        "only regular files",
    ),
    "write a pipe": (lambda s: s.write_file("fifo", b""), errors.WrongKind, "only regular files"),
    "write what is locked": (
        lambda s: s.write_file("locked", b""),
        errors.NotPermitted,
        "chmod first",
    ),
    "write beneath a file": (
        lambda s: s.write_file("file/x", b""),
        errors.WrongKind,
        "directory is needed",
    ),
    "write to the system": (
        lambda s: s.write_file("/etc/hostname", b""),
        errors.NotPermitted,
        "copy it into",
    ),
    "edit a missing file": (lambda s: s.edit_file("no", "a", "b"), errors.NotFound, "no such file"),
    "edit a directory": (lambda s: s.edit_file("dir", "a", "b"), errors.WrongKind, "not a regular"),
    "edit what is not there": (lambda s: s.edit_file("file", "too", "2"), errors.NoMatch, "two"),
    "edit one of two": (
        lambda s: s.edit_file("twice", "x", "y"),
        errors.Ambiguous,
        "lines 1, 2.*replace_all",
    ),
    "edit nothing": (
        lambda s: s.edit_file("file", "", "b"),
        errors.InvalidArgument,
        "old is empty",
    ),
    "edit to the same": (
        lambda s: s.edit_file("file", "a", "a"),
        errors.InvalidArgument,
        "the same",
    ),
    "edit with no text": (lambda s: s.edit_file("file", "\ud800", "b"), errors.InvalidArgument, ""),
    "edit what is locked": (
        lambda s: s.edit_file("locked", "one", "1"),
        errors.NotPermitted,
        "chmod first",
    ),
    "edit too large a file": (
        lambda s: s.edit_file("large", "a", "b"),
        errors.TooLarge,
        "such as sed",
    ),
    "edit too many places": (
        lambda s: s.edit_file("many", "y", "n", replace_all=True),
        errors.TooLarge,
        "such as sed",
    ),
    "list a missing directory": (lambda s: s.list_files("no"), errors.NotFound, "no such file"),
    "list a file": (lambda s: s.list_files("file"), errors.WrongKind, "use read_file"),
    "list what is shut": (lambda s: s.list_files("shut"), errors.NotPermitted, "ls -la"),
    "glob nothing": (lambda s: s.glob(""), errors.InvalidArgument, "1 to 1000 characters"),
    "glob upwards": (
        lambda s: s.glob("../*"),
        errors.InvalidArgument,
        "give the directory as path",
    ),
    "glob an open set": (lambda s: s.glob("[a"), errors.InvalidArgument, "glob"),
    "glob in a missing directory": (lambda s: s.glob("*", "no"), errors.NotFound, "no such file"),
    "glob in a file": (lambda s: s.glob("*", "file"), errors.WrongKind, "use read_file"),
    "grep nothing": (lambda s: s.grep(""), errors.InvalidArgument, "empty"),
    "grep a NUL": (lambda s: s.grep("a\0b"), errors.InvalidArgument, "NUL byte"),
    "grep no expression": (lambda s: s.grep("("), errors.InvalidArgument, "no regular expression"),
    "grep a wrong glob": (
        lambda s: s.grep("x", glob="../*"),
        errors.InvalidArgument,
        "give the directory as path",
    ),
    "grep in a missing place": (lambda s: s.grep("x", "no"), errors.NotFound, "no such file"),
    "delete what is missing": (lambda s: s.delete_file("no"), errors.NotFound, "no such file"),
    "delete what is full": (lambda s: s.delete_file("full"), errors.WrongKind, "recursive=true"),
    "delete the workspace": (
        lambda s: s.delete_file(".", recursive=True),
        errors.InvalidArgument,
        "inside it instead",
    ),
    "delete the home": (
        lambda s: s.delete_file("~", recursive=True),
        errors.InvalidArgument,
        "inside it instead",
    ),
    "delete the root": (
        lambda s: s.delete_file("/", recursive=True),
        errors.InvalidArgument,
        "inside it instead",
    ),
    "delete of the system": (lambda s: s.delete_file("/proc/version"), errors.NotPermitted, ""),
    "move what is missing": (lambda s: s.move_file("no", "new"), errors.NotFound, "no such file"),
    "move onto a file": (
        lambda s: s.move_file("twice", "file"),
        errors.AlreadyExists,
        "overwrite=true",
    ),
    "move onto a directory": (
        lambda s: s.move_file("file", "dir"),
        errors.AlreadyExists,
        "dir/name",
    ),
    "move a directory onto a full one": (
        lambda s: s.move_file("dir", "full", overwrite=True),
        errors.AlreadyExists,
        "delete it first",
    ),
    "move to the same": (lambda s: s.move_file("file", "file"), errors.InvalidArgument, "the same"),
    "move into itself": (
        lambda s: s.move_file("dir", "dir/inner/dir"),
        errors.InvalidArgument,
        "outside it",
    ),
    "move the workspace": (
        lambda s: s.move_file(".", "/tmp/w"),
        errors.InvalidArgument,
        "cannot be moved",
    ),
    "move onto the workspace": (
        lambda s: s.move_file("dir", "/workspace", overwrite=True),
        errors.InvalidArgument,
        "cannot be replaced",
    ),
    "move beneath a file": (lambda s: s.move_file("twice", "file/x"), errors.AlreadyExists, ""),
}


async def test_every_refusal_of_a_file_tool_is_the_exact_error_with_a_way_out(
    session: Session,
) -> None:
    made = await session.exec(_MADE)
    assert made.success, made.stderr
    before = await session.exec(_STATE)
    with anyio.fail_after(60):
        for row, (call, error, words) in _REFUSED.items():
            with pytest.raises(errors.CallerError, match=f"(?s){words}") as said:
                await call(session)
            assert (row, said.type) == (row, error), said.value
    after = await session.exec(_STATE)
    assert after.stdout == before.stdout


async def test_an_edit_changes_what_was_named_and_nothing_else(session: Session) -> None:
    await session.exec(_MADE + "chmod 0750 file")
    edited = await session.edit_file("file", "two", "2")
    assert (edited.path, edited.replacements) == ("file", 1)
    assert "-two\n+2\n" in edited.diff
    tried = await session.edit_file("file", "one", "1", dry_run=True)
    assert "-one\n+1\n" in tried.diff
    assert (await session.read_file("file")).data == b"one\n2\nthree\n"
    assert (await session.edit_file("twice", "x", "y", replace_all=True)).replacements == 2
    # Line ends stay as the file has them, a link stays a link, and so does the mode.
    await session.edit_file("dos", "a\nb", "a\nc")
    await session.edit_file("link", "three", "3")
    shown = await session.exec(
        "od -An -c dos | tr -d ' '; readlink link; find file -printf '%m\\n'; cat twice"
    )
    assert shown.stdout == "a\\r\\nc\\r\\n\nfile\n750\ny\ny\n"


async def test_calls_that_change_one_file_at_once_wait_for_each_other(session: Session) -> None:
    words = [f"<{number}>" for number in range(16)]
    await session.write_file("dir/shared", " ".join(words).encode() + b"\n")
    await session.exec("ln -s dir/shared link; ln -s dir other; ln -s dir/new later")
    names = ("dir/shared", "link", "other/shared", "/workspace/dir/../dir/shared")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for number in range(60):
                if number < 16:
                    old, new = words[number], f"[{number}]"
                    tasks.start_soon(session.edit_file, names[number % 4], old, new)
                line = f"line {number}\n".encode()
                tasks.start_soon(partial(session.write_file, names[number % 3], line, append=True))
                name = ("dir/new", "later", "other/new")[number % 3]
                tasks.start_soon(partial(session.write_file, name, line, append=True))
    first, *lines = (await session.read_file("dir/shared")).data.decode().splitlines()
    assert first.split() == [f"[{number}]" for number in range(16)]
    assert sorted(lines) == sorted(f"line {number}" for number in range(60))
    assert sorted((await session.read_file("dir/new")).data.decode().splitlines()) == sorted(lines)


async def test_a_file_that_is_moved_while_it_is_edited_is_whole(session: Session) -> None:
    refused = []

    async def edit(name: str) -> None:
        try:
            await session.edit_file(name, "old", "new")
        except errors.NotFound:
            refused.append(name)

    with anyio.fail_after(60):
        for name in "abcdefgh":
            await session.write_file(name, b"old")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(edit, name)
                tasks.start_soon(session.move_file, name, f"moved/{name}")
            shown = await session.exec(f"ls {name} 2>&1; cat moved/{name}")
            # The edit is in the moved file, or has found none.
            assert shown.stdout.endswith("old" if name in refused else "new")
            assert "No such file" in shown.stdout


async def test_a_move_gives_a_name_and_takes_the_other(session: Session) -> None:
    await session.exec(_MADE)
    moved = await session.move_file("file", "new/place/file")
    assert (moved.source, moved.destination, moved.replaced) == ("file", "new/place/file", False)
    assert (await session.move_file("twice", "dos", overwrite=True)).replaced
    # The link itself; a whole directory; to another file system and back.
    await session.move_file("link", "/tmp/contract-link")
    await session.move_file("full", "/tmp/contract-full")
    await session.move_file("/tmp/contract-full", "back")
    shown = await session.exec(
        "cat new/place/file dos back/sub/leaf; readlink /tmp/contract-link; "
        "rm /tmp/contract-link; find file twice link full /tmp/contract-* -maxdepth 0 2>/dev/null"
    )
    assert shown.stdout == "one\ntwo\nthree\nx\nx\ncontent\nfile\n"


async def test_lists_globs_and_searches_find_what_is_there(session: Session) -> None:
    await session.exec(
        _MADE + "chmod 0700 shut; rm large many; touch -d '2 hours ago' full/sub/leaf"
    )
    assert (await session.list_files("none/of this", missing_ok=True)).entries == ()
    listing = await session.list_files(depth=3)
    kinds = {entry.path: entry.kind for entry in listing.entries}
    assert (kinds["full/sub"], kinds["full/sub/leaf"], kinds["fifo"], kinds["link"]) == (
        *("directory", "file", "fifo", "link"),
    )
    assert list(kinds) == sorted(kinds)
    assert not listing.truncated
    assert [(entry.path, entry.target) for entry in listing.entries if entry.kind == "link"] == [
        *(("broken", "/nowhere"), ("link", "file"), ("loop", "loop")),
    ]
    assert ".hidden" not in {
        entry.path for entry in (await session.list_files(hidden=False)).entries
    }
    cut = await session.list_files(depth=3, limit=2)
    assert (len(cut.entries), cut.total, cut.truncated) == (2, listing.total, True)
    assert (await session.glob("**/l{eaf,ocked}")).paths == ("locked", "full/sub/leaf")
    assert (await session.glob("*", "full/sub")).paths == ("full/sub/leaf",)
    assert (await session.glob("*.none")).paths == ()
    found = await session.grep("^T", "file", ignore_case=True, context=1)
    assert found.lines == ("file-1-one", "file:2:two", "file:3:three")
    assert (found.matches, found.files, found.truncated) == (2, 1, False)
    assert (await session.grep("content|one", glob="l*")).lines == (
        *("full/sub/leaf:1:content", "locked:1:one"),
    )
    assert (await session.grep("nowhere")).lines == ()
    # One dialect, whichever ripgrep there is, or none.
    assert (await session.grep(r"one\ntwo$", "file")).lines == ("file:1:one", "file:2:two")
    assert (await session.grep(r"\<t[[:alpha:]]o\>", "file")).lines == ("file:2:two",)
    assert (await session.grep(r"one\|two", "file")).hint.endswith(": one|two matches")
    assert (await session.glob("full")).hint.startswith("full is a directory")
    assert (await session.grep("o", "file", limit=1)).truncated


async def test_a_file_that_is_not_utf_8_is_named_and_never_mixed(session: Session) -> None:
    latin = "a = 1  # café\r\nb = 2  # cafè\r\n".encode("latin-1")
    await session.write_file("f", latin)
    read = await session.read_file("f", offset=2)
    assert (read.encoding, read.data) == ("WINDOWS-1252", b"b = 2  # caf\\xe8\n")
    assert (await session.grep("a = 1", "f")).lines == (r"f:1:a = 1  # caf\xe9",)
    for old, new, words in (
        ("a = 1", "é", "iconv -f WINDOWS-1252 -t UTF-8"),
        ("# café", "", "iconv -f WINDOWS-1252 -t UTF-8"),
        (r"# caf\xe9", "", r"\\xNN that stand for bytes which are not UTF-8"),
    ):
        with pytest.raises(errors.CallerError, match=words):
            await session.edit_file("f", old, new)
    with pytest.raises(errors.WrongKind, match="iconv -f WINDOWS-1252 -t UTF-8"):
        await session.write_file("f", "é", append=True)
    edited = await session.edit_file("f", "a = 1", "c = 1")
    assert "-a = 1  # caf\\xe9\n+c = 1  # caf\\xe9\n b = 2  # caf\\xe8\n" in edited.diff
    await session.write_file("f", "plain\n", append=True)
    shown = await session.exec("iconv -f WINDOWS-1252 -t UTF-8 f")
    assert shown.stdout == "c = 1  # café\r\nb = 2  # cafè\r\nplain\n"
    await session.write_file("f", "é")
    assert (await session.read_file("f")).encoding == ""
    await session.write_file("f", "Grüße".encode("utf-16"))
    with pytest.raises(errors.WrongKind, match="iconv -f UTF-16 -t UTF-8"):
        await session.write_file("f", "plain\n", append=True)


async def test_linked_folders_are_entered_where_a_glob_names_them(session: Session) -> None:
    await session.exec(
        "mkdir -p store/pkg packages/{a,b}/node_modules; echo needle >store/pkg/i.js; "
        "ln -s ../../../store/pkg packages/a/node_modules/; ln -s .. packages/b/node_modules/pkg"
    )
    found = ("packages/a/node_modules/pkg/i.js",)
    assert (await session.glob("packages/*/node_modules/pkg/*.js")).paths == found
    assert (await session.glob("packages/*/node_modules/p*/*.js")).paths == ()
    back = await session.glob("**/pkg/**/*.js")
    assert (back.paths, back.truncated) == (("store/pkg/i.js",), False)
    lines = (await session.grep("needle", glob="packages/*/node_modules/pkg/*.js")).lines
    assert lines == (f"{found[0]}:1:needle",)


async def test_what_programs_fill_by_themselves_is_left_out_of_searches(session: Session) -> None:
    await session.exec(
        "mkdir -p v/lib src/node_modules/p out; touch v/pyvenv.cfg; echo /out/ >.gitignore; "
        "tee v/lib/a.py src/node_modules/p/a.py out/a.py src/a.py <<<needle; seq 1 9000"
    )
    left = ("out/", "v/", "src/node_modules/")
    found = await session.grep("needle")
    assert (found.lines, found.left_out) == (("src/a.py:1:needle",), left)
    globbed = await session.glob("**/*.py")
    assert (globbed.paths, globbed.left_out) == (("src/a.py",), left)
    listing = await session.list_files(depth=3)
    assert ({entry.path for entry in listing.entries}, listing.left_out) == (
        {".gitignore", "out", "src", "src/a.py", "src/node_modules", "v"},
        left,
    )
    assert (await session.grep("needle", "v")).lines == ("v/lib/a.py:1:needle",)
    assert (await session.glob("out/*")).paths == ("out/a.py",)
    # What is kept of the long output is in the home.
    home = await session.grep("^8999$", "~", glob="*.txt")
    assert (home.lines, home.left_out) == ((), ("/home/sandbox/.mcp-sandbox/",))
    assert (await session.grep("^8999$", "~/.mcp-sandbox/output")).matches == 1


async def test_a_deletion_takes_what_was_named_and_no_more(session: Session) -> None:
    await session.exec(_MADE)
    tree = await session.delete_file("full", recursive=True)
    assert (tree.path, tree.kind, tree.entries) == ("full", "directory", 3)
    assert (await session.delete_file("empty")).kind == "directory"
    assert (await session.delete_file("link")).kind == "link"
    assert (await session.delete_file("fifo")).kind == "fifo"
    assert (await session.delete_file("broken")).entries == 1
    shown = await session.exec("find full empty link fifo broken file -maxdepth 0 2>/dev/null")
    assert shown.stdout == "file\n"
