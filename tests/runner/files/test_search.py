import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from mcp_sandbox.runner.files import search
from mcp_sandbox.runner.files.search import compile_glob, normalize
from tests.runner.files.bench import call, refused, rows

RIPGREP = shutil.which("rg", path="/usr/local/bin:/usr/bin:/bin")
ENGINES = ["ripgrep", "python"]


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each engine in turn; Python is used where ripgrep is not found."""
    if request.param == "python":
        monkeypatch.setattr(search, "FOLDERS", ())
    elif not RIPGREP:
        pytest.skip("ripgrep is not installed")
    return str(request.param)


def grep(**args: Any) -> list[str]:
    return call("grep", **args)[1].decode().split("\n")[:-1]


def make(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"this is {path}\n")


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("*.py", ["a.py", "x/y/a.py", ".py"], ["a.pyc", "a.py/b"]),
        ("src/*.py", ["src/a.py"], ["a.py", "src/x/a.py", "x/src/a.py"]),
        ("/a.py", ["a.py"], ["x/a.py"]),
        ("./a.py", ["a.py", "x/a.py"], ["b.py"]),
        ("**/a.py", ["a.py", "x/y/a.py"], ["ba.py"]),
        ("src/**", ["src/a", "src/x/y"], ["src", "a"]),
        ("src/", ["src/a", "src/x/y"], ["src", "a"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["ab", "a/bb"]),
        ("a/**/**/b", ["a/b", "a/x/y/b"], ["ab"]),
        ("*.{js,ts}", ["a.js", "x/a.ts", "a.{js,ts}"], ["a.jsx", "a.{js"]),
        ("{src,test{s,ing}}/*", ["src/a", "tests/a", "testing/a"], ["test/a"]),
        ("?.txt", ["a.txt", "é.txt"], ["ab.txt", "/.txt"]),
        ("[a-c].txt", ["b.txt"], ["d.txt", "-.txt"]),
        ("[!a-c].txt", ["d.txt"], ["b.txt"]),
        ("[]].txt", ["].txt", "[]].txt"], ["a.txt"]),
        ("app/[id]/*.tsx", ["app/[id]/a.tsx", "app/i/a.tsx"], ["app/id/a.tsx"]),
        ("**/[[...slug]].ts", ["x/[[...slug]].ts"], ["x/slug.ts"]),
        (r"\[a].txt", ["[a].txt"], ["a.txt"]),
        (r"\*.txt", ["*.txt"], ["a.txt"]),
        ("a**b", ["ab", "axb"], ["a/b"]),
        ("!*.py", ["a.txt"], ["a.py"]),
        ("a b+c.(x)", ["a b+c.(x)"], ["a bc.x"]),
    ],
)
def test_globs_match_as_ignore_files_do(
    pattern: str, matching: list[str], other: list[str]
) -> None:
    matches = compile_glob(normalize(pattern, "/base"))
    assert [path for path in matching if not matches(path)] == []
    assert [path for path in other if matches(path)] == []


@pytest.mark.parametrize(
    "pattern", ["", "/", "[a", "{a", "a}", "../x", "a\0", "a" * 2000, "[z-a]", "{" * 20 + "}" * 20]
)
def test_bad_globs_are_refused_with_a_reason(workspace: Path, pattern: str) -> None:
    assert refused("glob", pattern=pattern).code == "invalid"


@pytest.mark.slow
def test_a_costly_glob_ends_in_time(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SECONDS", 2.0)
    make(workspace, "a" * 200)
    started = time.monotonic()
    call("glob", pattern="*a" * 12 + "b")
    call("glob", pattern="{a,b}" * 150 + "c")
    make(workspace, f"{'a' * 120}/file")
    (workspace / ".gitignore").write_text("*a" * 60 + "b")
    assert call("list", depth=2)[0]["truncated"] is True
    assert time.monotonic() - started < 10


def test_files_come_newest_first(workspace: Path) -> None:
    make(workspace, "old.py", "sub/new.py", "sub/.hidden.py", ".git/x.py", "text")
    (workspace / "dir.py").mkdir()
    for age, name in enumerate(["sub/new.py", "sub/.hidden.py", "old.py"]):
        os.utime(workspace / name, (1000 - age, 1000 - age))
    assert rows("glob", pattern="*.py") == ["sub/new.py", "sub/.hidden.py", "old.py"]
    assert rows("glob", pattern=f"{workspace}/sub/*.py", path="sub/..")[0] == "sub/new.py"
    assert rows("glob", pattern=".git/*.py") == [".git/x.py"]
    assert rows("glob", pattern="*.py", path="sub") == ["sub/new.py", "sub/.hidden.py"]
    result, body = call("glob", pattern="*.py", limit=1)
    assert result == {"total": 3, "truncated": True, "hint": "", "left_out": [".git/"]}
    assert body == b'["sub/new.py"]'


def test_links_are_found_but_not_followed(workspace: Path) -> None:
    make(workspace.parent / "home", "secret.txt")
    (workspace / "out").symlink_to(workspace.parent / "home")
    (workspace / "link.txt").symlink_to(workspace.parent / "home/secret.txt")
    assert rows("glob", pattern="*.txt") == ["link.txt"]
    assert grep(pattern="secret") == []


@pytest.mark.parametrize(
    "name", ["app/[id]/page.tsx", "a[1].txt", "{x}", "[...slug].ts", "[a-c]/{b,c}.py", "[!x]"]
)
def test_a_name_that_exists_is_found_as_it_stands(workspace: Path, engine: str, name: str) -> None:
    make(workspace, name, "a1.txt", "x", "a/b.py", "y")
    assert rows("glob", pattern=name) == [name]
    assert rows("glob", pattern=f"{workspace}/{name}") == [name]
    assert grep(pattern="this is", glob=name) == [f"{name}:1:this is {name}"]


def test_a_linked_folder_is_entered_when_it_is_named(workspace: Path, engine: str) -> None:
    make(workspace, "real/pkg/i.js", "real/pkg/lib/j.js")
    (workspace / "node_modules").mkdir()
    (workspace / "node_modules/pkg").symlink_to("../real/pkg")
    assert rows("glob", pattern="node_modules/pkg/*.js") == ["node_modules/pkg/i.js"]
    assert sorted(rows("glob", pattern="node_modules/pkg/")) == [
        *("node_modules/pkg/i.js", "node_modules/pkg/lib/j.js"),
    ]
    assert rows("glob", pattern="pkg/lib/*", path="node_modules") == ["node_modules/pkg/lib/j.js"]
    assert len(rows("glob", pattern="**/*.js")) == 2
    assert grep(pattern="is", glob="node_modules/pkg/l*/*.js") == [
        "node_modules/pkg/lib/j.js:1:this is real/pkg/lib/j.js"
    ]


def test_a_linked_folder_is_entered_where_it_is_named_behind_a_wildcard(
    workspace: Path, engine: str
) -> None:
    store = "node_modules/.pnpm/pkg@1/node_modules/pkg"
    make(workspace, f"{store}/i.js", f"{store}/lib/j.js", "packages/b/node_modules/pkg/i.js")
    (workspace / "packages/a/node_modules").mkdir(parents=True)
    (workspace / "packages/a/node_modules/pkg").symlink_to(f"../../../{store}")
    (workspace / "packages/a/node_modules/other").symlink_to(f"../../../{store}")
    (workspace / "packages/c").symlink_to("a")
    both = ["packages/a/node_modules/pkg/i.js", "packages/b/node_modules/pkg/i.js"]
    deep = "packages/a/node_modules/pkg/lib/j.js"
    for pattern, found in (
        ("packages/*/node_modules/pkg/*.js", both),
        ("/packages/*/node_modules/pkg/*.js", both),
        (f"{workspace}/packages/*/node_modules/pkg/*.{{js,ts}}", both),
        ("**/packages/{a,x/y}/node_modules/pkg/*.js", both[:1]),
        ("packages/?/node_modules/**/pkg/", [both[0], deep, both[1]]),
        ("packages/*/node_modules/pkg/l*/*.js", [deep]),
        # These name no link.
        ("packages/*/node_modules/p*/*.js", both[1:]),
        ("packages/*/node_modules/*/lib/*.js", []),
    ):
        assert sorted(rows("glob", pattern=pattern)) == found
        lines = grep(pattern="this", glob=pattern)
        assert [line.partition(":")[0] for line in lines] == found
    assert rows("glob", pattern="*/node_modules/pkg/*.js", path="packages/a/..") == both[::-1]
    assert rows("glob", pattern="packages/*/node_modules/pkg") == [both[0].removesuffix("/i.js")]


def test_links_that_lead_back_or_nowhere_end_a_search(workspace: Path, engine: str) -> None:
    make(workspace, "a/f.js", "a/b/f.js")
    (workspace / "a/b/a").symlink_to("../../a")
    (workspace / "a/b/up").symlink_to("../..")
    for name, target in (("gone", "nowhere"), ("self", "self"), ("file", "../f.js")):
        (workspace / "a/b" / name).symlink_to(target)
    back = ["a/b/a/b/f.js", "a/b/a/f.js"]
    assert rows("glob", pattern="*/b/a/*.js") == back[1:]
    assert sorted(rows("glob", pattern="**/a/**/f.js")) == [*back, "a/b/f.js", "a/f.js"]
    assert call("glob", pattern="**/a/**/up/**/f.js")[0]["truncated"] is False
    for name in ("gone", "self", "file"):
        assert rows("glob", pattern=f"*/b/{name}/*") == []
        assert grep(pattern="this", glob=f"*/b/{name}/*") == []


def test_a_byte_that_is_not_utf_8_is_found_beside_text_alone(workspace: Path, engine: str) -> None:
    (workspace / "f").write_bytes("café = 1\ncafè = 2\n".encode("latin-1"))
    assert grep(pattern="caf") == [r"f:1:caf\xe9 = 1", r"f:2:caf\xe8 = 2"]
    result, body = call("grep", pattern=r"caf\xe9 = 1")
    assert (result["matches"], body) == (0, b"")
    assert result["hint"] == (
        r"a byte that is shown as \xe9 is no character: search for the text beside it"
    )
    (workspace / "g").write_text("café = 1\n")
    assert grep(pattern=r"caf\xe9 = 1") == ["g:1:café = 1"]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("src", "src is a directory: src/**"),
        ("src/deep", "src/deep is a directory: src/deep/**"),
        ("de?p", "src/deep is a directory: src/deep/**"),
        ("src/[q]/*.py", r"write \["),
        ("*.none", ""),
    ],
)
def test_a_glob_without_files_says_why(
    workspace: Path, engine: str, pattern: str, hint: str
) -> None:
    make(workspace, "src/deep/a.py")
    found = call("glob", pattern=pattern)[0]
    assert hint in found["hint"]
    assert bool(found["hint"]) == bool(hint)
    searched = call("grep", pattern="this", glob=pattern)[0]
    assert searched["hint"] == f"no file matches the glob{'; ' * bool(hint)}{found['hint']}"


def test_matching_lines_come_with_file_and_number(workspace: Path, engine: str) -> None:
    make(workspace, "a.txt", "sub/b.txt", ".hidden", ".git/config")
    assert grep(pattern="this is") == [
        ".hidden:1:this is .hidden",
        "a.txt:1:this is a.txt",
        "sub/b.txt:1:this is sub/b.txt",
    ]
    assert grep(pattern="THIS", path="sub", ignore_case=True) == ["sub/b.txt:1:this is sub/b.txt"]
    assert grep(pattern="this", path="sub/b.txt") == ["sub/b.txt:1:this is sub/b.txt"]
    assert grep(pattern="this", glob="sub/*") == ["sub/b.txt:1:this is sub/b.txt"]
    assert grep(pattern="this", glob=".git/**") == [".git/config:1:this is .git/config"]
    result, _ = call("grep", pattern="this is")
    assert result == {
        "matches": 3,
        "files": 3,
        "truncated": False,
        "hint": "",
        "left_out": [".git/"],
    }


@pytest.fixture
def project(workspace: Path) -> Path:
    """A folder with what git and package managers keep beside what a person writes."""
    make(workspace, *("src/a.py", "src/gen/b.py", "debug.log", "keep.log", ".git/hook.py"))
    make(workspace, *("web/node_modules/x/c.py", "web/dist/d.py", "v/lib/e.py", ".cache/f.py"))
    make(workspace, ".mcp-sandbox/output/a-b.py", "sub/{x}.py", "other/{x}.py")
    (workspace / ".gitignore").write_text("# dist\n*.log\n!keep.log\n/src/gen/\n\n  \n[\n")
    (workspace / "web/.gitignore").write_text("dist/  \n")
    (workspace / ".cache/.gitignore").write_text("*\n")
    (workspace / "sub/.gitignore").write_text("{x}.py")
    (workspace / "v/pyvenv.cfg").touch()
    return workspace


_LEFT_OUT = [
    *(".cache/", ".git/", ".mcp-sandbox/", "v/"),
    *("src/gen/", "web/dist/", "web/node_modules/"),
]


def test_what_git_and_package_managers_keep_is_left_out_and_named(
    project: Path, engine: str
) -> None:
    found, body = call("grep", pattern="this is", glob="*.{py,log}")
    lines = [line.split(":")[0] for line in body.decode().splitlines()]
    assert lines == ["keep.log", "other/{x}.py", "src/a.py"]
    assert sorted(found["left_out"]) == sorted([*_LEFT_OUT, "debug.log", "sub/{x}.py"])
    result, body = call("glob", pattern="*.py")
    assert sorted(json.loads(body)) == lines[1:]
    assert result["left_out"] == [*_LEFT_OUT[:5], "sub/{x}.py", *_LEFT_OUT[5:]]
    listed, body = call("list", depth=5)
    names = [row[0] for row in json.loads(body)]
    assert listed["left_out"] == _LEFT_OUT
    assert {"v", "debug.log", "web/node_modules"} < {*names}
    assert not {"v/lib", "web/node_modules/x"} & {*names}
    assert "left_out" not in call("list")[0]


@pytest.mark.parametrize(
    ("path", "glob", "file"),
    [
        ("v", "", "v/lib/e.py"),
        ("web/node_modules/x", "", "web/node_modules/x/c.py"),
        (".", "web/dist/*.py", "web/dist/d.py"),
        ("web", "node_modules/**", "web/node_modules/x/c.py"),
        (".", "**/gen/*.py", "src/gen/b.py"),
        (".cache", "*.py", ".cache/f.py"),
        ("debug.log", "", "debug.log"),
        (".", "debug.log", "debug.log"),
        (".mcp-sandbox/output", "", ".mcp-sandbox/output/a-b.py"),
    ],
)
def test_what_is_left_out_is_found_when_it_is_named(
    project: Path, engine: str, path: str, glob: str, file: str
) -> None:
    assert file in "".join(grep(pattern="this is", path=path, glob=glob))
    if path != file:
        assert file in rows("glob", path=path, pattern=glob or "*.py")
        folder = file.rpartition("/")[0]
        assert file in [row[0] for row in rows("list", path=folder or ".", depth=9)]


def test_skills_in_the_workspace_are_files_like_others(workspace: Path, engine: str) -> None:
    make(workspace, ".claude/skills/mine/a.txt")
    assert grep(pattern="this is") == [
        ".claude/skills/mine/a.txt:1:this is .claude/skills/mine/a.txt"
    ]
    assert rows("glob", pattern="*.txt") == [".claude/skills/mine/a.txt"]


def test_context_lines_and_gaps_are_marked(workspace: Path, engine: str) -> None:
    (workspace / "f").write_text("".join(f"{n}\n" for n in range(1, 21)))
    assert grep(pattern="^(5|6|15)$", context=1) == [
        "f-4-4", "f:5:5", "f:6:6", "f-7-7", "--", "f-14-14", "f:15:15", "f-16-16",
    ]  # fmt: skip


def test_a_limit_of_matches_says_that_it_cut(workspace: Path, engine: str) -> None:
    (workspace / "f").write_text("x\ny\ny\n" * 10)
    result, body = call("grep", pattern="x", limit=2, context=1)
    assert result == {"matches": 2, "files": 1, "truncated": True, "hint": ""}
    assert body == b"f:1:x\nf-2-y\nf-3-y\nf:4:x\nf-5-y\n"


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ("a" * 300, "b" * 700, "[column 301] [...] {a}needle{b} [...]"),
        ("é" * 900_000, "b" * 700, "[column 900001] [...] {a}needle{b} [...]"),
        ("a needle " * 3 + "a" * 900, "", "[column 3] a needle a needle a needle {a} [...]"),
        ("a" * 600, "", "[column 601] [...] {a}needle"),
        ("a" * 240, "b" * 240, "{a}needle{b}"),
    ],
)
def test_a_long_line_is_shown_around_its_match(
    workspace: Path, engine: str, before: str, after: str, shown: str
) -> None:
    (workspace / "f").write_text(f"first\n{before}needle{after}\n")
    (line,) = call("grep", pattern="needle")[1].decode().splitlines()
    text = line.removeprefix("f:2:")
    pieces = [piece for piece in shown.replace("{b}", "{a}").split("{a}") if piece]
    assert all(piece in text for piece in pieces), text[:700]
    assert len(text) <= 540
    assert line.startswith("f:2:")


def test_binary_files_are_skipped_and_long_lines_cut(workspace: Path, engine: str) -> None:
    (workspace / "early").write_bytes(b"x\n\0\n")
    (workspace / "late").write_bytes(b"x\n" * 50_000 + b"\0\nx\n")
    (workspace / "utf16").write_bytes("x\n".encode("utf-16"))
    (workspace / "long").write_text("x" * 10_000_000 + "\nend x\n")
    (workspace / "bad").write_bytes(b"caf\xe9 x\r\n")
    result, body = call("grep", pattern="x", limit=100_000)
    lines = body.decode().split("\n")[:-1]
    shown = "[column 1] " + "x" * 500 + " [...]"
    assert lines == [r"bad:1:caf\xe9 x", f"long:1:{shown}", "long:2:end x"]
    assert result == {"matches": 3, "files": 2, "truncated": False, "hint": ""}


def test_a_bad_pattern_is_refused_with_the_reason(workspace: Path, engine: str) -> None:
    make(workspace, "f")
    error = refused("grep", pattern="(")
    assert error.code == "invalid"
    assert "unterminated" in error.message
    assert refused("grep", pattern="").code == "invalid"
    assert refused("grep", pattern="a\0b").code == "invalid"
    assert refused("grep", pattern="a", path="missing").code == "not_found"
    assert refused("grep", pattern="a", glob="[").code == "invalid"


def test_what_only_one_engine_knows_still_works(workspace: Path, engine: str) -> None:
    (workspace / "f").write_text("foobar\nfoobaz\n")
    assert grep(pattern="foo(?=baz)") == ["f:2:foobaz"]
    assert grep(pattern=r"(o)\1") == ["f:1:foobar", "f:2:foobaz"]


@pytest.mark.parametrize(
    ("pattern", "lines"),
    [
        (r"\<one\>", [1]),
        (r"two\nfoo", [1, 2]),
        ("two\nfoo", [1, 2]),
        (r"bar\r?\nbaz$", [2, 3]),
        (r"bar\n^baz\n", [2, 3]),
        (r"z[\r\n]+x", [3, 4, 5]),
        (r"bar\r", [2]),
        (r"(?s)one.*baz", [1, 2, 3]),
        (r"\Ao|\+z\Z", [1, 6]),
        (r"[^\n]oo", [2]),
        (r"x[[:punct:]]y", [5]),
        ("[x&&z][[]", [6]),
        (r"(?<what>o)ne", [1]),
    ],
)
def test_a_pattern_means_the_same_to_both_engines(
    workspace: Path, engine: str, pattern: str, lines: list[int]
) -> None:
    texts = ["one two", "foo bar\r", "baz", "", "x+y", "z[+z"]
    (workspace / "f").write_bytes("\n".join(texts).encode())
    expected = [f"f:{number}:{texts[number - 1].strip()}" for number in lines]
    assert grep(pattern=pattern) == expected
    assert grep(pattern=pattern, path="f") == expected


def test_a_match_across_lines_counts_once_and_has_context(workspace: Path, engine: str) -> None:
    (workspace / "f").write_text("a\nb\nc\n" * 2 + "d\n")
    result, body = call("grep", pattern=r"b\nc", context=1, limit=1)
    assert (result["matches"], result["truncated"]) == (1, True)
    assert body == b"f-1-a\nf:2:b\nf:3:c\nf-4-a\n"


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        (r"one\|foo", "one|foo"),
        (r"o\+ bar", "o+ bar"),
        (r"\(fo*\) bar", "(fo*) bar"),
        (r"o\{2\}", "o{2}"),
        ("call(x)", r"call\(x\)"),
        (r"no\|thing", ""),
        (r"x\(", ""),
        ("absent", ""),
    ],
)
def test_a_pattern_of_basic_syntax_is_answered_with_the_one_that_matches(
    workspace: Path, engine: str, pattern: str, meant: str
) -> None:
    (workspace / "f").write_text("one\nfoo bar\ncall(x)\n")
    hint = call("grep", pattern=pattern)[0]["hint"]
    assert hint.endswith(f": {meant} matches") if meant else hint == ""


def test_patterns_that_look_like_options_are_patterns(workspace: Path, engine: str) -> None:
    (workspace / "-e").write_text("--files\n")
    assert grep(pattern="--files") == ["-e:1:--files"]
    assert grep(pattern="--files", path="-e") == ["-e:1:--files"]


def test_settings_of_the_user_change_nothing(
    workspace: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workspace / "rc").write_text("--files-with-matches\n")
    (workspace / ".rgignore").write_text("*\n")
    monkeypatch.setenv("RIPGREP_CONFIG_PATH", str(workspace / "rc"))
    (workspace / "f").write_text("needle\n")
    assert grep(pattern="needle") == ["f:1:needle"]


def test_odd_names_come_out_whole(workspace: Path, engine: str) -> None:
    for name in (b"a\nb", b"a:1:b", b"\xff", b"--\nx"):
        with open(os.fsencode(workspace) + b"/" + name, "wb") as file:
            file.write(b"needle\n")
    assert sorted(grep(pattern="needle")) == sorted(
        [r"a\x0ab:1:needle", "a:1:b:1:needle", r"\xff:1:needle", r"--\x0ax:1:needle"]
    )


def test_a_fifo_holds_nobody_up(workspace: Path, engine: str) -> None:
    os.mkfifo(workspace / "fifo")
    assert grep(pattern="x") == []
    assert refused("grep", pattern="x", path="fifo").code == "wrong_kind"


@pytest.mark.slow
def test_a_catastrophic_pattern_ends_in_time(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "FOLDERS", ())
    monkeypatch.setattr(search, "SECONDS", 2.0)
    (workspace / "f").write_text("a" * 40 + "b\n")
    started = time.monotonic()
    assert call("grep", pattern="^(a+)+$")[0]["truncated"] is True
    assert time.monotonic() - started < 8


@pytest.mark.slow
@pytest.mark.parametrize("path", [".", "a" * 200])
def test_a_catastrophic_line_of_gitignore_ends_in_time(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(search, "SECONDS", 1.0)
    make(workspace, "a" * 200 + "/below/file")
    (workspace / ".gitignore").write_text("*a" * 12 + "b\n")
    for op, given in (
        ("list", {"depth": 2}),
        ("glob", {"pattern": "*"}),
        ("grep", {"pattern": "x"}),
    ):
        assert call(op, path=path, **given)[0]["truncated"] is True


WORDS = ["alpha", "Beta", "gamma_1", "délta", "x = 1;", "", "  tab\there", "foo(bar)", "\r"]
PATTERNS = ["a", r"\bfoo\b", r"\w+_\d", "^$", "^x", r"here$", "é", "(?i)beta", r"[^a-z\s]", "1;$"]
GLOBS = [None, "*.py", "src/**", "**/t*", "{a,src}/*", "/top.py", "?*.py", "[st]*", "!*.md", "sub/"]


def generated(folder: Path, choose: random.Random) -> None:
    folders = ["", "src", "src/sub", "a", "a/.hid", ".git", "sub", "été"]
    for number in range(60):
        ending = choose.choice([".py", ".md", ".txt", ""])
        name = choose.choice(["top", "test_x", "s p", ".dot", "n-1", f"f{number}", "ü"]) + ending
        path = folder / choose.choice(folders) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            " ".join(choose.choices(WORDS, k=choose.randint(0, 4)))
            for _ in range(choose.randint(0, 40))
        ]
        text = choose.choice(["\n", "\r\n"]).join(lines) + choose.choice(["", "\n"])
        path.write_bytes(text.encode() + (b"\0" if choose.random() < 0.05 else b""))


@pytest.mark.skipif(not RIPGREP, reason="ripgrep is not installed")
@pytest.mark.parametrize("seed", range(12))
def test_both_engines_find_the_same(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    choose = random.Random(seed)
    generated(workspace, choose)
    queries: list[dict[str, Any]] = [
        {
            "pattern": choose.choice(PATTERNS),
            "glob": choose.choice(GLOBS),
            "path": choose.choice([".", ".", "src"]),
            "ignore_case": choose.random() < 0.3,
            "context": choose.choice([0, 0, 1, 3]),
            "limit": choose.choice([5, 200, 100_000]),
        }
        for _ in range(25)
    ]
    (workspace / "src").mkdir(exist_ok=True)
    by_ripgrep = [call("grep", **query) for query in queries]
    monkeypatch.setattr(search, "FOLDERS", ())
    for query, expected in zip(queries, by_ripgrep, strict=True):
        assert (query, call("grep", **query)) == (query, expected)


@pytest.mark.skipif(not RIPGREP, reason="ripgrep is not installed")
def test_ripgrep_is_really_used_where_it_is_installed() -> None:
    assert search._program() == RIPGREP


def test_a_ripgrep_that_path_leads_to_is_not_run(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = workspace / "bin" / "rg"
    planted.parent.mkdir()
    planted.write_text(f"#!/bin/sh\necho ran >> {workspace}/ran\n")
    planted.chmod(0o755)
    monkeypatch.setenv("PATH", f"{planted.parent}:/usr/bin:/bin")
    (workspace / "f").write_text("needle\n")
    assert grep(pattern="^needle$") == ["f:1:needle"]
    assert not (workspace / "ran").exists()
