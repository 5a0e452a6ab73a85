"""Processes and cells that outlive their calls: each ends as it should, and is told of once."""

import re
import time
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.e2e.endurance.chat import Chat, Unanswered, text_of
from tests.e2e.endurance.tally import Tally

_FOLDER = "/workspace/runs"
# So many of one starter go on at a time: what ends with a sandbox is named, but not without end.
_MOST = 2
_CELLS = 0.4
_LASTS_S = 1.2
_ENDLESS_S = 600
# A call is answered for so long though its client has gone, and finds an end for so long.
_LATE_S, _PASSING_S = 1.5, 2.0
_SETTLED_S = 30.0
_NAMED = r'\((?:: |")(run-[\w-]+)"?;'
_NEWS = re.compile(rf"\[p\d+-\w{{3}} {_NAMED}.*?\) ((?:was|ended|ran|timed) [\w ]+?) after \d+ s")
_BURIED = re.compile(_NAMED)
_WITH = "Ended in the background:"
_COMMAND = ": {name}; sleep {lasts}; echo {name} $EPOCHREALTIME >> {folder}; exit {code}"
# The process calls itself as its notebook is called: so it is found from outside.
_CELL = """\
"{name}"; lasts = {lasts}
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, b"{notebook}")
time.sleep(lasts)
with open("{folder}", "a") as file:
    file.write(f"{name} {{time.time()}}\\n")
sys.exit({code})
"""


@dataclass
class Run:
    """One process. `code` is what it is to end with; None: it has to be stopped.

    `notebook`: whose cell it is; empty when it is a command.
    """

    name: str
    code: int | None
    notebook: str = ""
    process: str = ""
    # How its end was told: by news, with its sandbox, or to who had asked for it.
    news: int = 0
    buried: bool = False
    asked: bool = False

    @property
    def told(self) -> bool:
        return bool(self.news or self.buried or self.asked)


class Runs:
    """Those of one chat, whichever of its clients started them or was told."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._runs: dict[str, Run] = {}
        # Of calls that were cut off: when they began, and when they were.
        self._cut: list[tuple[float, float]] = []
        # Something of this chat's sandbox is killed in this round, or this notebook alone.
        self.is_struck = False
        self.struck_notebook = ""

    def add(self, run: Run) -> None:
        self._runs[run.name] = run

    def is_open(self, run: Run) -> bool:
        """Its end was not told yet, and is still to be."""
        return not run.told and run.name in self._runs

    def has_cell(self, notebook: str) -> bool:
        """Whether a notebook may still do a cell."""
        return any(run.notebook == notebook and not run.told for run in self._runs.values())

    def hear(self, result: Any) -> None:
        """Take what any answer of the chat tells."""
        text, said = text_of(result), (result.meta or {}).get("mcp-sandbox/result", {})
        if said.get("process") and not said["running"]:
            self._hear_answer(said)
        for name, how in _NEWS.findall(text):
            if run := self._runs.get(name):
                run.news += 1
                self._judge(run, how.removeprefix("ended with exit code "))
                if run.news > 1:
                    self._tally.fault("told twice", text[-600:])
        for name in _BURIED.findall(text.partition(_WITH)[2]):
            if run := self._runs.get(name):
                run.buried = True

    def _hear_answer(self, said: Any) -> None:
        for run in self._runs.values():
            if run.process == said["process"]:
                run.asked = True
                stopped = "was stopped" if said["signal"] == "SIGTERM" else None
                killed = "was killed by SIGKILL" if said["signal"] == "SIGKILL" else None
                self._judge(run, stopped or killed or str(said["exit_code"]))

    def _judge(self, run: Run, how: str) -> None:
        """Whether it may have ended so."""
        stopped = run.code is None and how in ("was stopped", "143")
        is_struck = self.is_struck or (run.notebook and run.notebook == self.struck_notebook)
        killed = is_struck and how in ("was killed by SIGKILL", "137")
        # Its start was cut off just as it began.
        killed = killed or (how == "was cancelled" and not run.process)
        if stopped or how == str(run.code):
            self._tally.count("processes that ended as they should")
        elif killed:
            self._tally.count("processes killed")
        else:
            self._tally.fault("wrong ends", f"{run} {how}")

    def cut_off(self, began: float, said: str) -> None:
        if "so nothing ran" not in said:
            self._cut.append((began, time.time()))

    def close(self, ended: dict[str, float]) -> None:
        """Reckon a round in which all has ended: `ended` says when, by names."""
        counts = self._tally.counts
        for run in self._runs.values():
            counts["processes told"] += bool(run.news)
            counts["processes that ended with their sandbox"] += run.buried
            counts["processes asked for"] += run.asked
            if not run.process:
                counts["processes of cut off starts"] += 1
            elif not run.told and self._was_cut_off(run, ended.get(run.name)):
                counts["processes told to a call cut off"] += 1
            elif not run.told:
                self._tally.fault("processes lost", f"{run} {ended.get(run.name)} {self._cut}")
        self._runs, self._cut, self.is_struck, self.struck_notebook = {}, [], False, ""

    def _was_cut_off(self, run: Run, ended: float | None) -> bool:
        """Whether the call that told its end may have been cut off in that very moment."""
        return any(
            cut + _LATE_S >= ended and began <= ended + _PASSING_S
            if ended
            else self.is_struck or run.code is None
            for began, cut in self._cut
        )


class Starter:
    """Starts processes and cells of its notebook; waits for some, stops some, forgets some."""

    def __init__(self, chat: Chat, name: str, runs: Runs, random: Random) -> None:
        self.runs = runs
        self.chat = chat
        self.notebook = name
        self._random = random
        self._count = 0
        self._mine: list[Run] = []
        chat.heard.append(runs.hear)
        chat.cut.append(runs.cut_off)

    async def step(self) -> None:
        """One random call."""
        self._mine = [run for run in self._mine if self.runs.is_open(run)]
        try:
            if len(self._mine) < _MOST:
                await self._start()
            else:
                await self._random.choice((self._wait, self._stop))(self._random.choice(self._mine))
        except Unanswered:
            self._mine = self._mine[1:]

    async def _start(self) -> None:
        self._count += 1
        code = self._random.choice((None, 3, 4, 5))
        lasts = _ENDLESS_S if code is None else round(self._random.uniform(0, _LASTS_S), 2)
        is_cell = self._random.random() < _CELLS and not self.runs.has_cell(self.notebook)
        run = Run(f"run-{self.notebook}-{self._count}", code, self.notebook * is_cell)
        self.runs.add(run)
        given = {**vars(run), "lasts": lasts, "folder": _FOLDER}
        if is_cell:
            what = {"code": _CELL.format_map(given), "notebook": self.notebook}
        else:
            what = {"command": _COMMAND.format_map(given)}
        result = await self.chat.call("run_code" if is_cell else "exec", **what, wait_s=0)
        run.process = self._meta(result)["process"]
        self.chat.tally.count("processes started")
        self.chat.tally.count("processes that are cells", int(is_cell))
        self._mine.append(run)

    async def _wait(self, run: Run) -> None:
        wait_s = self._random.uniform(0, 0.5)
        await self._ask(run, action="wait", id=run.process, wait_s=wait_s)

    async def _stop(self, run: Run) -> None:
        if run.code is None:
            await self._ask(run, action="stop", id=run.process)

    async def _ask(self, run: Run, **arguments: object) -> None:
        if self.runs.is_struck:
            # Its sandbox may be another by now.
            self.chat.note_kill()
        await self.chat.call("process", **arguments)

    @staticmethod
    def _meta(result: Any) -> Any:
        return (result.meta or {})["mcp-sandbox/result"]


async def settle(chat: Chat, runs: Runs) -> None:
    """End what has to be stopped, hear of all that has ended, and reckon."""
    deadline = time.monotonic() + _SETTLED_S
    while time.monotonic() < deadline:
        rows = (await chat.call("process", action="list")).meta["mcp-sandbox/result"]["processes"]
        going = [row for row in rows if row["running"] and "run-" in row["command"]]
        for row in going:
            if f" {_ENDLESS_S}" in row["command"]:
                await chat.call("process", action="stop", id=row["id"])
        if not going:
            break
    # Its news come with this one; a look at it is the proof of when each has ended.
    text = text_of(await chat.call("exec", command=f"cat {_FOLDER}; rm -f {_FOLDER}"))
    ended = {name: float(when) for name, when in re.findall(r"(run-\S+) ([\d.]+)", text)}
    runs.close(ended)
