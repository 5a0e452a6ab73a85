"""A Python that keeps its variables and runs one cell after another, each on pipes of its own.

All of it is the user's process: what a cell does to descriptors, modules or the socket to pid 1
(`notebooks` is the other end), it does to its own notebook.
"""

from __future__ import annotations

import _ast
import builtins
import os
import resource
import sys

from mcp_sandbox.runner.kernel.native import Socket, close, receive, send, signal
from mcp_sandbox.runner.wire.protocol import MAX_HEADER
from mcp_sandbox.runner.workers import figures, main_file, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_AWAITS = _ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_COROUTINE = 0x80  # A flag of code, as `inspect` names it.
_LONG = 2000
# What Python offers for magic commands of other notebooks.
_INSTEAD = {
    **dict.fromkeys(("time", "timeit"), "timeit.timeit()"),
    **dict.fromkeys(("bash", "sh", "ls", "cat", "pwd", "conda"), "!command"),
    "env": "os.environ",
    "run": "runpy.run_path()",
}
# In the format of linecache, which is loaded only after the first answer: it takes a while.
_sources: dict[str, Any] = {}


def run(job: dict[str, Any]) -> None:
    """Run cells until pid 1 closes the socket. Does not return."""
    control, notebook = Socket(fileno=main_file.CODE_FD), _Notebook(job["env"])
    os.set_inheritable(control.fileno(), False)
    pid, status = os.getpid(), 0
    while (cell := receive(control, MAX_HEADER + 4096, 4))[0]:
        if "ask" in cell[0]:
            send(control, {"e": "rests"}, [])
            continue
        answer = notebook.do(*cell)
        status = answer["status"] >> 8
        if os.getpid() != pid:
            # A process that the cell has forked ends with the cell.
            break
        send(control, answer, [])
        import traceback  # noqa: F401, PLC0415
    os._exit(status)


def _rest() -> None:
    """Drop what threads print between two cells, and ignore an interrupt that comes too late."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)


class _Notebook:
    def __init__(self, env: dict[str, str]) -> None:
        self._figures = figures.Figures()
        self._main, self._held = main_file.begin([""], "", self._figures)
        self._env, self._names, self._count = env, worker.SeenNames(), 0
        self._loop: Any = None
        builtins.__dict__.update(display=self._display, __magic__=_do_magic)
        _rest()

    def do(self, cell: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        """Run a cell, a file after its stdin, stdout and stderr; return the message of its end."""
        with open(fds.pop(), encoding="utf-8") as file:
            source = file.read()
        self._connect(fds)
        changed = {name: text for name, text in cell["env"].items() if self._env.get(name) != text}
        os.environ.update(changed)
        self._env = cell["env"]
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if cell["grow"] else 0, most))
        self._figures.base = cell["kept"]
        main_file.see_new_packages()
        self._names.begin(cell["workspace"])
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code = self._outcome(source)
        except BaseException:  # noqa: BLE001 - an interrupt as it ends, or nothing to print it on
            code = code or 1
        _rest()
        files = self._names.end(cell["workspace"])
        return {"e": "exit", "status": code << 8, "stays": False, **files}

    def _connect(self, fds: list[int]) -> None:
        for number, (fd, name) in enumerate(zip(fds, ("stdin", "stdout", "stderr"))):
            os.dup2(fd, number)
            # The built-in exit() closes stdin.
            if getattr(getattr(sys, name, None), "closed", True):
                setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
        close(fds)

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
        _sources[name] = (len(source), None, source.splitlines(keepends=True), name)
        if linecache := sys.modules.get("linecache"):
            linecache.cache.update(_sources)
        tree = _parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
        self._evaluate(tree, name, "exec")
        if last is None:
            return
        value = self._evaluate(_ast.Expression(last.value), name, "eval")
        line = source.encode().split(b"\n")[last.end_lineno - 1]
        if value is not None and not line[last.end_col_offset :].lstrip().startswith(b";"):
            self._main.__dict__["_"] = value
            self._display(value)

    def _evaluate(self, tree: Any, name: str, mode: str) -> Any:  # noqa: ANN401
        code = compile(tree, name, mode, _AWAITS, dont_inherit=True)
        value = eval(code, self._main.__dict__)
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
        """Print values as the value of a cell is printed: `display`, as other notebooks have it."""
        for value in values:
            if not self._draw(value):
                text, to_html = repr(value), getattr(type(value), "_repr_html_", None)
                html = to_html(value) if to_html and len(text) > _LONG else None
                if html and (path := self._figures.keep(html.encode(), "html")):
                    text = f"{text[:_LONG]}\n[… shortened; the whole as HTML: {path}]"
                sys.stdout.write(f"{text}\n")

    def _draw(self, value: Any) -> bool:  # noqa: ANN401
        """Save the picture that a value draws; return False if it draws none."""
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
    import linecache  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    linecache.cache.update(_sources)
    error = traceback.TracebackException(type(exc), exc, exc.__traceback__)
    first = next((at for at, each in enumerate(error.stack) if each.filename[:6] == "<cell "), 0)
    error.stack[:] = [each for each in error.stack[first:] if each.filename != __file__]
    sys.stderr.write("".join(error.format()))


def _parse(source: str, name: str) -> Any:  # noqa: ANN401
    """Parse the cell; lines with `!` and `%` that are not Python become calls of `__magic__`."""
    lines, flags = source.split("\n"), _AWAITS | _ast.PyCF_ONLY_AST
    try:
        return compile(source, name, "exec", flags, dont_inherit=True)
    except SyntaxError as exc:
        at = 0 if source.startswith("%%") else (exc.lineno or len(lines)) - 1
        rest = line = lines[at] if at < len(lines) else ""
        if line.lstrip()[:1] not in ("!", "%"):
            rest = line.partition("=")[2]
        if rest.lstrip()[:1] not in ("!", "%"):
            raise
    return _parse(_without_magic(lines, at, line[: -len(rest.lstrip())], name), name)


def _without_magic(lines: list[str], at: int, before: str, name: str) -> str:
    line, more = lines[at], at + 1
    while line.endswith("\\") and more < len(lines):
        line, lines[more], more = line + "\n" + lines[more], "", more + 1
    words = line[len(before) :].rstrip()
    word = words.split()[0]
    if word[0] == "%" and word not in ("%pip", "%cd", "%matplotlib"):
        way = _INSTEAD.get(word.lstrip("%"), "Python")
        text = f"{word} is not known here, use {way} (!command, %pip and %cd are known)"
        raise SyntaxError(text, (name, at + 1, 1, line))
    lines[at] = f"{before}__magic__({words!r}, {bool(before.strip())})"
    return "\n".join(lines)


def _do_magic(words: str, is_value: bool) -> list[str] | None:
    caller = sys._getframe(1)  # noqa: SLF001 - it has the variables
    words = _fill_in(words, {**caller.f_globals, **caller.f_locals})
    name, _, rest = words.partition(" ")
    if name == "%cd":
        os.chdir(os.path.expanduser(rest.strip() or "~"))
    elif name != "%matplotlib":
        command = ["/bin/bash", "-c", words[1:]]
        if name == "%pip":
            command[2:] = [f'exec "$0" -m {words[1:]}', sys.executable]
        sys.stdout.flush()
        back = [signal.SIGPIPE, signal.SIGXFSZ]
        out = os.memfd_create("out") if is_value else 1
        to = [(os.POSIX_SPAWN_DUP2, out, 1)]
        pid = os.posix_spawn(command[0], command, os.environ, file_actions=to, setsigdef=back)
        if status := os.waitpid(pid, 0)[1]:
            sys.stderr.write(f"[{name} ended with exit code {os.waitstatus_to_exitcode(status)}]\n")
        main_file.see_new_packages()
        if is_value:
            with open(out, "rb"):
                return os.pread(out, os.fstat(out).st_size, 0).decode(errors="replace").splitlines()
    return None


def _fill_in(words: str, names: dict[str, Any]) -> str:
    """Put the notebook's values in for `{n}` and `$n`; what is none of them is left to bash."""
    import re  # noqa: PLC0415 - seldom

    def look_up(found: Any) -> str:  # noqa: ANN401
        text = found[1] or found[2]
        try:
            code = compile(f"f{'{' + text + '}'!r}", "", "eval")
            loops = re.search(rf"\b(?:for|read) {found[1]}\b", words)
            known = names.keys() & {*code.co_names}
            return str(eval(code, names) if known and not loops else found[0])
        except Exception:  # noqa: BLE001 - it is no expression
            return str(found[0])

    return re.sub(r"(?<!\$)(?:\$([^\W\d]\w*)|\{([^{}]+)\})", look_up, words)
