"""Figures of Python code come as pictures, on every backend."""

import base64
from collections.abc import AsyncGenerator

import anyio
import pytest
from mcp import Client
from mcp.types import CallToolResult, ImageContent, TextContent

from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import make_session_finder
from mcp_sandbox.server.results import RESULT_KEY, inspect
from mcp_sandbox.server.server import build_server
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from tests.contract import plotting
from tests.server.scripted import one_chat

PLOTTER = ChatId("tester", "plots")
PLOT = "import matplotlib.pyplot as plt\n"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
async def session(lasting: SessionManager, tmp_path_factory: pytest.TempPathFactory) -> Session:
    """A chat whose home has matplotlib."""
    session = await lasting.session(PLOTTER)
    await plotting.install(session, tmp_path_factory.getbasetemp() / "wheels")
    return session


@pytest.fixture
async def client(lasting: SessionManager, session: Session) -> AsyncGenerator[Client]:
    server = build_server(make_session_finder(one_chat(PLOTTER), lasting.session))
    async with Client(server, mode="legacy") as client:
        yield client


def pictures(result: CallToolResult) -> list[tuple[int, int]]:
    """Return the sides of the pictures; each is whole."""
    found = []
    for block in result.content:
        if isinstance(block, ImageContent):
            data = base64.b64decode(block.data)
            picture = inspect("a figure", data, len(data))
            assert picture.mime == block.mime_type
            assert not picture.fault
            found.append((picture.width, picture.height))
    return found


def said(result: CallToolResult) -> str:
    texts = (block.text for block in result.content if isinstance(block, TextContent))
    return "\n".join(texts).strip()


async def run(client: Client, code: str, **more: object) -> CallToolResult:
    result = await client.call_tool("run_code", {"code": code, "timeout_s": 60, **more})
    assert not result.is_error, result
    return result


SIZES = "for side in (2, 3, 4):\n    plt.figure(figsize=(side, 2))\n    plt.plot([1, side])\n"


@pytest.mark.parametrize("ending", ["", "    plt.show()\n", "plt.show()\nprint('after')\n"])
async def test_figures_come_in_order_shown_or_left_open(client: Client, ending: str) -> None:
    result = await run(client, PLOT + SIZES + ending)
    assert pictures(result) == [(200, 200), (300, 200), (400, 200)]
    assert result.meta is not None
    assert len(result.meta[RESULT_KEY]["figures"]) == 3
    assert isinstance(result.content[0], TextContent)


async def test_code_without_figures_imports_nothing_for_them(client: Client) -> None:
    code = (
        "import sys\nprint([name for name in sys.modules if 'plot' in name or 'figures' in name])"
    )
    assert said(await run(client, code)) == "[]"


async def test_a_program_that_the_code_starts_inherits_no_setting(client: Client) -> None:
    code = PLOT + "plt.figure()\nplt.close()\nimport os, subprocess\n"
    code += "print(plt.get_backend().lower(), [each for each in os.environ if 'MPL' in each])"
    assert "agg []" in said(await run(client, code))


async def test_the_code_may_choose_another_way_to_draw(client: Client) -> None:
    code = "import matplotlib\nmatplotlib.use('svg')\n" + PLOT + "plt.plot([1])\n"
    result = await run(client, code + "print(plt.get_backend())")
    assert "svg" in said(result)
    assert pictures(result) == [(640, 480)]


async def test_a_huge_figure_is_drawn_with_fewer_dots(client: Client) -> None:
    code = PLOT + "import random\nplt.figure(figsize=(60, 90), dpi=300)\n"
    noise = "plt.imshow([[random.random() for _ in range(900)] for _ in range(900)])\n"
    result = await run(client, code + noise)
    [(width, height)] = pictures(result)
    assert height <= 2000
    assert abs(width / height - 2 / 3) < 0.01


async def test_figures_of_code_that_fails_or_exits_are_shown(client: Client) -> None:
    for ending in ("1 / 0", "import sys; sys.exit(3)"):
        result = await run(client, PLOT + "plt.plot([1])\n" + ending)
        assert len(pictures(result)) == 1


async def test_a_figure_that_cannot_be_drawn_is_named_and_the_others_are_shown(
    client: Client,
) -> None:
    code = PLOT + "plt.title('$\\\\frac$')\nplt.figure()\nplt.plot([1])\nprint('end')"
    result = await run(client, code)
    assert len(pictures(result)) == 1
    assert "could not be drawn: ValueError" in said(result)


async def test_a_loop_that_pauses_shows_what_it_ends_with(client: Client) -> None:
    code = PLOT + "for n in range(5):\n    plt.plot([n, 1])\n    plt.pause(0.01)\n"
    assert len(pictures(await run(client, code))) == 1


async def test_more_than_ten_figures_are_named(client: Client) -> None:
    code = PLOT + "for n in range(13):\n    plt.figure(figsize=(1, 1), num=n + 1)\n"
    result = await run(client, "import warnings; warnings.simplefilter('ignore')\n" + code)
    assert len(pictures(result)) == 10
    assert "3 further figures" in said(result)
    assert result.meta is not None
    last = result.meta[RESULT_KEY]["figures"][-1]
    assert last in said(result)
    shown = await client.call_tool("read_file", {"path": last})
    assert len(pictures(shown)) == 1


async def test_a_child_process_shows_figures_too_but_none_twice(client: Client) -> None:
    code = PLOT + (
        "import os\nplt.plot([1])\n"
        "if not os.fork():\n    plt.figure(figsize=(2, 2))\n    plt.close(1)\n    plt.show()\n"
        "else:\n    os.wait()\n"
    )
    assert sorted(pictures(await run(client, code))) == [(200, 200), (640, 480)]


HOSTILE = {
    "a link out": "os.symlink('/etc/passwd', name(1))",
    "a dangling link": "os.symlink('/nowhere', name(1))",
    "a pipe": "os.mkfifo(name(1))",
    "a directory": "os.mkdir(name(1))",
    "no picture": "open(name(1), 'w').write('text')",
    "half a picture": "open(name(1), 'wb').write(b'\\x89PNG\\r\\n\\x1a\\n' + bytes(9000))",
    "a large file": "open(name(1), 'wb').truncate(1 << 33)",
    "many": "for n in range(1, 20000): os.symlink('x', name(n))",
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_what_code_puts_in_the_place_of_figures_harms_nothing(
    client: Client, what: str
) -> None:
    code = (
        "import os, sys\n"
        "folder = os.path.expanduser('~/.mcp-sandbox/output')\n"
        "os.makedirs(folder, exist_ok=True)\n"
        "call = os.path.basename(__file__)[4:-3]\n"
        "def name(n): return f'{folder}/{call}-{n}.png'\n"
    )
    with anyio.fail_after(30):
        result = await run(client, code + HOSTILE[what])
    assert pictures(result) == []
    assert "root:" not in said(result)
    assert said(await run(client, "print('fine')")) == "fine"
    await client.call_tool("exec", {"command": "rm -rf ~/.mcp-sandbox"})


async def test_nothing_that_is_kept_lies_in_the_workspace(client: Client, session: Session) -> None:
    await session.exec("rm -rf * .[!.]*")
    await run(client, PLOT + "plt.plot([1])")
    await run(client, PLOT + "plt.plot([1])", notebook="main")
    for shell in (None, "build"):
        assert (await session.exec("seq 1 9000", shell=shell)).output_file
    assert (await session.exec("ls -A")).stdout == ""
    cloned = await session.exec("git init -q ~/source && git clone -q ~/source .")
    assert cloned.success, cloned.stderr


async def test_figures_of_a_notebook_come_with_their_cell(client: Client) -> None:
    cells = [
        (PLOT, []),
        ("plt.figure(figsize=(2, 2))\nplt.show()\nplt.figure(figsize=(3, 2)); 1", [200, 300]),
        ("fig = plt.figure(figsize=(4, 2))\nfig", [400]),
        ("print('none')", []),
        ("display(fig)\nplt.figure(figsize=(5, 2))\n1 / 0", [400, 500]),
        ("from PIL import Image\nImage.new('RGB', (7, 8))", [7]),
    ]
    for code, widths in cells:
        result = await run(client, code, notebook="plots")
        assert [width for width, _ in pictures(result)] == widths, code
    large = await run(client, "Image.new('RGB', (2001, 8))", notebook="plots")
    assert pictures(large) == []
    assert "a large figure: read_file path=" in said(large)


async def test_a_long_table_is_saved_as_html(client: Client, session: Session) -> None:
    code = (
        "import pandas\npandas.options.display.max_columns = 99\n"
        "pandas.DataFrame([[row * column for column in range(99)] for row in range(90)])"
    )
    text = said(await run(client, code, notebook="tables"))
    path = text.rpartition("HTML: ")[2].partition("]")[0]
    assert b"<table" in (await session.read_file(path)).data
    short = said(await run(client, "pandas.DataFrame([[1, 2]])", notebook="tables"))
    assert "HTML" not in short
