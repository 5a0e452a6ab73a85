"""Attacks a new sandbox in known ways, and says what it withstood.

Attempts look for canaries of this process: a file, sockets, a variable, a process, a secret, and
another chat. All is in a data root of its own, which goes away with everything that was started.
"""

import inspect
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any

from anyio import to_thread
from rich.console import Console

from mcp_sandbox.app.chats import on_trial, open_manager, temporary_data
from mcp_sandbox.config import Config, LimitsConfig
from mcp_sandbox.config.environment import having_variables
from mcp_sandbox.config.sections import PoolConfig, SecretConfig
from mcp_sandbox.doctor import attack_inside as inside
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.models import ChatId, SandboxFacts
from mcp_sandbox.sessions.session import Session

_STYLES = {"held": "green", "BROKEN": "bold red", "n/a": "yellow"}
_MIB = 1 << 20
# Low limits: quickly reached, and harmless to exceed.
_TIGHT = LimitsConfig(
    memory=512 * _MIB, pids=64, shm=16 * _MIB, tmp=32 * _MIB, open_files=256, file_size=64 * _MIB
)
_LIMIT_S, _SHORT_S = 40.0, 2.0
_ATTACKER, _OTHER = ChatId("doctor", "attacker"), ChatId("doctor", "other")
_SECRET = "ATTACK_SECRET"  # noqa: S105 - its name
# Runs beside the attacker, with a canary among its arguments.
_BESIDE = """import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
time.sleep(120)
"""


@dataclass(frozen=True)
class Result:
    """What was tried, the verdict (held, BROKEN or n/a), and the evidence."""

    group: str
    attempt: str
    verdict: str
    evidence: str


@dataclass(frozen=True)
class Attack:
    """The sandbox that was attacked, and how each attempt ended."""

    backend: str
    isolation: str
    network: str
    results: tuple[Result, ...]

    def count(self, verdict: str) -> int:
        return sum(each.verdict == verdict for each in self.results)


def render(found: Attack, console: Console) -> None:
    """Print how each attempt ended, and how many held."""
    for each in found.results:
        line = f"{each.verdict:7} {each.group}: {each.attempt}: {each.evidence}"
        console.print(line, style=_STYLES[each.verdict], markup=False, highlight=False)
    console.print(f"\n{found.backend}: {found.isolation}; network {found.network}", markup=False)
    counts = ", ".join(f"{found.count(verdict)} {verdict}" for verdict in _STYLES)
    console.print(counts, style=_STYLES["BROKEN" if found.count("BROKEN") else "held"])


async def attack(config: Config, tell: Callable[[str], object]) -> Attack:
    """Attack a sandbox of the configured backend, on the configured network; `tell` the progress.

    Raises OperatorError: no sandbox can be made.
    """
    async with temporary_data() as folder, AsyncExitStack() as stack:
        own, canaries, results = _build_own_config(config, folder), ExitStack(), list[Result]()
        stack.push_async_callback(to_thread.run_sync, canaries.close)
        at = await to_thread.run_sync(set_out, folder, canaries, own)
        program = await to_thread.run_sync(inspect.getsource, inside)
        manager = await stack.enter_async_context(open_manager(own))
        for chat in (_ATTACKER, _OTHER) if manager.saving else ():
            # Before there is a sandbox, which would stay if it cannot be saved.
            await manager.backups.list(chat)
            stack.push_async_callback(manager.remove, chat)
        session, other = await manager.session(_ATTACKER), await manager.session(_OTHER)
        await other.write_file(at["mark"], at["mark"])
        listen = other.processes.start(["python3", "-c", _BESIDE, at["beside"]])
        listening = await stack.enter_async_context(listen)
        at["beside_port"] = int((await listening.wait(until="\n", wait_s=_LIMIT_S)).stdout)
        facts = await session.info()
        gaps = _known_gaps(facts, config)
        for name in inside.ATTEMPTS:
            verdict, evidence = await _make_attempt(session, program, {**at, "attempt": name})
            group, _, attempt = name.partition(": ")
            if verdict == "BROKEN" and (known := gaps.get(name) or gaps.get(group)):
                verdict, evidence = "n/a", known if "not so" in evidence else f"{known}: {evidence}"
            results.append(Result(group, attempt, verdict, evidence))
            tell(f"{len(results)} of {len(inside.ATTEMPTS)} attempts are made")
    return Attack(facts.backend, facts.isolation, facts.network, tuple(results))


async def _make_attempt(
    session: Session, program: str, facts: Mapping[str, Any]
) -> tuple[str, str]:
    attempt, how = facts["attempt"], ["python3", "-I", "-S", "-c", program]
    limit_s = _SHORT_S if attempt == inside.TIME else _LIMIT_S
    try:
        ended = await session.exec(how, stdin=json.dumps(facts), timeout_s=limit_s)
    except SandboxGone:
        return "held" if attempt == inside.MEMORY else "BROKEN", "the sandbox ended"
    if ended.success:
        return "held", ended.stdout.strip()
    if attempt == inside.MEMORY and (ended.out_of_memory or ended.signal):
        return "held", "the kernel ended the program"
    if attempt == inside.TIME and ended.timed_out:
        return "held", f"killed after {ended.duration_ms / 1000:.1f} s"
    message = ended.stderr.strip() or f"it ended with {ended.signal or ended.exit_code}"
    return "BROKEN", message.splitlines()[-1][:200]


def _build_own_config(config: Config, folder: Path) -> Config:
    given = dict(config.limits)
    source = {"from": f"file:{folder / 'value'}", "hosts": ("a.example.com",), "users": ("doctor",)}
    planted = {_SECRET: SecretConfig.model_validate(source)}
    return on_trial(config, folder / "data").model_copy(
        update={
            "limits": LimitsConfig(**{name: min(given[name], most) for name, most in _TIGHT}),
            "secrets": planted if config.network == "allowlist" else {},
            "workspace": config.workspace.model_copy(update={"aliases": ()}),
            "pool": PoolConfig(size=0),
        }
    )


def set_out(folder: Path, stack: ExitStack, config: Config) -> dict[str, Any]:
    """Plant canaries on this machine until the stack closes; return their places by name."""
    names = ("mark", "variable", "value", "hidden", "beside", "process")
    at: dict[str, Any] = {name: token_hex(8) for name in names}
    at |= {"canary": str(folder / at["mark"]), "unix": str(folder / "unix")}
    # Readable by all: the sandbox's wall shall protect it, and not its permissions.
    folder.chmod(0o755)
    for name, text, mode in (("value", at["value"], 0o600), (at["mark"], "canary", 0o666)):
        (folder / name).write_text(text)
        (folder / name).chmod(mode)
    for address in (at["unix"], f"\0{at['mark']}"):
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(address)
        server.listen()
    (folder / "unix").chmod(0o777)
    stack.enter_context(having_variables({"ATTACK_CANARY": at["variable"]}))
    beside = [sys.executable, "-c", _BESIDE, at["process"]]
    process = subprocess.Popen(beside, start_new_session=True, stdout=subprocess.DEVNULL)  # noqa: S603 - ours
    stack.callback(stack.enter_context(process).kill)
    tcp = stack.enter_context(socket.create_server(("0.0.0.0", 0)))  # noqa: S104 - a canary
    port = tcp.getsockname()[1]
    local = re.findall(r"(?<!\S)(\S++)\n +/32 host LOCAL", Path("/proc/net/fib_trie").read_text())
    others = [f"{each}:{port}" for each in sorted({*local}) if not each.startswith("127.")][:5]
    hosts = ("127.0.0.1", "host.internal", "a.test", "169.254.169.254")
    chat = folder / "data" / "sandbox" / "workspace" / _OTHER.user / f"chat-{_OTHER.chat}"
    at |= {"port": port, "addresses": others, "secret": "".join(config.secrets)}
    at |= {"targets": [*(f"{each}:{port}" for each in hosts), *others]}
    return {**at, **asdict(config.limits.values()), "other": str(chat / at["mark"])}


def _known_gaps(facts: SandboxFacts, config: Config) -> Mapping[str, str]:
    """Return by attempt what does not hold in such a sandbox, as the README says."""
    gaps = dict[str, str]()
    if config.network != "allowlist":
        gaps |= dict.fromkeys((inside.DOOR, inside.PLACEHOLDER), "network is not allowlist")
    if "gVisor" in facts.limits["pids"]:
        gaps["system calls"] = "gVisor's own kernel answers, not the host's"
        own = "code in gVisor can look into the runner of its own sandbox, and end it"
        gaps |= dict.fromkeys((inside.LOOK, inside.END), own)
        gaps[inside.PROCESSES] = "limits.pids is raised, as gVisor's own threads are counted too"
    if config.network == "open" and facts.backend != "unsafe-local":
        reached = (inside.ADDRESSES, inside.ROUTE) if facts.backend == "docker" else ("network",)
        gaps |= dict.fromkeys(reached, "the network is open")
    elif facts.backend == "kubernetes":
        gaps[inside.ROUTE] = "there may be a route, on which a NetworkPolicy stops everything"
    if "by the runner" in facts.limits["pids"]:
        gaps[inside.PROCESSES] = "the runner makes room for calls; the limit of a pod is its node's"
    if "no writable cgroup" in facts.limits["pids"]:
        gaps |= dict.fromkeys((inside.MEMORY, inside.PROCESSES), "there is no writable cgroup")
    return gaps
