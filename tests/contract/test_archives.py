"""A chat's files as one stream: packed, and unpacked where the places are empty."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.errors import AlreadyExists, InvalidArgument, SandboxGone, TooLarge
from mcp_sandbox.models import Mount, Packed
from mcp_sandbox.runtime.runtime import Runtime
from tests.backends.live import connected, made, spec_for
from tests.conftest import configured

MAX = 1 << 30
ROOTS = ("workspace", "home")
EMPTY = (
    "chmod -fR u+rwX . ~; rm -rf mounted/*; find . ~ -mindepth 1 ! -path './mounted*' -delete; "
    "echo own > mounted/file"
)
# Not every place can mount a folder of this host.
OWN = "[ ! -d mounted ] || grep -qx own mounted/file || echo lost"
REST = f"find . ~ -mindepth 1 ! -path './mounted*'; {OWN}"
MADE = r"""
set -e
mkdir -p src/empty .claude node_modules/.bin node_modules/tool ~/.cache/pip ~/.config shut
printf '#!/bin/sh\necho a tool\n' > node_modules/tool/cli; chmod 755 node_modules/tool/cli
ln -s ../tool/cli node_modules/.bin/tool; ln -s /nowhere/at/all dangling; ln -s src here
echo own > .claude/settings.json; echo cached > ~/.cache/pip/x; echo kept > ~/.config/x
printf 'odd' > "$(printf 'src/\377\376 name\nof two lines')"; mkfifo fifo
python3 -m venv --without-pip venv; echo secret > shut/file; truncate -s 3M large
printf '\1\2\3' | dd of=large seek=2000000 bs=1 conv=notrunc status=none
name=$(printf 'n%.0s' {1..200}); mkdir -p $name/$name/$name; echo deep > $name/$name/$name/$name
mkdir -p ~/.mcp-sandbox/output ~/.mcp-sandbox/shells; echo long > ~/.mcp-sandbox/output/1.txt
chmod 4751 node_modules/tool/cli; chmod 400 shut/file; chmod 500 shut; chmod 555 src
touch -d @1000 src
"""
STATE = (
    r"find /workspace /home/sandbox -mindepth 1 ! -type p ! -path '*/.cache*' ! -path '*/mounted*' "
    r"! -path '*/.mcp-sandbox/output*' "
    r"-printf '%p %y %m %s %l ' \( -type f -a -readable -exec sha256sum {} \; -o -printf '\n' \) "
    # Folders of a volume belong to its group.
    "| sed -E 's/ 4751 / 751 /; s/ d 2(...) / d \\1 /' | LC_ALL=C sort; stat -c %Y src"
)


@pytest.fixture
async def runtime(runner: Runtime) -> Runtime:
    """The sandbox of this module, with nothing of an earlier test."""
    await runner.exec(EMPTY)
    return runner


@pytest.fixture(scope="module")
async def runner(
    backend_name: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Runtime]:
    config = configured(backend_name, tmp_path_factory.mktemp("data"))
    assert config.backend != "auto"
    mounted = Mount(config.data_dir / "mounted", "/workspace/mounted")
    spec = spec_for(config.data_dir / "places", [mounted])
    async with open_backend(config.backend, config) as backend, made(backend, spec) as sandbox:
        async with connected(sandbox) as opened:
            is_mounted = (await opened.exec("test -d mounted")).success
            assert is_mounted == (not backend.holds_files)
            yield opened


async def packed(runtime: Runtime) -> bytes:
    return (await counted(runtime))[0]


async def counted(runtime: Runtime) -> tuple[bytes, Packed]:
    pieces: list[bytes] = []

    async def take(data: bytes) -> None:
        pieces.append(data)

    said = await runtime.files.pack(take, roots=ROOTS, leave_out=[".cache"])
    return b"".join(pieces), said


async def given(*pieces: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
    if error:
        raise error


async def test_files_come_back_as_they_were(runtime: Runtime) -> None:
    assert (await runtime.exec(MADE)).success
    before = (await runtime.exec(STATE)).stdout
    archive = await packed(runtime)
    assert (await runtime.exec(STATE)).stdout == before
    await runtime.exec(EMPTY)
    unpacked = await runtime.files.unpack(given(archive), max_bytes=MAX)
    assert unpacked.bytes == len(archive)
    assert (await runtime.exec(STATE)).stdout == before
    # What is kept of output is not packed, what shells remember is.
    assert (await runtime.exec("cd ~/.mcp-sandbox; echo *")).stdout == "shells\n"
    ran = "venv/bin/python -c 'import sys; print(sys.prefix)'; node_modules/.bin/tool"
    assert (await runtime.exec(ran)).stdout == "/workspace/venv\na tool\n"
    assert (await runtime.exec(f"ls -d ~/.cache fifo; {OWN}")).stdout == ""


async def test_output_in_a_backup_of_an_earlier_version_comes_into_the_home(
    runtime: Runtime,
) -> None:
    kept = ".mcp-sandbox/output/1d-0a1b2c.txt"
    made = f"mkdir -p .mcp-sandbox/output; echo '*' >.mcp-sandbox/.gitignore; echo long >{kept}"
    await runtime.exec(f"{made}; echo mine >file")
    archive = await packed(runtime)
    await runtime.exec(EMPTY)
    await runtime.files.unpack(given(archive), max_bytes=MAX)
    assert (await runtime.exec(f"ls -AI mounted; cat ~/{kept}")).stdout == "file\nlong\n"
    assert await runtime.files.read(f"/workspace/{kept}") == b"long\n"


async def test_what_cannot_be_packed_is_counted(runtime: Runtime) -> None:
    await runtime.exec(
        "mkfifo pipe; echo x > unread; mkdir closed; echo y > closed/file; chmod 0 unread closed; "
        "echo kept > kept; echo z > .~mcp-draft"
    )
    archive, said = await counted(runtime)
    assert (said.left_out, said.filled, said.bytes) == (3, 0, len(archive))
    await runtime.exec(EMPTY)
    assert await runtime.files.unpack(given(archive), max_bytes=MAX) == Packed(3, len(archive))
    assert (await runtime.exec(REST)).stdout == "./kept\n"


async def test_where_files_are_nothing_is_unpacked(runtime: Runtime) -> None:
    await runtime.exec("echo first > file")
    archive = await packed(runtime)
    await runtime.exec("echo second > file")
    with pytest.raises(AlreadyExists, match="/workspace is not empty: file is there"):
        await runtime.files.unpack(given(archive), max_bytes=MAX)
    assert (await runtime.exec("cat file; ls -A -I mounted")).stdout == "second\nfile\n"


@pytest.mark.parametrize(
    ("cut", "most", "error"),
    [
        (0, MAX, RuntimeError("the store broke")),
        (700, MAX, None),
        (0, 1000, None),
    ],
    ids=["its source fails at the end", "it is cut short", "it is too large"],
)
async def test_a_stream_that_fails_leaves_nothing(
    runtime: Runtime, cut: int, most: int, error: Exception | None
) -> None:
    await runtime.exec("mkdir -p a/b; seq 100000 > a/b/c; chmod 555 a/b; seq 9 > ~/d")
    archive = await packed(runtime)
    await runtime.exec(EMPTY)
    with pytest.raises((RuntimeError, InvalidArgument, TooLarge)):
        await runtime.files.unpack(
            given(archive[: len(archive) - cut], error=error), max_bytes=most
        )
    assert (await runtime.exec(REST)).stdout == ""


async def test_a_call_that_is_given_up_leaves_nothing_and_the_next_one_works(
    runtime: Runtime,
) -> None:
    await runtime.exec("for i in $(seq 300); do seq 9000 > $i; done; mkdir x; seq 9 > x/y")
    archive = await packed(runtime)
    with anyio.CancelScope() as scope:
        await runtime.files.pack(lambda _: cancelled(scope), roots=ROOTS)
    assert await packed(runtime) == archive
    await runtime.exec(EMPTY)
    with anyio.CancelScope() as scope:
        await runtime.files.unpack(halved(archive, lambda: cancelled(scope)), max_bytes=MAX)
    assert (await runtime.exec(REST)).stdout == ""
    await runtime.files.unpack(given(archive), max_bytes=MAX)
    assert (await runtime.exec("ls -I mounted | wc -l; cat 300 x/y | md5sum")).stdout == (
        await runtime.exec("echo 301; (seq 9000; seq 9) | md5sum")
    ).stdout


async def cancelled(scope: anyio.CancelScope) -> None:
    scope.cancel()
    await anyio.sleep_forever()


async def halved(data: bytes, then: Callable[[], Awaitable[None]]) -> AsyncIterator[bytes]:
    """Half of the data, of which much has been taken when `then` is called."""
    yield data[: len(data) // 2]
    await then()


async def test_a_sandbox_that_is_killed_is_followed_by_one_with_nothing_or_all(
    backend_name: str, tmp_path: Path
) -> None:
    config = configured(backend_name, tmp_path / "data")
    assert config.backend != "auto"
    spec = spec_for(tmp_path)
    async with open_backend(config.backend, config) as backend:
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("for i in $(seq 300); do seq 9000 > $i; done; seq 9 > ~/own")
            archive = await packed(runtime)
            with pytest.raises(SandboxGone):
                await runtime.files.pack(lambda _: backend.destroy(sandbox.id), roots=ROOTS)
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            await runtime.exec("find . ~ -mindepth 1 -delete")
            cut = halved(archive, lambda: backend.destroy(sandbox.id))
            with pytest.raises(SandboxGone):
                await runtime.files.unpack(cut, max_bytes=MAX)
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            assert (await runtime.files.list()).entries == ()
            await runtime.files.unpack(given(archive), max_bytes=MAX)
            assert (await runtime.exec("ls -A | wc -l; tail -n1 ~/own")).stdout == "300\n9\n"
            # As far as the moves into place could come.
            await runtime.exec(
                "mkdir .~mcp-unpacked ~/.~mcp-unpacking; mv 1 .~mcp-unpacked; "
                "mv ~/own ~/.~mcp-unpacking"
            )
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            seen = await runtime.exec("ls -A | wc -l; tail -qn1 ~/own 1; cd ~; echo *")
            assert seen.stdout == "300\n9\n9000\nown\n"
