"""Hooks: what they get, and what becomes of one that fails."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from mcp_sandbox.agents import hooks
from mcp_sandbox.agents.events import Completion
from mcp_sandbox.agents.hooks import Context, HookMemory, Hooks, Payload, load_hooks
from mcp_sandbox.errors import ConfigError, NotPermitted, TooLarge
from mcp_sandbox.models import ChatId
from mcp_sandbox.sessions.chat_records import ChatRecords, UseTimes, system_clock

MESSAGES = [{"role": "user", "content": "hello"}]
DONE = Completion("done")


async def nothing(_: str) -> None:
    await anyio.lowlevel.checkpoint()


@pytest.fixture
def ctx() -> Context:
    return Context(ChatId("local", "a"), nothing, None, {})


async def test_a_file_of_hooks_may_have_one_both_or_none(tmp_path: Path, ctx: Context) -> None:
    assert load_hooks(None) == Hooks()
    file = tmp_path / "hooks.py"
    file.write_text(
        "async def create(ctx, messages, options):\n"
        "    ctx.memory['asked'] = len(messages)\n"
        "    return [*messages, {'role': 'user', 'content': options['more']}]\n"
    )
    found = await anyio.to_thread.run_sync(load_hooks, file)
    messages = await found.before(ctx, MESSAGES, {"more": "please"})
    assert messages == [*MESSAGES, {"role": "user", "content": "please"}]
    assert ctx.memory == {"asked": 1}
    assert await found.after(ctx, DONE, {}) == (DONE, "")


@pytest.mark.parametrize(
    "text", ["create = 1", "def next(ctx, payload, options): ...", "import nowhere", "("]
)
def test_a_file_that_cannot_be_used_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "hooks.py").write_text(text)
    with pytest.raises(ConfigError):
        load_hooks(tmp_path / "hooks.py")


async def test_who_raises_before_a_run_refuses_it(ctx: Context) -> None:
    async def create(*_: Any) -> Any:
        raise RuntimeError("node 22 is needed")

    with pytest.raises(NotPermitted, match="refused: node 22 is needed"):
        await Hooks(create).before(ctx, MESSAGES, {})


async def test_a_run_stands_whatever_happens_after_it(
    ctx: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: Any) -> Any:
        raise RuntimeError("no such file")

    async def changes(_: Context, payload: Payload, __: Any) -> Payload:
        return Payload(Completion(f"{payload.completion.content}, {payload.error}"))

    assert await Hooks(next=fails).after(ctx, DONE, {}) == (
        DONE,
        "the hook next failed: no such file",
    )
    assert caplog.records[0].levelno == logging.ERROR
    failed = Completion("", is_error=True, reason="timeout: over 3 s")
    assert await Hooks(next=changes).after(ctx, failed, {}) == (
        Completion(", timeout: over 3 s"),
        "",
    )


async def test_a_hook_is_not_waited_for_without_end(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow(*_: Any) -> Any:
        await anyio.sleep_forever()

    monkeypatch.setattr(hooks, "LIMIT_S", 0.01)
    with pytest.raises(NotPermitted, match=r"took over 0\.01 s"):
        await Hooks(slow).before(ctx, MESSAGES, {})
    assert (await Hooks(next=slow).after(ctx, DONE, {}))[0] == DONE


async def test_what_is_remembered_is_kept_with_the_chat_alone(tmp_path: Path) -> None:
    ledger = UseTimes(ChatRecords(tmp_path), system_clock)
    memory, other = (HookMemory(ledger, ChatId("local", chat)) for chat in ("a", "b"))
    assert await memory.load() == {}
    await memory.save({"runs": 1})
    assert await memory.load() == {"runs": 1}
    assert await other.load() == {}


async def test_only_so_much_is_remembered_as_json_holds(tmp_path: Path) -> None:
    memory = HookMemory(UseTimes(ChatRecords(tmp_path), system_clock), ChatId("local", "a"))
    with pytest.raises(TooLarge, match="at most 65,536 are kept"):
        await memory.save({"a": "x" * 70_000})
    values: Sequence[Any] = ({1}, object())
    for value in values:
        with pytest.raises(TypeError):
            await memory.save({"a": value})
    assert await memory.load() == {}
