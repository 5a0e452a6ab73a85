"""The second half of an everyday session: data, long output, time, network, servers, pictures."""

import struct
import zlib

from tests.e2e.stumbles.judging import Step, fails, run, suggested

_ROWS = """\
import random
pick = random.Random(1)
with open("sales.csv", "w") as file:
    file.write("id,city,day,amount\\n")
    for n in range(1_450_000):
        city = pick.choice(("Graz", "Wels", "Wien"))
        file.write(f"{n},{city},2025-{n % 12 + 1:02}-{n % 28 + 1:02},{n % 1000}.50,-----\\n")
    file.write("last,Nowhere,2026-01-01,1\\n")
print(file.closed)
"""
_TOTALS = """\
import csv, collections
totals = collections.Counter()
with open("sales.csv") as file:
    for row in csv.DictReader(file):
        totals[row["city"]] += float(row["amount"])
print(len(totals), round(sum(totals.values())))
"""

DATA = (
    Step("run_code", {"code": _ROWS}, ["True", "sales.csv"]),
    run("ls -lh sales.csv && wc -l sales.csv", "M ", "1450002"),
    Step("run_code", {"code": _TOTALS}, ["^4 7250000"]),
    Step("grep", {"pattern": "^1449999,", "path": "sales.csv"}, ["1449999,"]),
    Step("grep", {"pattern": "Wien", "path": "sales.csv", "limit": 5}, ["shortened|more"]),
    Step("read_file", {"path": "sales.csv", "limit": 3}, ["id,city", "offset=4"]),
    Step("read_file", {"path": "sales.csv", "offset": 1_450_000, "limit": 10}, ["last,Nowhere"]),
    Step("read_file", {"path": "sales.csv", "offset": 9_000_000}, ["1,?450,?002"], refused=True),
    Step(
        "run_code",
        {"code": "import pandas as pd\npd.read_csv('sales.csv')"},
        ["pandas", "image|skill"],
    ),
    run("sqlite3 data.db 'create table t (a); insert into t values (1)' && ls data.db", "data.db"),
    Step("read_file", {"path": "data.db"}, ["sqlite"]),
    run("python3 -c \"open('wide.txt', 'w').write('x' * 90_000 + 'needle' + 'y' * 90_000)\""),
    Step("grep", {"pattern": "needle", "path": "wide.txt"}, ["needle"]),
    Step("read_file", {"path": "wide.txt"}, ["shortened"]),
)

_LOG = """\
for n in range(40_000):
    print(f"{n:06} INFO all is well, nothing is to be seen here")
    if n == 20_123:
        print("ERROR disk 17 failed")
"""
_BAR = """\
import sys
for part in range(0, 101, 10):
    print(f"\\r\\x1b[32m{part:3}%\\x1b[0m {'#' * part}", end="", file=sys.stderr)
print("\\x1b[1mdone\\x1b[0m")
"""

OUTPUT = (
    Step("run_code", {"code": _LOG}, ["left out", r"\b1\b.*\berror", "grep"]),
    Step("exec", suggested("grep"), ["disk 17 failed"]),
    Step("run_code", {"code": _LOG}, ["left out", "read_file|tail -c"]),
    Step("run_code", {"code": "print('a' * 300_000)"}, ["left out", "tail -c"]),
    Step("exec", suggested("tail"), ["aaaa"]),
    Step("run_code", {"code": _BAR}, ["done", "100%", r"\\r"], [" 50%"]),
    run("printf '\\033[31mred\\033[0m\\n'; printf 'one\\rtwo\\n'", "^red$", "^one$", "^two$"),
    run("printf 'load 1\\rload 2\\n'", "^load 2$", "1 line left out", r"\\r", never=["load 1"]),
    Step(
        "exec",
        {"command": "for n in 1 2 3; do echo tick $n; done; sleep 60", "timeout_s": 2},
        ["tick 3", "timed out after 2 s"],
    ),
    Step(
        "run_code",
        {"code": "import time\nprint('begun')\ntime.sleep(60)", "timeout_s": 2},
        ["begun", "timed out"],
    ),
    Step("exec", {"command": "python3 -c 'print(1); import os; os.kill(os.getpid(), 9)'"}, ["^1$"]),
    Step("run_code", {"code": "print('so far')\nx = bytearray(10**11)"}, ["so far", "MemoryError"]),
    Step(
        "run_code",
        {"code": "print('so far')\nx = [bytearray(b'x' * 10**8) for _ in range(60)]"},
        ["so far", "out of memory"],
    ),
    run("for n in $(seq 500); do echo > part$n; done", r"and \d+ more"),
    run("rm part*", "deleted|no output"),
    run("true", "no output"),
    fails("false"),
    fails("head -c 300M /dev/zero > big; code=$?; rm -f big; exit $code", r"^\[(?!exit).*file"),
)

_OFFLINE = "no network"

NETWORK = (
    fails("pip install requests", _OFFLINE, timeout_s=20),
    Step(
        "exec",
        {"command": "npm install left-pad", "timeout_s": 20},
        [_OFFLINE],
        ["timed out"],
    ),
    fails("curl -sS https://example.org", _OFFLINE, timeout_s=20),
    fails("git clone https://github.com/octocat/Hello-World", _OFFLINE, timeout_s=20),
    Step(
        "run_code",
        {"code": "import urllib.request\nurllib.request.urlopen('https://example.org')"},
        [_OFFLINE],
    ),
    run(
        "python3 -m http.server 8123 --bind 127.0.0.1 > server.log 2>&1 & echo $! > server.pid; "
        "curl -sS --retry 20 --retry-connrefused --retry-delay 1 http://127.0.0.1:8123/pyproject.toml",
        'name = "shapes"',
    ),
    Step("read_file", {"path": "server.log"}, ["Serving HTTP", "GET /pyproject.toml"]),
    run("curl -sS http://localhost:8123/ && kill $(cat server.pid)", "pyproject.toml"),
    fails("curl -sS http://127.0.0.1:8123/", "connect", never=[_OFFLINE]),
)


def _png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checked = kind + data
        return struct.pack(">I", len(data)) + checked + struct.pack(">I", zlib.crc32(checked))

    rows = zlib.compress((b"\0" + b"\x40\x80\xc0" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def _hex(name: str, data: bytes) -> Step:
    code = f"open({name!r}, 'wb').write(bytes.fromhex('{data.hex()}'))\nprint('made')"
    return Step("run_code", {"code": code}, ["made", name])


PICTURES = (
    _hex("good.png", _png(64, 48)),
    Step("read_file", {"path": "good.png"}, ["64 ?. ?48"], picture=True),
    _hex("cut.png", _png(64, 48)[:60]),
    Step("read_file", {"path": "cut.png"}, ["cut.png", "damaged|not whole|cut|broken|end"]),
    _hex("wide.png", _png(20_000, 10)),
    Step("read_file", {"path": "wide.png"}, ["20,?000 ?. ?10"]),
    _hex("zeros.jpg", bytes(500)),
    Step("read_file", {"path": "zeros.jpg"}, ["zeros.jpg"]),
    Step("read_file", {"path": "/proc/cpuinfo"}, ["processor"]),
    Step("delete_file", {"path": "*.jpg"}, ["glob|pattern|wildcard"], refused=True),
    Step("delete_file", {"path": "zeros.jpg"}, ["zeros.jpg"]),
    Step("delete_file", {"path": "src"}, ["recursive"], refused=True),
    Step("delete_file", {"path": "src", "recursive": "true"}, ["src"]),
    Step("move_file", {"source": "good.png", "destination": "outputs/good.png"}, ["outputs"]),
    Step("exec", {"command": "cat src/shapes.py"}, ["No such file"]),
)
