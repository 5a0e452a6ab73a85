"""Work in a sandbox by HTTP: commands, files, and what bad input is answered."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from tests.control.working import Working, working

_BIG = 40 << 20


async def lines(response: httpx2.Response) -> AsyncGenerator[Any]:
    async for line in response.aiter_lines():
        yield json.loads(line)


async def pieces(count: int, size: int = 1 << 20) -> AsyncGenerator[bytes]:
    for number in range(count):
        yield bytes([number % 251]) * size


async def test_output_comes_as_it_is_printed_and_the_result_last(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        given = {"command": "echo begun; until [ -e go ]; do sleep .01; done; echo no >&2; exit 3"}
        seen = list[Any]()
        async with api.http.stream("POST", "exec", json=given) as response:
            assert response.headers["content-type"].startswith("application/x-ndjson")
            async for each in lines(response):
                if not seen:
                    await api.http.put("files", params={"path": "go"}, content=b"")
                seen.append(each)
        *told, last = seen
        assert told == [
            {"output": {"stream": "stdout", "text": "begun\n"}},
            {"output": {"stream": "stderr", "text": "no\n"}},
        ]
        assert last["data"]["exitCode"] == 3
        assert (last["data"]["stdout"], last["data"]["timedOut"]) == ("begun\n", False)


async def test_what_is_printed_is_one_line_of_json_whatever_it_holds(tmp_path: Path) -> None:
    odd = r"printf '\342\200\250 \302\205 \377 \0 \n.'; touch $'\377'"
    async with working(tmp_path) as api:
        response = await api.http.post("exec", json={"command": odd})
        told = [json.loads(line) for line in response.text.splitlines()]
        assert told[-1]["data"]["stdout"] == "\u2028 \x85 \ufffd \0 \n."
        listed = (await api.http.get("list")).json()["data"]["entries"]
        assert [each["path"] for each in listed if each["kind"] == "file"] != []


async def test_a_command_whose_client_hangs_up_ends_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    hidden = "setsid sleep 1000 & echo $! > pid; echo begun; sleep 1000"
    async with working(tmp_path) as api:
        async with api.http.stream("POST", "exec", json={"command": hidden}) as response:
            async for each in lines(response):
                assert each["output"]["text"] == "begun\n"
                break
        while await api.stdout("kill -0 $(cat pid) 2>/dev/null && echo there") != "":
            await anyio.sleep(0.01)


async def test_a_command_has_limits_of_its_own(tmp_path: Path) -> None:
    code = 'import time; x = b"x" * 120_000_000; time.sleep(9)'
    holds = f"head -c 3000000 /dev/zero; python3 -c '{code}'"
    async with working(tmp_path) as api:
        ended = (await api.exec(holds, memoryMb=100, outputMb=1))["data"]
        assert (ended["outOfMemory"], ended["signal"]) == (True, "SIGKILL")
        assert await api.stdout(f"wc -c < {ended['outputFile']}") == "1048576\n"
        wrong = await api.http.post("exec", json={"command": "true", "memoryMb": -1})
        assert (wrong.is_error, "memoryMb" in wrong.text) == (True, True)


async def test_a_command_goes_on_as_a_process_and_is_stopped_by_its_name(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        begun = (await api.exec("echo up; sleep 1000", until="up"))["data"]
        assert (begun["running"], begun["untilMet"]) == (True, True)
        stopped = await api.http.delete(f"processes/{begun['process']}")
        assert stopped.json()["data"]["signal"] == "SIGTERM"
        unknown = await api.http.delete("processes/p9-none")
        assert (unknown.status_code, unknown.json()["title"]) == (404, "NotFound")


async def test_files_larger_than_any_message_go_in_and_come_out(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        for announced in ({}, {"content-length": str(_BIG)}):
            sent = await api.http.put(
                "files", params={"path": "d/big"}, content=pieces(40), headers=announced
            )
            assert sent.json()["data"]["written"] == _BIG
            at, equal = 0, True
            async with api.http.stream("GET", "files", params={"path": "d/big"}) as response:
                async for data in response.aiter_raw():
                    here = bytes([(at >> 20) % 251])
                    equal = equal and data[:1] == here
                    at += len(data)
            assert (at, equal) == (_BIG, True)
        await api.http.put("files", params={"path": "e", "append": "true"}, content=b"a")
        await api.http.put("files", params={"path": "e", "append": "true"}, content=b"b")
        assert (await api.http.get("files", params={"path": "e"})).content == b"ab"


async def test_an_upload_without_room_is_refused_or_stopped_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    async with working(tmp_path, workspace={"size_limit": "64m"}) as api:
        announced = {"content-length": str(5 << 30)}
        for more, count in ((announced, 5 << 10), ({}, 200)):
            refused = await api.http.put(
                "files", params={"path": "big"}, content=pieces(count), headers=more
            )
            assert refused.status_code == 507, refused.text
            assert refused.json()["title"] == "WorkspaceFull"
        assert await api.stdout("ls -A | grep -v '^[.]mcp'") == ""


async def test_an_upload_that_breaks_off_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    async def broken() -> AsyncGenerator[bytes]:
        yield b"new" * 100_000
        raise ConnectionError

    async with working(tmp_path) as api:
        await api.http.put("files", params={"path": "kept"}, content=b"old")
        with pytest.raises(ConnectionError):
            await api.http.put("files", params={"path": "kept"}, content=broken())
        assert await api.stdout("cat kept; ls -A | grep -v '^[.]mcp'") == "oldkept\n"


async def test_a_client_that_stands_still_is_waited_for_no_longer_than_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_sandbox.control.work._STALLED_S", 0.3)
    head = "{} /api/sandbox/work/files?path={} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
    async with working(tmp_path) as api:
        await api.exec("echo old > kept; truncate -s 1G big")
        port = int(api.url.rpartition(":")[2])
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(head.format("PUT", "kept", 10).encode() + b"new")
            assert b"nothing of the file came for 0.3 s" in await client.receive()
        async with await anyio.connect_tcp("127.0.0.1", port) as client:
            await client.send(head.format("GET", "big", 0).encode())
            while api.manager.statistics().busy == 0:
                await anyio.sleep(0.01)
            while api.manager.statistics().busy:
                await anyio.sleep(0.01)
        assert await api.stdout("cat kept; ls -A | grep -v '^[.]mcp'") == "old\nbig\nkept\n"


async def test_a_file_whose_sandbox_ends_is_not_taken_for_whole(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        await api.exec("truncate -s 4G big")
        async with api.http.stream("GET", "files", params={"path": "big"}) as response:
            with pytest.raises(httpx2.RemoteProtocolError):
                await end_while_reading(api, response)
        assert await api.stdout("stat -c %s big") == f"{4 << 30}\n"


async def end_while_reading(api: Working, response: httpx2.Response) -> None:
    async for _ in response.aiter_raw():
        for status in await api.manager.list():
            await api.manager.stop(status.chat)


async def test_the_files_of_a_form_keep_their_names(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        form = [("files", ("a.txt", b"one")), ("files", ("b c.bin", b"\0\xff"))]
        sent = await api.http.post("upload", params={"path": "uploads"}, files=form)
        assert [each["path"] for each in sent.json()["data"]] == [
            "uploads/a.txt",
            "uploads/b c.bin",
        ]
        for name in ("../a.txt", "..", "x/y"):
            refused = await api.http.post("upload", files=[("files", (name, b"1"))])
            assert refused.status_code == 400, name
        assert await api.stdout("ls uploads; ls -d ../a.txt x 2>/dev/null") == "a.txt\nb c.bin\n"


async def test_a_text_is_replaced_and_a_folder_is_listed(tmp_path: Path) -> None:
    async with working(tmp_path) as api:
        await api.http.put("files", params={"path": "d/f"}, content=b"a a")
        change = {"path": "d/f", "old": "a", "new": "b"}
        twice = await api.http.post("edit", json=change)
        assert (twice.status_code, twice.json()["title"]) == (409, "Ambiguous")
        done = await api.http.post("edit", json={**change, "replaceAll": True})
        assert done.json()["data"]["replacements"] == 2
        (entry,) = (await api.http.get("list", params={"path": "d"})).json()["data"]["entries"]
        assert (entry["path"], entry["kind"], entry["size"]) == ("d/f", "file", 3)


async def test_paths_are_answered_as_the_tools_answer_them(tmp_path: Path) -> None:
    table = {
        "../outside": ("NotFound", "NotPermitted"),
        "/etc/shadow": ("NotPermitted", "NotPermitted"),
        "a\0b": ("InvalidArgument", "InvalidArgument"),
        "folder": ("WrongKind", "WrongKind"),
        "/dev/zero": ("WrongKind", "WrongKind"),
        "x" * 300: ("InvalidArgument", "InvalidArgument"),
        "none": ("NotFound", None),
    }
    async with working(tmp_path) as api:
        await api.exec("mkdir folder")
        for path, (read, written) in table.items():
            got = await api.http.get("files", params={"path": path})
            put = await api.http.put("files", params={"path": path}, content=b"1")
            assert got.json().get("title") == read, path
            assert put.json().get("title") == written, path
            assert written is None or put.json()["detail"], path


async def test_what_cannot_be_done_is_told_as_a_problem(tmp_path: Path) -> None:
    table: list[tuple[dict[str, Any], str, str]] = [
        ({"command": "x", "shell": "!"}, "InvalidArgument", "shell takes"),
        ({"command": "x", "timeoutS": -1}, "InvalidArgument", "timeout_s must be"),
        ({"command": "x", "cwd": "/none"}, "NotFound", "/none"),
    ]
    async with working(tmp_path) as api:
        for given, title, words in table:
            refused = (await api.http.post("exec", json=given)).json()
            assert (refused["title"], words in refused["detail"]) == (title, True), given
        for body in ({}, {"command": ""}, {"command": "x", "more": 1}, {"command": ["x", 1]}):
            assert 400 <= (await api.http.post("exec", json=body)).status_code < 500


async def test_the_policy_judges_what_comes_as_it_judges_an_agent(tmp_path: Path) -> None:
    async with working(tmp_path, policy={"profile": "isolated"}) as api:
        refused = await api.http.post("exec", json={"command": "rm -rf /workspace"})
        assert (refused.status_code, refused.json()["title"]) == (403, "NotPermitted")
        assert [each.sandbox_id for each in await api.manager.list()] in ([], [None])
