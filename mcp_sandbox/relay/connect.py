"""`mcp-sandbox connect`: from the first instruction to the copying of bytes."""

import os
import select

# What `signal` is made of: its enumerations would take longer to load than the daemon to answer.
from _signal import SIGHUP, SIGINT, SIGTERM, signal  # type: ignore[import-not-found]

from mcp_sandbox.relay.place import (
    DaemonAddress,
    DaemonLink,
    DaemonUnavailable,
    NotRunning,
    dial,
    say,
)


def run(place: DaemonAddress) -> int:
    """Relay between stdin and stdout and the daemon; returns the exit code.

    0: the client has gone. 1: there was never a daemon.
    """
    for number in (SIGINT, SIGTERM, SIGHUP):
        # The daemon sees the closed connection and cancels what this client has running.
        signal(number, lambda *_: os._exit(0))
    # A standard descriptor that a client left closed would become our socket.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    link, early, failure = None, b"", ""
    try:
        link = reach_daemon(place, replace=True)
        early = _head_start(link)
    except DaemonUnavailable as exc:
        failure = str(exc)
        if not place.may_start:
            say(failure)
            return 1
    from mcp_sandbox.relay.copying import LineRelay

    copying = LineRelay(lambda: reach_daemon(place), link)
    if failure:
        copying.note_failure(failure)
    copying.note_sent(early)
    return copying.run()


def reach_daemon(place: DaemonAddress, *, replace: bool = False) -> DaemonLink:
    """Return a connection to the daemon, starting one where there is none.

    With `replace` one of another version is handed over. Only a relay that starts does that, so
    that relays of two versions cannot go on replacing each other's daemon.

    Raises DaemonUnavailable: there is none, and none could be started.
    """
    try:
        link = dial(place)
    except NotRunning as exc:
        if not place.may_start:
            raise NotRunning(
                f"{exc}; start one with `mcp-sandbox serve`, or leave out --no-start"
            ) from None
    else:
        if not (replace and place.may_start and link.version != place.version):
            return link
        link.close()
    from mcp_sandbox.relay.start_daemon import start

    return start(place, replace=replace)


def _head_start(link: DaemonLink) -> bytes:
    """Pass on what the client has said already; the rest of the relay is loaded meanwhile."""
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    if not waiting.poll(0):
        return b""
    data = os.read(0, 64 << 10)
    try:
        link.send_all(data[: data.rfind(b"\n") + 1])
    except OSError:
        return data  # The daemon has gone: `LineRelay` sees that and answers.
    return data
