"""Runs a file as `__main__` in a process that was forked for it, and ends that process.

It ends as Python's own shutdown does as far as a program can tell: threads are waited for, exit
functions run, the objects of `__main__` are destroyed, every open file is flushed, the C library's
exit functions run. It leaves out taking modules apart: that takes longer than most programs do.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import sys
import types
from _frozen_importlib_external import SourceFileLoader

from mcp_sandbox.runner.kernel import processes
from mcp_sandbox.runner.kernel.native import signal
from mcp_sandbox.runner.workers.child import adapt_spawn
from mcp_sandbox.runner.workers.figures import Figures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
# What Python itself exits with when the last flush of its output fails.
_FLUSH_FAILED = 120
CODE_FD = 3
"""Where the process finds its code; it is closed before the code runs."""


def warm_up() -> None:
    """Touch the memory that every program needs: the fork copies it before there is code to run."""
    exec(compile("", "", "exec"), {})
    gc.collect()


def add_user_site() -> None:
    """Add the user's packages as Python does at its start: HOME was not yet the user's then."""
    import site  # noqa: PLC0415 - in every ordinary Python it is there already

    site.USER_BASE = site.USER_SITE = None
    known = site.removeduppaths()
    before = list(sys.path)
    site.addusersitepackages(known)
    added = [path for path in sys.path if path not in before]
    # The user's packages come before the system's.
    system = site.getsitepackages()
    first = next((i for i, path in enumerate(before) if path in system), len(before))
    sys.path[:] = [*before[:first], *added, *before[first:]]
    if site.ENABLE_USER_SITE:
        site.execusercustomize()


def see_new_packages() -> None:
    """Find the user's packages although their folder was made after this Python started."""
    user_site = sys.modules["site"].USER_SITE
    if user_site and user_site not in sys.path and os.path.isdir(user_site):
        add_user_site()


class _Imports:
    """Finds what other finders of `sys.meta_path` find, and adapts what is loaded by its name."""

    def __init__(self, figures: Figures) -> None:
        self._adapt = {"matplotlib.pyplot": figures.adapt, "multiprocessing.spawn": adapt_spawn}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ANN401
        if (adapt := self._adapt.get(name)) is None:
            return None
        others: Any = (each for each in sys.meta_path if each is not self)
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if loader := spec and spec.loader:
            execute = loader.exec_module
            loader.exec_module = lambda module: (execute(module), adapt(module))
        return spec


def run(path: str, workspace: str, base: str) -> None:
    """Run a file as `__main__` of the workspace, saving figures at `base`. Does not return."""
    shown, figures = os.path.join(workspace, os.path.basename(path)), Figures(base)
    main, held = begin([shown], os.getcwd(), figures)
    main.__file__, main.__loader__ = shown, SourceFileLoader("__main__", path)
    _end(_outcome(path, main), main, figures)
    del held


def begin(argv: list[str], first: str, figures: Figures) -> tuple[types.ModuleType, object]:
    """Return a new `__main__`, and the runner's modules, removed from `sys.modules`.

    Keep a reference to them: freeing them would copy memory shared with the worker.
    """
    sys.argv = argv
    sys.path[0] = first
    sys.meta_path.insert(0, _Imports(figures))
    ours = [name for name in sys.modules if name.partition(".")[0] == "mcp_sandbox"]
    held = [sys.modules.pop(name) for name in ours]
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins)
    sys.modules["__main__"] = main
    return main, held


def _outcome(path: str, main: types.ModuleType) -> int:
    """Return the exit code; negative for the signal that Python would end itself with."""
    try:
        with open(CODE_FD, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as exc:
        return exit_code(exc.code)
    except BaseException as exc:  # noqa: BLE001 - the user's own error, shown as Python shows it
        _show(exc)
        return -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def exit_code(code: object) -> int:
    """Return the exit code of a program that has raised SystemExit with this code."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)  # noqa: T201 - as Python does
    return 1


def _show(exc: BaseException) -> None:
    trace = exc.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(exc), exc.with_traceback(trace), trace)


def _end(code: int, main: types.ModuleType, figures: Figures) -> None:
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # noqa: SLF001 - what the interpreter calls
    # Before the exit functions, by which pyplot closes its figures.
    figures.end()
    atexit._run_exitfuncs()  # noqa: SLF001
    for name in [name for name in main.__dict__ if name != "__builtins__"]:
        main.__dict__[name] = None
    gc.collect()
    flushed = [flush(each) for each in gc.get_objects() if isinstance(each, _WRITERS)]
    if not all([flush(sys.stdout), flush(sys.stderr), *flushed]) and code == 0:
        code = _FLUSH_FAILED
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The C library's exit runs what C code has buffered or registered.
    processes.find_function("exit")(code)


def flush(file: object) -> bool:
    """Write the buffer; return False if the data is lost and the file was the program's stdout."""
    try:
        if isinstance(file, io.IOBase) and not file.closed and file.writable():
            file.flush()
    except (OSError, ValueError):
        # Its reader is gone, or it was detached or closed beneath.
        return file not in (sys.stdout, sys.__stdout__)
    return True
