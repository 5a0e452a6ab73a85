"""Small state files are damaged again and again under load: each call succeeds, each file stays."""

import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import anyio
import pytest
from anyio import to_thread

from tests.daemon.running import Client, Place, control, in_chat, listening, place, starting
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, if_whole

CHATS = ("a", "b", "c")
A_ROUND = 10
# What is no state: the chats' files, what sandboxes run from, sockets, and what was set aside.
_OTHER = ("workspace", "home", "trash", "claude", "skills", "projects", "sock")


def fill(path: Path, data: bytes) -> None:
    with path.open("r+b") as file:
        file.truncate(0)
        file.write(data)


def put_folder(path: Path, _random: Random) -> None:
    path.unlink()
    path.mkdir()


RUINS: dict[str, Callable[[Path, Random], None]] = {
    "cut off": lambda path, random: fill(path, path.read_bytes()[: random.randrange(60)]),
    "empty": lambda path, _: fill(path, b""),
    "random bytes": lambda path, random: fill(path, random.randbytes(random.randrange(1, 5000))),
    "no UTF-8": lambda path, _: fill(path, b'{"backend": "\xff\xfe"}'),
    "a folder": put_folder,
    "removed": lambda path, _: path.unlink(),
}


def state_files(data: Path) -> list[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(data / "sandbox"):
        inner[:] = [name for name in inner if name not in _OTHER and not name.startswith("runner-")]
        whole = [name for name in names if not name.endswith(".new") and ".damaged-" not in name]
        found += [path for name in whole if (path := Path(folder, name)).is_file()]
    return sorted(found)


@dataclass
class Load:
    """Clients that call without a pause; what their calls said."""

    place: Place
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHATS, 0))
    failed: list[str] = field(default_factory=list[str])
    told: set[str] = field(default_factory=set[str])
    log: list[str] = field(default_factory=list[str])
    last: str = ""
    turns: dict[str, anyio.Lock] = field(default_factory=lambda: {c: anyio.Lock() for c in CHATS})
    _done: anyio.Event = field(default_factory=anyio.Event)

    async def work(self, chat: str) -> None:
        async with in_chat(self.place, chat) as client:
            while True:
                async with self.turns[chat]:
                    await self._call(client, chat)

    async def _call(self, client: Client, chat: str) -> None:
        number = self.calls[chat] + 1
        result = await client.call("exec", command=f"touch f{number} && echo said-{number}")
        texts = [block["text"] for block in result["content"]]
        if result.get("isError") or f"said-{number}\n" not in texts:
            self.failed.append(f"after {self.last}: {texts}")
        self.told.update(text for text in texts if "was lost" in text)
        self.calls[chat] = number
        self._done.set()

    async def another_of_each(self) -> None:
        """Return when each chat has had a whole call from now on."""
        goal = {chat: count + 2 for chat, count in self.calls.items()}
        while any(self.calls[chat] < goal[chat] for chat in CHATS):
            self._done = anyio.Event()
            await self._done.wait()


@asynccontextmanager
async def served(where: Place, load: Load) -> AsyncGenerator[None]:
    """A daemon with clients that call; killed in the end."""
    async with starting(where) as daemon, anyio.create_task_group() as tasks:

        async def read() -> None:
            assert daemon.process.stderr
            async for data in daemon.process.stderr:
                load.log.append(data.decode())

        tasks.start_soon(read)
        await listening(where)
        async with anyio.create_task_group() as working:
            for chat in CHATS:
                working.start_soon(load.work, chat)
            yield
            working.cancel_scope.cancel()
        daemon.process.kill()
        tasks.cancel_scope.cancel()


def damage(data: Path, random: Random) -> str:
    path = random.choice(state_files(data))
    how = random.choice(tuple(RUINS))
    # What a server removed just now is damaged enough.
    with suppress(FileNotFoundError):
        RUINS[how](path, random)
    return f"{path.relative_to(data / 'sandbox')}: {how}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", [BUBBLEWRAP, if_whole(DOCKER)])
async def test_whatever_becomes_of_small_state_files_each_call_succeeds(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    random = Random(9)
    rounds = 10 if request.config.getoption("--whole") else 3
    where = place(tmp_path, backend)
    load = Load(where)
    done: list[str] = []

    async def strike() -> None:
        load.last = await to_thread.run_sync(damage, where.data, random)
        done.append(load.last)
        sys.stderr.write(f"{anyio.current_time():.2f} {load.last}\n")

    for number in range(rounds):
        with anyio.fail_after(120):
            if number:
                for _ in range(2):
                    await strike()
            async with served(where, load):
                await load.another_of_each()
                if not number:
                    # So that one chat at least has something to tell of.
                    async with load.turns["a"]:
                        fill(where.data / "sandbox/records/local/chat-a.json", b"")
                        await control(where, "stop", chat="a")
                    await load.another_of_each()
                while len(done) < (number + 1) * A_ROUND:
                    await strike()
                    if random.random() < 0.5:
                        # The next call of the chat has to find everything again.
                        chat = random.choice(CHATS)
                        async with load.turns[chat]:
                            await control(where, "stop", chat=chat)
                    await load.another_of_each()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{backend}: {len(done)} files damaged, {sum(load.calls.values())} calls, "
            f"{len(load.failed)} failed\n" + "".join(f"  {one}\n" for one in done)
        )
    assert load.failed == []
    assert load.told
    for chat, count in load.calls.items():
        files = set(os.listdir(where.data / f"sandbox/workspace/local/chat-{chat}"))
        assert files >= {f"f{number}" for number in range(1, count + 1)}
