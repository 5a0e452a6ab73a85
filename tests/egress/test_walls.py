"""What code in the process of the ways out can do: talk to the network, and nothing else."""

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Runs the entry as it is, up to the moment in which it would serve; then what a stranger might.
_ATTACKED = """
import sys
sys.path[:] = sys.argv[3:]
from mcp_sandbox.egress.process import child

async def attack(self):
    import ctypes, errno, json, os, resource, signal, socket, ssl, subprocess, threading
    place = json.loads(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)

    def call(number, *args):
        result = libc.syscall(number, *args)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    tried = {}
    exec(open_code(), {**globals(), **locals()})
    print(json.dumps(tried), flush=True)
    os._exit(0)

def open_code():
    return CODE

CODE = sys.stdin.read()
child.Child.run = attack
child.main()
"""
_NO_WALLS = "child.close_walls = lambda: None\nchild.main"
_TRY = """
def attempt(name, act):
    try:
        tried[name] = f"BROKEN: {act()!r}"[:200]
    except OSError as exc:
        tried[name] = errno.errorcode.get(exc.errno, str(exc))
    except Exception as exc:
        tried[name] = type(exc).__name__
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Files, sockets and a process that the code in it would like to have."""
    (tmp_path / "token").write_text("the secret of the server")
    (tmp_path / "token").chmod(0o644)
    tmp_path.chmod(0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    with (
        socket.socket(socket.AF_UNIX) as engine,
        socket.socket(socket.AF_UNIX) as abstract,
        socket.create_server(("127.0.0.1", 0)) as service,
        subprocess.Popen(["sleep", "60"]) as other,
    ):
        engine.bind(str(tmp_path / "engine.sock"))
        (tmp_path / "engine.sock").chmod(0o777)
        engine.listen()
        abstract.bind("\0mcp-sandbox-test-" + tmp_path.name)
        abstract.listen()
        yield {
            "folder": str(tmp_path),
            "abstract": "\0mcp-sandbox-test-" + tmp_path.name,
            "port": service.getsockname()[1],
            "other": other.pid,
            "server": os.getpid(),
        }
        other.kill()


def attacked(place: dict[str, Any], code: str, *, walls: bool = True) -> dict[str, str]:
    """How each attempt of the code ended, inside the process as it is when it serves."""
    script = _ATTACKED if walls else _ATTACKED.replace("child.main", _NO_WALLS)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        given = [str(theirs.fileno()), json.dumps(place), *sys.path]
        done = subprocess.run(  # noqa: PLW1510 - how it ends is part of what is looked at
            [sys.executable, "-I", "-S", "-c", script, *given],
            input=_TRY + textwrap.dedent(code),
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            timeout=30,
            cwd="/",
            env={},
        )
    assert done.stdout, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


def held(found: dict[str, str]) -> dict[str, str]:
    """Those attempts that came to something."""
    return {name: how for name, how in found.items() if how.startswith("BROKEN")}


def test_it_reads_no_file_of_the_server(place: dict[str, Any]) -> None:
    found = attacked(
        place,
        """
        folder, server = place["folder"], place["server"]
        for path in (
            f"{folder}/token", "/etc/passwd", "/etc/shadow", "/root/.bashrc", "/proc/1/environ",
            f"/proc/{server}/environ", f"/proc/{server}/mem", f"/proc/{server}/maps",
            "/proc/self/environ", "/proc/self/mem", "/proc/self/cmdline", "/proc/mounts",
            "/dev/kmsg", "/dev/mem", child.__file__, "/proc/self/exe", "/proc/self/cwd/etc/passwd",
        ):
            attempt(path, lambda: open(path, "rb").read(10))
        for path in (folder, "/", "/etc", "/root", "/proc", f"/proc/{server}/fd"):
            attempt(f"list {path}", lambda: os.listdir(path))
        """,
    )
    assert len(found) == 23
    assert held(found) == {}


def test_it_writes_nothing(place: dict[str, Any]) -> None:
    found = attacked(
        place,
        """
        folder = place["folder"]
        PLACES = (folder, "/tmp", "/dev/shm", "/var/tmp")
        for path in (f"{folder}/token", *(f"{each}/new" for each in PLACES)):
            attempt(f"write {path}", lambda: open(path, "wb"))
            attempt(f"append {path}", lambda: open(path, "ab"))
            attempt(f"mkdir {path}", lambda: os.mkdir(path))
            attempt(f"link {path}", lambda: os.symlink("/etc/passwd", path))
            attempt(f"fifo {path}", lambda: os.mkfifo(path))
            attempt(f"socket {path}", lambda: socket.socket(socket.AF_UNIX).bind(path))
        attempt("unlink", lambda: os.unlink(f"{folder}/token"))
        attempt("rename", lambda: os.rename(f"{folder}/token", f"{folder}/other"))
        attempt("truncate", lambda: os.truncate(f"{folder}/token", 0))
        attempt("chmod", lambda: os.chmod(f"{folder}/token", 0o777))
        attempt("chown", lambda: os.chown(f"{folder}/token", 1, 1))
        attempt("tmpfile", lambda: os.open("/tmp", os.O_TMPFILE | os.O_RDWR))
        """,
    )
    assert len(found) == 36
    assert held(found) == {}


def test_it_starts_no_program_and_touches_no_process(place: dict[str, Any]) -> None:
    found = attacked(
        place,
        """
        other, server = place["other"], place["server"]
        attempt("exec", lambda: os.execv("/bin/true", ["true"]))
        attempt("fork", lambda: os.fork())
        attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
        attempt("run", lambda: subprocess.run(["/bin/true"]))
        attempt("execveat", lambda: call(322, -1, b"/bin/true", None, None, 0))
        for pid in (other, server, 1):
            attempt(f"kill {pid}", lambda: os.kill(pid, 0))
            attempt(f"tgkill {pid}", lambda: call(234, pid, pid, 0))
            attempt(f"ptrace {pid}", lambda: call(101, 16, pid, 0, 0))
            attempt(f"read {pid}", lambda: call(310, pid, None, 0, None, 0, 0))
            attempt(f"limits {pid}", lambda: resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, 1)))
            attempt(f"pidfd {pid}", lambda: os.pidfd_open(pid))
            attempt(f"queue {pid}", lambda: call(129, pid, 15, None))
            attempt(f"nice {pid}", lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))
        """,
    )
    assert len(found) == 5 + 3 * 8
    assert held(found) == {}
    assert os.getpriority(os.PRIO_PROCESS, place["other"]) == os.getpriority(os.PRIO_PROCESS, 0)


def test_it_reaches_no_socket_of_this_machine_but_tcp(place: dict[str, Any]) -> None:
    found = attacked(
        place,
        """
        def other_socket(number):
            try:
                return os.readlink(f"/proc/self/fd/{number}").startswith(("/", "pipe"))
            except OSError:
                return False

        engine = place["folder"] + "/engine.sock"
        attempt("engine", lambda: socket.socket(socket.AF_UNIX).connect(engine))
        attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect(place["abstract"]))
        attempt("datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
        attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
        attempt("vsock", lambda: socket.socket(socket.AF_VSOCK))
        attempt("alg", lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET))
        attempt("audit", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 9))
        attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
        attempt("uring", lambda: call(425, 8, None))
        attempt("keyring", lambda: call(250, 0, -3, 0))
        attempt("bpf", lambda: call(321, 0, None, 0))
        attempt("namespace", lambda: call(272, 0x10000000))
        attempt("mount", lambda: call(165, b"none", b"/tmp", b"tmpfs", 0, None))
        attempt("root", lambda: os.setuid(0))
        attempt("group", lambda: os.setgroups([0]))
        attempt("descriptors", lambda: [*filter(other_socket, range(3, 100))] or 1 / 0)
        """,
    )
    assert len(found) == 17
    assert held(found) == {}


def test_it_can_do_what_it_is_for(place: dict[str, Any]) -> None:
    found = attacked(
        place,
        """
        attempt("names", lambda: socket.getaddrinfo("localhost", 80)[0][4])
        attempt("connect", lambda: socket.create_connection(("127.0.0.1", place["port"])))
        attempt("memory", lambda: os.open(f"/proc/self/fd/{os.memfd_create('x')}", os.O_RDONLY))
        thread = threading.Thread(target=lambda: tried.update(thread="BROKEN"))
        thread.start()
        thread.join()
        """,
    )
    assert set(held(found)) == {"names", "connect", "memory", "thread"}


def test_without_the_walls_each_of_these_gets_through(place: dict[str, Any]) -> None:
    code = """
        folder = place["folder"]
        attempt("token", lambda: open(f"{folder}/token").read())
        attempt("list", lambda: os.listdir("/etc"))
        attempt("write", lambda: open(f"{folder}/new", "wb"))
        attempt("run", lambda: subprocess.run(["/bin/true"]))
        attempt("kill", lambda: os.kill(place["other"], 0))
        attempt("engine", lambda: socket.socket(socket.AF_UNIX).connect(f"{folder}/engine.sock"))
        attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
    """
    assert len(held(attacked(place, code, walls=False))) == 7
    assert held(attacked(place, code)) == {}
