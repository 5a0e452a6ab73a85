"""What a hostile chat does while another one works: things by their names."""

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import anyio
from anyio import to_thread

from tests.daemon.running import Client, Place, dialled
from tests.e2e.doors import BOUND, PLAIN, READ, Chat
from tests.world import World

# How long a thing may go on; the other chat works meanwhile.
LASTS_S = 1


@dataclass(frozen=True)
class Hostile:
    """A chat that does one of the things, and where its daemon is."""

    chat: Chat
    place: Place
    world: World

    @property
    def client(self) -> Client:
        return self.chat.client

    async def runs(self, tool: str = "exec", **code: str) -> None:
        """Run code inside, which has to begin, however it ends."""
        result = await self.client.call(tool, **code, timeout_s=LASTS_S, wait_s=LASTS_S + 8)
        said = result["content"][0]["text"]
        # What ends its own sandbox is told so.
        assert said.startswith("begun\n") or "sandbox" in said, said[:500]

    async def sends(self, *lines: bytes) -> None:
        """Send lines; the daemon need not read on while its answers are not read."""
        with anyio.move_on_after(LASTS_S):
            for line in lines:
                await self.client.stream.send(line + b"\n")


Thing = Callable[[Hostile], Awaitable[object]]

_AT_THE_DOOR = """
import socket, ssl, sys, time
end = time.monotonic() + {seconds}
END = b" HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"
def door():
    line = socket.create_connection(("127.0.0.1", 17329), 5)
    line.settimeout(5)
    return line
def say(data, line=None):
    line = line or door()
    try:
        line.sendall(data)
        return line.recv(65536)
    except OSError:
        return b""
def for_a_while():
    while time.monotonic() < end:
        yield
"""
_DOOR = {
    "a-url-of-30000-bytes": """
for _ in range(3): say(b"GET http://" + b"a" * 30_000 + b"/#" + END)""",
    "a-port-of-30000-digits": f"""
for _ in range(3): say(b"CONNECT {PLAIN}:" + b"1" * 30_000 + END)""",
    "a-url-of-dots-and-at-signs": """
for each in (b"a.", b"@", b":", b"//", b"%41", b"[", b" "):
    say(b"GET http://" + each * 15_000 + b"/" + END)""",
    "a-head-without-end": """
line = door()
try:
    for _ in for_a_while(): line.sendall(b"x" * 65536)
except OSError: pass""",
    "headers-without-end": f"""
line = door()
try:
    line.sendall(b"GET http://{PLAIN}/ HTTP/1.1\\r\\n")
    for n in for_a_while(): line.sendall(b"a: b\\r\\n" * 1000)
except OSError: pass""",
    "refused-connections": """
for n in range(10_000):
    say(b"CONNECT denied.example.net:443" + END)
    if time.monotonic() > end: break""",
    "refused-names-of-many": """
for n in range(10_000):
    say(b"CONNECT n%d.example.net:443" % n + END)
    if time.monotonic() > end: break""",
    "idle-connections": """
kept = []
try:
    for _ in range(900): kept.append(door())
except OSError: pass
for _ in for_a_while(): time.sleep(0.1)""",
    "slow-heads": """
kept = [door() for _ in range(200)]
for _ in for_a_while():
    for line in kept:
        try: line.sendall(b"G")
        except OSError: pass
    time.sleep(0.1)""",
    "garbage-inside-tls": f"""
for _ in range(20):
    line = door()
    if b" 200 " in say(b"CONNECT {READ}:443 HTTP/1.1\\r\\nHost: {READ}:443\\r\\n\\r\\n", line):
        say(b"\\x16\\x03\\x01\\xff\\xff\\x01" + b"\\xff" * 70_000, line)""",
    "hellos-of-many-names": f"""
context = ssl._create_unverified_context()
for n in range(200):
    line = door()
    say(b"CONNECT {BOUND}:443 HTTP/1.1\\r\\nHost: {BOUND}:443\\r\\n\\r\\n", line)
    try: context.wrap_socket(line, server_hostname="n%d.example.com" % n)
    except OSError: pass
    if time.monotonic() > end: break""",
    "a-body-of-tiny-chunks": f"""
line = door()
head = b"POST http://{PLAIN}/ HTTP/1.1\\r\\nHost: {PLAIN}\\r\\n"
say(head + b"Transfer-Encoding: chunked\\r\\n\\r\\n1", line)
try:
    for _ in for_a_while(): line.sendall(b"1;" + b"a" * 500 + b"\\r\\nx\\r\\n")
except OSError: pass""",
    "many-requests-in-one-connection": f"""
line = door()
try:
    head = b"GET http://{PLAIN}/ HTTP/1.1\\r\\nHost: {PLAIN}\\r\\n\\r\\n"
    for _ in for_a_while(): line.sendall(head * 50)
except OSError: pass""",
}
_INSIDE = {
    "output-without-end": "while True: print('x' * 8191)",
    "errors-of-control-characters": "import os\nwhile True: os.write(2, bytes(range(256)) * 256)",
    "lines-of-one-byte": "import os\nwhile True: os.write(1, b'\\n')",
    "one-line-of-much": "import os\nwhile True: os.write(1, b'x' * 65536)",
    "processes-without-end": """
import os
while True:
    try: os.fork()
    except OSError: pass""",
    "memory-without-end": "kept = []\nwhile True: kept.append(b'x' * (16 << 20))",
    "files-without-end": """
n = 0
while True:
    n += 1
    if n % 1000 == 1: os.mkdir(f"d{n}"); os.chdir(f"d{n}")
    open(f"f{n}", "w").close()""",
    "a-disk-of-zeros": "open('zeros', 'wb').write(bytes(300 << 20))",
    "zeros-where-the-socket-is": """
with open("/run/mcp-sandbox/zeros", "wb") as file:
    for _ in range(64): file.write(bytes(1 << 20))""",
    "processor-time": "for _ in range(64): os.fork()\nwhile True: pass",
    "inotify": """
libc = ctypes.CDLL(None)
for _ in range(2000): libc.inotify_init()
time.sleep(9)""",
    "pages-of-pipes": """
kept = []
for _ in range(500):
    r, w = os.pipe(); kept += [r, w]; fcntl.fcntl(w, 1031, 1 << 20); os.write(w, bytes(1 << 16))
time.sleep(9)""",
    "pseudo-terminals": "kept = [os.open('/dev/ptmx', 2) for _ in range(2000)]\ntime.sleep(9)",
    "signals-that-wait": """
libc = ctypes.CDLL(None)
signal.pthread_sigmask(signal.SIG_BLOCK, range(34, 64))
for n in range(100_000): libc.sigqueue(os.getpid(), 34 + n % 30, 0)
time.sleep(9)""",
    "descriptors-under-way": """
kept = []
while True:
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); kept.append(b)
    for _ in range(10): socket.send_fds(a, [b"x"], [b.fileno()] * 200)""",
    "messages-and-shared-memory": """
libc = ctypes.CDLL(None)
for n in range(1000): libc.shmget(n, 1 << 20, 0o1666); libc.msgget(n, 0o1666)
open("/dev/shm/x", "wb").write(bytes(1 << 28))""",
    "asynchronous-input": """
libc = ctypes.CDLL(None)
for _ in range(1000): libc.syscall(206, 65536, ctypes.byref(ctypes.c_long()))
time.sleep(9)""",
    "links-in-circles": """
os.makedirs(".mcp-sandbox", exist_ok=True)
for n in range(500): os.symlink(f"l{(n + 1) % 500}", f"l{n}"); os.symlink("/", f".mcp-sandbox/o{n}")
""",
    "names-of-odd-bytes": """
for n in range(2000): open(bytes([10, 27, 255]) + b"%d" % n + b"\\n" * 100, "w").close()""",
    "a-number-to-the-first-process": """
for said in (b"{", b"9" * 5000, b"\\xff" * 65536, b"\\0\\0\\0\\x01{", b"\\0\\0\\0\\x02[["):
    for _ in range(200):
        line = socket.socket(socket.AF_UNIX); line.settimeout(1)
        try: line.connect("/run/mcp-sandbox/runner.sock"); line.sendall(said)
        except OSError: pass""",
    "connections-to-the-first-process": """
kept = []
try:
    while True:
        line = socket.socket(socket.AF_UNIX); line.connect("/run/mcp-sandbox/runner.sock")
        kept.append(line)
except OSError: time.sleep(9)""",
    "signals-to-all": """
for number in (1, 2, 3, 10, 12, 15, 19, 9):
    try: os.kill(-1, number)
    except OSError: pass""",
    "signals-to-the-first-process": """
while True:
    for number in range(1, 65): os.kill(1, number)""",
    "forged-frames-on-all-descriptors": """
for number in range(3, 64):
    try: os.write(number, b"\\0\\0\\0\\x02{}" * 100)
    except OSError: pass""",
    "processes-in-the-background": """
for _ in range(200): subprocess.Popen(["sleep", "9"], start_new_session=True)""",
}
_IMPORTS = (
    "import ctypes, fcntl, os, signal, socket, subprocess, sys, time\nprint('begun', flush=True)\n"
)


def _nested(depth: int) -> bytes:
    begin = b'{"jsonrpc":"2.0","id":9,"method":"tools/call","params":{"name":"exec","arguments":'
    return begin + b"[" * depth + b"]" * depth + b"}}"


def _call(tool: str, **arguments: object) -> bytes:
    params = {"name": tool, "arguments": arguments}
    return json.dumps(
        {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": params}
    ).encode()


async def _answered(hostile: Hostile, *lines: bytes) -> None:
    """Send each call and wait for what is said to it."""
    for line in lines:
        await hostile.sends(line)
        await hostile.client.answer(9)


async def _many_at_once(hostile: Hostile) -> None:
    numbers = [await hostile.client.request("tools/list", {}) for _ in range(300)]
    await hostile.client.answer(numbers[-1])


async def _many_strangers(hostile: Hostile) -> None:
    """Others of the same user, who connect to the daemon and say nothing."""

    async def come() -> None:
        async with dialled(hostile.place):
            await anyio.sleep_forever()

    with anyio.move_on_after(LASTS_S):
        async with anyio.create_task_group() as strangers:
            for _ in range(200):
                strangers.start_soon(come)


async def _kept_output(hostile: Hostile) -> None:
    link = "cd; mkdir -p .mcp-sandbox; rm -rf .mcp-sandbox/output; ln -s /usr .mcp-sandbox/output"
    for _ in range(5):
        await hostile.runs(command=f"echo begun; {link}; seq 1 20000")


async def _many_calls(hostile: Hostile) -> None:
    with anyio.move_on_after(LASTS_S):
        for n in range(300):
            await hostile.client.request(
                "tools/call", {"name": "exec", "arguments": {"command": f"echo {n}"}}
            )
        await anyio.sleep_forever()


_HAYSTACK = """
import os
open(".gitignore", "w").write("*a" * 40 + "b\\n")
for n in range(1000): open(f"f{n}" + "a" * 200, "w").close()
for n in range(50): os.mkdir("d"); os.chdir("d")
open("/workspace/text", "w").write("a" * 100_000 + "\\n" + "a b " * 100_000)
"""


async def _searches(hostile: Hostile, tool: str, **given: object) -> None:
    await hostile.client.call("run_code", code=_HAYSTACK)
    await hostile.client.call(tool, **given)


async def _archive(hostile: Hostile) -> None:
    holes = "truncate -s 2G hole; tar czf hole.tgz hole; rm hole; tar xzf hole.tgz"
    many = "seq 1 9999 | xargs touch; tar cf all.tar .; tar xf all.tar"
    await hostile.runs(command=f"echo begun; {holes}; {many}")


async def _terminals(hostile: Hostile) -> None:
    each = "script -qc 'sleep 9' /dev/null >/dev/null &"
    await hostile.runs(command=f"echo begun; for n in $(seq 80); do {each} done; wait")


async def _notebooks(hostile: Hostile) -> None:
    forged = _IMPORTS + _INSIDE["forged-frames-on-all-descriptors"]
    for name in ("a", "b", "c"):
        await hostile.client.call("run_code", code=forged, notebook=name, timeout_s=LASTS_S)


_SLOW = """
import socket, sys, time
end, kept = time.monotonic() + 1, []
for _ in range(200): kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
while time.monotonic() < end:
    for line in kept:
        try: line.sendall(b"G")
        except OSError: pass
    time.sleep(0.1)
"""


async def _preview(hostile: Hostile) -> None:
    """Strangers come slowly to a preview's address."""
    listens = "import http.server; http.server.test(port=8000)"
    serving = f"import subprocess\nsubprocess.Popen(['python3', '-c', {listens!r}])"
    await hostile.client.call("run_code", code=serving)
    port = re.search(r"http://[^/:]+:(\d+)", await hostile.chat.call("preview", port=8000))
    assert port
    run = partial(hostile.world.run, "python3", "-c", _SLOW, port[1], timeout_s=30)
    assert (await to_thread.run_sync(run)).returncode == 0


_OVER_MCP: dict[str, Thing] = {
    "a-list-of-a-million-for-env": lambda h: _answered(
        h, _call("exec", command="true", env=[0] * 10**6)
    ),
    "a-list-of-a-million-for-a-command": lambda h: _answered(h, _call("exec", command=[0] * 10**6)),
    "values-of-env-that-are-lists": lambda h: _answered(
        h, _call("exec", command="true", env={str(n): [n] for n in range(200_000)})
    ),
    "unknown-arguments": lambda h: _answered(
        h, _call("exec", command="true", **{f"a{n}": n for n in range(200_000)})
    ),
    "a-message-of-lists": lambda h: h.sends(b"[" + b"0," * 10**6 + b"0]"),
    "deep-lists": lambda h: h.sends(_nested(100_000)),
    "a-line-without-end": lambda h: h.client.stream.send(b"x" * (24 << 20)),
    "lines-of-nothing": lambda h: h.sends(*[b"{}", b"null", b"\xff"] * 1000),
    "many-requests-at-once": _many_at_once,
    "many-calls-at-once": _many_calls,
    "strangers-that-say-nothing": _many_strangers,
    "code-of-brackets": lambda h: h.client.call("run_code", code="(" * 500_000),
    "code-of-many-lines": lambda h: h.client.call("run_code", code="x = 'rm -rf /' + y\n" * 50_000),
    "a-command-of-substitutions": lambda h: h.client.call(
        "exec", command="$(" * 20_000 + ")" * 20_000
    ),
    "a-command-of-many-commands": lambda h: h.client.call("exec", command="true;" * 100_000),
    "a-command-of-quotes": lambda h: h.client.call("exec", command="'\"" * 100_000),
    "a-search-that-tracks-back": lambda h: _searches(h, "grep", pattern="(a+)+(a+)+c", path="text"),
    "a-pattern-of-many-stars": lambda h: _searches(h, "glob", pattern="**/" * 20 + "*a*a*a*a*a*b"),
    "a-giant-list": lambda h: _searches(h, "list_files", path=".", depth=10),
    "an-ignore-file-of-stars": lambda h: _searches(h, "grep", pattern="a" * 5000),
    "an-edit-of-much": lambda h: _searches(
        h, "edit_file", path="text", old="a " * 1000, new="b" * 10**6
    ),
    "kept-output-behind-a-link": _kept_output,
    "archives": _archive,
    "terminals": _terminals,
    "notebooks-that-forge": _notebooks,
    "a-preview": _preview,
}


def _inside(code: str) -> Thing:
    return lambda hostile: hostile.runs("run_code", code=_IMPORTS + code)


THINGS: dict[str, Thing] = {
    **{
        name: _inside(_AT_THE_DOOR.format(seconds=LASTS_S - 0.3) + code)
        for name, code in _DOOR.items()
    },
    **{name: _inside(code) for name, code in _INSIDE.items()},
    **_OVER_MCP,
}
# What differs where the kernel's limits are an engine's.
ON_DOCKER = (
    *("processes-without-end", "memory-without-end", "files-without-end", "inotify"),
    *("zeros-where-the-socket-is", "pages-of-pipes", "pseudo-terminals", "signals-that-wait"),
    *("a-number-to-the-first-process", "signals-to-all", "idle-connections"),
)
