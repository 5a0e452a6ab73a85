"""Two servers with one data directory: a chat goes on at another, and nothing is restored."""

import json
import logging
import re
import time
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from redis.asyncio import Redis

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config, FleetConfig
from mcp_sandbox.doctor.machine import examine_fleet
from mcp_sandbox.errors import ConfigError
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import system_clock
from mcp_sandbox.workspace.retention import Moment
from tests.daemon.running import control, in_chat, place, running
from tests.fleet.machines import LEASE_S, Fleet, Machine, fleet, on_engines
from tests.fleet.test_deaths import said
from tests.fleet.test_fleet import ON_ENGINES, eventually, is_free, ticks, until_refused, works
from tests.redis_server import RedisServer

logger = logging.getLogger(__name__)
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.redis,
    pytest.mark.s3,
    pytest.mark.bubblewrap,
    pytest.mark.xdist_group("fleet"),
]


@pytest.fixture(scope="module", params=["bubblewrap", ON_ENGINES])
async def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, anyio_backend: str
) -> AsyncGenerator[Fleet]:
    folder = tmp_path_factory.mktemp("shared")
    if request.param == "docker":
        network = request.getfixturevalue("network")
        opened = on_engines(folder, network, shared_data=True)
    else:
        opened = fleet(folder, shared_data=True)
    async with opened as found:
        yield found


def record(machine: Machine, chat: str) -> Any:
    """What is stored of a chat beside its files."""
    file = machine.place.data / "sandbox" / "records" / "ada" / f"chat-{chat}.json"
    return json.loads(file.read_text())


async def has_noted_its_sandbox(machine: Machine, chat: str) -> bool:
    return "id" in record(machine, chat).get(".seen", {})


def trash(machine: Machine) -> list[str]:
    return [path.name for path in (machine.place.data / "sandbox" / "trash").glob("*")]


async def test_a_dead_servers_chat_goes_on_with_the_files_as_they_are(two: Fleet) -> None:
    session = await two.a.prepare("dead")
    await two.a.run(session["id"], "echo saved > note")
    await two.a.saved(session["id"])
    await two.a.run(session["id"], "echo late >> note")
    await eventually(partial(has_noted_its_sandbox, two.a, "dead"))
    await two.a.kill()
    began = time.monotonic()
    text = await said(two.b, "dead", "cat note")
    # No word of a backup; what was in /tmp has gone with the server.
    assert re.fullmatch(r"saved\nlate\n\n\[The sandbox had ended .* count on nothing .*\]", text)
    logger.info("taken over after %.1f s, lease %g s", time.monotonic() - began, LEASE_S)
    assert time.monotonic() - began < LEASE_S + 3
    await two.b.run(session["id"], "echo b >> note")
    lease = json.loads(await two.asked("GET", "lease:ada/dead"))
    assert record(two.b, "dead")["backup"]["epoch"] == lease["epoch"]
    # The server comes back: it ends its own sandbox of the chat, and leaves that of the other.
    sandbox = record(two.b, "dead")["sandbox_id"]
    await two.a.start()
    await eventually(partial(runs_only, two.a, []))
    assert await said(two.a, "dead", "cat note") == "saved\nlate\nb\n"
    assert record(two.b, "dead")["sandbox_id"] == sandbox
    assert await two.has("dead") == "b"
    assert trash(two.b) == []


async def runs_only(machine: Machine, sandboxes: list[str]) -> bool:
    """Whether a server's own folder notes these sandboxes alone."""
    folder = machine.place.data / "servers" / machine.name / "sandbox" / "run"
    return [path.name for path in folder.glob("mcs-*")] == sandboxes


async def test_a_chat_that_comes_back_has_what_the_other_server_wrote(two: Fleet) -> None:
    session = await two.a.prepare("back")
    await two.a.run(session["id"], "echo a >> note")
    for machine, other in ((two.b, two.a), (two.a, two.b)):
        await other.ask("POST", f"sandbox/{session['id']}/terminate")
        assert "as of" not in await said(machine, "back", f"echo {machine.name} >> note")
    assert await two.b.run(session["id"], "cat note") == "a\nb\na\n"
    assert trash(two.a) == []


async def test_a_server_that_is_cut_off_writes_nothing_when_another_does(two: Fleet) -> None:
    session = await two.a.prepare("cut")
    told: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(until_refused, two.a, session["id"], told)
        await eventually(partial(has_ticked, two.a, 0))
        two.line.cut()
        await eventually(partial(is_free, two, "cut"))
        await eventually(partial(works, two.b, session["id"]))
        seen = ticks(two.a, "cut")
        assert await said(two.b, "cut", "sleep 0.3; true")
        assert ticks(two.a, "cut") == seen
        two.line.whole.set()
        await eventually(partial(works, two.a, session["id"]))
    assert "SandboxGone" in told[0]
    # Its record is the other's now: what that writes is still to be saved.
    assert not record(two.b, "cut")["backup"]["clean"]


async def has_ticked(machine: Machine, times: int) -> bool:
    file = machine.files("cut") / "tick"
    return file.exists() and len(ticks(machine, "cut")) > times


async def test_chats_of_the_unix_socket_are_one_servers_at_a_time_too(two: Fleet) -> None:
    async with in_chat(two.a.place, "own") as client:
        assert await client.exec("echo a > who; cat who") == "a\n"
    async with in_chat(two.b.place, "own") as client:
        assert f"on the server a ({two.a.url})" in await client.exec("cat who")
    await control(two.a.place, "stop", chat="own")
    async with in_chat(two.b.place, "own") as client:
        assert await client.exec("cat who") == "a\n"


async def test_files_that_another_server_uses_are_not_too_old(tmp_path: Path) -> None:
    redis, chat, later_s = await to_thread.run_sync(RedisServer), ChatId("ada", "long"), 0.0

    def ahead() -> Moment:
        now = system_clock()
        return Moment(now.wall_s + later_s, now.steady_s + later_s)

    def configure(name: str) -> Config:
        given = {"redis": redis.url, "name": name, "url": f"http://{name}", "shared_data_dir": True}
        more = {"fleet": given, "workspace": {"retention": "1h"}}
        return Config.model_validate({"data_dir": tmp_path, "backend": "unsafe-local", **more})

    try:
        async with Redis.from_url(redis.url) as asked:
            await asked.set("born", 1)
        async with (
            open_manager(configure("a"), for_many=True) as a,
            open_manager(configure("b"), for_many=True, clock=ahead) as b,
        ):
            await (await a.session(chat)).exec("echo kept > note")
            assert (await b.collect()).items == ()
            later_s = 7200.0
            assert (await b.collect()).items == ()
            await a.stop(chat)
            assert [item.what for item in (await b.collect()).items] == ["ada/long"]
    finally:
        redis.close()


def configuration(two: Fleet, **more: object) -> Config:
    given = {"redis": two.redis.url, "name": "a", "url": two.a.url, "lease": LEASE_S}
    shared = {**given, "shared_data_dir": True, **more}
    return Config.model_validate({"data_dir": two.a.place.data, "fleet": shared})


async def test_doctor_tries_the_locks(two: Fleet, tmp_path: Path) -> None:
    _, found = await examine_fleet(configuration(two))
    assert (found.status, found.found) == (
        "ok",
        f"locks hold in {two.a.place.data}: of another process, a, b",
    )
    # A server that lives, and whose lock is not in this directory.
    elsewhere = configuration(two, name="c").model_copy(update={"data_dir": tmp_path})
    _, found = await examine_fleet(elsewhere)
    assert (found.status, "has no lock of another a that lives" in found.found) == ("fail", True)


async def test_what_does_not_ask_for_leases_gets_no_chat_of_a_shared_directory(
    two: Fleet, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"start one with `mcp-sandbox serve`"):
        async with open_manager(configuration(two)):
            pass
    # A server that was not told that others have its directory.
    shared = configuration(two)
    with pytest.raises(ConfigError, match="only they agree who has a chat"):
        async with open_manager(shared.model_copy(update={"fleet": FleetConfig()}), for_many=True):
            pass
    # And one that runs already when the first of the others starts.
    alone = place(tmp_path)
    async with running(alone):
        other = shared.model_copy(update={"data_dir": alone.data})
        with pytest.raises(ConfigError, match="a server that shares nothing serves"):
            async with open_manager(other, for_many=True):
                pass
