"""Programs that pods run beside the runner. They are sent, so they import nothing.

`BOOT` is the first process: it waits for the runner's secret and becomes the runner. `START` is an
exec that hands the secret over and then is the first channel. `REACH` tries the network.
"""

from mcp_sandbox.backends.runner_copy import MAIN
from mcp_sandbox.models import OURS, RELAY

PYTHON = "/usr/bin/python3"
PLACE = "/run/mcp-sandbox"
SOCKET = f"{PLACE}/runner.sock"
WAITING = b"waiting\n"
# Exit codes.
OTHER_RUNNER, REACHED = 3, 7
PORT = 8080

# Where a variable of the image changes how Python starts, the first process ignores it.
BOOT = f"""
import os, select
fifo = "{PLACE}/start"
os.mkfifo(fifo, 0o600)
file = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
if not select.select([file], [], [], 300)[0]:
    raise SystemExit("nobody started the runner")
os.set_blocking(file, True)
secret = b"".join(iter(lambda: os.read(file, 4096), b""))
os.close(file)
os.unlink(fifo)
file = os.open("{PLACE}/token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
os.write(file, secret)
os.close(file)
steered = [name for name in os.environ if name.startswith(("PYTHON", "LD_", "GLIBC_", "MALLOC_"))]
flags = ["-I", "-S"] if steered else []
os.execv("{PYTHON}", ["{PYTHON}", *flags, "{OURS}/{MAIN}"])
"""

_SAME_RUNNER = f"""
import hashlib, os, sys
root, found = "{OURS}/mcp_sandbox", []
for folder, _, names in os.walk(root + "/runner"):
    found += [folder[len(root) + 1:] + "/" + n for n in names if n.endswith((".py", ".cjs"))]
digest = hashlib.sha256()
for path in [*sorted(found, key=lambda path: path.split("/")), "relay/inside.py"]:
    try:
        with open(root + "/" + path, "rb") as file:
            data = file.read()
    except OSError:
        break
    digest.update(("%s %d\\n" % (path, len(data))).encode() + data)
if digest.hexdigest() != sys.argv[1]:
    raise SystemExit({OTHER_RUNNER})
"""

# Nothing of a chat runs yet; still its memory is closed before the secret is there.
START = f"""
import ctypes, time
ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)
{_SAME_RUNNER}
os.write(2, {WAITING!r})
secret = b""
while not secret.endswith(b"\\n"):
    part = os.read(0, 1)
    if not part:
        raise SystemExit(1)
    secret += part
deadline = time.monotonic() + float(sys.argv[2])
while not os.path.exists("{PLACE}/start"):
    if time.monotonic() > deadline:
        raise SystemExit("the first process does not wait for the secret")
    time.sleep(0.005)
file = os.open("{PLACE}/start", os.O_WRONLY)
os.write(file, secret.strip())
os.close(file)
sys.path.insert(0, "{OURS}")
from mcp_sandbox.relay.inside import main
os._exit(main(["--announce", "{SOCKET}", sys.argv[2]]))
"""

LISTEN = f"""
import socket
server = socket.create_server(("", {PORT}))
while True:
    server.accept()[0].close()
"""

# A refusal may be that of a policy, or come from one that does not listen yet.
REACH = f"""{_SAME_RUNNER}
import socket, time
deadline = time.monotonic() + 3
while time.monotonic() < deadline:
    try:
        socket.create_connection((sys.argv[2], {PORT}), timeout=3).close()
    except ConnectionRefusedError:
        time.sleep(0.05)
    except OSError:
        break
    else:
        raise SystemExit({REACHED})
"""


def program(text: str, *arguments: str) -> list[str]:
    """Return the command that runs one of the programs."""
    return [PYTHON, "-I", "-S", "-c", text, *arguments]


def relay_command(seconds: float) -> list[str]:
    """Return the command that joins an exec's streams to the runner."""
    return [PYTHON, "-I", "-S", RELAY, "--announce", SOCKET, f"{seconds:g}"]
