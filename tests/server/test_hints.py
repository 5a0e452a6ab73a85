from dataclasses import replace

import pytest

from mcp_sandbox.models import ExecResult
from mcp_sandbox.server.tools.code import hints

FAILED = ExecResult(stdout="", stderr="", exit_code=1, duration_ms=7, offline=True)
MADE_BY = (
    "the operator can make an image for the docker backend that has {}, as docs/sandboxes.md says"
)


@pytest.mark.parametrize(
    "said",
    [
        'Get "https://proxy.golang.org/x/@v/list": dial tcp: lookup proxy.golang.org on [::1]:53: '
        "read: connection refused",
        "[6] Couldn't resolve host name (Could not resolve host: index.crates.io)",
        "Could not resolve host: github.com",
        "W: Failed to fetch http://x/InRelease  Temporary failure resolving 'x'",
        "psycopg2.OperationalError: connection failed: Network is unreachable",
        "npm error code EAI_AGAIN",
        "java.net.UnknownHostException: repo.maven.apache.org",
        "[ERROR] Could not transfer artifact: Unknown host repo.maven.apache.org",
        "[ERROR] No plugin found for prefix 'archetype' in the current project and in the plugin "
        "groups [org.apache.maven.plugins] available from the repositories",
        "Warning: unable to access index for repository https://cran.r-project.org/src/contrib:",
        "ERROR:  Could not find a valid gem 'rake' (>= 0), here is why: Unable to download data "
        "from https://rubygems.org/ - no such name (https://rubygems.org/specs.4.8.gz)",
        "curl: (7) Failed to connect to 192.0.2.1 port 80 after 1 ms: Couldn't connect to server",
    ],
)
async def test_a_failure_for_want_of_a_network_is_explained(said: str) -> None:
    [hint] = await hints(replace(FAILED, stderr=said), "", "bash")
    assert hint.startswith("this computer has no network: nothing can be downloaded")
    assert await hints(replace(FAILED, stderr=said, offline=False), "", "bash") == []
    assert await hints(replace(FAILED, stderr=said, exit_code=0), "", "bash") == []


@pytest.mark.parametrize(
    "said",
    [
        "curl: (7) Failed to connect to localhost port 9 after 0 ms: Couldn't connect to server",
        "Failed to connect to 127.0.0.1 port 5432",
        "connect ECONNREFUSED ::1:3000",
        "[!] RollupError: Could not resolve './App' from main.js",
        "ERESOLVE could not resolve",
        "No module named 'utils'",
        "No module named 'numpy.nothing'; 'numpy' is not a package",
        "No module named 'winreg'",
        "bash: line 1: deploy: command not found",
        "cat: make: No such file or directory",
        "error: command 'gcc' failed with exit code 1",
        "HTTP 404: not found",
    ],
)
async def test_a_mistake_of_the_code_is_left_to_it(said: str) -> None:
    assert await hints(replace(FAILED, stderr=said), "", "bash") == []


@pytest.mark.parametrize(
    ("code", "said", "exit_code"),
    [
        ("vim f", "Vim: Warning: Output is not to a terminal\n", 1),
        ("top", "top: failed tty get\n", 1),
        ("tmux", "open terminal failed: not a terminal\n", 1),
        ("stty size", "stty: 'standard input': Inappropriate ioctl for device\n", 1),
        ("gpg --gen-key", "gpg: cannot open '/dev/tty': No such device or address\n", 2),
        ("x = input('x? ')", "EOFError: EOF when reading a line\n", 1),
        ("getpass()", "    raise EOFError\nEOFError\n", 1),
        ("node ask.js", "TypeError: process.stdin.setRawMode is not a function\n", 1),
        ("read -p 'Name? ' name; echo $name", "", 0),
        ("read -r -sp 'Word: ' word", "", 1),
    ],
)
async def test_what_needs_a_terminal_says_how_it_gets_one(
    code: str, said: str, exit_code: int
) -> None:
    result = replace(FAILED, stderr=said, exit_code=exit_code)
    (hint,) = await hints(result, code, "bash")
    assert hint.startswith("this needs a terminal: exec tty=true, then process action=input ")
    assert await hints(replace(result, of="terminal"), code, "bash") == []
    assert await hints(replace(result, exit_code=0), "read -r p < file", "bash") == []


@pytest.mark.parametrize(
    "said",
    ["ModuleNotFoundError: No module named 'cv2'\n", "/usr/bin/python3: No module named cv2\n"],
)
async def test_a_missing_module_says_what_has_it(said: str) -> None:
    where = f"{MADE_BY.format('it')}; the skill python-data-analysis does without"
    assert await hints(replace(FAILED, stdout=said), "", "bash") == [
        f"cv2 is not installed: {where}"
    ]
    assert await hints(replace(FAILED, stderr=said, offline=False), "", "bash") == [
        f"cv2 is not installed: `pip install opencv-python-headless` may help, or {where}"
    ]


@pytest.mark.parametrize(
    ("said", "name", "offer"),
    [
        ("bash: line 1: gdb: command not found\n", "gdb", ""),
        ("sh: 1: cmake: not found\n", "cmake", ""),
        ("make: g++: No such file or directory\nmake: *** [all] Error 127\n", "g++", ""),
        ("error: command 'x86_64-linux-gnu-gcc' failed: No such file or directory\n", "gcc", ""),
        ('cgo: C compiler "gcc" not found: exec: "gcc": executable file not found', "gcc", ""),
        ("error: cannot run ssh: No such file or directory\nfatal: unable to fork", "ssh", ""),
        (
            "/usr/bin/env: \N{LEFT SINGLE QUOTATION MARK}cmake': No such file or directory\n",
            "cmake",
            "",
        ),
        ("Error: spawn gdb ENOENT\n", "gdb", ""),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'make'\n", "make", ""),
        (
            "bash: line 1: pytest: command not found\n",
            "pytest",
            "`pip install pytest` may help, or ",
        ),
        (
            "/usr/bin/python3: No module named pytest\n",
            "pytest",
            "`pip install pytest` may help, or ",
        ),
    ],
)
async def test_a_missing_program_says_what_has_it(said: str, name: str, offer: str) -> None:
    where = MADE_BY.format("it")
    assert await hints(replace(FAILED, stderr=said), "", "bash") == [
        f"{name} is not installed: {where}"
    ]
    assert await hints(replace(FAILED, stderr=said, offline=False), "", "bash") == [
        f"{name} is not installed: {offer}{where}"
    ]


async def test_several_that_are_missing_are_told_at_once() -> None:
    said = "bash: line 1: gdb: command not found\nNo module named 'docx'\nNo module named 'docx'\n"
    assert await hints(replace(FAILED, stderr=said, offline=False), "", "bash") == [
        "gdb, docx are not installed: `pip install python-docx` may help, or "
        + MADE_BY.format("them")
    ]


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("bash: line 1: chromium: command not found\n", "chromium"),
        ("Error: Cannot find module 'puppeteer'\n", "puppeteer"),
    ],
)
async def test_a_missing_browser_says_how_an_image_gets_one(said: str, name: str) -> None:
    assert await hints(replace(FAILED, stderr=said), "", "bash") == [
        f"{name} is not installed: {MADE_BY.format('a browser')}"
    ]
