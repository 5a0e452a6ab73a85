"""An engine of our own, which may be killed and started again as one likes. Blocking."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from subprocess import DEVNULL
from typing import IO

IMAGE = "mcp-sandbox/base:latest"
# Most of its bytes: Node, documentation, what is known of packages, Perl, git.
_NOT_RUN = ("usr/local", "usr/share", "var/lib", "var/cache", "usr/lib/*/perl*", "usr/lib/git-core")
_UP_S = 60.0
_ENDED_S = 30.0


class Engine:
    """A dockerd without networks, in that of the process `beside` or in one of its own."""

    def __init__(self, folder: Path, beside: int = 0) -> None:
        self._folder = folder
        # An engine without a bridge deletes the one that it finds.
        namespace = ["nsenter", f"--net=/proc/{beside}/ns/net"] if beside else ["unshare", "--net"]
        self._inside = [*namespace, "--"]
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"unix://{folder / 'docker.sock'}"

    def start(self) -> None:
        """Return when it answers."""
        folder = self._folder
        command = [*self._inside, "dockerd"]
        command += ["--data-root", str(folder / "data"), "-H", self.address]
        command += ["--exec-root", str(folder / "exec"), "--pidfile", str(folder / "pid")]
        command += ["--bridge", "none", "--iptables=false"]
        with (folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + _UP_S
        while self.client("version").returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            time.sleep(0.05)

    def end(self, number: signal.Signals) -> None:
        """Let it end, or kill it, which leaves its containers behind."""
        if self._process is not None:
            self._process.send_signal(number)
            try:
                self._process.wait(_ENDED_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def restart(self, random: Random) -> str:
        number = random.choice((signal.SIGTERM, signal.SIGKILL))
        self.end(number)
        time.sleep(random.uniform(0.0, 1.0))
        self.start_again()
        return "engine ended" if number == signal.SIGTERM else "engine killed"

    def start_again(self) -> None:
        """Start after one that was killed."""
        # It leaves these behind, and the next would wait in vain for who listened there.
        for stale in (self._folder / "pid", *self._folder.glob("exec/containerd/containerd.[ps]*")):
            stale.unlink(missing_ok=True)
        self.start()

    def load(self) -> None:
        """Take the image over from the usual engine, without what is not run here."""
        left_out = [f"--exclude=./{path}" for path in _NOT_RUN]
        pack = ["docker", "run", "--rm", "--network", "none", "--log-driver", "none"]
        pack += ["--user", "0", "--entrypoint", "tar", IMAGE, "-c", *left_out]
        with subprocess.Popen(
            [*pack, "--one-file-system", "-C", "/", "."], stdout=subprocess.PIPE
        ) as files:
            changes = [word for each in _instructions() for word in ("--change", each)]
            done = self.client("import", *changes, "-", IMAGE, stdin=files.stdout)
        if files.returncode or done.returncode:
            raise RuntimeError(f"the image could not be taken over: {done.stderr!r}")

    def client(
        self, *words: str, stdin: IO[bytes] | int | None = DEVNULL
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command of its client."""
        return subprocess.run(
            ["docker", "-H", self.address, *words],
            stdin=stdin,
            capture_output=True,
            check=False,
        )


def _instructions() -> Iterator[str]:
    """What a Dockerfile would say of the image's configuration."""
    asked = ["docker", "image", "inspect", "--format", "{{json .Config}}", IMAGE]
    config = json.loads(subprocess.run(asked, capture_output=True, check=True).stdout)
    yield f"ENTRYPOINT {json.dumps(config['Entrypoint'])}"
    yield f"USER {config['User']}"
    yield f"WORKDIR {config['WorkingDir']}"
    yield from (f"ENV {each}" for each in config["Env"])
    yield from (f"LABEL {name}={value}" for name, value in config["Labels"].items())


def absent() -> str:
    """Why there can be no engine of our own here; "" when there can be one."""
    if os.geteuid() != 0:
        return "an engine of our own needs root"
    return "" if shutil.which("dockerd") else "there is no dockerd"


@contextmanager
def own_engine(beside: int = 0) -> Generator[Engine]:
    """An engine with our images, gone with the block; the shared one is never touched."""
    # Its socket's path must be short, and its layers must not lie on another overlay.
    folder = Path(tempfile.mkdtemp(prefix="mcs-engine-", dir="/var/tmp"))
    engine = Engine(folder, beside)
    try:
        engine.start()
        engine.load()
        yield engine
    finally:
        engine.end(signal.SIGTERM)
        _unmount(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _unmount(folder: Path) -> None:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    for point in sorted((line.split()[4] for line in lines), reverse=True):
        if point.startswith(f"{folder}/"):
            with suppress(OSError):
                subprocess.run(["umount", "-l", point], check=False)
