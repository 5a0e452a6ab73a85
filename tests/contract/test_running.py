"""Code and commands behave the same on every backend."""

from functools import partial
from typing import cast, get_args

import anyio
import pytest
from mcp import Client

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.errors import InvalidArgument, NotFound, Unsupported
from mcp_sandbox.models import Language
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.server import build_server
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract.conftest import CHAT
from tests.server.scripted import one_chat


@pytest.fixture
def manager(lasting: SessionManager) -> SessionManager:
    return lasting


@pytest.fixture
def session(emptied: Session) -> Session:
    return emptied


async def test_a_command_answers_with_its_output_and_exit_code(session: Session) -> None:
    result = await session.exec("echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
    assert result.signal is None
    assert not result.success


async def test_printing_nothing_is_a_normal_result(session: Session) -> None:
    result = await session.exec("true")
    assert (result.stdout, result.stderr, result.exit_code) == ("", "", 0)


async def test_a_list_of_arguments_runs_without_a_shell(session: Session) -> None:
    result = await session.exec(["printf", "%s|", "a b", "$HOME", "*"])
    assert result.stdout == "a b|$HOME|*|"


async def test_what_is_no_language_or_no_time_is_refused_before_it_runs(session: Session) -> None:
    with pytest.raises(InvalidArgument, match="python, bash, javascript"):
        await session.run_code("1", cast("Language", "ruby"))
    with pytest.raises(InvalidArgument, match="timeout_s"):
        await session.exec("true", timeout_s=-1)


async def test_a_command_that_is_not_installed_is_said_so(session: Session) -> None:
    with pytest.raises(Unsupported, match="no-such-program"):
        await session.exec(["no-such-program"])
    shell = await session.exec("no-such-program")
    assert shell.exit_code == 127
    assert "no-such-program: command not found" in shell.stderr


async def test_a_command_begins_in_the_workspace_and_in_a_directory_of_it(session: Session) -> None:
    await session.exec("mkdir -p sub && touch here sub/below")
    assert "here" in (await session.exec("ls")).stdout
    assert (await session.exec("ls", cwd="sub")).stdout == "below\n"
    with pytest.raises(NotFound, match="missing"):
        await session.exec("ls", cwd="missing")


async def test_a_command_reads_what_it_is_given_and_else_nothing(session: Session) -> None:
    assert (await session.exec("cat", stdin="given")).stdout == "given"
    assert (await session.exec("cat; echo end")).stdout == "end\n"


async def test_megabytes_go_through_a_command_unchanged(session: Session) -> None:
    data = bytes(range(256)) * 16_384
    result = await session.exec("cat > big; sha256sum < big; wc -c < big", stdin=data)
    assert str(len(data)) in result.stdout


async def test_a_command_gets_the_variables_it_is_given_and_no_others_of_ours(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "leaked")
    result = await session.exec("env", env={"MINE": "a b\nc"})
    assert "MINE=a b\nc" in result.stdout
    assert "SECRET" not in result.stdout
    assert "MCP_SANDBOX" not in result.stdout


async def test_a_script_of_a_megabyte_runs(session: Session) -> None:
    filler = ": " + "x" * 900_000
    assert (await session.exec(f"{filler}\necho done")).stdout == "done\n"


async def test_a_signal_that_ends_a_command_is_named(session: Session) -> None:
    result = await session.exec("kill -SEGV $$")
    assert (result.exit_code, result.signal) == (None, "SIGSEGV")


async def test_python_prints_and_exits_as_python_does(session: Session) -> None:
    result = await session.run_code("import sys\nprint(6*7)\nsys.exit(4)")
    assert (result.stdout, result.exit_code) == ("42\n", 4)
    said = await session.run_code("import sys\nsys.exit('sorry')")
    assert (said.stderr, said.exit_code) == ("sorry\n", 1)


async def test_a_python_traceback_shows_the_users_lines_only(session: Session) -> None:
    result = await session.run_code("def divide():\n    return 1 / 0\n\ndivide()")
    assert result.exit_code == 1
    assert "ZeroDivisionError: division by zero" in result.stderr
    assert "return 1 / 0" in result.stderr
    assert "mcp_sandbox" not in result.stderr


async def test_python_code_is_a_main_file_in_the_workspace(session: Session) -> None:
    code = (
        "import __main__, inspect, os, sys\n"
        "def shown(): return 'source'\n"
        "class Shown: 'source'\n"
        "print(inspect.getsource(shown).strip(), inspect.getsource(Shown).strip())\n"
        "print(__name__, sys.argv == [__file__] == [__main__.__file__])\n"
        "print(os.path.dirname(__file__) == os.getcwd(), os.path.exists(__file__))\n"
        "print([name for name in sys.modules if 'mcp_sandbox' in name])\n"
    )
    result = await session.run_code(code)
    assert result.stdout == (
        "def shown(): return 'source' class Shown: 'source'\n__main__ True\nTrue False\n[]\n"
    )
    assert result.changed_files == ()


_BESIDE = {
    "python": "import os, pathlib; os.chdir('/tmp')\n"
    "(pathlib.Path(__file__).parent / 'beside').touch()",
    "javascript": "process.chdir('/tmp')\n"
    "require('fs').writeFileSync(require('path').join(__dirname, 'beside'), '')",
    "bash": 'cd /tmp; touch "$(dirname "$0")/beside"',
}


@pytest.mark.parametrize("language", get_args(Language))
async def test_what_code_names_beside_itself_lies_in_the_workspace(
    session: Session, language: Language
) -> None:
    result = await session.run_code(_BESIDE[language], language)
    assert result.success, result.stderr
    assert result.changed_files == ("beside",)
    await session.delete_file("beside")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
async def test_processes_that_begin_anew_have_the_code_and_its_place(
    session: Session, method: str
) -> None:
    code = (
        "# coding: utf-8\n"
        "import inspect, multiprocessing, sys\n"
        "BESIDE = __file__\n"
        "class Of: pass\n"
        "def tell(way, deeper):\n"
        "    print(BESIDE == sys.argv[0], inspect.getsource(Of).strip(), flush=True)\n"
        "    if deeper: run(way, False)\n"
        "def run(way, deeper):\n"
        "    child = multiprocessing.get_context(way).Process(target=tell, args=(way, deeper))\n"
        "    child.start(); child.join(); print(child.exitcode, flush=True)\n"
        f"if __name__ == '__main__': run('{method}', True)\n"
    )
    result = await session.run_code(code)
    assert (result.stdout, result.stderr) == ("True class Of: pass\n" * 2 + "0\n" * 2, "")


RETURNS = {
    "a block": ("for a in 1 2; do\n  echo $a\ndone", "1\n2\n"),
    "a folder": ("mkdir -p dd\nls", "dd\n"),
    "a document": ("cat <<END\n$((1 + 1))\nEND\necho on", "2\non\n"),
    "literal documents": ("cat <<'E' - <<-\\F /dev/fd/0\nx\nE\n\ty\n\tF\necho on", "y\r\non\n"),
    "no documents": ("# <<'E'\necho \"<<'E'\"\necho $((1 << 2))\nE=1", "<<'E'\n4\n"),
}


@pytest.mark.parametrize("what", RETURNS)
async def test_carriage_returns_at_ends_of_lines_are_no_part_of_a_script(
    session: Session, what: str
) -> None:
    code, printed = RETURNS[what]
    code = code.replace("\n", "\r\n") + "\r\n"
    for result in (await session.exec(code), await session.run_code(code, "bash")):
        assert (result.stdout, result.stderr) == (printed, "")
        assert ["carriage returns" in line for line in result.shell] == [True]
    await session.exec("rm -rf dd")


async def test_carriage_returns_that_are_meant_are_kept(session: Session) -> None:
    result = await session.exec("cat <<'E'\na\r\nE\nprintf 'b\rc\n'")
    assert (result.stdout, result.shell) == ("a\r\nb\rc\n", ())


ENCODINGS = {
    "python": "# -*- coding: latin-1 -*-\nprint('é')\n# é\nraise ValueError('ü')  # ü",
    "python, second line": "#!/bin/python\r\n# vim: set fileencoding=utf-16 :\r\nprint('é')\r\n",
    "python, marked": "\ufeff# coding: ascii\nprint('é')",
    "python, no cookie": 'print("""é\n# coding: latin-1""", end="\\n")',
    "bash": "\ufeffecho é",
    "javascript": "\ufeffconsole.log('é')",
}


@pytest.mark.parametrize("what", ENCODINGS)
async def test_code_is_text_whatever_it_says_of_its_encoding(session: Session, what: str) -> None:
    code, language = ENCODINGS[what], cast("Language", what.partition(",")[0])
    result = await session.run_code(code, language)
    assert result.stdout == ("é\n" if "no" not in what else "é\n# coding: latin-1\n")
    assert result.success or "raise ValueError('ü')  # ü\n" in result.stderr


async def test_python_imports_what_lies_in_the_workspace(session: Session) -> None:
    await session.write_file("helper.py", b"answer = 42\n")
    assert (await session.run_code("import helper; print(helper.answer)")).stdout == "42\n"


_PLANT = """
folder=$(python3 -m site --user-site) && mkdir -p "$folder/beside"
echo "import sys; sys.planted = ['pth']" > "$folder/planted.pth"
echo "$folder/beside" >> "$folder/planted.pth"
echo "import sys; sys.planted.append(sys.path[-1])" > "$folder/usercustomize.py"
"""
_SHOW = """
import site, sys
print(sys.flags, sys.path, sys.prefix, sys.executable)
print(getattr(sys, "planted", "nothing"), site.ENABLE_USER_SITE, site.USER_BASE, site.USER_SITE)
print([(file.encoding, file.errors) for file in (sys.stdin, sys.stdout, sys.stderr)])
"""


async def test_python_code_runs_in_the_python_that_a_shell_would_start(session: Session) -> None:
    await session.write_file("show.py", _SHOW.encode())
    for prepare in ("true", _PLANT):
        await session.exec(prepare)
        await session.reset()
        by_shell = await session.exec("python3 show.py")
        assert by_shell.success, by_shell.stderr
        assert (await session.run_code(_SHOW)).stdout == by_shell.stdout


async def test_variables_of_the_operator_steer_the_python_of_code(config: Config) -> None:
    variables = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": "/workspace/first"}
    async with open_manager(config.model_copy(update={"env": variables})) as manager:
        session = await manager.session(CHAT)
        code = "import sys; print(sys.flags.dont_write_bytecode, '/workspace/first' in sys.path)"
        assert (await session.run_code(code)).stdout == "1 True\n"


async def test_nothing_of_one_python_call_is_left_for_the_next(session: Session) -> None:
    await session.run_code("import builtins, os\nbuiltins.spy = 1\nos.environ['SPY'] = '1'")
    result = await session.run_code(
        "import builtins, os\nprint(hasattr(builtins, 'spy'), 'SPY' in os.environ)"
    )
    assert result.stdout == "False False\n"


async def test_files_left_open_by_python_are_written_at_its_end(session: Session) -> None:
    await session.run_code("f = open('open.txt', 'w'); f.write('kept')")
    assert (await session.read_file("open.txt")).data == b"kept"


ENDINGS = [
    ("import sys; sys.exit()", "", 0),
    ("import sys; sys.exit(True)", "", 1),
    ("import sys; sys.exit(256 + 7)", "", 7),
    ("raise SystemExit(3)", "", 3),
    ("import atexit; atexit.register(print, 'at exit'); print('first')", "first\nat exit\n", 0),
    ("import ctypes; ctypes.CDLL(None).printf(b'from C\\n')", "from C\n", 0),
    ("class A:\n    def __del__(self): print('deleted')\na = A()", "deleted\n", 0),
    ("import os; os._exit(5)", "", 5),
    (
        "import threading, time\n"
        "def late(): time.sleep(0.2); print('thread')\n"
        "threading.Thread(target=late).start()\nprint('main')",
        "main\nthread\n",
        0,
    ),
    ("import sys; sys.stdout.write('no newline')", "no newline", 0),
]


async def test_python_ends_as_it_ends_anywhere(session: Session) -> None:
    for code, stdout, exit_code in ENDINGS:
        result = await session.run_code(code)
        assert (result.stdout, result.exit_code) == (stdout, exit_code), (code, result)


async def test_python_killed_by_a_signal_or_an_interrupt_says_so(session: Session) -> None:
    assert (await session.run_code("import os; os.abort()")).signal == "SIGABRT"
    interrupted = await session.run_code("raise KeyboardInterrupt")
    assert interrupted.signal == "SIGINT"
    assert "KeyboardInterrupt" in interrupted.stderr


async def test_a_module_of_the_user_writes_what_it_left_open(session: Session) -> None:
    await session.write_file("logs.py", b"f = open('log.txt', 'w'); f.write('flushed')")
    await session.run_code("import logs")
    assert (await session.read_file("log.txt")).data == b"flushed"


async def test_a_syntax_error_is_shown_with_its_line(session: Session) -> None:
    result = await session.run_code("x = (1,\n")
    assert result.exit_code == 1
    assert "SyntaxError" in result.stderr
    assert "mcp_sandbox" not in result.stderr


async def test_python_starts_processes_of_its_own(session: Session) -> None:
    code = (
        "import multiprocessing, subprocess\n"
        "def square(n): return n * n\n"
        "if __name__ == '__main__':\n"
        "    print(subprocess.run(['echo', 'child'], capture_output=True, text=True).stdout)\n"
        "    with multiprocessing.get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(square, [1, 2, 3]))\n"
    )
    result = await session.run_code(code)
    assert result.stdout == "child\n\n[1, 4, 9]\n", result.stderr


async def test_bash_code_runs(session: Session) -> None:
    assert (await session.run_code("echo $((6*7))", "bash")).stdout == "42\n"


async def test_javascript_runs_or_is_said_to_be_missing(session: Session) -> None:
    if (await session.exec("command -v node")).success:
        result = await session.run_code("console.log(6*7)", "javascript")
        assert result.stdout == "42\n", result.stderr
    else:
        with pytest.raises(Unsupported, match="node"):
            await session.run_code("console.log(6*7)", "javascript")


async def test_a_call_ends_with_its_command_though_a_child_holds_the_pipe(
    session: Session,
) -> None:
    with anyio.fail_after(20):
        result = await session.exec("(sleep 300; echo late) & echo now")
    assert result.stdout == "now\n"
    assert result.duration_ms < 10_000


async def test_what_runs_in_the_background_lives_on_and_may_print(session: Session) -> None:
    start = "(for i in 1 2 3; do echo $i; done; read x < go; echo alive > proof; echo > ready) &"
    await session.exec(f"mkfifo go ready; {start}")
    result = await session.exec("echo > go; read x < ready; cat proof", timeout_s=20)
    assert result.stdout == "alive\n"


async def test_a_server_inside_is_reached_over_the_sandboxs_own_loopback(session: Session) -> None:
    serve = "python3 -m http.server 0 --bind 127.0.0.1 2>/dev/null"
    script = (
        f"{serve} > >(sed -u 's/.*port //; s/ .*//' > port) & "
        "until [ -s port ]; do sleep 0.05; done; "
        "curl -sS -o /dev/null -w '%{http_code}' http://127.0.0.1:$(cat port)/; kill %1"
    )
    assert (await session.exec(script, env={"PYTHONUNBUFFERED": "1"}, timeout_s=30)).stdout == "200"


async def test_changed_files_are_named_and_new_ones_apart(
    session: Session, backend_name: str
) -> None:
    await session.write_file("old.txt", b"old")
    await session.exec("sleep 0.05")
    result = await session.exec("mkdir -p sub; echo 1 > sub/new.txt; echo 2 >> old.txt")
    assert result.changed_files == ("old.txt", "sub/new.txt")
    assert result.created_files == ("sub/new.txt",)
    assert backend_name.startswith(result.backend or "none")


async def test_long_output_keeps_both_ends_and_the_whole_in_a_file(session: Session) -> None:
    result = await session.exec("seq 1 200000")
    assert result.truncated
    assert result.stdout.startswith("1\n2\n")
    assert result.stdout.endswith("199999\n200000\n")
    assert result.output_file is not None
    page = await session.read_file(result.output_file, offset=150_000, limit=1)
    assert page.data.rstrip() == b"150000"


HOLDS = "import time; held = b'x' * ({mib} << 20); time.sleep(99)"
TWO = " & ".join([f'python3 -c "{HOLDS.format(mib=60)}"'] * 2)


@pytest.mark.parametrize(
    "command",
    [
        f'python3 -c "{HOLDS.format(mib=120)}"; echo after',
        f"{TWO}; wait",
        f"(setsid {TWO} & ); sleep 99",
        ["python3", "-c", HOLDS.format(mib=120)],
    ],
)
async def test_a_call_that_holds_more_memory_than_it_may_is_ended(
    session: Session, backend_name: str, command: str | list[str]
) -> None:
    if backend_name == "docker-runsc" and "setsid" in command:
        pytest.skip("in gVisor nothing says of whom a process is once its parent has ended")
    result = await session.exec(command, memory_mb=100, timeout_s=30)
    assert (result.out_of_memory, result.signal, result.timed_out) == (True, "SIGKILL", False)
    assert result.killed_because == "it held more memory than its memory_mb"
    assert not (await session.exec("pgrep -f '[h]eld ='", memory_mb=100)).success


async def test_memory_of_a_call_is_its_own(session: Session) -> None:
    killed = await session.run_code(HOLDS.format(mib=120), memory_mb=100, timeout_s=30)
    assert (killed.out_of_memory, killed.timed_out) == (True, False)
    too_much = await session.run_code("x = bytearray(500 << 20)", memory_mb=100)
    assert too_much.out_of_memory or "MemoryError" in too_much.stderr
    for run in (session.run_code, partial(session.run_code, memory_mb=200)):
        assert (await run("import time; x = b'x' * (120 << 20); time.sleep(0.5)")).success
    with pytest.raises(InvalidArgument, match="above 0"):
        await session.exec("true", memory_mb=0)


async def test_memory_that_processes_share_counts_once(session: Session, backend_name: str) -> None:
    if backend_name == "docker-runsc":
        pytest.skip("gVisor does not say what is shared")
    code = "x = b'x' * (60 << 20); [os.fork() for _ in range(2)]; time.sleep(1); os._exit(0)"
    assert (await session.run_code(f"import os, time; {code}", memory_mb=100)).success


async def test_the_kept_output_of_a_call_has_a_limit_of_its_own(session: Session) -> None:
    for mib, kept in ((0.5, 524_288), (1, 1_048_576), (100_000, 3_000_000)):
        result = await session.exec("head -c 3000000 /dev/zero", output_mb=mib)
        size = await session.exec(f"wc -c < {result.output_file}")
        assert (int(size.stdout), result.stdout_bytes) == (kept, 3_000_000)


async def test_output_comes_live_to_who_listens(session: Session) -> None:
    seen: list[bytes] = []
    first = anyio.Event()

    async def listen(_name: str, data: bytes) -> None:
        seen.append(data)
        first.set()

    async def answer() -> None:
        await first.wait()
        await session.write_file("go", b"")

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            wait = "echo first; until [ -e go ]; do sleep 0.01; done; echo second"
            result = await session.exec(wait, on_output=listen)
    assert result.stdout == "first\nsecond\n"
    assert b"".join(seen) == b"first\nsecond\n"


async def test_fifty_calls_at_once_each_get_their_own_answer(session: Session) -> None:
    answers: dict[int, str] = {}

    async def ask(number: int) -> None:
        if number % 2:
            result = await session.exec(f"echo {number}")
        else:
            result = await session.run_code(f"print({number})")
        answers[number] = result.stdout

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(ask, number)
    assert answers == {number: f"{number}\n" for number in range(50)}


async def test_code_may_do_what_it_likes_to_its_own_file(session: Session) -> None:
    own = "import os, sys\nown = sys._getframe().f_code.co_filename\n"
    assert (await session.run_code(f"{own}os.remove(own); os.mkdir(own)")).success
    assert (await session.run_code("print('fine')")).stdout == "fine\n"


async def test_no_variable_without_a_name_is_handed_on(session: Session) -> None:
    code = "import subprocess\nprint(subprocess.run(['env', '-0'], capture_output=True).stdout)"
    assert "\\x00\\x00" not in (await session.run_code(code)).stdout


@pytest.mark.parametrize(
    ("start", "notebook"),
    [
        ("subprocess.run(['env'])", None),
        ("os.execvp('env', ['env'])", None),
        ("subprocess.run([sys.executable, '-c', 'import os; os.system(\"env\")'])", None),
        ("os.system('env');", "n"),
    ],
)
async def test_programs_that_python_starts_get_the_variables_of_a_command(
    session: Session, start: str, notebook: str | None
) -> None:
    before = "import os, subprocess, sys\nos.environ['MINE'] = 'own'\n"
    said = (await session.run_code(f"{before}{start}", notebook=notebook)).stdout.split("\n")
    given = (await session.exec("env")).stdout.split("\n")
    own = ("PWD=", "SHLVL=", "_=", "OLDPWD=")
    assert {line for line in given if line and not line.startswith(own)} <= set(said)
    assert "MINE=own" in said


PRINTS = {
    "python": (
        "import os, time\nprint('begun')\nwhile not os.path.exists('seen'): time.sleep(0.01)"
    ),
    "bash": "echo begun; until [ -e seen ]; do sleep 0.01; done",
    "javascript": (
        "console.log('begun'); const fs = require('fs');"
        "while (!fs.existsSync('seen')) await new Promise(go => setTimeout(go, 10))"
    ),
}


async def test_what_code_prints_is_shown_while_it_runs(
    manager: SessionManager, session: Session
) -> None:
    """Through a client that asks for progress: the code ends only when its output was seen."""
    shown = list[str]()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        shown.append(message or "")
        if "begun" in shown:
            await session.write_file("seen", b"")

    server = build_server(make_session_finder(one_chat(CHAT), manager.session))
    with anyio.fail_after(50):
        async with Client(server, mode="legacy") as client:
            for language, code in PRINTS.items():
                shown.clear()
                arguments = {"code": code, "language": language, "timeout_s": 30}
                result = await client.call_tool(
                    "run_code", arguments, progress_callback=on_progress
                )
                assert not result.is_error
                assert "begun" in shown
                await session.delete_file("seen")
