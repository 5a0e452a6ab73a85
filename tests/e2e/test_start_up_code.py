"""Modules and programs that a chat plants are run for it, and never by the runner for itself."""

import anyio
import pytest

from mcp_sandbox.errors import Unsupported
from mcp_sandbox.sessions.session import Session
from tests.e2e.attacks import (
    KEPT,
    WHOLE,
    all_is_well,
    attempt,
    on_bubblewrap,
    on_gvisor_if_whole,
    survive,
)

_PLANT = (
    "import os\nopen('/workspace/imported', 'a').write(__name__ + ' ' + str(os.getpid()) + '\\n')\n"
)
_MODULES = (
    "json",
    "socket",
    "struct",
    "signal",
    "ctypes",
    "types",
    "builtins",
    "re",
    "stat",
    "mcp_sandbox",
    "encodings",
    "codecs",
    "io",
    "abc",
    "heapq",
    "select",
    "resource",
    "array",
)


@on_gvisor_if_whole
async def test_modules_planted_in_the_workspace_are_not_loaded_by_the_runner(
    session: Session,
) -> None:
    for name in _MODULES:
        await session.write_file(f"{name}.py", _PLANT.encode())
    for name in ("sitecustomize", "usercustomize"):
        await session.write_file(f"{name}.py", _PLANT.encode())
    await session.write_file("mcp_sandbox/runner/__init__.py", _PLANT.encode())
    await session.write_file("kept", KEPT)
    await session.reset()
    # Tools and the start of the warm interpreter, with the workspace as working directory.
    assert (await session.exec("echo fine")).stdout == "fine\n"
    assert (await session.run_code("print('started')")).stdout == "started\n"
    await session.edit_file("kept", "had", "has")
    await session.grep("what")
    await session.glob("**/*")
    await session.delete_file("mcp_sandbox", recursive=True)
    assert "NotFound" in await attempt(session.read_file("imported"))


_AS_PYTHON = "#!/bin/sh\necho hijacked > /workspace/hijacked-$(basename $0)\n"


@on_gvisor_if_whole
async def test_programs_planted_in_the_home_are_not_used_by_the_runner(session: Session) -> None:
    await session.write_file("kept", KEPT)
    for name in ("python3", "python", "sh", "env", "relay.py"):
        await session.write_file(f"~/.local/bin/{name}", _AS_PYTHON.encode())
    for name in (".bashrc", ".profile", ".bash_profile", ".bash_env"):
        await session.write_file(f"~/{name}", b"touch /workspace/hijacked-shell\n")
    await session.write_file("~/.ripgreprc", b"--pre=/home/sandbox/.local/bin/sh\n")
    await session.exec("chmod +x ~/.local/bin/*")
    await session.reset()
    await all_is_well(session)
    await session.grep("what")
    assert (await session.glob("hijacked*")).paths == ()


@on_bubblewrap
async def test_grep_does_not_run_a_program_of_the_chat(session: Session) -> None:
    await session.write_file("~/.local/bin/rg", _AS_PYTHON.encode())
    await session.exec("chmod +x ~/.local/bin/rg")
    await session.reset()
    await attempt(session.grep("what"))
    assert (await session.glob("hijacked*")).paths == ()


async def _start_up_folder(session: Session) -> str:
    return (await session.exec("/usr/bin/python3 -m site --user-site")).stdout.strip()


_START_UP = {
    "ends": "import os\nos._exit(7)\n",
    "raises": "raise SystemExit('no')\n",
    "hangs": "while True: pass\n",
    "garbage": "import os\nos.write(3, b'garbage')\n",
    "nonsense": "import os\nos.write(3, b'[1]')\n",
    "hello": 'import os\nos.write(3, b\'{"e":"hello","pid":-1}\')\n',
    "closes": "import os\nos.close(3)\n",
    "python_worker": "import socket\nsocket.socket.send = lambda *a: 0\n",
    "fork": "import os\nos.fork = lambda: 1\n",
}


# The same Python runs either file, before it does anything else.
_PLANTED = [
    pytest.param(kind, what, marks=[WHOLE] if kind == "evil.pth" and what != "hello" else [])
    for kind in ("usercustomize.py", "evil.pth")
    for what in _START_UP
]


@on_bubblewrap
@pytest.mark.parametrize(("kind", "what"), _PLANTED)
async def test_start_up_code_of_the_chat_harms_only_its_own_python(
    shared: Session, what: str, kind: str
) -> None:
    session = shared
    await session.write_file("kept", KEPT)
    folder, code = await _start_up_folder(session), _START_UP[what]
    line = code if kind.endswith(".py") else f"import os; exec({code!r})\n"
    await session.write_file(f"{folder}/{kind}", line.encode())
    await session.reset()
    try:
        result = await survive(session.run_code("print('ran')", timeout_s=2))
        assert result is None or result.stdout == "ran\n" or not result.success
    except Unsupported:
        # Said so: the message names the files that may be broken.
        assert what not in ("hello", "python_worker")
    with anyio.fail_after(10):
        assert (await session.exec("cat kept")).stdout == KEPT.decode()
        await session.delete_file(f"{folder}/{kind}")
    await session.reset()
    await all_is_well(session)


_FREE = 'import os\nos.write(3, b\'{"e":"free"}\')\n'


@on_bubblewrap
async def test_the_warm_interpreter_gets_no_call_of_others(session: Session) -> None:
    await session.write_file("kept", KEPT)
    folder = await _start_up_folder(session)
    await session.write_file(f"{folder}/usercustomize.py", _FREE.encode())
    await session.reset()
    await survive(session.run_code("print('ran')", timeout_s=5))
    with anyio.fail_after(10):
        assert (await session.exec("echo fine", timeout_s=5)).stdout == "fine\n"
        assert (await session.read_file("kept")).data == KEPT
