"""A Python that keeps its variables: does one cell after another, each on pipes of its own.

All of it is the user's process: what a cell does to descriptors, modules or the socket to pid 1
(`cells` is the other end), it does to its own notebook.
"""

from __future__ import annotations

import _ast
import builtins
import linecache
import os
import sys
import traceback

from mcp_sandbox.runner import figures, main_file, worker
from mcp_sandbox.runner.native import Socket, close, receive, send, signal
from mcp_sandbox.runner.protocol import MAX_HEADER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_AWAITS = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = 0x80  # A flag of code, as `inspect` names it.
_LONG = 2000
# How Python does what other notebooks have a word for.
_INSTEAD = {
    **dict.fromkeys(("time", "timeit"), "timeit.timeit()"),
    **dict.fromkeys(("who", "whos"), "dir()"),
    **dict.fromkeys(("bash", "sh", "ls", "cat", "pwd", "conda"), "!command"),
    "env": "os.environ",
    "run": "runpy.run_path()",
    "writefile": "open()",
}


def run(job: dict[str, Any]) -> None:
    """Be the notebook that this process was forked for. Does not return."""
    control, shown = Socket(fileno=main_file.CODE_FD), figures.Figures()
    os.set_inheritable(control.fileno(), False)
    _rest()
    # Our modules are held by this frame.
    main, _held = main_file.begin([""], "", shown)
    notebook, pid, status = _Notebook(main.__dict__, shown, job), os.getpid(), 0
    # A process that a cell has forked ends with that cell.
    while os.getpid() == pid and (cell := receive(control, MAX_HEADER + 4096, 4))[0]:
        said = notebook.do(*cell)
        status = said["status"] >> 8
        if os.getpid() == pid:
            send(control, said, [])
    os._exit(status)


def _rest() -> None:
    """What threads print between two cells goes nowhere, and an interrupt comes too late."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


class _Notebook:
    def __init__(
        self, variables: dict[str, Any], shown: figures.Figures, job: dict[str, Any]
    ) -> None:
        self._variables = variables
        self._figures = shown
        self._env = job["env"]
        self._names = worker.Names()
        self._count = 0
        self._loop: Any = None
        builtins.__dict__.update(display=self._display, __magic__=_do_magic)

    def do(self, cell: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Do a cell, given as a file behind its stdin, stdout and stderr; how it has ended."""
        with open(fds.pop(), encoding="utf-8") as file:
            source = file.read()
        self._set_up(cell, fds)
        self._names.begin(cell["workspace"])
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = self._outcome(source)
        except BaseException:  # noqa: BLE001 - an interrupt as it ends, or nothing to print it on
            code = code or 1
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        changed, counts = self._names.end(cell["workspace"])
        _rest()
        ending = {"changed": changed, "counts": counts, "stays": False}
        return {"e": "exit", "status": code << 8, **ending}

    def _set_up(self, cell: dict[str, Any], fds: list[int]) -> None:
        for number, (fd, name) in enumerate(zip(fds, ("stdin", "stdout", "stderr"))):
            os.dup2(fd, number)
            # exit() closes the first.
            if getattr(getattr(sys, name), "closed", True):
                mode = "w" if number else "r"
                setattr(sys, name, os.fdopen(number, mode, closefd=False))
        close(fds)
        for name, value in cell["env"].items():
            if self._env.get(name) != value:
                os.environ[name] = value
        self._env = cell["env"]
        import resource  # noqa: PLC0415 - C, and not in every Python

        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if cell["grow"] else 0, most))
        self._figures.begin(figures.base_of(cell["workspace"], cell["name"]))
        main_file.see_new_packages()

    def _outcome(self, source: str) -> int:
        try:
            try:
                self._execute(source)
            finally:
                self._figures.end()
        except SystemExit as exc:
            return main_file.exit_code(exc.code)
        except BaseException as exc:  # noqa: BLE001 - the user's own error
            _show(exc)
            return 1
        finally:
            main_file.flush(sys.stdout)
            main_file.flush(sys.stderr)
        return 0

    def _execute(self, source: str) -> None:
        self._count += 1
        name = f"<cell {self._count}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        tree = _parse(source, name)
        last = tree.body[-1] if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        if last:
            tree.body.pop()
        self._evaluate(tree, name, "exec")
        if last:
            value = self._evaluate(_ast.Expression(last.value), name, "eval")
            lines = source.encode().split(b"\n")[(last.end_lineno or 1) - 1 :]
            silent = lines[0][last.end_col_offset :].lstrip().startswith(b";")
            if value is not None and not silent:
                self._variables["_"] = value
                self._display(value)

    def _evaluate(self, tree: Any, name: str, mode: str) -> Any:  # noqa: ANN401
        code = compile(tree, name, mode, _AWAITS, dont_inherit=True)
        value = eval(code, self._variables)
        return self._wait_for(value) if code.co_flags & _COROUTINE else value

    def _wait_for(self, coroutine: Any) -> Any:  # noqa: ANN401
        import asyncio  # noqa: PLC0415 - only for cells that await

        self._loop = self._loop or asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        finally:
            if task.cancel():
                self._loop.run_until_complete(asyncio.wait([task]))

    def _display(self, *values: object) -> None:
        """Show values as the value of a cell is shown; `display` of notebooks."""
        for value in values:
            if not self._draw(value):
                text, to_html = repr(value), getattr(type(value), "_repr_html_", None)
                html = to_html(value) if to_html and len(text) > _LONG else None
                if html and (path := self._figures.keep(html.encode(), "html")):
                    text = f"{text[:_LONG]}\n[… shortened; the whole as HTML: {path}]"
                sys.stdout.write(f"{text}\n")

    def _draw(self, value: Any) -> bool:  # noqa: ANN401
        """Keep the picture that a value is; False if it is none."""
        if type(value).__module__ == "matplotlib.figure" and hasattr(value, "savefig"):
            self._figures.save(value)
            return True
        for kind, suffix in (("png", "png"), ("jpeg", "jpg")):
            draw = getattr(type(value), f"_repr_{kind}_", None)
            data = draw(value) if draw else None
            if isinstance(data, bytes):
                return self._figures.keep(data, suffix) is not None
        return False


def _show(exc: BaseException) -> None:
    """Print the user's own error with the user's own frames."""
    shown = traceback.TracebackException(type(exc), exc, exc.__traceback__)
    mine = [at for at, frame in enumerate(shown.stack) if frame.filename.startswith("<cell ")]
    frames = shown.stack[mine[0] if mine else 0 :]
    shown.stack[:] = [frame for frame in frames if frame.filename != __file__]
    sys.stderr.write("".join(shown.format()))


def _parse(source: str, name: str) -> Any:  # noqa: ANN401
    """The cell as a syntax tree; where it is no Python, lines with `!` and `%` are put into it."""
    lines, flags = source.split("\n"), _AWAITS | _ast.PyCF_ONLY_AST
    try:
        return compile(source, name, "exec", flags, dont_inherit=True)
    except SyntaxError as exc:
        at = 0 if source.startswith("%%") else (exc.lineno or len(lines)) - 1
        if at >= len(lines) or lines[at].lstrip()[:1] not in ("!", "%"):
            raise
    return _parse(_without_magic(lines, at, name), name)


def _without_magic(lines: list[str], at: int, name: str) -> str:
    line, more = lines[at], at + 1
    while line.endswith("\\") and more < len(lines):
        line, lines[more], more = line + "\n" + lines[more], "", more + 1
    words = line.strip()
    word = words.split()[0]
    if word[0] == "%" and word not in ("%pip", "%cd", "%matplotlib"):
        way = _INSTEAD.get(word.lstrip("%"), "Python")
        text = f"{word} is not known here, use {way} (!command, %pip and %cd are known)"
        raise SyntaxError(text, (name, at + 1, 1, line)) from None
    lines[at] = f"{line[: -len(line.lstrip())]}__magic__({words!r})"
    return "\n".join(lines)


def _do_magic(words: str) -> None:
    name, _, rest = words.partition(" ")
    if name == "%cd":
        os.chdir(os.path.expanduser(rest.strip() or "~"))
    elif name != "%matplotlib":
        command = ["/bin/bash", "-c", words[1:]]
        if name == "%pip":
            command[2:] = [f'exec "$0" -m {words[1:]}', sys.executable]
        sys.stdout.flush()
        back = [signal.SIGPIPE, signal.SIGXFSZ]
        pid = os.posix_spawn(command[0], command, os.environ, setsigdef=back)
        if status := os.waitpid(pid, 0)[1]:
            sys.stderr.write(f"[{name} ended with exit code {os.waitstatus_to_exitcode(status)}]\n")
        main_file.see_new_packages()
