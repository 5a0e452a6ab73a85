"""Hostile output and names through the real server, down to the bytes that a client reads."""

import re
import signal
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from tests import leftovers
from tests.e2e.attacks import on_bubblewrap
from tests.e2e.test_exhaustion import MIB, resident
from tests.server.test_stdio import INITIALIZE, ROOT, RawClient

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@asynccontextmanager
async def served(data_root: Path, backend: str) -> AsyncGenerator[RawClient]:
    """A client of `mcp-sandbox stdio`, which ends cleanly when its input closes."""
    command = [sys.executable, "-m", "mcp_sandbox", "stdio", "--backend", backend]
    command += ["--user", "mallory", "--chat", "wire", "--data", str(data_root)]
    with anyio.fail_after(55):
        async with await anyio.open_process(command, cwd=ROOT, stderr=None) as process:
            try:
                client = RawClient(_Quiet(process))  # type: ignore[arg-type]
                await client.answer(await client.request("initialize", INITIALIZE))
                await client.notify("notifications/initialized", {})
                yield client
                await client.stdin.aclose()
                assert await process.wait() == 0
            finally:
                if process.returncode is None:
                    process.send_signal(signal.SIGTERM)
                    await process.wait()


class _Quiet:
    """A process whose stderr goes where ours goes; the raw client wants one to read."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stdout
        self.pid = process.pid


def texts(value: Any) -> Iterator[str]:
    """Every text in an answer."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts(part)


_PRINTED = r"""
import sys
sys.stdout.buffer.write(
    b'\x1b]52;c;c3RvbGVu\x07\x1b[2J\x1b]8;;http://x\x07\x9b31m\x00\x08\x7f\xff\xfe\xc2\x9b0m'
    b'\xe2\x80\xaetxet\xe2\x81\xa6\r\n{"jsonrpc":"2.0","id":3,"result":{"forged":true}}\n'
    b'Content-Length: 10\r\n\r\n' + b'\xed\xa0\x80\xf0\x9f\x98')
"""


@on_bubblewrap
async def test_what_is_printed_and_named_is_shown_and_not_sent(
    data_root: Path, backend_name: str
) -> None:
    names = (
        "import os\nfor name in (b'\\xff', b'\\x1b[31m', b'a\\nb', b'\\xc2\\x9bm', "
        "b'\\xe2\\x80\\xaex'): open(name, 'w').write('\\x1b[2Jmark')"
    )
    async with served(data_root, backend_name) as client:
        answers = [await client.call("run_code", {"code": code}) for code in (_PRINTED, names)]
        answers += [
            await client.call("list_files", {}),
            await client.call("glob", {"pattern": "*"}),
            await client.call("grep", {"pattern": "mark"}),
            await client.call("read_file", {"path": "\x1b[31m"}),
            await client.call("read_file", {"path": "missing \x1b[2J\x07"}),
            await client.call("edit_file", {"path": "\x1b[31m", "old": "mark", "new": "x\x07"}),
            await client.call("exec", {"command": "printf '\\033[2J' >&2; exit 3"}),
            await client.call("delete_file", {"path": "\x1b[31m"}),
        ]
    assert "forged" in "".join(texts(answers[0]))
    shown = {text for answer in answers for text in texts(answer) if _CONTROL.search(text)}
    assert not shown


@on_bubblewrap
async def test_the_server_process_stays_small(data_root: Path, backend_name: str) -> None:
    async with served(data_root, backend_name) as client:
        pid = client.process.pid
        # Everything is loaded and used once before the first look.
        await client.call("exec", {"command": "seq 100000"})
        await client.call("run_code", {"code": "print('x' * 3_000_000)"})
        before = resident(pid)
        most = 0
        for command in (
            "head -c 100M /dev/zero | tr '\\0' 'x\\n'",
            "head -c 64M /dev/zero | tr '\\0' '\\033'",
            "head -c 16M /dev/urandom",
        ):
            answer = await client.call("exec", {"command": command})
            assert len("".join(texts(answer["content"]))) < 60_000
            most = max(most, resident(pid) - before)
    assert most < 32 * MIB, most / MIB
    assert leftovers.remove(data_root) == []
