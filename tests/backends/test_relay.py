import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mcp_sandbox.relay import inside

RELAY = Path(inside.__file__)
PYTHON = ["/usr/bin/python3", "-I", "-S"]
MANY = 64 * 1024 * 1024


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        server.settimeout(20)
        yield server


def start(*arguments: str | Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*PYTHON, RELAY, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def drain(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(1 << 20), b""))


def test_answer_is_complete_after_the_input_has_ended(
    listener: socket.socket, tmp_path: Path
) -> None:
    with start(tmp_path / "s") as process:
        connection, _ = listener.accept()
        with connection:
            assert process.stdin is not None
            process.stdin.write(b"question")
            process.stdin.close()
            assert drain(connection) == b"question"
            connection.sendall(b"late answer")
        assert process.stdout is not None
        assert process.stdout.read() == b"late answer"
    assert process.returncode == 0


def test_much_data_passes_unchanged_in_both_directions_at_once(
    listener: socket.socket, tmp_path: Path
) -> None:
    data = bytes(range(256)) * (MANY // 256)
    with start(tmp_path / "s") as process:
        connection, _ = listener.accept()
        received: list[bytes] = []

        def serve() -> None:
            reader = threading.Thread(target=lambda: received.append(drain(connection)))
            reader.start()
            connection.sendall(data)
            reader.join()
            connection.close()

        server = threading.Thread(target=serve)
        server.start()
        output, _ = process.communicate(data, timeout=60)
        server.join()
    assert received == [data]
    assert output == data


def test_slow_reader_slows_the_writer(listener: socket.socket, tmp_path: Path) -> None:
    with start(tmp_path / "s") as process:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(1.0)
            with pytest.raises(TimeoutError):
                # Nobody reads the relay's output: pipes and sockets fill, and then it must stop.
                connection.sendall(bytes(MANY))
        process.kill()


def test_relay_ends_when_the_socket_does_though_input_is_open(
    listener: socket.socket, tmp_path: Path
) -> None:
    with start(tmp_path / "s") as process:
        connection, _ = listener.accept()
        connection.close()
        assert process.wait(timeout=20) == 0


def test_absent_socket_is_named_with_the_reason(tmp_path: Path) -> None:
    with start(tmp_path / "absent") as process:
        _, complaint = process.communicate(timeout=20)
    assert process.returncode == 1
    assert complaint == (
        f"relay: cannot connect to {tmp_path}/absent: No such file or directory\n".encode()
    )


def test_relay_waits_for_a_socket_that_comes_later_and_says_when_it_is_there(
    tmp_path: Path,
) -> None:
    with start("--announce", tmp_path / "s", "20") as process, socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tmp_path / "s"))
        s.listen()
        s.settimeout(20)
        connection, _ = s.accept()
        assert process.stderr is not None
        assert process.stderr.readline() == b"connected\n"
        connection.close()
        assert process.wait(timeout=20) == 0


def test_memory_of_the_relay_is_closed_to_others(listener: socket.socket, tmp_path: Path) -> None:
    with start("--announce", tmp_path / "s") as process:
        connection, _ = listener.accept()
        assert process.stderr is not None
        process.stderr.readline()
        # The kernel gives the files of an undumpable process to root.
        owner = Path(f"/proc/{process.pid}/environ").stat().st_uid
        readable = subprocess.run(
            ["cat", f"/proc/{process.pid}/environ"], user=10001, capture_output=True, check=False
        )
        connection.close()
    assert owner == 0
    assert readable.returncode != 0
