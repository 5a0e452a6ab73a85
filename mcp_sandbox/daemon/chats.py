"""What a person asks about chats: commands, a shell, copying of files, an agent at work."""

import json
import re
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio

from mcp_sandbox.agents.messages import MOST_BYTES
from mcp_sandbox.agents.run import Agent
from mcp_sandbox.daemon.acceptor import TimedStream
from mcp_sandbox.daemon.control_client import JsonObject
from mcp_sandbox.daemon.daemon import while_connected
from mcp_sandbox.errors import (
    Ambiguous,
    CallerError,
    ConfigError,
    InvalidArgument,
    NotFound,
    SandboxError,
    TooLarge,
)
from mcp_sandbox.models import ChatId, SessionStatus
from mcp_sandbox.runner.wire.terminal_frames import END, ERROR, MAX_BYTES, FrameError, Frames, frame
from mcp_sandbox.sessions.approvals import Approval
from mcp_sandbox.sessions.doors import Egress
from mcp_sandbox.sessions.manager import SessionManager
from mcp_sandbox.sessions.session import Session
from mcp_sandbox.workspace.projects import PROJECT

_MOST_SHOWN = 10
_TERM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
_CLEAN_S = 30.0
_PATH = r"""
fail() { echo "$p in the sandbox $1" >&2; exit 2; }
p=${1:-.}; [[ $p == '~' || $p == '~/'* ]] && p=$HOME${p:1}; [[ $p == /* ]] || p=./$p
"""
_MATCH = rf"""{_PATH}
[[ -e $p || -L $p ]] && printf '%s\0' "$p" && exit
shopt -s nullglob; IFS=; printf '%s\0' $p
"""
_OUT = rf"""{_PATH}
tar --help 2>&1 | grep -q -e --hard-dereference && gnu='--format=gnu --hard-dereference'
if [[ -d $p ]]; then cd "$p" && tar $gnu -cf - .
elif [[ -f $p ]]; then cd "${{p%/*}}/" && tar $gnu -chf - "./${{p##*/}}"
else fail 'is no file or folder'
fi
code=$?; [[ $gnu && $code == 1 ]] || exit $code  # With 1 it says that something changed meanwhile.
"""
# The stage is named like the runner's own drafts, which file lists leave out.
_IN = rf"""{_PATH}
[[ $p == */ || -d $p ]] && p=${{p%/}}/$2
stage=${{p%/*}}/.~mcp-$3
[[ $0 == clean && -e $stage/old && ! -e $p ]] && mv -T "$stage/old" "$p"
[[ $0 == clean ]] && chmod -R u+rwx "$stage" 2>/dev/null
[[ $0 == clean ]] && exec rm -rf "$stage"
mkdir -p "${{p%/*}}/" 2>/dev/null || fail 'is in no folder, and none can be made there'
[[ ( -e $p || -L $p ) && ! $4 ]] && fail 'is there: --force replaces it'
mkdir -m 700 "$stage" && tar -xpof - -C "$stage" && chmod u+w "$stage/x" || exit
[[ -d $p && ! -L $p ]] && {{ mv -T "$p" "$stage/old" || exit; }}
mv -fT "$stage/x" "$p" && {{ rm -rf "$stage" 2>/dev/null; exit 0; }}
"""
_GIVEN = ("assistant", "chat", "connector", "timeout_s")


class ChatControl:
    """The commands `list`, `find`, `stop`, `pause` and others, and the conversation `shell`.

    `manager` returns the session manager, and opens it if needed.
    """

    def __init__(self, manager: Callable[[], Awaitable[SessionManager]]) -> None:
        self._manager = manager
        self.commands: Mapping[str, Callable[[JsonObject], Awaitable[JsonObject]]] = {
            "list": self._list,
            "find": self._find,
            "stop": self._stop,
            "pause": self._pause,
            "resume": partial(self._change, "resumed", SessionManager.resume),
            "remove": partial(self._change, "removed", SessionManager.remove),
            "collect": self._collect,
            "egress": self._egress,
            "approvals": self._approvals,
            "backup": self._backup,
            "project": self._project,
            "trash": self._trash,
        }

    async def _list(self, arguments: JsonObject) -> JsonObject:
        manager = await self._manager()
        rows = [_make_row(status) for status in await manager.list()]
        # To measure thousands of chats takes long: "latest" stops after those used last.
        sizes, until = arguments.get("sizes"), anyio.current_time() + 0.1
        for number, row in enumerate(rows if sizes else ()):
            if sizes == "latest" and number >= 20 and anyio.current_time() > until:
                break
            row["size"] = await manager.size(ChatId(row["user"], row["chat"]))
        return {"chats": rows}

    async def _find(self, arguments: JsonObject) -> JsonObject:
        _, chat = await self._find_named(arguments)
        return {"chat": str(chat)}

    async def _change(
        self,
        key: str,
        change: Callable[[SessionManager, ChatId], Awaitable[object]],
        arguments: JsonObject,
    ) -> JsonObject:
        manager, chat = await self._find_named(arguments)
        # What always succeeds returns nothing.
        return {"chat": str(chat), key: await change(manager, chat) is not False}

    async def _pause(self, arguments: JsonObject) -> JsonObject:
        manager, chat = await self._find_named(arguments)
        done, found = await manager.pause(chat), await manager.status(chat)
        keeps = manager.keeps_paused_processes and bool(found and found.sandbox_id)
        return {"chat": str(chat), "paused": done, "keeps_processes": keeps}

    async def _stop(self, arguments: JsonObject) -> JsonObject:
        end = partial(SessionManager.stop, force=bool(arguments.get("force")))
        return await self._change("stopped", end, arguments)

    async def _collect(self, arguments: JsonObject) -> JsonObject:
        manager = await self._manager()
        return asdict(await manager.collect(dry_run=bool(arguments.get("dry_run"))))

    async def _egress(self, arguments: JsonObject) -> JsonObject:
        """Show or change the allowed hosts: `do` is list, allow, deny or check."""
        egress, do = (await self._manager()).egress, arguments["do"]
        host, chat = str(arguments.get("host")), None
        if egress is None:
            raise ConfigError("no hosts are allowed: set network to allowlist, and egress.allow")
        if arguments.get("chat") or do != "check":
            _, chat = await self._find_named(arguments)
        if chat is None or do == "check":
            return await egress.check(host, chat)
        if do == "allow":
            how = {name: arguments[name] for name in ("read", "by", "for_s")}
            grant = await egress.allow(chat, host, **how)
            return {"chat": str(chat), "rule": str(grant.rule), "until_s": grant.until_s}
        if do == "deny":
            await egress.deny(chat, host)
        return {"chat": str(chat), **await egress.describe_traffic(chat)}

    async def _approvals(self, arguments: JsonObject) -> JsonObject:
        """Show or answer calls that wait for approval: `do` is list, show or answer."""
        manager, do = await self._manager(), arguments["do"]
        approvals, found = manager.approvals, list[JsonObject]()
        if do == "list":
            for chat, each in await approvals.list():
                if not await _is_granted(manager.egress, chat, each):
                    found.append({**asdict(each), "chat": str(chat)})
            return {"approvals": found}
        chat, approval = await approvals.find(str(arguments.get("id")))
        if do == "answer":
            word, by = arguments["word"], str(arguments.get("by"))
            approval = await approvals.answer(chat, approval.id, word, by)
        return {**asdict(approval), "chat": str(chat)}

    async def _project(self, arguments: JsonObject) -> JsonObject:
        """Take what lies at the paths of a chat's folders for these, where a person was asked."""
        manager, chat = await self._find_named(arguments)
        records, now_s = manager.use_times.records, manager.use_times.clock().wall_s
        noted = await records.kept(chat, PROJECT) or {}
        asked = {name: each["asked"] for name, each in noted.items() if "asked" in each}
        known = {name: {"known": mark} for name, mark in asked.items()}
        await records.keep(chat, PROJECT, lambda old: {**(old or {}), **known}, now_s)
        return {"chat": str(chat), "accepted": asked}

    async def _backup(self, arguments: JsonObject) -> JsonObject:
        """List, find, make or restore backups of a chat: `do` is list, find, save or restore."""
        manager, do = await self._manager(), arguments["do"]
        try:
            _, chat = await self._find_named(arguments)
        except NotFound:
            # It may have files in the object store alone.
            user, _, name = ("local/" + str(arguments.get("chat"))).rpartition("/")
            chat = ChatId(user.removeprefix("local/") or "local", name)
        if do == "list":
            found = await manager.backups.list(chat)
        elif do == "find":
            found = await manager.backups.find(chat, arguments.get("key"))
        elif do == "restore":
            found = [await manager.backups.restore(chat, arguments.get("key"))]
        else:
            saved = await manager.backups.save(chat)
            found = [saved] if saved else []
        return {"chat": str(chat), "backups": [each.model_dump(mode="json") for each in found]}

    async def _trash(self, arguments: JsonObject) -> JsonObject:
        """List the trash, the latest last, or put the latest of a `chat` back, as chat `new`."""
        manager, name = await self._manager(), arguments.get("chat")
        found = [each for each in await manager.trashed(measured=not name) if each.chat]
        if not name:
            rows = [(str(each.chat), each.allocated_bytes, each.discarded_at) for each in found]
            return {"trash": [dict(zip(("chat", "size", "at"), row, strict=True)) for row in rows]}
        last = {each.chat: each for each in found if each.chat}
        chat = find_chat(name, last, "trash list")
        new = ChatId(chat.user, arguments.get("new") or chat.chat)
        await manager.take_back(new, last[chat])
        return {"chat": str(new)}

    async def _find_named(self, arguments: JsonObject) -> tuple[SessionManager, ChatId]:
        manager = await self._manager()
        chats = [status.chat for status in await manager.list()]
        return manager, find_chat(str(arguments.get("chat", "")), chats)

    async def session(self, arguments: JsonObject) -> Session:
        manager, chat = await self._find_named(arguments)
        return await manager.session(chat)

    async def shell(self, arguments: JsonObject, connection: TimedStream) -> None:
        """Announce that frames follow, and pass them on both ways until the shell ends.

        Raises:
            SandboxError: the shell cannot begin; nothing was sent to the client.
        """
        session = await self.session(arguments)
        size = [_read_positive(arguments, "rows"), _read_positive(arguments, "columns")]
        tty, term = bool(arguments.get("tty", True)), arguments.get("term")
        if not (isinstance(term, str) and _TERM.fullmatch(term)):
            term = "xterm-256color"
        env, room = {"TERM": term} if tty else {}, int(arguments.get("room") or 0)
        args = {"env": env, "tty": tty, "size": size, "command": arguments.get("command", [])}
        frames = Frames()
        await connection.tell({"event": {"chat": str(session.chat)}})

        async def show(data: bytes) -> None:
            for kind, content in frames.feed(data):
                if kind not in (END, ERROR):
                    await connection.send(frame(kind, content))

        async with aclosing(_read_frames(connection)) as typed:
            try:
                ended = await session.shell(typed, show, args=args, room=room)
            except (SandboxError, FrameError) as exc:
                await connection.send(frame(ERROR, str(exc).encode()[:MAX_BYTES]))
            else:
                await connection.send(frame(END, json.dumps(asdict(ended)).encode()))


async def _is_granted(egress: Egress | None, chat: ChatId, asked: Approval) -> bool:
    """Return whether hosts that a question is about have been allowed in another way."""
    hosts = [each.partition(" ")[2] for each in asked.about]
    with suppress(CallerError):
        if egress and (asked.what, asked.state) == ("network_access", "open"):
            return not await egress.find_missing(chat, hosts, read=asked.effect.startswith("Read"))
    return False


def _make_row(status: SessionStatus) -> dict[str, Any]:
    row = asdict(status)
    for name in ("created", "last_used", "saved"):
        moment = row.pop(f"{name}_at")
        row[name] = moment and moment.isoformat()
    row["sandbox"] = row.pop("sandbox_id")
    return {**row, **row["chat"]}


def find_chat(text: str, chats: Collection[ChatId], shown_by: str = "ls") -> ChatId:
    """Return the chat called `text`, else the one whose id or user/id begins with it.

    Raises:
        NotFound: no chat matches.
        Ambiguous: several match; the message names them.
        InvalidArgument: `text` is empty.
    """
    if not text:
        raise InvalidArgument("name a chat: `mcp-sandbox ls` lists them")
    for found in (
        [chat for chat in chats if text in (chat.chat, str(chat))],
        [chat for chat in chats if chat.chat.startswith(text) or str(chat).startswith(text)],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            names, more = sorted(map(str, found))[:_MOST_SHOWN], len(found) - _MOST_SHOWN
            listed = ", ".join(names) + (f" or one of {more} others" if more > 0 else "")
            raise Ambiguous(f"{text!r} could mean {listed}: write more of the name")
    raise NotFound(f"no chat is called {text!r}: `mcp-sandbox {shown_by}` lists them")


async def _read_frames(connection: TimedStream) -> AsyncGenerator[bytes]:
    """Yield the person's frames as they come, unchecked: the runner checks them."""
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
        while True:
            yield await connection.receive()


def _read_positive(arguments: JsonObject, name: str) -> int:
    value = arguments.get(name)
    if not isinstance(value, int) or not 0 < value < 65536:
        raise InvalidArgument(f"{name!r} must be a number from 1 to 65535")
    return value


async def copy(chats: ChatControl, arguments: JsonObject, connection: TimedStream) -> None:
    """Stream a tar out of a chat; or, given a `name`, into it, with one entry called `x`.

    The copy gets its name when it is complete; after a failure nothing is left.
    """
    path, name = (str(arguments.get(key) or "") for key in ("path", "name"))
    plain = {**arguments, "tty": False, "rows": 1, "columns": 1}
    if not name:
        script = _MATCH if arguments.get("match") else _OUT
        await chats.shell({**plain, "command": ["bash", "-c", script, "cp", path]}, connection)
        return
    given = [path, name, secrets.token_hex(8), "force" if arguments.get("force") else ""]
    session = await chats.session(arguments)
    try:
        await chats.shell({**plain, "command": ["bash", "-c", _IN, "cp", *given]}, connection)
    finally:
        with anyio.move_on_after(_CLEAN_S, shield=True), suppress(SandboxError):
            await session.exec(["bash", "-c", _IN, "clean", *given])


async def run_agent(
    opening: Callable[..., AbstractAsyncContextManager[Agent]],
    arguments: JsonObject,
    connection: TimedStream,
) -> None:
    """Have an agent do what a prompt of `size` bytes says.

    `opening` opens one as `open_agent` does. It ends when the client hangs up. Raises TooLarge.
    """
    if (size := int(arguments["size"])) > MOST_BYTES:
        raise TooLarge(f"the prompt has {size:,} bytes; at most {MOST_BYTES:,} can be sent")
    prompt = (await connection.receive_exactly(size)).decode(errors="replace")
    given = {name: arguments[name] for name in _GIVEN if arguments.get(name)}
    asked, resume = [{"role": "user", "content": prompt}], bool(arguments.get("resume"))
    async with while_connected(connection):
        try:
            async with (
                opening(**given) as agent,
                aclosing(agent.stream(asked, resume=resume)) as events,
            ):
                async for event in events:
                    await connection.tell(
                        {"event": {**asdict(event), "type": type(event).__name__}}
                    )
            await connection.tell({"result": {}})
        except SandboxError as exc:
            await connection.tell({"error": str(exc)})
