"""Live sandboxes of bubblewrap: their walls and their limits."""

import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend
from mcp_sandbox.models import Limits, Mount
from tests.backends.live import connected, made, proc, say, spec_for, state_of

pytestmark = pytest.mark.bubblewrap

ROOT = os.geteuid() == 0
BOMB = """
import os, signal
pids = []
try:
    while len(pids) < 100:
        pid = os.fork()
        if not pid:
            signal.pause()
        pids.append(pid)
except BlockingIOError:
    print(len(pids))
for pid in pids:
    os.kill(pid, signal.SIGKILL)
"""
as_root = pytest.mark.skipif(not ROOT, reason="needs root")


@pytest.fixture
def backend(data_root: Path) -> BubblewrapBackend:
    return BubblewrapBackend(data_root)


def command_lines() -> list[str]:
    """Arguments of every process of the host."""
    names = [path.name for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [proc(name, "cmdline") for name in names if Path(f"/proc/{name}").exists()]


async def test_code_has_no_privileges(backend: BubblewrapBackend, tmp_path: Path) -> None:
    said = await say(
        backend, spec_for(tmp_path), "id -u; grep -E '^(Cap|No|Sec)' /proc/self/status"
    )
    fields = said.split()
    assert fields[0] == ("10001" if ROOT else str(os.getuid()))
    assert fields[fields.index("NoNewPrivs:") + 1] == "1"
    assert fields[fields.index("Seccomp:") + 1] == "2"
    for name in ("CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"):
        assert int(fields[fields.index(name) + 1], 16) == 0


async def test_nothing_of_the_host_but_usr_and_a_small_etc_is_inside(
    backend: BubblewrapBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVER_SECRET", "abc123")
    (tmp_path / "beside").write_text("host file")
    said = await say(
        backend,
        spec_for(tmp_path),
        f"ls -A / /etc /home /run /opt /var; ls {tmp_path} /root /proc/1/root; "
        "cat /proc/keys /etc/shadow; env; hostname; cat /etc/passwd",
    )
    top = said.split("/:\n")[1].split("\n\n")[0].split()
    assert set(top) <= {
        *("bin", "dev", "etc", "home", "lib", "lib32", "lib64", "libx32", "opt", "proc", "run"),
        *("sbin", "sys", "tmp", "usr", "var", "workspace"),
    }
    assert "SERVER_SECRET" not in said
    assert "MCP_SANDBOX_TOKEN" not in said
    assert f"cannot access '{tmp_path}'" in said
    assert "'/root'" in said
    assert "'/proc/1/root': Permission denied" in said
    assert "/etc/shadow: No such file" in said
    assert "\nsandbox\n" in said
    assert "sandbox:x:" in said


async def test_programs_of_the_host_find_their_settings(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    bundles = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
    here = [path for path in ("/etc/os-release", "/etc/shells", *bundles) if os.path.exists(path)]
    said = await say(
        backend,
        spec_for(tmp_path),
        f"cat {' '.join(here)} >/dev/null; "
        "find /usr -maxdepth 5 -path /usr/share/doc -prune -o -xtype l -print",
    )
    assert "No such file" not in said
    lost = {os.path.realpath(link) for link in said.split() if os.path.exists(link)}
    public = {path for path in lost if path.startswith("/etc/") and os.stat(path).st_mode & 0o4}
    assert public <= {"/etc/environment", "/etc/resolv.conf"}


async def test_system_is_read_only_and_own_places_are_not(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    said = await say(
        backend,
        spec_for(tmp_path),
        "for d in / /etc /usr /usr/bin /opt /opt/mcp-sandbox /var /dev /run /proc/sys/kernel /home "
        "/etc/ssl; do touch $d/planted 2>/dev/null && echo open $d; done; "
        "for d in /workspace /home/sandbox /tmp /var/tmp /dev/shm; do "
        "touch $d/mine || echo closed $d; done",
    )
    assert said == ""


async def test_kernel_calls_beyond_ordinary_programs_are_refused(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    spec = spec_for(tmp_path)
    source = Path(__file__).with_name("refused_calls.py").read_text()
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            result = await runtime.run_code(source, "python", timeout_s=30)
            compat = await runtime.exec("python3 -c 'import socket; socket.socketpair()'; echo $?")
    assert json.loads(result.stdout) == [], result.stderr
    assert compat.stdout == "0\n"


async def test_network_is_a_loopback_of_its_own(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        said = await say(
            backend,
            spec_for(tmp_path),
            f"(echo > /dev/tcp/127.0.0.1/{port}) && echo reached; tail -n +3 /proc/net/dev; "
            'python3 -c \'import socket; s = socket.create_server(("127.0.0.1", 0)); '
            'print("own", bool(socket.create_connection(s.getsockname(), 5)))\'',
        )
    assert "reached" not in said
    assert "Connection refused" in said
    assert "own True" in said
    assert re.findall(r"^ *(\w+): +\d", said, re.MULTILINE) == ["lo"]


async def test_open_network_reaches_the_host_and_the_facts_say_so(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    spec = replace(spec_for(tmp_path), network="open")
    with socket.create_server(("127.0.0.1", 0)) as server, anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            command = f"(echo > /dev/tcp/127.0.0.1/{server.getsockname()[1]}) && echo reached"
            assert (await runtime.exec(command)).stdout == "reached\n"
            assert "shares the host's network" in sandbox.facts.network


async def test_limits_hold_inside(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    limits = Limits(memory_mb=128, pids=64, tmp_mb=4, shm_mb=2, open_files=128, file_mb=1)
    spec = replace(spec_for(tmp_path), limits=limits)
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            facts = sandbox.facts.limits
            hog = await runtime.run_code(
                "x = b'x' * (400 << 20); print(len(x))", "python", timeout_s=20
            )
            files = await runtime.exec(
                "head -c 2M /dev/zero > big; ls -s big; "
                "python3 -c 'f = [open(\"/dev/null\") for _ in range(200)]'; "
                "for i in $(seq 8); do head -c 1M /dev/zero > /tmp/$i; done; du -sm /tmp; "
                "for i in $(seq 4); do head -c 1M /dev/zero > /dev/shm/$i; done; du -sm /dev/shm; "
                "ulimit -c"
            )
            pid = state_of(data_root, sandbox.id)["process"]["pid"]
            score = proc(pid, "oom_score_adj")
    assert hog.stdout == ""
    assert "Too many open files" in files.stderr
    assert "File size limit exceeded" in files.stderr
    assert "4\t/tmp" in files.stdout
    assert "2\t/dev/shm" in files.stdout
    assert files.stdout.endswith("\n0\n")
    assert score == "500\n"
    assert facts["tmp"] == "4 MiB (tmpfs)"
    if "cgroup)" in facts["memory"]:
        assert hog.signal == "SIGKILL"
        assert hog.out_of_memory


@as_root
async def test_groups_bound_processes_and_are_set_before_anything_runs(
    backend: BubblewrapBackend, tmp_path: Path, data_root: Path
) -> None:
    spec = replace(spec_for(tmp_path), limits=Limits(memory_mb=128, pids=40, cpus=0.5))
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox, connected(sandbox) as runtime:
            if sandbox.facts.limits["pids"] != "40 (cgroup)":
                pytest.skip("no writable control groups here")
            result = await runtime.run_code(BOMB, "python", timeout_s=20)
            groups = proc(state_of(data_root, sandbox.id)["process"]["pid"], "cgroup")
            after = await runtime.exec("cat /proc/self/cgroup; echo fine")
    assert 10 < int(result.stdout) < 40
    assert groups.count(f"/mcp-sandbox/{sandbox.id}\n") == 3
    assert sandbox.id not in after.stdout
    assert "fine" in after.stdout


async def test_more_processors_than_the_machine_gives_become_all_of_them(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    spec = replace(spec_for(tmp_path), limits=Limits(cpus=1024))
    with anyio.fail_after(50):
        async with made(backend, spec) as sandbox:
            said = sandbox.facts.limits["cpus"]
    if said != "not limited: no writable cgroup":
        assert said == f"{len(os.sched_getaffinity(0))} (cgroup), all that this machine gives"


async def test_token_is_nowhere_to_be_seen(backend: BubblewrapBackend, tmp_path: Path) -> None:
    with anyio.fail_after(50):
        async with made(backend, spec_for(tmp_path)) as sandbox, connected(sandbox) as runtime:
            needle = sandbox.token.hex()
            inside = await runtime.exec(
                "cat /proc/*/cmdline /proc/*/environ /proc/1/maps /proc/1/mem | tr '\\0' '\\n'; "
                "ls -l /proc/1/fd"
            )
            outside = command_lines()
    assert needle not in inside.stdout
    assert "Permission denied" in inside.stderr
    assert not any(needle in line for line in outside)


async def test_the_runners_socket_is_nowhere_inside(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    said = await say(backend, spec_for(tmp_path), "ls /run/mcp-sandbox; find / -xdev -type s")
    assert said == "ls: cannot access '/run/mcp-sandbox': No such file or directory\n"


async def test_further_mounts_appear_and_read_only_ones_are(
    backend: BubblewrapBackend, tmp_path: Path
) -> None:
    further = (
        Mount(tmp_path / "workspace", "/mnt/user-data/workspace"),
        Mount(tmp_path / "skills", "/mnt/skills", read_only=True),
    )
    spec = spec_for(tmp_path, further)
    (tmp_path / "skills" / "a").write_text("skill\n")
    said = await say(
        backend,
        spec,
        "echo x > /mnt/user-data/workspace/f; cat f /mnt/skills/a; touch /mnt/skills/b",
    )
    assert said.startswith("x\nskill\n")
    assert "Read-only file system" in said


async def test_environment_of_the_spec_arrives(backend: BubblewrapBackend, tmp_path: Path) -> None:
    spec = replace(spec_for(tmp_path), env={"GREETING": "hello there"})
    assert await say(backend, spec, 'echo "$GREETING $LANG $TZ"') == "hello there C.UTF-8 UTC\n"


@pytest.fixture
def others_folder() -> Iterator[Path]:
    """A directory of an ordinary user, where that user can reach it."""
    with tempfile.TemporaryDirectory(prefix="mcs-user-", dir="/tmp") as name:
        os.chown(name, 12345, 12345)
        yield Path(name)


@pytest.fixture
def system_python() -> str:
    """The system's Python, when it can import what ours imports."""
    path = Path(f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}")
    if not path.exists():
        pytest.skip("the system's Python is another version than ours")
    return str(path)


@as_root
async def test_ordinary_user_gets_the_same_walls(others_folder: Path, system_python: str) -> None:
    site = next(path for path in sys.path if path.endswith("site-packages"))
    script = (
        "import anyio, sys; from pathlib import Path\n"
        "from mcp_sandbox.backends.bubblewrap.backend import BubblewrapBackend\n"
        "from tests.backends.live import spec_for, say\n"
        f"root = Path({str(others_folder)!r})\n"
        "b = BubblewrapBackend(root / 'data')\n"
        "print(anyio.run(b.probe)); print(anyio.run(say, b, spec_for(root),"
        " 'id -u; ulimit -d; node -e \"console.log(40+2)\"; echo x > f; ls /root /proc/1/fd'))\n"
    )
    with anyio.fail_after(55):
        done = await anyio.run_process(
            [system_python, "-c", script],
            env={"PYTHONPATH": f"{os.getcwd()}:{site}", "PATH": "/usr/bin:/bin"},
            check=False,
            user=12345,
            group=12345,
            extra_groups=[],
        )
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "control groups bound nothing" in text
    assert "12345\n2097152\n" in text
    assert "'/root'" in text
    assert "'/proc/1/fd': Permission denied" in text
