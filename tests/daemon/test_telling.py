"""What a running daemon tells its operator."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from tests.daemon.running import command, control, in_chat, place, running, starting


async def test_each_call_is_a_line_of_json_and_a_figure_of_the_status(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where, "--log-format", "json") as daemon:
        async with in_chat(where, "told") as client:
            assert await client.exec("echo s3cret-words") == "s3cret-words\n"
            await client.call("read_file", path="s3cret-name")
            calls = (await control(where, "status"))["result"]["calls"]
        daemon.process.terminate()
        await daemon.end()
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    told = [line for line in lines if line["event"] == "call"]
    fields = ("chat", "tool", "backend", "outcome")
    assert [tuple(line[field] for field in fields) for line in told] == [
        ("local/told", "exec", "unsafe-local", "ok"),
        ("local/told", "read_file", "unsafe-local", "caller_error"),
    ]
    assert "s3cret" not in daemon.log
    assert {(each["tool"], each["calls"], each["failed"]) for each in calls} == {
        ("exec", 1, 0),
        ("read_file", 1, 1),
    }


async def test_text_is_the_form_unless_the_settings_say_json(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where) as daemon, in_chat(where, "told") as client:
        await client.exec("true")
        await daemon.noted("outcome=ok")
        (line,) = (line for line in daemon.log.splitlines() if ": call chat=" in line)
    assert " INFO mcp_sandbox.telemetry.calls: call chat=local/told call=" in line


@pytest.mark.timeout(20)
async def test_an_unknown_form_is_refused(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with starting(where, "--log-format", "xml") as daemon:
        assert await daemon.end() == 1
    assert "write text or json" in daemon.log


async def test_prometheus_reads_calls_and_sandboxes(tmp_path: Path) -> None:
    where = place(tmp_path)
    async with running(where, "--http", "127.0.0.1:0", "--allow-anonymous-loopback"):
        address = (await control(where, "status"))["result"]["http"]
        async with in_chat(where, "told") as client:
            await client.exec("true")
            async with httpx2.AsyncClient() as http:
                text = (await http.get(urljoin(address, "/metrics"))).text
    assert 'mcp_sandbox_calls_total{outcome="ok",tool="exec"} 1.0' in text
    assert 'mcp_sandbox_call_seconds_count{tool="exec"} 1.0' in text
    assert 'mcp_sandbox_sandboxes{state="idle"} 1.0' in text
    assert "mcp_sandbox_calls_queued 0.0" in text


async def test_a_blocked_event_loop_is_told_by_log_figures_and_doctor(tmp_path: Path) -> None:
    told = place(tmp_path)
    named = {"MCP_SANDBOX_SOCKET": str(told.socket)}
    where = replace(told, module="tests.daemon.blocking", more=named)
    async with running(where, "--http", "127.0.0.1:0", "--allow-anonymous-loopback") as daemon:
        address = (await control(where, "status"))["result"]["http"]
        async with in_chat(where, "waits") as client:
            daemon.process.send_signal(signal.SIGUSR1)
            await daemon.noted("WARNING mcp_sandbox.telemetry.metrics: the event loop is blocked")
            await daemon.noted("\n")
            await client.exec("true")
        assert (await control(where, "status"))["result"]["loop_blocked"] == 1
        async with httpx2.AsyncClient() as http:
            text = (await http.get(urljoin(address, "/metrics"))).text
        assert "mcp_sandbox_loop_blocked_total 1.0" in text
        checks = json.loads((await command(where, "doctor --json", asks=False)).out)["checks"]
        (check,) = (each for each in checks if each["area"] == "daemon")
        assert (check["status"], check["found"]) == ("warn", "blocked 1 times since its start")
        assert "mcp-sandbox logs" in check["remedy"]
