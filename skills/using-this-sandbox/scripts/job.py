#!/usr/bin/env python3
"""Run a command in the background, and look after it in later calls.

Exit codes: 0 = well, 1 = the job failed or was lost, 2 = called wrongly, 3 = the job still runs.
Everything about a job is in .jobs/NAME, its output in .jobs/NAME/log.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

WELL, FAILED, USAGE, RUNNING = 0, 1, 2, 3
SHOWN_BYTES = 4000
POLL_S = 0.1
STOP_S = 5


class WrongUse(Exception):
    """The message says what to do instead."""


class Job:
    """A command, its process and its files: command, process, log, exit_code."""

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            raise WrongUse(f"{name!r} is no name: use letters, digits, dots and dashes")
        self.name = name
        self.folder = Path(os.environ.get("JOBS_DIR", "/workspace/.jobs")) / name

    def read(self, file: str) -> str:
        try:
            return (self.folder / file).read_text(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def write(self, file: str, text: str) -> None:
        """Write it whole: who reads in between sees the old text or the new."""
        new = self.folder / f"{file}.new"
        new.write_text(text)
        new.replace(self.folder / file)

    def state(self) -> str:
        """running, lost, or how it ended: done, failed (exit code 2)."""
        code = self.read("exit_code")
        if not code and self.runs():
            return "running"
        code = code or self.read("exit_code")
        if not code:
            return "lost"
        return "done" if code == "0" else f"failed (exit code {code})"

    def runs(self) -> bool:
        keeper = self.read("keeper").split()
        return bool(keeper) and identity(int(keeper[0])) == keeper

    def tail(self) -> str:
        log = self.folder / "log"
        size = log.stat().st_size if log.exists() else 0
        if not size:
            return "(no output)"
        with log.open("rb") as file:
            file.seek(max(0, size - SHOWN_BYTES))
            text = file.read().decode(errors="replace").rstrip("\n")
        left_out = max(0, size - SHOWN_BYTES)
        return f"[… {left_out:,} bytes before this in {log}]\n{text}" if left_out else text


def identity(pid: int) -> list[str]:
    """The process and when it began: a number alone is used again, in a new sandbox too."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [] if fields[0] == "Z" else [str(pid), fields[19]]


def start(job: Job, command: list[str]) -> int:
    if job.folder.exists() and job.state() == "running":
        raise WrongUse(f"{job.name} still runs: wait for it, stop it, or take another name")
    if shutil.which(command[0]) is None:
        raise WrongUse(f"there is no program {command[0]}; for shell syntax: -- bash -c '…'")
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    job.write("command", shlex.join(command))
    with (job.folder / "log").open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, __file__, "keep", job.name, "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    job.write("keeper", " ".join(identity(keeper.pid)))
    print(f"{job.name} started; its output goes to {job.folder / 'log'}")
    return WELL


def keep(job: Job, command: list[str]) -> int:
    """Stay with the command until it ends, and note how."""
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as exc:
        print(f"job.py: cannot run {command[0]}: {exc.strerror}", flush=True)
        job.write("exit_code", "127")
        return FAILED
    job.write("group", str(process.pid))
    code = process.wait()
    job.write("exit_code", str(code if code >= 0 else 128 - code))
    return WELL


def wait(job: Job, seconds: float) -> int:
    known(job)
    until = time.monotonic() + seconds
    while job.state() == "running" and time.monotonic() < until:
        time.sleep(POLL_S)
    return report(job)


def stop(job: Job) -> int:
    known(job)
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + STOP_S
        while job.state() == "running" and time.monotonic() < until:
            if job.read("group"):
                signal_group(int(job.read("group")), number)
            time.sleep(POLL_S)
    return RUNNING if report(job) == RUNNING else WELL


def signal_group(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def known(job: Job) -> None:
    if not job.folder.is_dir():
        raise WrongUse(f"there is no job {job.name}; `job.py list` shows all")


def report(job: Job) -> int:
    state = job.state()
    print(job.tail())
    print(f"[{job.name}: {state}]")
    return {"done": WELL, "running": RUNNING}.get(state, FAILED)


def list_jobs() -> int:
    folder = Job("any").folder.parent
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    for name in names:
        job = Job(name)
        print(f"{name}: {job.state()}: {job.read('command')}")
    if not names:
        print("no jobs")
    return WELL


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="job.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="start|wait|stop|list")
    begin = verbs.add_parser(
        "start", help="start COMMAND and return at once: start NAME -- COMMAND"
    )
    later = verbs.add_parser("wait", help="wait until it ends, and show the end of its output")
    end = verbs.add_parser("stop", help="end it and its children")
    # Not for users, so it has no help: the process that stays with the command.
    inner = verbs.add_parser("keep")
    for verb in (begin, later, end, inner):
        verb.add_argument("name", metavar="NAME")
    for verb in (begin, inner):
        verb.add_argument("command", metavar="COMMAND", nargs="+", help="after --")
    later.add_argument("--for", dest="seconds", type=float, default=40, metavar="SECONDS")
    verbs.add_parser("list", help="show all jobs")
    return parser.parse_args()


def main() -> int:
    given = arguments()
    if given.verb == "list":
        return list_jobs()
    job = Job(given.name)
    if given.verb == "start":
        return start(job, given.command)
    if given.verb == "keep":
        return keep(job, given.command)
    return wait(job, given.seconds) if given.verb == "wait" else stop(job)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except WrongUse as exc:
        print(f"job.py: {exc}", file=sys.stderr)
        sys.exit(USAGE)
