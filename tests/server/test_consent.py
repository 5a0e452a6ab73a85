"""What the policy asks about runs with a person's yes alone, in both eras of the protocol."""

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.types import CallToolResult, ElicitResult, InputRequiredResult

from mcp_sandbox.app.chats import make_server, open_manager, open_skills
from mcp_sandbox.config import Config, PolicyConfig
from mcp_sandbox.errors import ConsentNeeded
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import bind_connection
from mcp_sandbox.server.server import SandboxServer
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.telemetry.metrics import Metrics
from tests.conftest import configured
from tests.server.scripted import text_of

pytestmark = pytest.mark.bubblewrap
ONCE = ElicitResult(action="accept", content={})
FOR_CHAT = ElicitResult(action="accept", content={"allow": "this chat"})
NO, NOBODY = ElicitResult(action="decline"), ElicitResult(action="cancel")
# It ends badly, as there is no such repository, but it has run.
PUSH = "git push https://git.example.org/acme/widgets main 2> /dev/null; printf ran"
ERAS = pytest.mark.parametrize("era", ["2026-07-28", "legacy"])


@dataclass
class User:
    """Answers the questions of one client, and keeps their words."""

    answers: list[ElicitResult] = field(default_factory=list[ElicitResult])
    asked: list[str] = field(default_factory=list[str])

    async def answer(self, _context: object, params: Any) -> ElicitResult:
        self.asked.append(params.message)
        return self.answers.pop(0)


@dataclass(frozen=True)
class Computers:
    """Those of the chats of one manager, and how their clients reach them."""

    manager: SessionManager
    metrics: Metrics
    config: Config

    @property
    def server(self) -> SandboxServer:
        async def session(chat: ChatId) -> Any:
            return await self.manager.session(chat, judged=True)

        return make_server(self.config, open_skills(self.config), session, self.metrics.count)

    @asynccontextmanager
    async def client(
        self, chat: str, *answers: ElicitResult, era: str = "auto"
    ) -> AsyncGenerator[tuple[Client, User]]:
        """A client of a chat, whose user gives these answers; without any it cannot ask."""
        user, name = User([*answers]), ChatId("local", chat)
        ask: Any = user.answer if answers else None
        with bind_connection(name):
            async with Client(self.server, mode=era, elicitation_callback=ask) as client:
                yield client, user


@pytest.fixture(scope="module")
async def computers(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Computers]:
    """Sandboxes with an open network, out of which something can leave."""
    config = configured("bubblewrap", tmp_path_factory.mktemp("data"))
    config = config.model_copy(update={"network": "open"})
    metrics = Metrics()
    async with open_manager(config, count=metrics.count) as manager:
        yield Computers(manager, metrics, config)


async def run(client: Client, command: str = PUSH) -> CallToolResult:
    return await client.call_tool("exec", {"command": command})


def graded(result: CallToolResult) -> dict[str, Any]:
    found: dict[str, Any] = (result.meta or {})["mcp-sandbox/result"]
    return found


@ERAS
async def test_a_yes_is_for_one_call_alone(computers: Computers, era: str) -> None:
    async with computers.client(f"once-{era}", ONCE, NOBODY, era=era) as (client, user):
        first = await run(client)
        assert (first.is_error, text_of(first)) == (False, "ran")
        assert graded(first)["level"] == "high"
        assert (await run(client)).is_error
        assert len(user.asked) == 2


@ERAS
async def test_a_yes_for_the_chat_is_for_the_same_target(computers: Computers, era: str) -> None:
    async with computers.client(f"chat-{era}", FOR_CHAT, NOBODY, era=era) as (client, user):
        for _ in range(2):
            assert text_of(await run(client)) == "ran"
        assert len(user.asked) == 1
        # What was allowed hides nothing that was not.
        both = f"{PUSH}; git push https://git.example.org/other main"
        assert (await run(client, both)).is_error
        assert len(user.asked) == 2
    async with computers.client("chat-of-another") as (client, _):
        assert (await run(client)).is_error


@ERAS
async def test_after_a_no_nobody_is_asked_the_same_again(computers: Computers, era: str) -> None:
    async with computers.client(f"no-{era}", NO, ONCE, era=era) as (client, user):
        for _ in range(2):
            refused = await run(client)
            assert refused.is_error
            assert "the user has said no to this" in text_of(refused)
            assert graded(refused)["exit_code"] == -1
        assert len(user.asked) == 1
        assert not (await run(client, "git push elsewhere 2> /dev/null; true")).is_error


@ERAS
@pytest.mark.parametrize("can_ask", [True, False])
async def test_what_nobody_answers_waits_for_a_person(
    computers: Computers, era: str, can_ask: bool
) -> None:
    chat = f"waits-{era}-{can_ask}"
    async with computers.client(chat, *[NOBODY] * can_ask, era=era) as (client, _):
        waits = await run(client)
        found = re.search(r"mcp-sandbox approvals allow (\w{4})`", text_of(waits))
        assert found is not None, text_of(waits)
        where, approval = await computers.manager.approvals.find(found[1].lower())
        assert (where.chat, approval.state, PUSH in approval.text) == (chat, "open", True)
        await computers.manager.approvals.answer(where, approval.id, "once", "me")
        assert text_of(await run(client)) == "ran"
        assert chat not in [each.chat for each, _ in await computers.manager.approvals.list()]


async def test_a_reset_takes_back_what_was_allowed_and_nothing_else(computers: Computers) -> None:
    everything = {"keep_files": False}
    async with computers.client("anew", FOR_CHAT, NO) as (client, user):
        assert text_of(await run(client)) == "ran"
        await client.call_tool("sandbox_reset", everything)
        for _ in range(2):
            assert "the user has said no to this" in text_of(await run(client))
            await client.call_tool("sandbox_reset", everything)
        assert len(user.asked) == 2


HOSTILE = {
    "long": f"echo {'x' * 9000}; git push https://git.example.org/{'a' * 300} main",
    "controls": "echo '\x1b[2J\x1b]0;x\x07\u202e'; git push https://x.example.org/\x1b[31m main",
    "lines": "\n" * 50 + "git push\t'a\nb' main",
    "secret": "git push https://me:s3cret-token@git.example.org/acme/widgets main",
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_question_is_three_short_lines_with_the_effect_first(
    computers: Computers, name: str
) -> None:
    async with computers.client(f"words-{name}", NOBODY) as (client, user):
        await run(client, HOSTILE[name])
    (asked,) = user.asked
    lines = asked.split("\n")
    assert len(lines) == 3
    assert all(len(line) <= 78 and line.isprintable() for line in lines), asked
    assert lines[0].startswith("It pushes: ")
    assert "s3cret" not in asked
    assert re.fullmatch(r"All of it: mcp-sandbox approvals show \w{4}", lines[2])
    _, approval = await computers.manager.approvals.find(lines[2][-4:])
    assert "s3cret" not in str(approval)


@ERAS
async def test_one_question_at_a_time_is_asked_in_a_chat(computers: Computers, era: str) -> None:
    asked, answered = anyio.Event(), anyio.Event()

    async def answer(*_: object) -> ElicitResult:
        asked.set()
        await answered.wait()
        return ONCE

    ask: Any = answer

    name = ChatId("local", f"turns-{era}")
    with anyio.fail_after(20), bind_connection(name):
        async with Client(computers.server, mode=era, elicitation_callback=ask) as client:
            results = list[CallToolResult]()

            async def push() -> None:
                results.append(await run(client))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(push)
                await asked.wait()
                for number in range(20):
                    busy = await run(client, f"git push {number}")
                    assert "being asked about another call" in text_of(busy)
                answered.set()
            assert text_of(results[0]) == "ran"
    noted = [each for each in await computers.manager.approvals.list() if each[0] == name]
    assert noted == []


async def first_round(client: Client, command: str = PUSH) -> InputRequiredResult:
    found = await client.session.call_tool("exec", {"command": command}, allow_input_required=True)
    assert isinstance(found, InputRequiredResult)
    return found


async def second_round(
    client: Client, asked: InputRequiredResult, answer: Any, command: str = PUSH
) -> Any:
    (key,) = asked.input_requests or {}
    return await client.session.call_tool(
        "exec",
        {"command": command},
        allow_input_required=True,
        input_responses={key: answer},
        request_state=asked.request_state,
    )


async def test_an_answer_counts_for_this_very_call_of_this_chat_once(computers: Computers) -> None:
    async with computers.client("sealed", ONCE) as (client, _):
        asked = await first_round(client)
        with pytest.raises(MCPError, match="requestState"):
            await second_round(client, asked, ONCE, "git push elsewhere")
        with (
            bind_connection(ChatId("local", "thief")),
            pytest.raises(MCPError, match="requestState"),
        ):
            await second_round(client, asked, ONCE)
        nothing = ElicitResult(action="accept", content={"allow": "everything"})
        assert (await second_round(client, asked, nothing)).is_error
        assert text_of(await second_round(client, asked, ONCE)) == "ran"
        again = await second_round(client, asked, ONCE)
        assert isinstance(again, InputRequiredResult)


@pytest.mark.parametrize("era", ["2026-07-28", "legacy"])
async def test_being_asked_is_told_of_and_is_no_call(
    computers: Computers, caplog: pytest.LogCaptureFixture, era: str
) -> None:
    caplog.set_level(logging.INFO, "mcp_sandbox")
    before = counted(computers.metrics)
    async with computers.client(f"told-{era}", ONCE, era=era) as (client, _):
        await run(client)
        await run(client, "rm -rf /workspace")
    lines = [vars(each) for each in caplog.records if each.message == "call"]
    told = [(each["outcome"], each["risk"], each["decision"], each["rule"]) for each in lines]
    asked = [("asked", "high", "ask", "git-push")] if era != "legacy" else []
    assert told == [
        *asked,
        ("ok", "high", "granted", "git-push"),
        ("caller_error", "critical", "deny", "rm-all"),
    ]
    assert counted(computers.metrics) - before == 2


def counted(metrics: Metrics) -> int:
    return sum(each.calls for each in metrics.snapshot())


async def test_what_destroys_the_chats_files_is_refused_and_opens_no_sandbox(
    computers: Computers,
) -> None:
    async with computers.client("refused", ONCE) as (client, user):
        for tool, given in (
            ("exec", {"command": "cd /tmp && sudo rm -rf /workspace"}),
            ("exec", {"command": "bash", "stdin": "rm -rf /workspace\n"}),
            ("run_code", {"language": "bash", "code": "rm -rf ~"}),
            ("run_code", {"language": "bash", "code": "rm -rf *"}),
            ("exec", {"command": "rm -rf ./*"}),
            ("exec", {"command": "rm -rf *", "cwd": "build/.."}),
            ("exec", {"command": 'rm -rf "$PWD"'}),
            ("exec", {"command": "rm -rf ${HOME}/"}),
            ("exec", {"command": "cd /tmp; rm -rf $OLDPWD /work*"}),
            ("exec", {"command": "rm -rf /{workspace,home}"}),
            ("exec", {"command": "rm -r /h?me /home/s*"}),
            ("exec", {"command": "cd /; bash -c 'rm -rf work*'"}),
        ):
            refused = await client.call_tool(tool, given)
            assert refused.is_error
            assert "sandbox_reset" in text_of(refused)
            found = graded(refused)
            assert (found["exit_code"], found["level"]) == (-1, "critical")
            assert found["patterns"][0]["rule"] == "rm-all"
        assert user.asked == []
    assert not (await computers.manager.session(ChatId("local", "refused"))).has_sandbox


@pytest.mark.parametrize("given", [{"cwd": "empty"}, {"shell": "s"}, {"cwd": "~/.cache"}])
async def test_what_may_be_another_folder_than_the_workspace_can_be_emptied(
    computers: Computers, given: dict[str, str]
) -> None:
    async with computers.client("empties") as (client, _):
        await run(client, "mkdir -p empty ~/.cache")
        told = {"command": "rm -rf *", **given}
        assert not (await client.call_tool("exec", told)).is_error


async def test_a_yes_hides_nothing_behind_many_others(computers: Computers) -> None:
    remotes = [f"git push r{number}" for number in range(30)]
    async with computers.client("many", FOR_CHAT, *[NOBODY] * 2) as (client, user):
        assert not (await run(client, "; ".join([*remotes, "true"]))).is_error
        assert (await run(client, "; ".join([*remotes, "git push last", "true"]))).is_error
        assert (await run(client, f"git push {'x' * 400}; true")).is_error
    assert len(user.asked) == 3


async def test_a_program_is_judged_where_it_asks_for_that(computers: Computers) -> None:
    chat = ChatId("local", "program")
    assert (await (await computers.manager.session(chat)).exec(PUSH)).stdout == "ran"
    judged = await computers.manager.session(chat, judged=True)
    with pytest.raises(ConsentNeeded, match="mcp-sandbox approvals allow"):
        await judged.exec(PUSH)
    approvals = computers.manager.approvals
    (waits,) = (each for where, each in await approvals.list() if where == chat)
    await approvals.answer(chat, waits.id, "once", "me")
    assert (await judged.exec(PUSH)).stdout == "ran"


@pytest.mark.parametrize(
    ("profile", "command", "asked", "refused"),
    [
        ("auto", "echo a | tr a b", 0, False),
        ("auto", "echo a > f; cat f", 1, False),
        ("auto", "curl x | sh", 0, True),
        ("isolated", "echo a > f; cat f", 0, False),
        ("off", "echo a > f; rm -r f", 0, False),
    ],
)
async def test_without_walls_a_person_is_asked_about_all_that_is_risky(
    tmp_path: Path, profile: Any, command: str, asked: int, refused: bool
) -> None:
    config = configured("unsafe-local", tmp_path / "data")
    config = config.model_copy(update={"policy": PolicyConfig(profile=profile)})
    async with open_manager(config) as manager:
        computers = Computers(manager, Metrics(), config)
        async with computers.client("strict", ONCE) as (client, user):
            result = await run(client, command)
            assert (result.is_error, len(user.asked)) == (refused, asked)


async def test_other_ways_to_lose_files_are_asked_about_like_the_plain_ones(tmp_path: Path) -> None:
    config = configured("unsafe-local", tmp_path / "data")
    config = config.model_copy(update={"policy": PolicyConfig(profile="strict")})
    commands = (
        "fd -X rm",
        "fdfind -e pyc -x rm -f",
        "git -C sub clean -fdx",
        "git -c clean.requireForce=false clean -d",
        "git reset --hard",
        "tar --remove-files -cf a.tar a",
        "rsync -a --delete a/ b/",
        "zip -m a.zip a",
        "chown -R 0 .",
        "chgrp -R staff .",
        'rm -rf "$PWD/build"',
    )
    async with open_manager(config) as manager:
        computers = Computers(manager, Metrics(), config)
        async with computers.client("strict", *[NO] * len(commands)) as (client, user):
            for number, command in enumerate(commands):
                assert (await run(client, command)).is_error
                assert len(user.asked) == number + 1, command


async def test_a_yes_in_a_shell_whose_folder_nobody_knows_is_for_this_very_call(
    computers: Computers,
) -> None:
    async with computers.client("shell", FOR_CHAT, NOBODY, NOBODY) as (client, user):
        given = {"command": "git push origin main 2> /dev/null; printf ran", "shell": "s"}
        assert text_of(await client.call_tool("exec", given)).startswith("ran")
        for other in ("git push origin main", "cd a; git push origin main"):
            assert (await client.call_tool("exec", {**given, "command": other})).is_error
        assert len(user.asked) == 3


async def test_a_yes_for_a_folder_is_for_no_other(computers: Computers) -> None:
    same = "cd a; git push origin main 2> /dev/null; printf ran"
    also = ("cd ../workspace/a; git push origin main 2> /dev/null; printf ran",)
    others = (
        "cd b; git push origin main",
        "cd b && bash -c 'git push origin main'",
        "(cd a); git push origin main",
        "cd a/b; git push origin main",
        "cd $(cat name); git push origin main",
    )
    async with computers.client("folder", FOR_CHAT, *[NOBODY] * 6) as (client, user):
        await client.call_tool("exec", {"command": "mkdir -p a/b b"})
        for command in (same, same, *also):
            assert text_of(await run(client, command)) == "ran"
        assert len(user.asked) == 1
        for command in others:
            assert (await run(client, command)).is_error
        given = {"command": "git push origin main", "cwd": "b"}
        assert (await client.call_tool("exec", given)).is_error
        assert len(user.asked) == 7


async def test_a_yes_for_what_is_not_known_is_for_this_very_call(computers: Computers) -> None:
    async with computers.client("unknown", FOR_CHAT, NOBODY) as (client, user):
        for _ in range(2):
            said = await run(client, 'x=$(echo f); git push "$x" 2> /dev/null; printf ran')
            assert text_of(said) == "ran"
        assert (await run(client, 'x=$(echo g); git push "$x"; printf ran')).is_error
        assert len(user.asked) == 2


UNSEEN = (
    "\u200b\u200c\u200d\u2060\u2064\ufeff\ufe0f\u202e\u2066\u061c\u180e\u00ad\u3164\u2800\u00a0"
    "\U000e0041\U000e007f\U000e0100"
)


@pytest.mark.parametrize("char", UNSEEN, ids=lambda char: f"{ord(char):x}")
async def test_what_nobody_would_see_is_shown_escaped(computers: Computers, char: str) -> None:
    escaped = char.encode("ascii", "backslashreplace").decode()
    command = f"git push or{char}igin m{char}ain; echo {char}"
    name = f"unseen-{ord(char):x}"
    async with computers.client(name, FOR_CHAT, NOBODY) as (client, user):
        await run(client, command)
        [question] = user.asked
        assert char not in question
        assert f"or{escaped}igin" in question.splitlines()[0]
        # A yes is for this target, and for none that only looks so.
        await run(client, command.replace(char, "\u200e"))
        assert len(user.asked) == 2
    kept = await computers.manager.approvals.list()
    text = next(each.text for _, each in kept if escaped in each.text)
    assert char not in text
    assert text.endswith(f"echo {escaped}")
