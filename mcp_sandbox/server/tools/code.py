"""Tools that run something: what the model reads of them, progress, and hints with a result.

The languages are `models.Language`; runner/calls/command.py has the command that runs each.
"""

import codecs
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Annotated, Any

import anyio
from anyio import to_thread
from mcp.types import CallToolResult
from pydantic import Field, StringConstraints

from mcp_sandbox.config.sections import CallsConfig
from mcp_sandbox.config.values import show_duration
from mcp_sandbox.models import ExecResult, Language
from mcp_sandbox.reading.commands import names
from mcp_sandbox.runtime.runtime import OnOutput
from mcp_sandbox.server.errors import sole_error
from mcp_sandbox.server.identity import Request
from mcp_sandbox.server.results import format_exec, with_notices
from mcp_sandbox.server.text import clean_output, clip
from mcp_sandbox.server.tool import (
    CHANGES,
    Code,
    Env,
    LanguageName,
    Path,
    SandboxTool,
    Text,
    build_tool,
    find_client_timeout,
)
from mcp_sandbox.sessions.session import Session

INTERVAL_S = 0.2
"""At most five messages a second."""
SILENCE_S = 10.0
"""Clients give up on a call they hear nothing of, so a silent one says that it is alive."""
_MAKING_S = 1.0
_MAX_KEPT = 8_000
_DECODER = codecs.getincrementaldecoder("utf-8")
# How programs say that there is no network, and what pip and apt say instead.
_UNREACHED = re.compile(
    r"Temporary failure (?:in name resolution|resolving)|Could(?: not|n't) resolve host|EAI_AGAIN"
    r"|ENETUNREACH|Network is unreachable|no servers could be reached|dial tcp: lookup "
    r"|Failed to connect to (?!localhost|127\.|0\.0\.0\.0|::1)|Unknown ?[hH]ost"
    r"|No plugin found for prefix|unable to access index for|Unable to download data from"
    r"|No matching distribution found for|TLS CA certificate bundle|/var/lib/(?:apt/|dpkg/lock)"
)
_OFFLINE = (
    "this computer has no network: nothing can be downloaded; sandbox_info lists what is installed"
)
_LACKING = re.compile(
    r"No module named '?(?P<python>\w{1,100})\b(?!\.)"
    r"|(?P<command>[\w.+-]{1,60})\W?: (?:command |executable file )?not found"
    r"|(?:make\S{0,5}: |env: .|cannot run |spawn |directory: '|command '(?:\w{1,20}-linux-gnu-)?)"
    r"(?P<program>[\w.+-]{1,60})(?:\W?(?: failed)?: No such file| ENOENT|'$)",
    re.ASCII | re.MULTILINE,
)
# Of what people often miss: modules that the skill python-data-analysis does without, others, the
# names by which pip has those that are called otherwise, and programs that an image alone can have.
_DATA = names(
    "cv2 duckdb imageio matplotlib networkx numpy openpyxl pandas plotly polars pyarrow scipy "
    "seaborn sklearn statsmodels tabulate"
)
_MODULES = _DATA | names(
    "aiohttp bs4 defusedxml docx docxtpl dotenv feedparser fitz httpx jinja2 lxml markitdown mypy "
    "pdf2image pdfplumber PIL pptx pypdf PyPDF2 pytesseract pytest reportlab requests rich ruff "
    "weasyprint xlsxwriter yaml"
)
_CALLED = {
    "bs4": "beautifulsoup4", "cv2": "opencv-python-headless", "docx": "python-docx",
    "dotenv": "python-dotenv", "fitz": "pymupdf", "PIL": "pillow", "pptx": "python-pptx",
    "sklearn": "scikit-learn", "yaml": "pyyaml",
}  # fmt: skip
_PROGRAMS = names(
    "cmake convert dot exiftool ffmpeg ffprobe g++ gcc gdb gs latexmk libreoffice magick make "
    "pandoc pdflatex pdftk pdftoppm pdftotext qpdf rsvg-convert Rscript scp soffice ssh tesseract "
    "xelatex"
)
_BROWSER = re.compile(
    r"\b(chrom\w{1,40}|google-chrome\S{0,40}|firefox)\b.{0,20}: (?:command )?not found"
    r"|Cannot find (?:module|package) '(playwright|puppeteer)\S{0,200}'"
)
# What belongs to a prompt or a notebook, and how interpreters refuse it.
_FOREIGN = re.compile(r"^(?:\$ |>>> |!\w+|%%?[a-z]{2,})", re.MULTILINE)
_REFUSED = re.compile("SyntaxError|syntax error|command not found|no job control|no such job")
_IPYTHON = re.compile("No module named 'IPython|name 'get_ipython' is not defined")
_DISPLAY = (
    "there is no IPython: in a notebook, display(value) needs no import and shows values, figures "
    "and PIL images; print() the text of HTML and Markdown, and see image files with read_file"
)
_FOR_PROMPTS = "{!r} is for prompts and notebooks: leave it out, and run shell commands with exec"
_IMAGE = (
    "{} not installed: {}the operator can make an image for the docker backend that has {}, as "
    "docs/sandboxes.md says"
)
_ASKS = re.compile(
    r"\bread (?:-\w{1,9} ){0,5}-\w{0,9}p\b|not (?:(?:to|from|on) )?a (?:terminal|tty)"
    r"|failed tty get|/dev/tty[':]|EOF when reading a line|\nEOFError\n|setRawMode is not"
    r"|Inappropriate ioctl"
)
_PRINTS = {"python": "print()", "javascript": "console.log()"}
Until = Annotated[
    str,
    StringConstraints(min_length=1, max_length=200),
    Field(description="Answer as soon as this text is printed."),
]
WAIT_S = 45
NotebookName = Annotated[
    str, Field(min_length=1, max_length=32, description="A name: there, Python's variables stay.")
]


@asynccontextmanager
async def live_progress(session: Session, request: Request) -> AsyncGenerator[OnOutput | None]:
    """Report what is fed to the yielded function while the body runs; None without a listener."""
    meta = request.request_context.meta
    if not meta or meta.get("progress_token") is None:
        yield None
        return
    progress = _Progress(session, request)
    with sole_error():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(progress.report)
            yield progress.take
            tasks.cancel_scope.cancel()


class _Progress:
    """The last output of a call, and the loop that sends it."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._request = request
        self._recent = b""
        self._arrived = anyio.Event()

    async def take(self, _stream: str, data: bytes) -> None:
        self._recent = (self._recent + data)[-_MAX_KEPT:]
        self._arrived.set()

    async def report(self) -> None:
        started = time.monotonic()
        while True:
            being_made = not self._session.is_open
            with anyio.move_on_after(_MAKING_S if being_made else SILENCE_S):
                await self._arrived.wait()
            elapsed_s = time.monotonic() - started
            message = f"running for {elapsed_s:.0f} s"
            if being_made:
                message = f"the sandbox is being made ({elapsed_s:.0f} s)"
            if self._arrived.is_set():
                self._arrived = anyio.Event()
                # The last character may have come in part only.
                text = _DECODER("replace").decode(self._recent)
                lines = [line for line in clean_output(text).splitlines() if line.strip()]
                message = clip("\n".join(lines[-3:]), 500) or message
            await self._request.report_progress(elapsed_s, message=message)
            await anyio.sleep(INTERVAL_S)


async def hints(result: ExecResult, code: str, language: Language) -> list[str]:
    """Return sentences for an agent about code that failed, or that showed nothing."""
    said = code if result.success else f"{code}\n{result.stderr}"
    if result.of not in ("terminal", "screen") and _ASKS.search(said[-9999:]):
        cell = "a cell reads no input: put values into its code; or " * bool(result.notebook)
        return [f"{cell}this needs a terminal: exec tty=true, then process action=input to type"]
    if not result.success:
        return await to_thread.run_sync(_hints, result, code)
    has_output = any((result.stdout, result.stderr, result.changed_files, result.figures))
    way = "" if has_output else _PRINTS.get(language)
    return [f"nothing was printed: show values with {way}"] if way else []


def _hints(result: ExecResult, code: str) -> list[str]:
    output = f"{result.stderr}\n{result.stdout}"
    found = _FOREIGN.search(code) if _REFUSED.search(result.stderr) else None
    lines = [_FOR_PROMPTS.format(found[0])] if found else []
    lines += [_DISPLAY] if _IPYTHON.search(result.stderr) else []
    lines += [_OFFLINE] if result.offline and _UNREACHED.search(output) else []
    if browser := _BROWSER.search(output):
        lines.append(_IMAGE.format(f"{browser[1] or browser[2]} is", "", "a browser"))
    return [*lines, *_lacking(output, offline=result.offline)]


def _lacking(output: str, *, offline: bool) -> list[str]:
    """Return what is to be done about the well-known modules and programs that are not there."""
    missing = list[str]()
    for found in islice(_LACKING.finditer(output), 20):
        name = found[found.lastgroup or 0]
        known = name in _MODULES or (name in _PROGRAMS and not found["python"])
        missing += [name] if known and name not in missing else []
    if not missing:
        return []
    of_pip = [_CALLED.get(name, name) for name in missing if name in _MODULES]
    way = "" if offline or not of_pip else f"`pip install {' '.join(of_pip)}` may help, or "
    plain = "; the skill python-data-analysis does without" if _DATA & {*missing} else ""
    said = f"{', '.join(missing)} {'are' if missing[1:] else 'is'}"
    return [_IMAGE.format(said, way, "them" if missing[1:] else "it") + plain]


async def shown(result: ExecResult) -> ExecResult:
    """Return the result; if its program draws, with the screen instead of what was sent."""
    return await to_thread.run_sync(_on_screen, result) if result.of == "screen" else result


def _on_screen(result: ExecResult) -> ExecResult:
    from mcp_sandbox.server.screen import on_screen  # noqa: PLC0415 - terminals alone need pyte

    return on_screen(result)


async def run_code(
    session: Session,
    request: Request,
    code: Code,
    *,
    language: LanguageName = "python",
    notebook: NotebookName | None = None,
    wait_s: float = WAIT_S,
    timeout_s: float | None = None,
) -> CallToolResult:
    """Run Python, bash or JavaScript code and see what it prints.

    Every call is a fresh process in /workspace: keep what you need in files, or name a notebook:
    in one, Python's variables stay for the next call, and the last value is shown. Use print() to
    see values; matplotlib figures are shown. JavaScript takes import, require and top-level await.
    Answers stdout, stderr, a non-zero exit code and the files created or changed. What takes longer
    than wait_s goes on in the background: see process.
    """
    async with live_progress(session, request) as on_output:
        result = await session.run_code(
            code,
            language,
            notebook=notebook,
            timeout_s=timeout_s,
            wait_s=wait_s,
            on_output=on_output,
            leave=find_client_timeout(request).leave,
        )
    notes = [] if notebook and result.success else await hints(result, code, language)
    return with_notices(format_exec(result), notes)


async def exec_(
    session: Session,
    request: Request,
    command: Code,
    *,
    cwd: Annotated[Path | None, Field(description="Default: /workspace.")] = None,
    env: Annotated[Env, Field(description="Additional variables.")] = None,
    stdin: Text | None = None,
    shell: Annotated[
        str | None, Field(min_length=1, max_length=32, description="Its memory is used and kept.")
    ] = None,
    tty: Annotated[bool, Field(description="On a terminal, for what asks or draws.")] = False,
    wait_s: float = WAIT_S,
    until: Until | None = None,
    timeout_s: float | None = None,
) -> CallToolResult:
    """Run a bash command line: pipes, git, builds, tests, servers, package managers.

    Each call is a new shell; with shell=NAME, directory, variables, functions and options carry
    over to the next call with that name, one call at a time. Answers stdout, stderr, a non-zero
    exit code and the files created or changed. What takes longer than wait_s goes on in the
    background, and you are told when it ends: see process. To start a server, set until to what
    it prints when it is ready, or wait_s to 0.
    """
    async with live_progress(session, request) as on_output:
        result = await session.exec(
            command,
            cwd=cwd,
            env=env,
            stdin=stdin,
            shell=shell,
            timeout_s=timeout_s,
            tty=tty,
            wait_s=wait_s,
            until=until,
            on_output=on_output,
            leave=find_client_timeout(request).leave,
        )
    notes = await hints(result, "" if stdin else command, "bash")
    return with_notices(format_exec(await shown(result)), notes)


def waits(longest_s: float) -> tuple[Any, float]:
    """Type and default of a parameter that says how long a call waits."""
    wait = Annotated[float, Field(ge=0, le=longest_s, description="Seconds to wait.")]
    return wait, min(WAIT_S, longest_s)


def code_tools(calls: CallsConfig, *, note: str) -> list[SandboxTool]:
    """Return run_code and exec; `note` is added to their descriptions."""
    anything = CHANGES.model_copy(update={"open_world_hint": True})
    tool = partial(build_tool, annotations=anything, note=note)
    wait = {"wait_s": waits(calls.longest_wait)}
    return [
        tool(run_code, title="Run code", bounds=wait | _limit(calls.code_timeout)),
        tool(exec_, title="Run a command", bounds=wait | _limit(calls.timeout)),
    ]


def _limit(default_s: float) -> dict[str, tuple[Any, None]]:
    about = f"Seconds until it is killed. Default: {show_duration(default_s)}, none with wait_s=0."
    return {"timeout_s": (Annotated[float, Field(ge=1, le=86_400, description=about)] | None, None)}
