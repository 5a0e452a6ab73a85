"""Relays that start the real daemon: once, detached, after another one, or not at all."""

import json
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from subprocess import DEVNULL

import anyio
import pytest

from mcp_sandbox.config import server_variables
from mcp_sandbox.relay.start_daemon import daemon_variables
from tests.daemon.running import Place, command, control, dialled, ended, listening, place
from tests.relay.relays import META, Relay, environment, relayed, scripted

OLD = "0.0.9"
RUN_OLD = f"""import sys, mcp_sandbox
mcp_sandbox.__version__ = "{OLD}"
from mcp_sandbox.cli import main
main()"""


@pytest.fixture
def here(tmp_path: Path) -> Place:
    return place(tmp_path)


@asynccontextmanager
async def ending(here: Place) -> AsyncGenerator[None]:
    """Whatever daemon listens at the end is told to end, and has ended."""
    try:
        yield
    finally:
        with anyio.fail_after(20, shield=True):
            pid = await daemon_pid(here)
            await control(here, "shutdown")
            await gone(pid)


async def daemon_pid(here: Place) -> int:
    """Which process answers on the socket."""
    async with dialled(here) as client:
        pid: int = (await client.greet(role="control", command="status"))["pid"]
        return pid


async def gone(pid: int) -> None:
    while Path(f"/proc/{pid}/exe").exists():
        await anyio.sleep(0.01)


def test_a_daemon_finds_the_cluster_that_its_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/etc/cluster")
    for variables in (daemon_variables(), server_variables()):
        assert variables["KUBECONFIG"] == "/etc/cluster"


async def listed(relay: Relay) -> bool:
    answer = await relay.answer(await relay.request("tools/list", {"_meta": META}))
    return "exec" in [tool["name"] for tool in answer["result"]["tools"]]


async def text_of(relay: Relay, command: str) -> str:
    text: str = (await relay.answer(await relay.start_call(command)))["result"]["content"][0][
        "text"
    ]
    return text


async def test_daemon_is_started_and_tied_to_nothing_of_the_client(here: Place) -> None:
    async with AsyncExitStack() as stack:
        async with relayed(here, ANTHROPIC_API_KEY="secret", LC_ALL="C.UTF-8") as relay:
            assert await listed(relay)
            await stack.enter_async_context(ending(here))
            pid = await daemon_pid(here)
            relay.process.send_signal(signal.SIGTERM)
            assert await relay.process.wait() == 0
        process = Path(f"/proc/{pid}")
        assert os.getsid(pid) == pid
        assert (process / "cwd").readlink() == Path("/")
        log = here.home / ".local/state/mcp-sandbox/daemon.log"
        outputs = {(process / "fd" / str(number)).readlink() for number in (1, 2)}
        assert (process / "fd/0").readlink() == Path(os.devnull)
        assert outputs == {log}
        assert log.stat().st_mode & 0o777 == 0o600
        inherited = (process / "environ").read_bytes()
        assert b"LC_ALL=C.UTF-8" in inherited
        assert b"ANTHROPIC" not in inherited
        assert b"PYTHONPATH" not in inherited
        async with relayed(here, "--no-start") as second:
            assert await listed(second)


KEYS = {
    "MCP_SANDBOX_STORAGE__ENDPOINT": "http://127.0.0.1:9",
    "MCP_SANDBOX_STORAGE__BUCKET": "chats",
    "MCP_SANDBOX_STORAGE__ACCESS_KEY": "env:OUR_KEY",
    "MCP_SANDBOX_STORAGE__SECRET_KEY": "env:SANDBOX_TOKEN",
    "OUR_KEY": "a-key-of-the-store",
    "SANDBOX_TOKEN": "a-token-of-ours",
    "OTHERS": "not-named",
}
NO_TOKEN = {"MCP_SANDBOX_STORAGE__SECRET_KEY": "env:OUR_KEY"}


async def refused(here: Place, **variables: str) -> str:
    """What a client is answered whose daemon does not start."""
    async with relayed(here, **variables) as relay:
        return json.dumps(await relay.answer(await relay.request("tools/list", {"_meta": META})))


async def test_a_daemon_has_the_variables_that_its_settings_name(here: Place) -> None:
    # Nobody has noted them yet: it says so, and the next start has them.
    said = await refused(here, **{**KEYS, **NO_TOKEN})
    assert "the variable OUR_KEY is not set" in said
    assert "`mcp-sandbox doctor`" in said
    async with relayed(here, **{**KEYS, **NO_TOKEN}) as relay:
        assert await listed(relay)
        async with ending(here):
            inherited = Path(f"/proc/{await daemon_pid(here)}/environ").read_bytes()
            assert b"OUR_KEY=a-key-of-the-store" in inherited
            assert b"OTHERS" not in inherited


async def test_a_token_of_ours_is_handed_on_to_no_daemon(here: Place) -> None:
    assert "the variable OUR_KEY is not set" in await refused(here, **KEYS)
    assert "the variable SANDBOX_TOKEN is not set" in await refused(here, **KEYS)


async def test_what_doctor_has_found_in_order_starts_at_once(here: Place) -> None:
    known = environment(here, **{**KEYS, **NO_TOKEN, "MCP_SANDBOX_SOCKET": str(here.socket)})
    await ended(["doctor"], env=known)
    (noted,) = (here.home / ".local/state/mcp-sandbox").glob("variables*")
    assert noted.read_text().split() == ["OUR_KEY", "OUR_KEY"]
    async with relayed(here, **{**KEYS, **NO_TOKEN}) as relay:
        assert await listed(relay)
        async with ending(here):
            pass
    # What is not set any more is not named either.
    await ended(["doctor"], env={**known, **{name: "" for name in KEYS if "STORAGE" in name}})
    assert not noted.exists()


async def test_the_log_of_a_daemon_turns_over_while_it_runs(here: Place) -> None:
    log = here.home / ".local/state/mcp-sandbox/daemon.log"
    full = log.with_name("daemon.log.1")
    async with relayed(here) as relay:
        assert await listed(relay)
        async with ending(here):
            os.truncate(log, 9 << 20)
            await text_of(relay, "echo before")
            while not full.exists():
                await anyio.sleep(0.01)
            pid = await daemon_pid(here)
            await text_of(relay, "echo after")
            outputs = {Path(f"/proc/{pid}/fd/{number}").readlink() for number in (1, 2)}
            assert outputs == {log}
    before, after = full.read_text().rpartition("\0")[2], log.read_text()
    assert before.endswith("\n")
    assert (before + after).count(": call chat=") == 2
    assert "the daemon ends: shutdown" in after
    told = await command(here, "logs")
    assert ": call chat=" in told.out
    assert str(log) in told.err


async def test_relays_at_once_start_one_daemon(here: Place) -> None:
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(relayed(here)) for _ in range(4)]
        assert await listed(relays[0])
        async with ending(here):
            for relay in relays[1:]:
                assert await listed(relay)
            log = here.home / ".local/state/mcp-sandbox/daemon.log"
            assert "another" not in log.read_text()
            holder = json.loads((here.data / "sandbox" / "daemon.lock").read_bytes())
            assert holder["pid"] == await daemon_pid(here)


async def test_a_relay_that_is_told_to_leave_leaves_at_once_while_the_daemon_goes_on_starting(
    here: Place,
) -> None:
    async with relayed(here) as relay:
        while not here.socket.with_name("mcp.sock.start").exists():
            await anyio.sleep(0.01)
        log = here.home / ".local/state/mcp-sandbox/daemon.log"
        while not log.exists():
            await anyio.sleep(0.01)
        relay.process.send_signal(signal.SIGTERM)
        assert await relay.process.wait() == 0
    async with relayed(here) as second:
        assert await listed(second)
        async with ending(here):
            pass


async def test_killed_in_the_middle_of_a_call_the_daemon_is_replaced_and_files_are_there(
    here: Place,
) -> None:
    async with relayed(here, "--chat", "c") as relay:
        assert await listed(relay)
        async with ending(here):
            await text_of(relay, "echo kept > file")
            marker = "echo once >> calls; sync; touch began; sleep 60"
            number = await relay.start_call(marker)
            await existing(here.data, "began")
            os.kill(pid := await daemon_pid(here), signal.SIGKILL)
            answer = await relay.answer(number)
            assert "ended during this call" in answer["error"]["message"]
            # The socket is still there, and nobody listens on it.
            assert here.socket.is_socket()
            assert "kept\nonce\n" in await text_of(relay, "cat file calls")
            assert await daemon_pid(here) != pid


async def existing(folder: Path, name: str) -> Path:
    while not (found := list(folder.glob(f"sandbox/workspace/**/{name}"))):
        await anyio.sleep(0.01)
    return found[0]


async def test_daemon_of_another_version_hands_over_and_finishes_its_calls(here: Place) -> None:
    arguments = here.command("serve")[3:]
    async with await anyio.open_process(
        [sys.executable, "-c", RUN_OLD, *arguments],
        stdin=DEVNULL,
        stdout=None,
        stderr=None,
        env=environment(here),
    ) as old:
        await listening(here)
        # This one has met the old daemon as if it were of its own version.
        async with relayed(here, "--no-start", "--chat", "old") as before:
            number = await before.start_call("touch began; until test -e go; do sleep 0.1; done")
            began = await existing(here.data, "began")
            async with relayed(here, "--chat", "new") as after:
                assert await listed(after)
                async with ending(here):
                    assert await daemon_pid(here) != old.pid
                    began.with_name("go").touch()
                    answer = await before.answer(number)
                    assert "result" in answer
                    # The old daemon's clients go on with the new one.
                    await old.wait()
                    assert await text_of(before, "ls")


async def test_daemon_that_does_not_hand_over_is_used_as_it_is(here: Place) -> None:
    async with scripted(here, OLD, "stays"), relayed(here, "--chat", "c") as relay:
        assert await listed(relay)
        said = await relay.said("\n")
    assert f"of version {OLD} goes on" in said
    assert "`mcp-sandbox shutdown`" in said


async def test_a_relay_that_runs_accepts_whatever_version_comes(here: Place) -> None:
    async with AsyncExitStack() as stack:
        async with scripted(here) as first:
            relay = await stack.enter_async_context(relayed(here))
            assert await listed(relay)
            await first.kill()
        async with scripted(here, "99.0") as second:
            assert await listed(relay)
            assert (await second.noted("first"))["role"] == "chat"


async def test_daemon_that_cannot_start_is_explained_to_the_person_and_to_the_client(
    here: Place,
) -> None:
    async with relayed(here, MCP_SANDBOX_LIMITS__MEMORY="much") as relay:
        number = await relay.request("tools/list", {"_meta": META})
        message = (await relay.answer(number))["error"]["message"]
        said = await relay.said("limits.memory")
        await relay.close_input()
        assert await relay.ended() == ([], 1)
    for text in (message, said):
        assert "did not start (exit code 1)" in text
        assert str(here.home / ".local/state/mcp-sandbox/daemon.log") in text
        assert re.search(r"limits\.memory .*much", text)


async def test_a_socket_that_cannot_be_is_a_readable_complaint(here: Place) -> None:
    long = str(here.home / ("x" * 120))
    async with relayed(here, "--socket", long) as relay:
        assert "give another path with --socket" in await relay.said("\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's socket")
async def test_socket_of_another_user_is_refused(here: Place) -> None:
    here.socket.parent.mkdir()
    program = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); "
        "os.setresuid(10001, 10001, 10001); s.listen(); print(flush=True); c, _ = s.accept(); "
        "sys.exit(len(c.recv(9)))"
    )
    async with await anyio.open_process(
        [sys.executable, "-c", program, str(here.socket)], stderr=None
    ) as other:
        assert other.stdout
        await other.stdout.receive()
        async with relayed(here) as relay:
            assert "belongs to another user (uid 10001)" in await relay.said("\n")
        assert await other.wait() == 0
