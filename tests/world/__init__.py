"""A world of its own in a network namespace: names, addresses, servers; nothing leaves the machine.

Its process (`python -m tests.world`) holds the namespaces and serves; a program that is started
inside sees its resolver, its addresses and its authority where the real ones would be. What
reaches a server, a name server or a canary is written down in the order in which it came.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Addresses that are public and, in no network that tests run in, anybody's.
PUBLIC, PUBLIC6 = "11.0.0.1", "2600::11"
OTHER = "11.0.0.2"
PRIVATE, PRIVATE6, METADATA = "10.1.2.3", "fd00::1", "169.254.169.254"
# What a name answers, look-up by look-up; the last answer stays.
NAMES: Mapping[str, Sequence[Sequence[str]]] = {
    "private.example.com": [[PRIVATE]],
    "inner.example.net": [[PRIVATE]],
    "loopback.example.com": [["127.0.0.1"]],
    "loopback6.example.com": [["::1"]],
    "metadata.example.com": [[METADATA]],
    "mapped.example.com": [["::ffff:127.0.0.1"]],
    "mixed.example.com": [[PUBLIC, PRIVATE]],
    "rebind.example.com": [[PUBLIC], ["127.0.0.1"]],
    "six.example.com": [[PUBLIC6]],
    "other.example.com": [[OTHER]],
    "db.example.lan": [[PRIVATE]],
}
# Real names that have shops of ours here, and names beneath which there is anything.
SHOPS = ("pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "deb.debian.org")
GITS = ("github.com", "code.example.com")
PUBLIC_SUFFIXES = (".example.com", ".example.org", ".example.net", ".example")
# Listens and writes down whoever comes; never a place that anything may reach.
CANARIES = {
    **dict.fromkeys(("127.0.0.1", "::1", PRIVATE, PRIVATE6, METADATA), (22, 80, 443, 8443)),
    **dict.fromkeys((PUBLIC, PUBLIC6, OTHER), (22, 25)),
}
DATABASE = (PRIVATE, 5432)
LOCAL = ("127.0.0.1", 9000)
# A server of an authority that no machine knows by itself, and the file of that authority.
COMPANY_AT, COMPANY = (PUBLIC, 9443), "company.pem"


@dataclass(frozen=True)
class World:
    """A running world: `pid` is the process that holds it."""

    folder: Path
    pid: int

    def heard(self, kind: str = "") -> list[dict[str, Any]]:
        """All that came so far: of `kind` http, name or canary."""
        lines = (self.folder / "heard").read_text().splitlines()
        return [each for each in map(json.loads, lines) if kind in ("", each["kind"])]

    @contextmanager
    def hearing(self, kind: str = "") -> Iterator[list[dict[str, Any]]]:
        """What came during a block; the list is filled at its end."""
        found: list[dict[str, Any]] = []
        before = len(self.heard(kind))
        yield found
        found += self.heard(kind)[before:]

    def run(self, *command: str, timeout_s: float = 30) -> "subprocess.CompletedProcess[str]":
        """Run a program of this machine in it, as what the servers should do without us."""
        return subprocess.run(
            [*entering(self.pid), *command],
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )


def entering(pid: int) -> list[str]:
    """The words before a command that start it in the world of a process."""
    own = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
    return ["nsenter", f"--target={pid}", *own, "--net", "--mount", "--"]


def absent() -> str | None:
    """Why there can be no world here."""
    for program in ("unshare", "nsenter", "ip", "git"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    rootless = [] if os.geteuid() == 0 else ["-r"]
    done = subprocess.run(
        ["unshare", "--net", "--mount", *rootless, "true"], capture_output=True, check=False
    )
    return f"unshare: {done.stderr.decode().strip()}" if done.returncode else None


@contextmanager
def opened(folder: Path) -> Iterator[World]:
    """A world that keeps its things in a folder; gone with all that it runs at the end."""
    rootless = [] if os.geteuid() == 0 else ["-r"]
    start = ["unshare", "--net", "--mount", *rootless, sys.executable, "-m", "tests.world"]
    with subprocess.Popen(
        [*start, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "HOME": str(folder)},
        cwd=folder,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n", "the world did not begin"
            yield World(folder, process.pid)
        finally:
            # It reads until then, so that it also ends when this process is killed.
            process.stdin.close()
