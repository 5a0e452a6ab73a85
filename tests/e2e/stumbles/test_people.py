"""What a person at the command line sees: every command is a real process, with its own home."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import anyio
import pytest
from anyio import to_thread

from tests.daemon.running import ROOT, Done, ended
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, if_whole
from tests.relay.relays import Relay

# What is said of chats is the same wherever they live.
IN_BUBBLEWRAP = pytest.mark.parametrize("backend_name", [BUBBLEWRAP, if_whole(DOCKER)])
AT_HOME = pytest.mark.parametrize("backend_name", ["unsafe-local"])


@dataclass
class Person:
    """Someone with a home, a configuration file, and no other settings."""

    home: Path
    runtime: Path
    variables: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def file(self) -> Path:
        return self.home / ".config/mcp-sandbox/mcp-sandbox.yaml"

    def environment(self, **more: str) -> dict[str, str]:
        names = ("PATH", "DOCKER_HOST", "MCP_SANDBOX_DOCKER__IMAGE")
        known = {name: os.environ[name] for name in names if name in os.environ}
        own = {"HOME": str(self.home), "XDG_RUNTIME_DIR": str(self.runtime)}
        ends = {"MCP_SANDBOX_SESSIONS__ORPHANED": "2s", "PYTHONPATH": str(ROOT)}
        # Where no wall is they would be asked.
        ends["MCP_SANDBOX_POLICY__PROFILE"] = "off"
        return {**known, **own, **ends, **more}

    async def runs(
        self, *arguments: str, stdin: bytes | None = b"", more: Mapping[str, str] | None = None
    ) -> Done:
        """A command; with None its standard input is closed."""
        environment = self.environment(**(more or {}))
        if stdin == b"":
            return await ended(arguments, env=environment)
        command = [sys.executable, "-m", "mcp_sandbox", *arguments]
        if stdin is None:
            command = ["sh", "-c", 'exec "$@" <&-', "sh", *command]

        def run() -> CompletedProcess[bytes]:
            # Not all of the input need be read.
            return subprocess.run(
                command,
                input=stdin or b"",
                capture_output=True,
                env=environment,
                cwd="/",
                timeout=50,
                check=False,
            )

        done = await to_thread.run_sync(run)
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    async def told(self, *arguments: str, **more: str) -> str:
        done = await self.runs(*arguments, more=more)
        assert done.code == 0, done
        return done.out

    @asynccontextmanager
    async def agent(self, chat: str = "a", **more: str) -> AsyncGenerator[Relay]:
        """An agent's client, which starts the daemon if none runs."""
        command = [sys.executable, "-m", "mcp_sandbox", "connect", "--chat", chat]
        with anyio.fail_after(50):
            async with await anyio.open_process(
                command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=self.environment(**more), cwd="/"
            ) as process:
                client = Relay(process)
                await client.initialize()
                yield client
                await client.close_input()
                await client.ended()


@pytest.fixture
async def person(tmp_path: Path, backend_name: str) -> AsyncGenerator[Person]:
    with tempfile.TemporaryDirectory(prefix="mcs-") as runtime:
        one = Person(tmp_path, Path(runtime))
        one.file.parent.mkdir(parents=True)
        one.file.write_text(f"backend: {backend_name}\n")
        yield one
        for socket in Path(runtime).rglob("*.sock"):
            await one.runs("shutdown", "--all", "--socket", str(socket))


def started(person: Person) -> Iterator[Path]:
    return (person.runtime / "mcp-sandbox").glob("*.sock")


@AT_HOME
async def test_settings_that_the_daemon_does_not_have_are_named(person: Person) -> None:
    async with person.agent() as agent:
        assert await agent.exec("echo begun") == "begun\n"
    assert "as configured" in await person.told("status")
    with person.file.open("a") as file:
        file.write("network: open\nenv: {KEY: secret-one}\n")
    wanted = f"network is 'none', yours is 'open' ({person.file} line 2)"
    for command in ("status", "config", "doctor"):
        done = await person.runs(command)
        said = done.out if command == "status" else done.err
        text = " ".join(said.split())
        assert wanted in text, done
        assert "`mcp-sandbox shutdown --socket " in text
        assert "secret-one" not in done.out + done.err
    said = (await person.runs("config", "set", "limits.cpus", "1")).err
    assert f"limits.cpus is 2.0, yours is 1.0 ({person.file} line 4)" in " ".join(said.split())
    async with person.agent() as agent:
        assert wanted in await agent.said("shutdown --socket")
        assert await agent.exec("echo goes on") == "goes on\n"
    assert json.loads(await person.told("config", "--json"))["network"]["value"] == "open"
    await person.told("shutdown")
    async with person.agent(MCP_SANDBOX_LIMITS__PIDS="99"):
        assert "as configured" in await person.told("status", MCP_SANDBOX_LIMITS__PIDS="99")
        assert "limits.pids is 99, yours is 512 (default)" in await person.told("status")
    person.file.write_text("network: all\n")
    async with person.agent() as agent:
        assert "yours cannot be used: network 'all' " in await agent.said("cannot be used")


@AT_HOME
async def test_another_data_root_has_a_daemon_of_its_own(person: Person, tmp_path: Path) -> None:
    other = {"MCP_SANDBOX_DATA_DIR": str(tmp_path / "other")}
    async with person.agent() as first, person.agent(**other) as second:
        await first.exec("echo first > note")
        assert "No such file" in await second.exec("cat note 2>&1; true")
        one = json.loads(await person.told("status", "--json"))
        two = json.loads(await person.told("status", "--json", **other))
        assert one["pid"] != two["pid"]
        assert [one["data"], two["data"]] == [
            str(tmp_path / ".local/share/mcp-sandbox"),
            str(tmp_path / "other"),
        ]
        assert "notice" not in one
        assert "notice" not in two
    assert len(list(started(person))) == 2


@IN_BUBBLEWRAP
async def test_chats_are_seen_and_removed_without_a_daemon(person: Person) -> None:
    async with person.agent() as agent:
        await agent.exec("sleep 600 >/dev/null 2>&1 & echo kept > note")
    said = await person.told("shutdown")
    assert "local/a: 1 in the background runs on" in said
    assert "`mcp-sandbox stop local/a`" in said
    assert "running" in await person.told("ls")
    assert "its sandbox has ended" in await person.told("stop", "a")
    assert "files only" in await person.told("ls")
    assert "nothing to remove; 1 chat, " in await person.told("gc")
    assert "the daemon ends: shutdown" in (await person.runs("logs")).out
    assert "removed" in await person.told("rm", "--yes", "a")
    assert await person.told("ls") == "no chats yet\n"
    assert list(started(person)) == []


@IN_BUBBLEWRAP
async def test_shutdown_of_all_leaves_nothing_running(person: Person) -> None:
    async with person.agent() as agent:
        await agent.exec("sleep 600 >/dev/null 2>&1 & echo kept > note")
    assert "local/a: 1 in the background has ended" in await person.told("shutdown", "--all")
    rows = json.loads(await person.told("ls", "--json"))
    assert [(row["chat"], row["state"], row["sandbox"]) for row in rows] == [("a", "warm", None)]


@IN_BUBBLEWRAP
async def test_shutdown_of_all_ends_what_an_ended_daemon_has_left(person: Person) -> None:
    async with person.agent() as agent:
        await agent.exec("sleep 600 >/dev/null 2>&1 &")
    assert "runs on" in await person.told("shutdown")
    assert await person.told("shutdown", "--all") == (
        "local/a: its sandbox has ended; its files stay\n"
    )
    assert "files only" in await person.told("ls")
    assert (await person.runs("shutdown", "--all")).code == 3


@AT_HOME
async def test_ls_and_gc_say_how_much_there_is_and_until_when(person: Person) -> None:
    async with person.agent() as agent:
        await agent.exec("head -c 3000000 /dev/urandom > big")
    await person.told("stop", "a")
    shown = (await person.told("ls")).splitlines()
    assert shown[0].split()[:3] == ["chat", "state", "size"]
    assert "files only" in shown[1]
    assert "3 MiB" in shown[1]
    assert " now " in shown[1]
    said = await person.told("gc")
    assert said == "nothing to remove; 1 chat, 3 MiB; the next would go in 6 days\n"


@AT_HOME
async def test_a_relative_data_dir_does_not_depend_on_who_starts(person: Person) -> None:
    person.file.write_text("backend: unsafe-local\ndata_dir: data\n")
    async with person.agent() as agent:
        await agent.exec("true")
    data = str(person.file.parent / "data")
    assert json.loads(await person.told("status", "--json"))["data"] == data
    done = await person.runs("config", more={"MCP_SANDBOX_DATA_DIR": "here"})
    assert done.code == 1
    assert "data_dir 'here' (environment MCP_SANDBOX_DATA_DIR) is not usable" in done.err
    assert "absolute path" in done.err


@IN_BUBBLEWRAP
async def test_a_command_runs_in_a_chats_computer_with_its_exit_code(person: Person) -> None:
    async with person.agent() as agent:
        await agent.exec("echo by the agent > note")
        done = await person.runs("shell", "a", "--", "sh", "-c", "ls; echo wrong >&2; exit 7")
        assert done == (7, "note\n", "wrong\n")
        given = os.urandom(300_000).hex().encode()
        piped = await person.runs("shell", "a", "--", "cat", stdin=given)
        assert piped == (0, given.decode(), "")
        assert (await person.runs("shell", "a", "head", "-c", "3", stdin=given)).code == 0
        assert await person.told("shell", "a", "ls", "-1", "--all", "note") == "note\n"
        assert await person.told("shell", "a", "cat note | tr a-z A-Z") == "BY THE AGENT\n"
        assert (await person.runs("shell", "a", "--", "no-such-thing")).code == 127
        assert (await person.runs("shell", "a", "--", "bash", "-c", "kill -9 $$")).code == 137
        assert (await person.runs("shell", "a", stdin=b"cat note\nexit 3\n"))[:2] == (
            3,
            "by the agent\n",
        )
        assert await person.runs("shell", "a", stdin=None) == (0, "", "")


@AT_HOME
async def test_wrong_settings_are_told_in_our_words(person: Person) -> None:
    person.file.write_text("limits:\n  pids: -5\n  memory: 1m\npool: {size: many}\n")
    done = await person.runs("config", more={"MCP_SANDBOX_SKILLS__SHIPPED": "maybe"})
    where = f"({person.file} line"
    assert sorted(done.err.removeprefix("error: ").splitlines()) == [
        f"limits.memory '1m' {where} 3) is not usable: "
        "write a size such as 512m or 2g, at least 64m",
        f"limits.pids -5 {where} 2) is not usable: write a whole number, at least 16",
        f"pool.size 'many' {where} 4) is not usable: "
        "write auto or a whole number, at least 0, at most 64",
        "skills.shipped 'maybe' (environment MCP_SANDBOX_SKILLS__SHIPPED) is not usable: "
        "write true or false",
    ]
