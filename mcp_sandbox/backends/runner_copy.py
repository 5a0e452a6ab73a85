"""A copy of the runner under the data root, compiled for the Python that will run it.

Sandboxes get this directory, never the package: it holds the runner and the relay and nothing
else. Its name carries a digest of the sources and of the Python, so an update makes a new one and
running sandboxes keep theirs.
"""

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from mcp_sandbox.backends.records import make_private
from mcp_sandbox.backends.runner_sources import PACKAGE, digest_of, runner_sources
from mcp_sandbox.errors import BackendUnavailable, StorageUnavailable

_OLDEST = (3, 9)
_COMPILE_LIMIT_S = 60.0
MAIN = "mcp_sandbox/runner/__main__.py"


def install(data_root: Path, python: Path) -> Path:
    """Return the directory to show to sandboxes, making it when it is not there. Blocks.

    Raises:
        BackendUnavailable: this Python cannot run the runner.
        StorageUnavailable: the data root cannot be written.
    """
    sources = runner_sources()
    target = data_root / "sandbox" / _name(sources, python)
    if target.is_dir():
        return target
    try:
        make_private(target.parent)
        with tempfile.TemporaryDirectory(prefix=".runner-", dir=target.parent) as scratch:
            _fill(Path(scratch) / "root", sources, python)
            _rename_once(Path(scratch) / "root", target)
    except OSError as exc:
        raise StorageUnavailable(
            f"cannot copy the runner to {target} ({exc.strerror}): free space or set data_dir"
        ) from exc
    return target


def _name(sources: list[Path], python: Path) -> str:
    real = python.resolve()
    state = real.stat()
    made_of = f"{real} {state.st_size} {state.st_mtime_ns} {digest_of(sources)}"
    return f"runner-{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


def _fill(root: Path, sources: list[Path], python: Path) -> None:
    for source in sources:
        copy = root / "mcp_sandbox" / source.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    _compile(root, python)
    for path in (root, *root.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _compile(root: Path, python: Path) -> None:
    # Without the check of the sources' times a start saves a stat call for each module.
    program = (
        f"import sys; sys.version_info >= {_OLDEST} or sys.exit('too old: ' + sys.version);"
        "import compileall, py_compile;"
        "sys.exit(not compileall.compile_dir('.', quiet=1,"
        " invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))"
    )
    done = subprocess.run(  # noqa: S603 - the Python that the operator's machine runs sandboxes with
        [python, "-I", "-S", "-c", program],
        cwd=root,
        env={},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_COMPILE_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-300:]
        raise BackendUnavailable(
            f"{python} cannot run the runner ({said}): install Python "
            f"{'.'.join(map(str, _OLDEST))} or newer with its standard library"
        )


def _rename_once(made: Path, target: Path) -> None:
    try:
        made.rename(target)
    except OSError:
        # Another process may have been quicker; a directory in use is not replaced.
        if not target.is_dir():
            raise


def start_command(python: str, root: str) -> tuple[str, ...]:
    """The command that starts the runner of a copy."""
    return (python, "-I", "-S", os.path.join(root, MAIN))  # noqa: PTH118 - a path inside
