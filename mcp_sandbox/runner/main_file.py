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

from mcp_sandbox.runner import processes
from mcp_sandbox.runner.native import signal

_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
# What Python itself exits with when the last flush of its output fails.
_FLUSH_FAILED = 120
CODE_FD = 3
"""Where the process finds its code; it is closed before the code runs."""


def warm_up() -> None:
    """Touch the memory that every program needs, so that it is our own copy before we are asked."""
    exec(compile("", "", "exec"), {})
    gc.collect()


def run(path: str) -> None:
    """Run the file, leaving nothing of ours in its way. Does not return."""
    sys.argv = [path]
    sys.path[0] = os.getcwd()
    # Out of sight, but held: to take them apart would copy memory that is shared with the seat.
    ours = [name for name in sys.modules if name.partition(".")[0] == "mcp_sandbox"]
    held = [sys.modules.pop(name) for name in ours]
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = main
    _end(_outcome(path, main), main)
    del held


def _outcome(path: str, main: types.ModuleType) -> int:
    """The exit code; negative for the signal that Python would end itself with."""
    try:
        with open(CODE_FD, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)
    except SystemExit as exc:
        return _exit_code(exc.code)
    except BaseException as exc:  # noqa: BLE001 - the user's own error, shown as Python shows it
        _show(exc)
        return -signal.SIGINT if isinstance(exc, KeyboardInterrupt) else 1
    return 0


def _exit_code(code: object) -> int:
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


def _end(code: int, main: types.ModuleType) -> None:
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()  # noqa: SLF001 - what the interpreter calls
    atexit._run_exitfuncs()  # noqa: SLF001
    for name in [name for name in main.__dict__ if name != "__builtins__"]:
        main.__dict__[name] = None
    gc.collect()
    flushed = [_flush(each) for each in gc.get_objects() if isinstance(each, _WRITERS)]
    if not all([_flush(sys.stdout), _flush(sys.stderr), *flushed]) and code == 0:
        code = _FLUSH_FAILED
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    # The C library's exit: what C code has buffered or registered gets its turn.
    processes.function("exit")(code)


def _flush(file: object) -> bool:
    try:
        if isinstance(file, io.IOBase) and not file.closed and file.writable():
            file.flush()
    except (OSError, ValueError):
        # Nobody reads it any more, or it was detached or closed beneath.
        return file not in (sys.stdout, sys.__stdout__)
    return True
