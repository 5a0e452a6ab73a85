"""A whole run: many calls at once, many chats at once, load with kills, and the reckoning."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import anyio
from anyio import to_thread

from mcp_sandbox.app.chats import open_backend, open_manager
from mcp_sandbox.config import Config, SessionsConfig, load_config, server_variables
from mcp_sandbox.models import BackendName, ChatId
from mcp_sandbox.sessions.manager import SessionManager
from tests.e2e.endurance.chat import USER, Chat, text_of
from tests.e2e.endurance.places import Place
from tests.e2e.endurance.tally import Tally
from tests.e2e.endurance.worker import Worker

IDLE_S = 3
AT_ONCE = 50
_WORKERS = 5
_GONE_S = 60.0
_LATE_S = 60.0
_NOTE_EVERY_S = 0.5
_KINDS = ("runner", "container", "server")


@dataclass(frozen=True)
class Plan:
    """What to do for how long. `chats` are under random load while they are killed.

    So many chats as `crowd` are used at once before.
    """

    backend: BackendName
    data: Path
    seconds: float
    seed: int
    chats: int = 3
    crowd: int = 20
    mean_kill_s: float = 4.0
    networks: tuple[str, ...] = ("none",)


async def run(plan: Plan) -> tuple[Tally, dict[str, dict[str, int]]]:
    """Do all of it; returns the counts, and what was left at each moment looked at."""
    tally = Tally()
    place = Place(plan.data, plan.backend, set())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_watch, place)
        await _many_calls(plan, tally)
        await _many_chats(plan, tally)
        await _load(plan, place, tally)
        tasks.cancel_scope.cancel()
    return tally, await _reckoning(plan, place)


async def _config(plan: Plan) -> Config:
    flags = {"data_dir": str(plan.data), "backend": plan.backend}
    return (await to_thread.run_sync(load_config, None, flags)).config


async def _watch(place: Place) -> None:
    while True:
        await to_thread.run_sync(place.note)
        await anyio.sleep(_NOTE_EVERY_S)


async def _chat(plan: Plan, name: str, tally: Tally, network: str = "none") -> Chat:
    settings = {
        "MCP_SANDBOX_SESSIONS__ORPHANED": f"{IDLE_S}s",
        "MCP_SANDBOX_NETWORK": network,
    }
    command = [sys.executable, "-m", "mcp_sandbox", "stdio", "--user", USER, "--chat", name]
    command += ["--data", str(plan.data), "--backend", plan.backend]
    environment = {**await to_thread.run_sync(server_variables), **settings}
    return Chat(name, command, environment, tally, pid_file=plan.data.parent / f"{name}.pid")


async def _many_calls(plan: Plan, tally: Tally) -> None:
    """So many calls at once in one chat, in rounds; each answer must be its own."""
    chat = await _chat(plan, "many-calls", tally)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(chat.serve)
        rounds = max(2, int(plan.seconds // 30))
        for turn in range(rounds):
            async with anyio.create_task_group() as calls:
                for number in range(AT_ONCE):
                    calls.start_soon(_one_of_many, chat, f"{turn}-{number}", number)
        chat.stop()


async def _one_of_many(chat: Chat, nonce: str, number: int) -> None:
    path = f"many/{nonce}"
    if number % 3 == 0:
        result = await chat.call("exec", command=f"sleep 0.0{number}; echo {nonce}", timeout_s=60)
        right = result.content[0].text == f"{nonce}\n"
    elif number % 3 == 1:
        result = await chat.call("run_code", code=f"print({nonce!r})", timeout_s=60)
        right = result.content[0].text == f"{nonce}\n"
    else:
        await chat.call("write_file", path=path, content=nonce)
        right = text_of(await chat.call("read_file", path=path)) == f"     1\t{nonce}"
    if not right:
        chat.tally.fault("mixed-up replies", f"many calls: {nonce}")


async def _many_chats(plan: Plan, tally: Tally) -> None:
    """So many chats at once in one process, several calls at once in each."""
    sessions = SessionsConfig(max_open=plan.crowd)
    config = (await _config(plan)).model_copy(update={"sessions": sessions})
    async with open_manager(config) as manager:
        async with anyio.create_task_group() as tasks:
            for number in range(plan.crowd):
                for caller in range(3):
                    tasks.start_soon(_one_of_crowd, manager, f"crowd-{number}", caller, tally)


async def _one_of_crowd(manager: SessionManager, name: str, caller: int, tally: Tally) -> None:
    session = await manager.session(ChatId(USER, name))
    for turn in range(3):
        nonce = f"{name}-{caller}-{turn}"
        tally.count("calls", 3)
        await session.write_file(f"{caller}.txt", nonce.encode())
        told = [
            (await session.exec(f"cat {caller}.txt", timeout_s=60)).stdout,
            (await session.run_code(f"print(open('{caller}.txt').read())")).stdout.strip(),
        ]
        tally.count("answered", 3)
        if told != [nonce, nonce]:
            tally.fault("mixed-up replies", f"many chats: {told} instead of {nonce}")


async def _load(plan: Plan, place: Place, tally: Tally) -> None:
    """Random calls and random kills for the rest of the time; then every file is looked at."""
    random = Random(plan.seed)
    networks = plan.networks
    chats = [
        await _chat(plan, f"load-{number}", tally, networks[number % len(networks)])
        for number in range(plan.chats)
    ]
    workers = {
        chat: [Worker(chat, f"w{n}", Random(random.random())) for n in range(_WORKERS)]
        for chat in chats
    }
    end = anyio.current_time() + plan.seconds

    def goes_on() -> bool:
        # A busy machine may have had nothing to strike yet.
        late_s = anyio.current_time() - end
        struck = all(tally.counts[f"killed: {kind}"] for kind in _KINDS)
        return late_s < (0 if struck else _LATE_S)

    async with anyio.create_task_group() as servers:
        for chat in chats:
            servers.start_soon(chat.serve)
        async with anyio.create_task_group() as tasks:
            for chat, some in workers.items():
                tasks.start_soon(_kill_at_random, plan, place, chat, goes_on)
                for worker in some:
                    tasks.start_soon(_work, worker, goes_on)
        await _look_at_all(workers, tally)
        for chat in chats:
            chat.stop()


async def _work(worker: Worker, goes_on: Callable[[], bool]) -> None:
    while goes_on():
        await worker.step()


async def _kill_at_random(
    plan: Plan, place: Place, chat: Chat, goes_on: Callable[[], bool]
) -> None:
    random = Random(f"{plan.seed} {chat.name}")
    while True:
        await anyio.sleep(random.uniform(0.05, 2 * plan.mean_kill_s))
        if not goes_on():
            return
        # What was struck least is next, so that a short run strikes each.
        what = min(random.sample(_KINDS, 3), key=lambda kind: chat.tally.counts[f"killed: {kind}"])
        if what == "server":
            hit = chat.kill_server()
        else:
            chat.note_kill()
            kill = place.kill_runner if what == "runner" else place.kill_container
            hit = await to_thread.run_sync(kill, chat.name)
            # A call that came before the blow may have succeeded meanwhile.
            chat.note_kill()
        if hit:
            chat.tally.count(f"killed: {what}")


async def _look_at_all(workers: Mapping[Chat, list[Worker]], tally: Tally) -> None:
    """Twice may fail: the last kill may still be under way."""
    for chat, some in workers.items():
        for worker in some:
            for _ in range(3):
                if await worker.look():
                    break
            else:
                tally.fault("lost or wrong files", f"{chat.name}: the last look was not answered")


async def _reckoning(plan: Plan, place: Place) -> dict[str, dict[str, int]]:
    """What is left after the idle time, and after a server has swept up."""
    deadline = time.monotonic() + IDLE_S + _GONE_S
    while time.monotonic() < deadline:
        left = await to_thread.run_sync(place.remains)
        if not (left["processes"] or left["containers"]):
            break
        await anyio.sleep(0.5)
    async with open_backend(plan.backend, await _config(plan)) as backend:
        await backend.running()
    return {
        "after the idle time": left,
        "after a sweep": await to_thread.run_sync(place.remains),
    }
