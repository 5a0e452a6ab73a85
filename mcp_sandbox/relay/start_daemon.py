"""Starts the daemon, once however many relays want it at the same time."""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from mcp_sandbox.relay.place import (
    DaemonAddress,
    DaemonLink,
    DaemonUnavailable,
    NotRunning,
    dial,
    noted_variables,
    say,
    state_folder,
)

START_S = 90.0
"""How long a daemon may take until it listens. It may have to wait for one that is leaving."""
HAND_OVER_S = 30.0
_LOOK_EVERY_S = 0.02
_NAMES = {"PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "TMPDIR", "SSH_AUTH_SOCK", "S3_ENDPOINT"}
_PREFIXES = ("LC_", "XDG_", "DOCKER_", "KUBE", "MCP_SANDBOX_", "SSL_CERT_")


def start(place: DaemonAddress, *, replace: bool) -> DaemonLink:
    """Start a daemon and return a connection to it, or to the one that another relay started.

    With `replace` a running one of another version is asked to leave first.

    Raises DaemonUnavailable: it did not start; the message quotes its log.
    """
    try:
        os.makedirs(os.path.dirname(place.socket), mode=0o700, exist_ok=True)
        with _start_lock(place):
            return _running(place, replace=replace) or _started(place)
    except OSError as exc:
        raise DaemonUnavailable(
            f"cannot start a sandbox server: {exc}; correct that, or give another path with "
            "--socket or MCP_SANDBOX_SOCKET"
        ) from exc


@contextmanager
def _start_lock(place: DaemonAddress) -> Generator[None]:
    """Hold the lock of all relays that start a daemon for this socket."""
    path = f"{place.socket}.start"
    number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + HAND_OVER_S + START_S
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise DaemonUnavailable(
                    f"another `mcp-sandbox connect` has been starting a server for too long; see "
                    f"who holds {path} and end it"
                )
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        os.close(number)


def _running(place: DaemonAddress, *, replace: bool) -> DaemonLink | None:
    """Return a connection to a daemon that runs already, unless it makes room for a new one."""
    try:
        link = dial(place)
    except NotRunning:
        return None
    if not replace or link.version == place.version:
        return link
    try:
        _hand_over(place)
    except DaemonUnavailable as exc:
        say(
            f"the sandbox server of version {link.version} goes on, since it does not hand over "
            f"to {place.version}: {exc}; end it with `mcp-sandbox shutdown` to get the new one"
        )
        return link
    link.close()
    return None


def _hand_over(place: DaemonAddress) -> None:
    """Ask a daemon to leave its place. Raises DaemonUnavailable if it does not.

    It has closed its door and released its lock when it says that it has done so. It ends by
    itself when what runs has finished, and leaves its sandboxes to the next.
    """
    try:
        link = dial(place, place.line({"role": "control", "command": "hand-over"}))
    except NotRunning:
        return
    deadline = time.monotonic() + HAND_OVER_S
    try:
        while time.monotonic() < deadline:
            answer = json.loads(link.receive_line())
            if "error" in answer:
                raise DaemonUnavailable(str(answer["error"]))
            if "result" in answer:
                return
    except EOFError:
        return  # It has gone altogether.
    except (OSError, ValueError, TypeError) as exc:
        raise DaemonUnavailable(f"its answer was {exc}") from exc
    finally:
        link.close()
    raise DaemonUnavailable(f"it has not done so for {HAND_OVER_S:.0f} s")


def _started(place: DaemonAddress) -> DaemonLink:
    log = os.path.join(state_folder(), "daemon.log")
    os.makedirs(os.path.dirname(log), mode=0o700, exist_ok=True)
    if os.path.exists(log) and os.stat(log).st_size >= 4 << 20:
        os.replace(log, f"{log}.1")
    before = os.stat(log).st_size if os.path.exists(log) else 0
    process = _spawn(place, log)
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        try:
            return dial(place)
        except NotRunning:
            # Asked in this order: another daemon may be the reason why this one ended.
            if ended:
                raise DaemonUnavailable(_complaint(log, before, process.returncode)) from None
        time.sleep(_LOOK_EVERY_S)
    raise DaemonUnavailable(
        f"the sandbox server (pid {process.pid}) does not listen at {place.socket} after "
        f"{START_S:.0f} s; its log is {log}"
    )


def daemon_variables() -> dict[str, str]:
    """Return what a daemon has of the environment: the rest is a client's, with keys and tokens."""
    return {k: v for k, v in os.environ.items() if k in _NAMES or k.startswith(_PREFIXES)}


def _spawn(place: DaemonAddress, log: str) -> "subprocess.Popen[bytes]":
    """Start the daemon so that nothing ties it to this process: not its session, nor its folder."""
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "mcp_sandbox", "serve", "--socket", place.socket],
            stdin=subprocess.DEVNULL,
            stdout=number,
            stderr=number,
            cwd="/",
            env={**daemon_variables(), **noted_variables(place.socket)},
            start_new_session=True,
        )
    finally:
        os.close(number)


def _complaint(log: str, before: int, code: int) -> str:
    """Say that the daemon did not start, and show what it wrote since."""
    with open(log, "rb") as file:
        file.seek(max(before, os.stat(log).st_size - 4096))
        lines = file.read().decode(errors="replace").splitlines()[-15:]
    output = "\n".join(f"  {line}" for line in lines) or "  (nothing)"
    return f"the sandbox server did not start (exit code {code}). It wrote to {log}:\n{output}"
