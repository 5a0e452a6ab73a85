"""A sandbox as an agent's runtime sees it: connect, work, disconnect.

The control plane decides about lifecycles, and is asked by its HTTP API: nothing here makes,
pauses or ends a sandbox, keeps a record of one, or runs by a timer.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar

import anyio
import httpx2
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from mcp_sandbox import errors
from mcp_sandbox.models import ChatId, EditResult, ExecResult, Listing, WriteResult

if TYPE_CHECKING:
    from mcp_sandbox.config import Config
    from mcp_sandbox.sessions.manager import SessionManager
    from mcp_sandbox.sessions.session import Session

Mode = Literal["cloud", "local", "none"]
OnOutput = Callable[[str, bytes], Awaitable[None]]
T = TypeVar("T")

# How long a sandbox that was asked for is waited for, and how often it is looked for meanwhile.
_WAIT_S, _TRIES = 5.0, 10
# A restore is answered when it is done; a command shows by empty lines that it goes on.
_ANSWER_S, _CONNECT_S = 600.0, 5.0
_MOST_READ = 256 << 20


class _Answer(BaseModel, Generic[T]):
    model_config = ConfigDict(alias_generator=to_camel, val_json_bytes="base64")

    data: T


class _HttpSession:
    """The calls of a Session that is reached by HTTP."""

    def __init__(self, http: httpx2.AsyncClient, session_id: str) -> None:
        self._http = http
        self._place = f"/api/sandbox/{session_id}"
        # As a Session has them: `processes.stop` and `previews.open`.
        self.processes = self.previews = self

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        what: str,
        **given: Any,  # noqa: ANN401 - as httpx2 takes it
    ) -> AsyncGenerator[httpx2.Response]:
        try:
            async with self._http.stream(method, f"{self._place}/{what}", **given) as response:
                if response.is_error:
                    raise _read_error(await response.aread(), response.status_code)
                yield response
        except httpx2.TransportError as exc:
            raise errors.BackendUnavailable(
                f"{self._http.base_url} does not answer ({str(exc) or type(exc).__name__}): what "
                "was asked may have been done, so look before you ask again"
            ) from exc

    async def ask(self, kind: type[T], method: str, what: str, **given: Any) -> T:  # noqa: ANN401
        async with self._request(method, what, **given) as response:
            text = await response.aread()
            return _Answer[kind].model_validate_json(text).data  # type: ignore[valid-type]

    async def exec(
        self, command: str | Sequence[str], *, on_output: OnOutput | None = None, **how: object
    ) -> ExecResult:
        given = {to_camel(name): value for name, value in {"command": command, **how}.items()}
        async with self._request("POST", "exec", json=given) as response:
            async for line in response.aiter_lines():
                message = json.loads(line or "{}")
                if on_output and (part := message.get("output")):
                    await on_output(part["stream"], part["text"].encode())
                if "error" in message:
                    raise _read_error(json.dumps(message["error"]), 500)
                if "data" in message:
                    return _Answer[ExecResult].model_validate_json(line).data
        raise errors.SandboxGone(
            "the answer ended before the command's result: look at what the command has done "
            "before you run it again"
        )

    async def read_to(self, path: str, take: Callable[[bytes], Awaitable[None]]) -> int:
        async with self._request("GET", "files", params={"path": path}) as response:
            async for data in response.aiter_raw():
                await take(data)
            return response.num_bytes_downloaded

    async def write_file(self, path: str, data: bytes | str) -> WriteResult:
        return await self.ask(WriteResult, "PUT", "files", params={"path": path}, content=data)

    async def edit_file(
        self, path: str, old: str, new: str, *, replace_all: bool = False
    ) -> EditResult:
        given = {"path": path, "old": old, "new": new, "replaceAll": replace_all}
        return await self.ask(EditResult, "POST", "edit", json=given)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> Listing:
        return await self.ask(Listing, "GET", "list", params={"path": path, "depth": depth})

    async def share(self, path: str, *, expires_s: float = 3600) -> str:
        given = {"path": path, "expiresS": expires_s}
        return (await self.ask(dict[str, str], "POST", "share", json=given))["url"]

    async def stop(self, process: str) -> ExecResult:
        return await self.ask(ExecResult, "DELETE", f"processes/{process}")

    async def open(self, port: int) -> str:
        preview = await self.ask(dict[str, str], "POST", "preview", json={"port": port})
        return preview["containerUrl"]


class RemoteSandbox:
    """The sandbox of one session, used with `async with`; connect before the first call.

    Its calls raise what those of a Session do: CallerError, OperatorError, SandboxGone.
    """

    def __init__(
        self,
        url: str = "",
        token: str = "",
        *,
        mode: Mode = "cloud",
        user: str = "",
        redis: str = "",
        config: "Config | None" = None,
    ) -> None:
        """`mode`: where sandboxes are. "local": in this process, by `config`; "none": nowhere.

        `url` and `token` are the control plane's; with a platform's token `user` says whose chats.
        `redis`: the URL at which it tells of sandboxes that have come.
        """
        self.mode: Mode = mode
        self._user, self._redis, self._config = user, redis, config
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        headers |= {"Mcp-Sandbox-User": user} if user else {}
        timeout = httpx2.Timeout(_ANSWER_S, connect=_CONNECT_S)
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout)
        self._stack = AsyncExitStack()
        self._manager: SessionManager | None = None
        self._at: Session | _HttpSession | None = None
        self._site: tuple[str, int, str | None, str | None] | None = None

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._http)
        if self.mode == "local":
            from mcp_sandbox.app.chats import open_manager
            from mcp_sandbox.config import Config

            opened = open_manager(self._config or Config())
            self._manager = await self._stack.enter_async_context(opened)
        return self

    async def __aexit__(self, *why: Any) -> bool | None:  # noqa: ANN401 - as the stack has it
        await self.disconnect()
        return await self._stack.__aexit__(*why)

    async def connect_to(self, session_id: str, provider: str) -> None:
        """Connect to the sandbox of a session, which must be there: none is made.

        Raises:
            NotFound: there is no such session, or no sandbox in it.
            InvalidArgument: its sandboxes are another provider's.
        """
        if self._manager:
            chat = ChatId(self._user or "local", session_id)
            self._at = await self._manager.session(chat, judged=True)
        if self.mode != "cloud":
            return
        at = _HttpSession(self._http, session_id)
        status = await at.ask(dict[str, Any], "GET", "status")
        if status["provider"] != provider:
            raise errors.InvalidArgument(
                f"session {session_id} has the provider {status['provider']}, not {provider}"
            )
        if not (status.get("providerSandboxId") or provider == "noop"):
            raise errors.NotFound(
                f"session {session_id} is {status['status']} and has no sandbox: have the control "
                "plane prepare it, and wait for it"
            )
        self._at = at

    async def wait_and_connect(self, session: Mapping[str, Any]) -> None:
        """Connect to the sandbox of a session that prepare has answered; wait up to 5 s for it.

        Raises what `connect_to` does.
        """
        if self._redis and self.mode == "cloud":
            from mcp_sandbox.storage.redis import SandboxBoard

            async with aclosing(SandboxBoard(self._redis)) as board:
                await board.wait(str(session["id"]), _WAIT_S, _TRIES)
        for left in reversed(range(_TRIES)):
            try:
                return await self.connect_to(str(session["id"]), session.get("provider", ""))
            except errors.NotFound:
                if not left:
                    raise
            await anyio.sleep(_WAIT_S / _TRIES)
        return None

    async def disconnect(self) -> None:
        """Drop the reference; the sandbox goes on as the control plane wants it."""
        self._at = None

    @property
    def _session(self) -> "Session | _HttpSession":
        if self._at is not None:
            return self._at
        if self.mode == "none":
            raise errors.Unsupported(
                "this run has no sandbox (its mode is none): go on without one"
            )
        raise errors.InvalidArgument("not connected: use connect_to or wait_and_connect first")

    async def run_command(
        self,
        command: str | Sequence[str],
        *,
        on_output: OnOutput | None = None,
        **how: Any,  # noqa: ANN401 - as Session.exec
    ) -> ExecResult:
        """Run a command; `how`: cwd, env, stdin, shell, tty, timeout_s, wait_s and until."""
        return await self._session.exec(command, on_output=on_output, **how)

    async def read_file(self, path: str) -> bytes:
        """Return the bytes of a file; TooLarge above 256 MiB."""
        got = bytearray()

        async def take(data: bytes) -> None:
            got.extend(data)
            if len(got) > _MOST_READ:
                raise errors.TooLarge(
                    f"{path} has more than {_MOST_READ:,} bytes: read parts of it"
                )

        await self._session.read_to(path, take)
        return bytes(got)

    async def write_file(self, path: str, data: bytes | str) -> WriteResult:
        return await self._session.write_file(path, data)

    async def edit_file(
        self, path: str, old: str, new: str, *, replace_all: bool = False
    ) -> EditResult:
        return await self._session.edit_file(path, old, new, replace_all=replace_all)

    async def list_files(self, path: str = ".", *, depth: int = 1) -> Listing:
        return await self._session.list_files(path, depth=depth)

    async def upload_user_files(
        self, files: Mapping[str, bytes | str], folder: str = "uploads"
    ) -> Sequence[WriteResult]:
        """Put files, by their names, into a folder."""
        put = self._session.write_file
        return [await put(f"{folder}/{name}", data) for name, data in files.items()]

    async def share(self, path: str, *, expires_s: float = 3600) -> str:
        """Return an address by which anybody can download a copy of a file for this long."""
        return await self._session.share(path, expires_s=expires_s)

    async def sync(self) -> None:
        """Save the chat's files to the object store now."""
        if isinstance(here := self._session, _HttpSession):
            await here.ask(dict[str, Any] | None, "POST", "sync")  # type: ignore[arg-type]
        elif self._manager:
            await self._manager.backups.save(here.chat)

    async def restore(self, key: str | None = None) -> None:
        """Put back a backup of the chat's files, by default the newest."""
        if isinstance(here := self._session, _HttpSession):
            await here.ask(dict[str, Any], "POST", "restore", json={"key": key})
        elif self._manager:
            await self._manager.backups.restore(here.chat, key)

    async def bootstrap_website(self, command: str, port: int, *, cwd: str | None = None) -> str:
        """Start a web server in the background; return the address at which a browser sees it."""
        started = await self.run_command(command, cwd=cwd, wait_s=0)
        self._site = command, port, cwd, started.process
        return await self._session.previews.open(port)

    async def restart_dev_server(self) -> str:
        """Stop what `bootstrap_website` has started, start it again, and return its address."""
        if self._site is None:
            raise errors.InvalidArgument("no web server was started: use bootstrap_website first")
        command, port, cwd, process = self._site
        with suppress(errors.NotFound):
            await self._session.processes.stop(process or "")
        return await self.bootstrap_website(command, port, cwd=cwd)


def _read_error(answer: bytes | str, status: int) -> errors.SandboxError:
    """Return the error that a problem document tells of, or one of what else came."""
    try:
        problem = dict[str, Any](json.loads(answer))
    except (ValueError, TypeError):
        problem = {"detail": f"the answer was {status}: {answer[:500]!r}"}
    kind = getattr(errors, str(problem.get("title")), None)
    if not (isinstance(kind, type) and issubclass(kind, errors.SandboxError)):
        kind = errors.CallerError if status < 500 else errors.OperatorError
    return kind(str(problem.get("detail")))
