"""Machines that are network namespaces on one switch, each with an engine of its own. Blocking."""

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.e2e.faults.engine import Engine, own_engine


@dataclass(frozen=True)
class Host:
    """Where a server runs: its address, and a process in its network; 0 is this one."""

    address: str = "127.0.0.1"
    pid: int = 0
    engine: Engine | None = None


@dataclass(frozen=True)
class Network:
    """Hosts on a switch, which this machine reaches, and is reached by, at `address`."""

    address: str
    hosts: tuple[Host, ...]
    switch: int = 0

    def plug(self, host: Host, *, in_: bool) -> None:
        """Plug the cable of a host in, or pull it: then nothing passes, and nobody is told."""
        link = f"port{self.hosts.index(host)}"
        _ip(self.switch, "link", "set", link, *(("master", "hub") if in_ else ("nomaster",)))


def _ip(pid: int, *words: str) -> None:
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words], check=True)


def _start_namespace(stack: ExitStack) -> int:
    """Make a network that lasts as long as the stack; return a process in it."""
    command = ["unshare", "--net", "sh", "-c", "ip link set lo up && echo ready && exec cat"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = stack.enter_context(subprocess.Popen(command, **pipes))  # type: ignore[call-overload]
    # It reads until then, so that it also ends when this process is killed.
    stack.callback(process.stdin.close)
    assert process.stdout.readline() == b"ready\n"
    return int(process.pid)


def _connect(switch: int, pid: int, port: str, address: str, name: str = "eth0") -> None:
    peer = ("peer", "name", port, "netns", str(switch))
    _ip(pid, "link", "add", name, "type", "veth", *peer)
    _ip(switch, "link", "set", port, "master", "hub", "up")
    _ip(pid, "address", "add", f"{address}/24", "dev", name)
    _ip(pid, "link", "set", name, "up")


@contextmanager
def open_network(count: int = 2) -> Iterator[Network]:
    """Open a network of hosts; it ends with the block, with all engines."""
    me = os.getpid()
    # Of addresses that are for trials of networks.
    prefix = f"198.{18 + me // 256 % 2}.{me % 256}"
    with ExitStack() as stack:
        switch = _start_namespace(stack)
        _ip(switch, "link", "add", "hub", "type", "bridge")
        _ip(switch, "link", "set", "hub", "up")
        _connect(switch, me, "port-here", f"{prefix}.1", f"mcs{me}")
        pids = [_start_namespace(stack) for _ in range(count)]
        for number, pid in enumerate(pids):
            _connect(switch, pid, f"port{number}", f"{prefix}.{number + 2}")
        threads = stack.enter_context(ThreadPoolExecutor(count))
        opened = [ExitStack() for _ in pids]
        stack.callback(lambda: list(threads.map(ExitStack.close, opened)))
        engines = threads.map(ExitStack.enter_context, opened, map(own_engine, pids))
        found = zip(pids, engines, strict=True)
        hosts = [Host(f"{prefix}.{at}", *each) for at, each in enumerate(found, 2)]
        yield Network(f"{prefix}.1", tuple(hosts), switch)
