import socket
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends.docker import exec_stream
from mcp_sandbox.errors import BackendUnavailable


@pytest.mark.parametrize("failure", [None, BackendUnavailable("the engine is gone too")])
async def test_stream_ends_with_the_container_though_the_engine_says_nothing(
    failure: Exception | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_stream, "_QUIET_S", 0.01)
    asked: list[bool] = []

    async def alive() -> bool:
        asked.append(True)
        if failure and len(asked) == 3:
            raise failure
        return len(asked) < 3

    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(tmp_path / "engine"))
        engine.listen()
        raw = await anyio.connect_unix(tmp_path / "engine")
        async with exec_stream.ExecStream(raw, alive) as stream:
            theirs, _ = engine.accept()
            with theirs:
                theirs.sendall(b"\1\0\0\0\0\0\0\2hi")
                with anyio.fail_after(10):
                    assert await stream.receive() == b"hi"
                    ended = anyio.BrokenResourceError if failure else anyio.EndOfStream
                    with pytest.raises(ended):
                        await stream.receive()
    assert len(asked) == 3
