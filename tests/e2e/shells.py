"""`python -m tests.e2e.shells`: many shells at once; each answer is its own, and nothing is lost.

Each command counts itself in a variable of its shell and in a file; a fifth of them print nothing.
"""

import argparse
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import SessionsConfig
from mcp_sandbox.models import BackendName, ChatId
from mcp_sandbox.sessions.session import Session
from tests.conftest import configured


@dataclass(frozen=True)
class Plan:
    backend: BackendName
    sandboxes: int
    shells: int
    commands: int
    seed: int


@dataclass
class Tally:
    """What went wrong, by kind, and how long commands took."""

    faults: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    later_s: list[float] = field(default_factory=list)
    said: set[str] = field(default_factory=set)

    def judge(self, printed: str, expected: str) -> None:
        if printed == expected:
            if printed and printed in self.said:
                self.faults["repeated"] += 1
            self.said.add(printed)
        elif not printed:
            self.faults["empty"] += 1
        else:
            self.faults["mixed" if printed.count("\n") != 1 else "wrong"] += 1


async def _work(
    session: Session, shell: str, plan: Plan, chance: random.Random, tally: Tally
) -> None:
    for number in range(1, plan.commands + 1):
        word = f"{session.chat.chat}-{shell}-{chance.getrandbits(64):x}"
        silent = chance.random() < 0.2
        show = "" if silent else f"; echo {word}-$n"
        started = time.monotonic()
        result = await session.exec(f"n=$((n + 1)); echo $n >> count-{shell}{show}", shell=shell)
        (tally.later_s if number > 1 else tally.first_s).append(time.monotonic() - started)
        tally.judge(result.stdout, "" if silent else f"{word}-{number}\n")
        if not result.success or result.stderr or (number > 1 and result.shell):
            tally.faults["wrong"] += 1


async def run(plan: Plan, data: Path) -> tuple[Tally, float, float]:
    """What was seen, and the seconds for as much work at once and one after another."""
    chance, tally = random.Random(plan.seed), Tally()
    shells = [f"s{number}" for number in range(plan.shells)]
    room = SessionsConfig(max_open=plan.sandboxes, max_per_user=plan.sandboxes)
    config = configured(plan.backend, data).model_copy(update={"sessions": room})
    async with open_manager(config) as manager:
        chats = [ChatId("tester", f"shells-{number}") for number in range(plan.sandboxes)]
        sessions = [await manager.session(chat) for chat in chats]
        pairs = [(session, shell) for session in sessions for shell in shells]
        chance.shuffle(pairs)
        started = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for session, shell in pairs:
                tasks.start_soon(_work, session, shell, plan, chance, tally)
        at_once_s = time.monotonic() - started
        for session, shell in pairs:
            counted = (await session.exec(f"cat count-{shell}")).stdout.split()
            if counted != [str(number) for number in range(1, plan.commands + 1)]:
                tally.faults["lost"] += 1
        # As much work as one sandbox did, by one of its shells after another.
        one, alone = sessions[0], Tally()
        started = time.monotonic()
        for shell in shells:
            await _work(one, f"{shell}-alone", plan, chance, alone)
        return tally, at_once_s, (time.monotonic() - started) * plan.sandboxes


def report(plan: Plan, tally: Tally, at_once_s: float, apart_s: float) -> str:
    """The lines that a run prints."""
    count = plan.sandboxes * plan.shells * plan.commands
    kinds = ("wrong", "empty", "mixed", "repeated", "lost")
    return (
        f"{count:,} commands in {plan.sandboxes} × {plan.shells} shells, {plan.backend}, "  # noqa: RUF001
        f"seed {plan.seed}\n"
        + ", ".join(f"{kind} {tally.faults[kind]}" for kind in kinds)
        + f"\nat once {at_once_s:.1f} s, one after another {apart_s:.1f} s\n"
        f"slowest first command {max(tally.first_s):.2f} s, later {max(tally.later_s):.2f} s\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.shells")
    parser.add_argument("--backend", choices=("docker", "bubblewrap"), default="bubblewrap")
    parser.add_argument("--sandboxes", type=int, default=10)
    parser.add_argument("--shells", type=int, default=10)
    parser.add_argument("--commands", type=int, default=100)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    plan = Plan(**vars(parser.parse_args()))
    with tempfile.TemporaryDirectory(prefix="mcs-shells-", ignore_cleanup_errors=True) as folder:
        tally, at_once_s, apart_s = anyio.run(run, plan, Path(folder))
    sys.stdout.write(report(plan, tally, at_once_s, apart_s))
    return 1 if tally.faults else 0


if __name__ == "__main__":
    sys.exit(main())
