"""One server with many chats: `python -m tests.kubernetes.simulation --chats 10000`.

The server's side is real, and a process of its own. The cluster is the fake one: pods of chats have
no processes, but for one that is called.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import anyio

from mcp_sandbox.app.chats import open_backend
from mcp_sandbox.backends.kubernetes.backend import KubernetesBackend
from mcp_sandbox.backends.kubernetes.objects import VOLUME, Made
from mcp_sandbox.backends.runner_copy import runner_digest
from mcp_sandbox.config import Config, load_config
from mcp_sandbox.models import SandboxSpec
from tests.backends.live import connected
from tests.kubernetes.cluster import Cluster, running

_CALLS = 200
_EVICTED = 1000
# What one answer has: to read it takes memory once, however many chats there are.
_CHUNK = 500
# An hour of a cluster whose watches last as much shorter than its 3,000 s.
_FASTER = 600
_HOUR_S = 3600


def _configured(data_root: Path) -> Config:
    news = {"data_dir": data_root, "backend": "kubernetes"}
    return load_config().config.model_copy(update=news)


class Server:
    """The process of the server, which does one order after another."""

    def __init__(self, data_root: Path) -> None:
        command = [sys.executable, "-m", "tests.kubernetes.simulation", "--serve", str(data_root)]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE, text=True)

    def do(self, order: str, *given: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([order, *given]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


async def _serve(data_root: Path) -> None:
    async with open_backend("kubernetes", _configured(data_root)) as backend:
        assert isinstance(backend, KubernetesBackend)
        orders: dict[str, Any] = {
            "list": _list,
            "ended": _ended,
            "make": _make,
            "call": _call,
            "pause": _pause,
        }
        while line := await anyio.to_thread.run_sync(sys.stdin.readline):
            name, *given = json.loads(line)
            sys.stdout.write(json.dumps(await orders[name](backend, *given)) + "\n")
            sys.stdout.flush()


async def _list(backend: KubernetesBackend) -> tuple[int, float, float]:
    """Return how many sandboxes are known, the seconds of that, and the memory in KiB."""
    began = time.monotonic()
    found = len(await backend.running())
    taken = time.monotonic() - began
    status = Path("/proc/self/status").read_text().split()
    return found, taken, float(status[status.index("VmRSS:") + 1])


async def _ended(backend: KubernetesBackend, pods: list[tuple[Any, str]]) -> float:
    """Return when the end of all these pods is known."""
    for name, uid in pods:
        look = partial(backend.why_ended, name, uid)
        assert await backend.space.until(look, 60) == "evicted"
    return time.monotonic()


async def _make(backend: KubernetesBackend) -> str:
    return (await backend.create(_spec("called"))).id


async def _call(backend: KubernetesBackend, name: Any, calls: int) -> None:
    async with connected(await backend.attach(name)) as runtime:
        for _ in range(calls):
            assert (await runtime.exec("true")).success


async def _pause(backend: KubernetesBackend, name: Any) -> None:
    await backend.pause(name)
    await backend.attach(name)


def _spec(chat: str) -> SandboxSpec:
    return SandboxSpec((), labels={"user": "tester", "chat": chat, "started": "1"}, idle_s=60)


async def _bodies(data_root: Path, chats: range) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of chats that a server of this data root has made before."""
    config = _configured(data_root)
    async with open_backend("kubernetes", config) as backend:
        assert isinstance(backend, KubernetesBackend)
        render, found = backend.renderer, []
        for number in chats:
            spec = _spec(f"chat-{number}")
            made = Made.of(spec, config.kubernetes.image, runner_digest())
            name = render.name(spec.labels)
            claim = render.owner(VOLUME, name, made)
            found += [("persistentvolumeclaims", claim), ("pods", render.pod(name, made))]
        return found


class Simulation:
    """A cluster with servers of one data root, one after another."""

    def __init__(self, fake: Cluster, data_root: Path, say: Callable[[str], object]) -> None:
        self._fake = fake
        self._data_root = data_root
        self._say = say
        self.figures: dict[str, float] = {}

    def run(self, chats: int) -> None:
        with closing(Server(self._data_root)) as server:
            self._call(server)
        self._populate(range(_CHUNK))
        with closing(Server(self._data_root)) as server:
            _, _, few_kib = server.do("list")
        self._populate(range(_CHUNK, chats))
        # The next server finds them all, as after a restart.
        self._fake.store.watch_s = 3000 / _FASTER
        with closing(Server(self._data_root)) as server:
            self._list(server, chats, few_kib)
            self._idle(chats)
            self._evict(server, min(chats, _EVICTED))

    def _note(self, name: str, value: float, words: str) -> None:
        self.figures[name] = value
        self._say(f"{value:12.4g}  {words}")

    @contextmanager
    def _requests(self, name: str, words: str, per: int = 1) -> Iterator[None]:
        before = len(self._fake.requests)
        yield
        self._note(name, (len(self._fake.requests) - before) / per, f"requests: {words}")

    def _call(self, server: Server) -> None:
        with self._requests("new", "the first chat of a server, with what is asked once"):
            called = server.do("make")
        with self._requests("channel", "a channel to a chat, with one call"):
            server.do("call", called, 1)
        with self._requests("calls", f"a channel, with {_CALLS} calls (no more)"):
            server.do("call", called, _CALLS)
        with self._requests("pause", "a chat is suspended and comes back (4)"):
            server.do("pause", called)

    def _populate(self, chats: range) -> None:
        self._fake.node.is_hollow = True
        for plural, body in anyio.run(_bodies, self._data_root, chats):
            self._fake.do(self._fake.store.add, plural, body)

    def _list(self, server: Server, chats: int, few_kib: float) -> None:
        found, taken, kib = server.do("list")
        assert found == chats + 1
        self._note("begin", taken, f"s: a server that begins knows {found} sandboxes")
        _, taken, _ = server.do("list")
        self._note("list", taken * 1000, "ms: all are listed once more")
        claims = self._fake.store.objects["persistentvolumeclaims"].values()
        record = len(json.dumps([each["metadata"]["annotations"] for each in claims])) / found
        self._note("record", record, "bytes: the record of a chat, in its object")
        beyond = (kib - few_kib) * 1024 / (chats - _CHUNK) - record
        self._note("memory", beyond, "bytes: memory of the server a chat beyond that (2048)")

    def _idle(self, chats: int) -> None:
        before = self._fake.store.version
        with self._requests("idle", "an idle chat and hour, for the watches (4)", per=chats):
            time.sleep(_HOUR_S / _FASTER)
        events = self._fake.store.version - before
        self._note("events", events, "events of the watches in that hour")

    def _evict(self, server: Server, most: int) -> None:
        metadata = [pod["metadata"] for pod in self._fake.store.objects["pods"].values()]
        evicted = [(each["name"], each["uid"]) for each in metadata[-most:]]
        before, began = self._fake.store.version, time.monotonic()
        for name, _ in evicted:
            self._fake.do(self._fake.node.end_pod, name, "Evicted")
        struck = time.monotonic()
        known = server.do("ended", evicted)
        events = self._fake.store.version - before
        self._note("struck", struck - began, f"s: {most} pods are evicted, {events} events")
        self._note("evictions", known - struck, "s: after the last of them, all are known")


def simulate(chats: int, say: Callable[[str], object]) -> dict[str, float]:
    """Return the figures by name, and say each as it is known."""
    with tempfile.TemporaryDirectory(prefix="mcp-") as folder:
        with running(Path(folder) / "cluster") as fake:
            simulation = Simulation(fake, Path(folder) / "data", say)
            simulation.run(chats)
            return simulation.figures


def main() -> None:
    """Serve, or simulate."""
    parser = argparse.ArgumentParser(prog="python -m tests.kubernetes.simulation")
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        anyio.run(_serve, given.serve)
    else:
        simulate(given.chats, print)


if __name__ == "__main__":
    main()
