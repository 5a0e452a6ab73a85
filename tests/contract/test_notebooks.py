"""A notebook keeps its variables, and hurts nobody but itself, on every backend."""

import string
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import Client
from mcp.types import TextContent

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import Busy, NotFound, SandboxError
from mcp_sandbox.models import ExecResult
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT
from tests.server.scripted import one_chat, text_of
from tests.streams import printing


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
async def session(emptied: Session) -> AsyncGenerator[Session]:
    """The shared chat, without notebooks."""
    yield emptied
    for row in await emptied.processes.list():
        # What a call has left running may end by itself.
        with suppress(NotFound):
            if row.running:
                await emptied.processes.stop(row.id, "KILL")


async def run(
    session: Session, code: str, notebook: str = "a", timeout_s: float = 30
) -> ExecResult:
    return await session.run_code(code, notebook=notebook, timeout_s=timeout_s)


async def test_variables_functions_and_modules_stay(session: Session) -> None:
    first = await run(session, "import math\nx = 4\ndef half(n): return n / 2")
    assert (first.stdout, first.notebook) == ("", "new")
    second = await run(session, "print(half(x), math.floor(2.5), __name__)")
    assert (second.stdout, second.notebook) == ("2.0 2 __main__\n", "kept")


async def test_notebooks_and_plain_calls_do_not_share_variables(session: Session) -> None:
    await run(session, "x = 1", "a")
    await run(session, "x = 2", "b")
    assert (await run(session, "x", "a")).stdout == "1\n"
    assert "NameError" in (await session.run_code("x")).stderr


SHOWN = [
    ("40 + 2", "42\n"),
    ("_ + 1", "43\n"),
    ("5;", ""),
    ("5; # no", ""),
    ("'a;b' # yes;", "'a;b'\n"),
    ("(1,\n 2)", "(1, 2)\n"),
    ("None", ""),
    ("_", "(1, 2)\n"),
    ("x = 3", ""),
    ("for n in range(2): n", ""),
    ("print(1); 2", "1\n2\n"),
    ("'ä€𝄞'; 'b';", ""),
    ("display('one', 2)", "'one'\n2\n"),
    ("", ""),
    ("# nothing", ""),
    ("from __future__ import annotations\ndef f(x: nowhere): pass", ""),
]


async def test_the_value_of_the_last_expression_is_shown(session: Session) -> None:
    for code, stdout in SHOWN:
        result = await run(session, code)
        assert (result.stdout, result.stderr, result.exit_code) == (stdout, "", 0), code


async def test_await_works_outside_of_functions(session: Session) -> None:
    await run(
        session, "import asyncio\nasync def wait(n):\n    await asyncio.sleep(0.01); return n"
    )
    assert (await run(session, "await wait(3)")).stdout == "3\n"
    task = await run(session, "task = asyncio.ensure_future(wait(4)) if await wait(1) else 0")
    assert task.success, task.stderr
    assert (await run(session, "await task")).stdout == "4\n"
    assert (await run(session, "asyncio.run(wait(5))")).stdout == "5\n"


COMMANDS = """
!echo hi \\
  there; echo oops >&2
if True:
    !mkdir -p sub
%cd sub
%matplotlib inline
!pwd; exit 3
"""


async def test_commands_of_other_notebooks_work_where_a_cell_is_no_python(session: Session) -> None:
    result = await run(session, COMMANDS)
    here = (await session.exec("pwd -P")).stdout.strip()
    assert result.stdout == f"hi there\n{here}/sub\n"
    assert result.stderr == "oops\n[!pwd; ended with exit code 3]\n"
    assert (await run(session, "import os; os.path.basename(os.getcwd())")).stdout == "'sub'\n"
    assert (await run(session, "%pip --version")).stdout.startswith("pip ")
    plain = await run(session, "text = '''\n!ls\n%cd x'''\nprint(7\n% 4)")
    assert plain.stdout == "3\n"


FILLED = [
    ("x = !echo a; echo 'b c'\nx", "['a', 'b c']\n"),
    ("if True:\n    y = !printf 'no end'\ny", "['no end']\n"),
    ("n, d = 4, {'k': [1.5]}\n!echo {n} $n $n, {d['k'][0]:.2f} {n + 1}", "4 4 4, 1.50 5\n"),
    ("!echo '{a,b}' {a,b} ${n} {unknown} $unknown; n=5; echo ${n}", "{a,b} a b {unknown}\n5\n"),
    ("!for n in 1 2; do echo $n; done; echo 'x y' | awk '{print $2}'", "1\n2\ny\n"),
    ("def f(arg):\n    out = !echo {arg}\n    return out\nf(7)", "['7']\n"),
    ("%cd {'/' + d.__class__.__name__[:0]}\n!pwd", "/\n"),
]


async def test_commands_give_lines_and_take_values_of_the_notebook(session: Session) -> None:
    for code, stdout in FILLED:
        result = await run(session, code)
        assert (result.stdout, result.stderr, result.exit_code) == (stdout, "", 0), code
    failed = await run(session, "x = !echo out; echo err >&2; exit 3\nx")
    assert (failed.stdout, failed.stderr.split("\n")[0]) == ("['out']\n", "err")


POOLS = """
import multiprocessing, math
from concurrent.futures import ProcessPoolExecutor
def double(n): return 2 * n
spawn = multiprocessing.get_context("spawn")
"""


async def test_a_pool_of_new_processes_says_what_it_lacks_and_does_the_rest(
    session: Session,
) -> None:
    await run(session, POOLS)
    for made in ("spawn.Pool(2)", "ProcessPoolExecutor(2, mp_context=spawn)"):
        with anyio.fail_after(25):
            result = await run(session, f"with {made} as pool: list(pool.map(double, [1, 2]))")
        assert "do not have what cells define: use multiprocessing.get_context" in result.stderr
        result = await run(session, f"with {made} as p: print(*p.map(math.sqrt, [4, 9]))")
        assert (result.stdout, result.stderr) == ("2.0 3.0\n", "")


@pytest.mark.parametrize(
    ("code", "way"),
    [
        (
            "from IPython.display import display, HTML",
            "in a notebook, display(value) needs no import",
        ),
        ("get_ipython().system('ls')", "in a notebook, display(value) needs no import"),
        (
            "name = input('Name: ')",
            "a cell reads no input: put values into its code; or this needs",
        ),
    ],
)
async def test_what_a_notebook_has_not_is_told_with_what_it_has(
    manager: SessionManager, session: Session, code: str, way: str
) -> None:
    server = build_server(make_session_finder(one_chat(CHAT), manager.session))
    async with Client(server, mode="legacy") as client:
        result = await client.call_tool("run_code", {"code": code, "notebook": "a"})
        assert way in text_of(result)


async def test_other_magics_are_refused_with_the_python_way(session: Session) -> None:
    for code, way in (
        ("x = 1\n%timeit x", "%timeit is not known here, use timeit.timeit()"),
        ("%%bash\necho \"it's\n", "%%bash is not known here, use !command"),
        ("%what", "%what is not known here, use Python"),
    ):
        result = await run(session, code)
        assert result.exit_code == 1
        assert way in result.stderr
        assert result.stderr.startswith('  File "<cell ')
    assert "NameError" in (await run(session, "x")).stderr


async def test_a_traceback_has_the_users_lines_and_no_others(session: Session) -> None:
    await run(session, "def divide(n):\n    return 1 / n")
    for code in ("divide(0)", "await __import__('asyncio').sleep(0); divide(0)", "0 + divide(0)"):
        result = await run(session, code)
        assert result.exit_code == 1
        assert result.stderr.startswith('Traceback (most recent call last):\n  File "<cell ')
        assert "    return 1 / n" in result.stderr
        assert code in result.stderr
        assert result.stderr.count("File ") == 2
        assert "\x1b" not in result.stderr
    inspected = await run(session, "import inspect; print(inspect.getsource(divide))")
    assert inspected.stdout.startswith("def divide(n):")


async def test_an_error_in_a_repr_or_a_syntax_error_is_the_cells_own(session: Session) -> None:
    code = "class Bad:\n    def __repr__(self): raise ValueError('no repr')\n"
    result = await run(session, code + "Bad()")
    assert "ValueError: no repr" in result.stderr
    assert "notebook.py" not in result.stderr
    wrong = await run(session, "x = (1,\n")
    assert "SyntaxError" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    missing = await run(session, "%cd /not/there")
    assert "FileNotFoundError" in missing.stderr
    assert "notebook.py" not in missing.stderr


async def test_input_finds_the_end_and_exit_ends_the_cell_alone(session: Session) -> None:
    assert "EOFError" in (await run(session, "x = 1\ninput()")).stderr
    assert (await run(session, "import sys; sys.exit(3)")).exit_code == 3
    assert (await run(session, "exit()")).exit_code == 0
    said = await run(session, "sys.exit('sorry')")
    assert (said.exit_code, said.stderr) == (1, "sorry\n")
    assert "EOFError" in (await run(session, "print(x); input()")).stderr


async def test_long_values_with_html_are_saved_and_named(session: Session) -> None:
    code = (
        "class Table:\n    def __repr__(self): return 'row ' * 1000\n"
        "    def _repr_html_(self): return '<table>whole</table>'\nTable()"
    )
    result = await run(session, code)
    assert len(result.stdout) < 2500
    path = result.stdout.rpartition(": ")[2].strip().rstrip("]")
    assert (await session.read_file(path)).data == b"<table>whole</table>"
    assert result.figures == ()


async def test_a_value_that_is_a_picture_is_shown_as_one(session: Session) -> None:
    code = (
        "import struct, zlib\n"
        "def part(kind, data):\n"
        "    body = kind + data\n"
        "    return struct.pack('>I', len(data)) + body + struct.pack('>I', zlib.crc32(body))\n"
        "class Dot:\n"
        "    def _repr_png_(self):\n"
        "        head = struct.pack('>IIBBBBB', 1, 1, 8, 0, 0, 0, 0)\n"
        "        data = zlib.compress(bytes(2))\n"
        "        parts = part(b'IHDR', head), part(b'IDAT', data), part(b'IEND', b'')\n"
        "        return b'\\x89PNG\\r\\n\\x1a\\n' + b''.join(parts)\n"
        "display(Dot(), Dot())\nDot()"
    )
    result = await run(session, code)
    assert result.success, result.stderr
    assert [each.mime for each in result.figures] == ["image/png"] * 3
    assert result.stdout == ""


async def test_nothing_of_a_cell_appears_in_another(session: Session) -> None:
    late = (
        "import threading, os\n"
        "def late():\n    while not os.path.exists('go'): pass\n"
        "    print('late'); os.write(1, b'late'); open('done', 'w')\n"
        "threading.Thread(target=late).start()\nprint('first')"
    )
    assert (await run(session, late)).stdout == "first\n"
    await session.write_file("go", b"")
    done = "import time\nwhile not os.path.exists('done'): time.sleep(0.01)"
    await session.run_code("import os\n" + done, timeout_s=10)
    assert (await run(session, "print('second')")).stdout == "second\n"


async def test_long_output_is_kept_and_changed_files_are_named(session: Session) -> None:
    result = await run(session, "for n in range(50_000): print(n)\nopen('new.txt', 'w').close()")
    assert result.truncated
    assert result.stdout.endswith("49999\n")
    assert result.output_file
    assert result.changed_files == ("new.txt",)
    assert (await run(session, "1")).changed_files == ()


async def test_a_cell_over_its_time_is_interrupted_and_variables_stay(session: Session) -> None:
    await run(session, "x = 7")
    result = await run(session, "print('begun')\nwhile True: pass", timeout_s=1)
    assert (result.stdout, result.timed_out, result.notebook) == ("begun\n", True, "kept")
    assert "KeyboardInterrupt" in result.stderr
    assert (await run(session, "await __import__('asyncio').sleep(60)", timeout_s=1)).timed_out
    assert (await run(session, "!sleep 60", timeout_s=1)).timed_out
    assert (await run(session, "x")).stdout == "7\n"


STUBBORN = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass"


async def test_a_cell_that_ignores_the_interrupt_is_killed_with_all_it_started(
    session: Session,
) -> None:
    start = "import subprocess, sys\nchild = subprocess.Popen(['sleep', '4321'])\n"
    with anyio.fail_after(15):
        result = await run(session, start + STUBBORN, timeout_s=1)
    assert (result.timed_out, result.notebook, result.signal) == (True, "ended", "SIGKILL")
    assert (await session.exec("pgrep -f '^sleep 4321'")).stdout == ""
    again = await run(session, "'child' in dir()")
    assert (again.stdout, again.notebook) == ("False\n", "new")


async def test_a_cancelled_cell_is_interrupted(session: Session) -> None:
    await run(session, "x = 8")
    begun = anyio.Event()

    async def listen(_name: str, _data: bytes) -> None:
        begun.set()

    async with anyio.create_task_group() as tasks:
        forever = "print('begun', flush=True)\nwhile True: pass"
        tasks.start_soon(partial(session.run_code, forever, notebook="a", on_output=listen))
        await begun.wait()
        tasks.cancel_scope.cancel()
    with anyio.fail_after(10):
        assert (await _once_free(session, "x")).stdout == "8\n"


async def _once_free(session: Session, code: str) -> ExecResult:
    while True:
        try:
            return await run(session, code)
        except Busy:
            await anyio.sleep(0.01)


CRASHES = [
    ("import os; os._exit(5)", 5, None),
    ("import os; os.abort()", None, "SIGABRT"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", None, "SIGSEGV"),
    ("import os, signal; os.kill(0, signal.SIGKILL)", None, "SIGKILL"),
]


async def test_a_notebook_that_dies_says_so_and_begins_anew(session: Session) -> None:
    for code, exit_code, signal in CRASHES:
        await run(session, "x = 1")
        result = await run(session, f"print('last', flush=True)\n{code}")
        ended = (result.stdout, result.exit_code, result.signal, result.notebook)
        assert ended == ("last\n", exit_code, signal, "ended"), code
        assert (await run(session, "'x' in dir()")).stdout == "False\n"


HOSTILE = [
    "import os; os.closerange(0, 65536)",
    "import os; os.closerange(3, 65536)",
    'import os\nfor fd in range(3, 100):\n    try: os.write(fd, b\'{"e": "nonsense"}\')\n'
    "    except OSError: pass",
    'import socket, time\nsocket.socket(fileno=3).send(b\'{"e":"free"}\'); time.sleep(60)',
    'import os, socket\nsocket.socket(fileno=3).send(b\'{"e":"exit","status":0,"changed":null,'
    '"counts":null,"stays":false}\'); import time; time.sleep(0.1)',
    "import socket\nsocket.socket(fileno=3).shutdown(2)",
    "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "import sys; sys.stdout = sys.stderr = None",
    "import sys; del sys.stdout, sys.stderr, sys.stdin",
]


@pytest.mark.parametrize("code", HOSTILE)
async def test_only_its_own_notebook_suffers(session: Session, code: str) -> None:
    await run(session, "x = 1", "b")
    with anyio.fail_after(20):
        await run(session, code, "a", timeout_s=2)
        assert (await run(session, "x", "b")).stdout == "1\n"
        again = await run(session, "print('fine')", "a", timeout_s=5)
        if again.stdout != "fine\n":
            again = await run(session, "print('fine')", "a", timeout_s=5)
        assert again.stdout == "fine\n" or "sys" in code
    await session.reset()


FORGED = (
    "import os, signal, socket, threading, time\n"
    "signal.signal(signal.SIGINT, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n"
    "control = socket.socket(fileno=3)\n"
    'end = b\'{"e":"exit","status":0,"changed":null,"counts":null,"stays":false}\'\n'
)
RUNS_ON = [
    "control.send(end)\nwhile True: pass",
    "control.send(end)\nwhile True: time.sleep(1)",
    # And takes what is asked, unread.
    "control.send(end)\nwhile control.recv(1 << 16): pass",
    # A child tells it, which holds the socket on.
    "if not os.fork():\n    control.send(end); time.sleep(600)\nwhile True: time.sleep(1)",
]


@pytest.mark.parametrize("forged", RUNS_ON, ids=["busy", "asleep", "reads", "child"])
async def test_a_cell_that_only_says_that_it_has_ended_ends_at_its_limit(
    session: Session, forged: str
) -> None:
    with anyio.fail_after(40):
        said = await run(session, FORGED + forged, timeout_s=1)
        gone = f"while kill -0 {int(said.stdout)}; do sleep 0.1; done"
        assert (await session.exec(gone, timeout_s=20)).exit_code == 0
        assert (await run(session, "print('fine')")).stdout == "fine\n"


async def test_a_notebook_that_has_ended_its_cell_outlives_the_limit(session: Session) -> None:
    with anyio.fail_after(40):
        assert (await run(session, "x = 6", timeout_s=1)).exit_code == 0
        # Longer than the limit and the time that it is given for its answer.
        assert (await session.exec("sleep 7", timeout_s=20)).exit_code == 0
        assert (await run(session, "x")).stdout == "6\n"


def few_processes(config: Config, backend_name: str) -> Config:
    if backend_name.startswith(("docker-runsc", "unsafe-local", "kubernetes", "e2b")):
        pytest.skip("no limit of processes is the sandbox's own there")
    limits = config.limits.model_copy(update={"pids": 96})
    return config.model_copy(update={"limits": limits})


async def test_a_fork_bomb_in_a_notebook_makes_room(config: Config, backend_name: str) -> None:
    few = few_processes(config, backend_name)
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: break"
    async with open_manager(few) as manager:
        session = await manager.session(CHAT)
        await run(session, "x = 1", "b")
        with anyio.fail_after(40):
            await run(session, bomb, timeout_s=2)
            assert (await session.exec("echo fine")).stdout == "fine\n"
            assert (await run(session, "x", "b")).stdout == "1\n"
            assert (await run(session, "2")).stdout == "2\n"


async def test_notebooks_outlive_a_call_that_finds_no_process(
    config: Config, backend_name: str
) -> None:
    few = few_processes(config, backend_name)
    fill = (
        "import os, time\n"
        "try:\n    while os.fork(): pass\n"
        "except OSError: print('full', flush=True)\n"
        "time.sleep(60)\n"
    )
    async with open_manager(few) as manager:
        session = await manager.session(CHAT)
        await run(session, "x = 1", "b")
        async with printing(session, ["python3", "-c", fill]):
            for name in ("c", "d"):
                with pytest.raises(SandboxError):
                    await run(session, "1", name)
        assert (await run(session, "x", "b")).stdout == "1\n"


async def test_a_process_that_a_cell_forks_lives_on_alone(session: Session) -> None:
    code = (
        "import os, time\nx = 1\n"
        "if not os.fork():\n    os.setsid()\n"
        "    while not os.path.exists('go'): time.sleep(0.01)\n"
        "    open('done', 'w').close()\n"
    )
    assert (await run(session, code)).success
    assert (await run(session, "x")).stdout == "1\n"
    wait = "until [ -e done ]; do sleep 0.01; done; rm go done"
    assert (await session.exec(f"touch go; {wait}", timeout_s=10)).success
    assert (await run(session, "x + 1")).stdout == "2\n"


async def test_cells_of_calls_at_once_follow_each_other(session: Session) -> None:
    await run(session, "import time\nseen = []")

    async def add(number: int) -> None:
        assert (await run(session, f"time.sleep(0.02)\nseen.append({number})")).success

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(add, number)
    assert (await run(session, "seen")).stdout == "[0, 1, 2, 3, 4]\n"


async def test_a_notebook_whose_cell_goes_on_refuses_a_second_one(session: Session) -> None:
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)"
    cell = (await session.run_code(wait, notebook="a", wait_s=0)).process
    with pytest.raises(Busy, match="notebook a still does a cell"):
        await run(session, "1")
    assert (await run(session, "2", "b")).stdout == "2\n"
    await session.write_file("go", b"")
    assert (await session.processes.wait(cell or "")).success


async def test_there_are_at_most_eight(session: Session) -> None:
    for name in "abcdefgh":
        await run(session, "1", name)
    with pytest.raises(Busy, match="a, b, c, d, e, f, g, h"):
        await run(session, "1", "c0")


async def test_what_cannot_be_a_notebook_is_said_to(manager: SessionManager) -> None:
    server = build_server(make_session_finder(one_chat(CHAT), manager.session))
    async with Client(server, mode="legacy") as client:
        for arguments, said in (
            ({"notebook": "../x"}, "notebook must be"),
            ({"notebook": "x" * 33}, "notebook must be"),
            ({"notebook": "a", "language": "javascript"}, "exec tty=true command=node"),
            ({"notebook": "a", "language": "bash"}, "exec shell=NAME"),
        ):
            result = await client.call_tool("run_code", {"code": "1", **arguments})
            assert result.is_error
            assert isinstance(result.content[0], TextContent)
            assert said in result.content[0].text


async def test_an_idle_notebook_is_no_background_but_what_it_left_running_is(
    session: Session,
) -> None:
    await run(session, "import subprocess")
    async with session._hold.open_sandbox() as held:

        async def runs(*expected: str) -> None:
            # What is killed, or just forked, shows for a moment.
            with anyio.fail_after(10):
                while True:
                    background = (await held.runtime.status()).background
                    if [each.command for each in background.processes] == [*expected]:
                        return

        await runs()
        await run(session, "child = subprocess.Popen(['sleep', '4322'])")
        await runs("sleep 4322")
        await run(session, "child.kill(); child.wait()")
        await runs()


LINES = st.lists(
    st.one_of(
        st.integers(-99, 99).map(lambda n: f"total += {n}"),
        st.text(string.ascii_letters + "äß€\n;!%'\"\\", max_size=8).map(lambda t: f"seen += {t!r}"),
        st.just("1 / 0"),
        st.just("print(total)"),
    ),
    max_size=6,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck])
@given(cells=st.lists(LINES, min_size=1, max_size=4))
async def test_cells_compute_what_one_python_computes(
    session: Session, cells: list[list[str]]
) -> None:
    """Compared with the same cells in one plain call, each up to its error."""
    begin = "total, seen = 0, ''"
    show = "print((total, seen))"
    code = [begin]
    for cell in cells:
        body = "".join(f"    {line}\n" for line in cell) or "    pass\n"
        code.append(f"try:\n{body}except ZeroDivisionError: pass")
    expected = (await session.run_code("\n".join([*code, show]))).stdout
    got = []
    for cell in [[begin], *cells, [show]]:
        result = await run(session, "\n".join(cell))
        assert result.success or "ZeroDivisionError" in result.stderr
        got.append(result.stdout)
    assert "".join(got) == expected


@settings(max_examples=30, deadline=None, suppress_health_check=[*HealthCheck])
@given(code=st.text("ab=1+()[]{}:;!%'\"\\\n #é", max_size=60))
async def test_any_text_is_a_cell(session: Session, code: str) -> None:
    await run(session, "kept = 1")
    result = await run(session, code, timeout_s=5)
    assert result.exit_code in (0, 1)
    assert (await run(session, "kept")).stdout == "1\n"


async def test_a_full_workspace_takes_no_figures_and_says_why(config: Config) -> None:
    small = config.workspace.model_copy(update={"size_limit": 2 * 1024**2, "min_free": 0})
    async with open_manager(config.model_copy(update={"workspace": small})) as manager:
        session = await manager.session(CHAT)
        await run(session, "class Dot:\n    def _repr_png_(self): return b'no picture'\nx = 1")
        assert len((await run(session, "Dot()")).figures) == 1
        await session.write_file("big", bytes(1_900_000))
        await session.exec("cat big > more")
        full = await run(session, "display(Dot()); x")
        assert "a figure could not be kept: the workspace is full: delete files" in full.stderr
        assert (full.figures, full.stdout[-2:]) == ((), "1\n")
        await session.exec("rm big more")
        with anyio.fail_after(20):
            while not (await run(session, "display(Dot())")).figures:
                await anyio.sleep(0.1)
        assert (await run(session, "open('new', 'w').write('again')")).stdout == "5\n"


async def test_a_cell_goes_on_beyond_its_call_and_its_figures_come_with_its_end(
    session: Session,
) -> None:
    await run(session, "class Dot:\n    def _repr_png_(self): return b'no picture'\nx = 1")
    wait = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.01)\nx = 2; Dot()"
    released = await session.run_code(wait, notebook="a", wait_s=0)
    assert released.running
    assert released.process
    with pytest.raises(Busy, match=released.process):
        await run(session, "x")
    (row,) = [row for row in await session.processes.list() if row.running]
    assert (row.id, row.of, row.running) == (released.process, "notebook a", True)
    await session.write_file("go", b"")
    ended = await session.processes.wait(released.process, wait_s=20)
    assert (ended.exit_code, ended.notebook, len(ended.figures)) == (0, "kept", 1)
    assert (await run(session, "x")).stdout == "2\n"


async def test_a_notebook_is_stopped_by_its_name(session: Session) -> None:
    await run(session, "x = 1")
    assert [row.id for row in await session.processes.list() if row.running] == ["a"]
    stopped = await session.processes.stop("a")
    assert (stopped.stopped, stopped.notebook) == (True, "ended")
    assert [row.id for row in await session.processes.list() if row.running] == []
    assert (await run(session, "'x' in dir()")).notebook == "new"
    released = await session.run_code("import time; time.sleep(60)", notebook="a", wait_s=0)
    stopped = await session.processes.stop("a", grace_s=1)
    assert (stopped.process, stopped.notebook) == (released.process, "ended")
