"""A chat's files as one stream: packed, and unpacked where the places are empty."""

from collections.abc import AsyncGenerator, AsyncIterator

import pytest

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.errors import AlreadyExists, InvalidArgument, TooLarge
from mcp_sandbox.runtime.runtime import Runtime
from tests.backends.live import connected, made, spec_for
from tests.conftest import configured

MAX = 1 << 30
ROOTS = ("workspace", "home")
EMPTY = "chmod -R u+rwX /workspace /home/sandbox; find /workspace /home/sandbox -mindepth 1 -delete"
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
chmod 4751 node_modules/tool/cli; chmod 0 shut/file; chmod 500 shut; chmod 555 src
touch -d @1000 src
"""
STATE = (
    r"find /workspace /home/sandbox -mindepth 1 ! -type p ! -path '*/.cache*' "
    r"-printf '%p %y %m %s %l ' \( -type f -a -readable -exec sha256sum {} \; -o -printf '\n' \) "
    "| sed 's/ 4751 / 751 /' | LC_ALL=C sort; stat -c %Y src"
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
    async with open_backend(config.backend, config) as backend:
        async with made(backend, spec_for(config.data_dir / "places")) as sandbox:
            async with connected(sandbox) as opened:
                yield opened


async def packed(runtime: Runtime) -> bytes:
    pieces: list[bytes] = []

    async def take(data: bytes) -> None:
        pieces.append(data)

    await runtime.files.pack(take, roots=ROOTS, leave_out=[".cache"])
    return b"".join(pieces)


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
    ran = "venv/bin/python -c 'import sys; print(sys.prefix)'; node_modules/.bin/tool"
    assert (await runtime.exec(ran)).stdout == "/workspace/venv\na tool\n"
    assert (await runtime.exec("ls -d ~/.cache fifo")).stdout == ""


async def test_where_files_are_nothing_is_unpacked(runtime: Runtime) -> None:
    await runtime.exec("echo first > file")
    archive = await packed(runtime)
    await runtime.exec("echo second > file")
    with pytest.raises(AlreadyExists, match=r"/workspace is not empty: file is there"):
        await runtime.files.unpack(given(archive), max_bytes=MAX)
    assert (await runtime.exec("cat file; ls -A")).stdout == "second\nfile\n"


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
    assert (await runtime.exec("find . ~ -mindepth 1")).stdout == ""
