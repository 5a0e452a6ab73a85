"""The runner as sandboxes get it: its files, and the environment of it and of its commands.

`install` copies the runner and the relay, and nothing else, to a directory that is named by their
contents and their Python: an update makes a new one, and running sandboxes keep theirs.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from mcp_sandbox.backends.sandbox_records import sandbox_user
from mcp_sandbox.durable import make_folder, publish_folder, set_aside
from mcp_sandbox.errors import BackendUnavailable, StorageUnavailable
from mcp_sandbox.models import HOME, PENDING_SIGNALS, PROGRAMS, SandboxSpec
from mcp_sandbox.runner.wire.protocol import UNWATCHED

PACKAGE = Path(__file__).parents[1]
_OLDEST = (3, 9)
_COMPILE_LIMIT_S = 60.0
_MARK = "digest"
MAIN = "mcp_sandbox/runner/__main__.py"
# The same in every sandbox, unless its configuration, a call or the code itself says otherwise.
USUAL = {
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    # What is printed is seen at once, and kept when the program is killed.
    "PYTHONUNBUFFERED": "1",
    # Into the home, as no other place can be written to; what they install is on PATH.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    **dict.fromkeys(("npm_config_prefix", "CARGO_INSTALL_ROOT"), f"{HOME}/.local"),
    **dict.fromkeys(("GOBIN", "PNPM_HOME"), f"{HOME}/.local/bin"),
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    **UNWATCHED,
}
# Where there is no network, trying again only takes time.
OFFLINE = {"PIP_RETRIES": "0", "npm_config_fetch_retries": "0"}
# /etc/gitconfig: a commit works at once; what a chat sets itself comes before it.
GITCONFIG = b"""[user]
\tname = Sandbox
\temail = sandbox@localhost
[init]
\tdefaultBranch = main
[safe]
\tdirectory = *
"""
_SHARED = ("LANG", "LC_", "TZ")
_NOWHERE = "/nonexistent"


def runner_sources() -> list[Path]:
    """Return the runner's source files, all below `PACKAGE`."""
    found = [*(PACKAGE / "runner").rglob("*.py"), *(PACKAGE / "runner").rglob("*.cjs")]
    return [*sorted(found), PACKAGE / "relay" / "inside.py"]


def digest_of(sources: Iterable[Path], top: Path = PACKAGE) -> str:
    """Return a digest of the names and contents of source files. Blocks."""
    digest = hashlib.sha256()
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.relative_to(top)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


@cache
def runner_digest() -> str:
    """Return the digest of the files when first read: an image carries it as a label."""
    return digest_of(runner_sources())


def install(data_root: Path, python: Path) -> Path:
    """Return the directory to show to sandboxes, making it when it is not there. Blocks.

    Raises BackendUnavailable if this Python cannot run the runner, StorageUnavailable.
    """
    sources, real = runner_sources(), python.resolve()
    state = real.stat()
    made_of = f"{real} {state.st_size} {state.st_mtime_ns} {digest_of(sources)}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:16]
    target = data_root / "sandbox" / f"runner-{digest}"
    try:
        mark = target / _MARK
        if mark.is_file() and mark.read_bytes() == _contents(target):
            return target
        make_folder(target.parent)
        # Sandboxes that run use it on, under its new name.
        set_aside(target, "not as it was copied")
        with tempfile.TemporaryDirectory(prefix=".runner-", dir=target.parent) as scratch:
            root = Path(scratch) / "root"
            for source in sources:
                copy = root / "mcp_sandbox" / source.relative_to(PACKAGE)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, copy)
            _compile(root, python)
            for path in (root, *root.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            (root / _MARK).write_bytes(_contents(root))
            publish_folder(root, target)
    except OSError as exc:
        raise StorageUnavailable(
            f"cannot copy the runner to {target} ({exc.strerror}): free space or set data_dir"
        ) from exc
    return target


def _contents(root: Path) -> bytes:
    found = [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != _MARK]
    return digest_of(found, root).encode()


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


def name_user(uid: int, gid: int) -> dict[str, str]:
    """Return the content of passwd and group for the user of a sandbox."""
    return {
        "passwd": f"sandbox:x:{uid}:{gid}:sandbox:{HOME}:/bin/bash\n"
        "root:x:0:0:root:/root:/usr/sbin/nologin\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"sandbox:x:{gid}:\nroot:x:0:\nnogroup:x:65534:\n",
    }


def list_process_limits(spec: SandboxSpec) -> dict[str, int]:
    """Return the limits of each process of a sandbox, by the names that Docker has for them."""
    limits = {
        "core": 0,
        "fsize": spec.limits.file_mb << 20,
        "memlock": 64 << 10,
        "msgqueue": 819_200,
        "nofile": spec.limits.open_files,
    }
    if sandbox_user(spec) != sandbox_user():
        # It counts by user, as nproc does: where all have one, it would hurt the neighbours.
        limits["sigpending"] = PENDING_SIGNALS
    return limits


def environment(spec: SandboxSpec, path: str) -> dict[str, str]:
    """Return the environment of commands; it has nothing of the server's own environment."""
    offline = OFFLINE if spec.network == "none" else {}
    found = {"PATH": path, **USUAL, **offline, **spec.env, "HOME": HOME}
    if any(mount.target == PROGRAMS for mount in spec.mounts):
        found["PATH"] = f"{PROGRAMS}/bin:{found['PATH']}"
    return found


def beside_pid_1(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for commands under other names, so that they do not affect pid 1.

    Its language and time zone are theirs; its home is nowhere, for it loads packages from there.
    """
    shared = {name: value for name, value in variables.items() if name.startswith(_SHARED)}
    renamed = {f"MCP_SANDBOX_ENV_{name}": value for name, value in variables.items()}
    return {**shared, "HOME": _NOWHERE, **renamed}
