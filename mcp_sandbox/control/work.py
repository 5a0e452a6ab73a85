"""Work in the sandbox of one session, by HTTP: commands, files, previews, backups.

All of it is taken for an agent's work: the policy judges it as it judges calls over MCP, and the
gate counts and records it. An answer is `{"data": …}`; names in JSON are in camelCase.
"""

import json
import logging
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Generic, TypeVar

import anyio
from fastapi import APIRouter, Depends, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Send

from mcp_sandbox import errors
from mcp_sandbox.errors import InvalidArgument, SandboxError
from mcp_sandbox.models import EditResult, ExecResult, Listing, WriteResult
from mcp_sandbox.runtime.channel import own_tasks
from mcp_sandbox.sessions.session import Session

logger = logging.getLogger(__name__)

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]
Path = Annotated[str, Query(description="in the workspace, or absolute inside", min_length=1)]

# A silent command shows by an empty line that it goes on: proxies cut what is silent for a minute.
_ALIVE_S = 15.0
# How long a client may take nothing of an answer, or send nothing of a file.
_STALLED_S = 60.0
# What readers of lines take for an end of one, and JSON lets stand.
_LINE_BREAKS = {ord(each): f"\\u{ord(each):04x}" for each in "\x85\u2028\u2029"}
LINES, EVENTS, _BYTES = "application/x-ndjson", "text/event-stream", "application/octet-stream"
# What is sent in long silence.
_KEEPALIVE = {LINES: b"\n", EVENTS: b": \n\n"}

# The first that fits counts; 410 is what no proxy asks for again.
_STATUS: Mapping[int, tuple[type[SandboxError], ...]] = {
    404: (errors.NotFound,),
    403: (errors.NotPermitted,),
    413: (errors.TooLarge,),
    507: (errors.WorkspaceFull,),
    409: (errors.AlreadyExists, errors.Busy, errors.NoMatch, errors.Ambiguous),
    400: (errors.CallerError,),
    410: (errors.SandboxGone,),
    503: (SandboxError,),
}


def describe_problem(error: Exception) -> dict[str, Any]:
    """Return an error as a problem document (RFC 9457), whose `title` is its class."""
    title, detail = type(error).__name__, str(error) or type(error).__doc__
    match error:
        case RequestValidationError():
            return _describe_invalid(error)
        case HTTPException(status_code=404 | 405 as status):
            detail = "there is no such address or method: /api/openapi.json lists them"
            title = "NotFound"
        case HTTPException(status_code=status, detail=detail):
            title = "InvalidArgument"
        case _:
            status = next(number for number, kinds in _STATUS.items() if isinstance(error, kinds))
    return {"title": title, "status": status, "detail": detail}


def _describe_invalid(error: RequestValidationError) -> dict[str, Any]:
    first = error.errors()[0]
    place = () if first["type"] == "json_invalid" else first["loc"][1:]
    field = ".".join(map(str, place)) or "the body"
    detail = f"{field}: {SandboxError(first['msg'])}"
    return {"title": "InvalidArgument", "status": 400, "detail": detail, "field": field}


async def answer_problem(_request: Request, error: Exception) -> Response:
    """Answer an error by a problem document."""
    found = describe_problem(error)
    return Json(found, found["status"], media_type="application/problem+json")


class RequestModel(BaseModel):
    """What a client sends: nothing is guessed, and no name too many is passed over."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="forbid", frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, given: object) -> object:
        # JSON may hold halves of characters; UnicodeEncodeError is a ValueError.
        json.dumps(given, ensure_ascii=False, default=repr).encode()
        return given


class Answer(BaseModel, Generic[T]):
    """What a client gets."""

    model_config = ConfigDict(
        alias_generator=to_camel, serialize_by_alias=True, ser_json_bytes="base64"
    )

    data: T


class Json(JSONResponse):
    """JSON in one line of valid UTF-8: in names that are none, each odd byte is shown as `?`."""

    def render(self, content: object) -> bytes:
        text = json.dumps(content, ensure_ascii=False).translate(_LINE_BREAKS)
        return text.encode("utf-8", "replace")


class CommandRequest(RequestModel):
    """A bash command line, or a program and its arguments; as the tool `exec` takes it."""

    command: str | list[str] = Field(min_length=1)
    cwd: str | None = None
    env: dict[str, str] | None = None
    stdin: str | None = None
    shell: str | None = None
    tty: bool = False
    timeout_s: float | None = None
    wait_s: float | None = Field(None, ge=0)
    memory_mb: float | None = Field(None, gt=0)
    output_mb: float | None = Field(None, gt=0)
    until: str | None = None


class Edit(RequestModel):
    """A text of a file that is to be another."""

    path: str
    old: str = Field(min_length=1)
    new: str
    replace_all: bool = False
    dry_run: bool = False


class Port(RequestModel):
    """Where in the sandbox a web server listens."""

    port: int = Field(gt=0, lt=65536)


class Share(RequestModel):
    """A file that anybody who has its address may download for this long, a day at most."""

    path: str = Field(min_length=1)
    expires_s: float = 3600


class StreamedAnswer(StreamingResponse):
    """A body that is made while it is sent; it ends when its client hangs up.

    An error before the first byte is the answer in place of it. After that it is the last line of
    lines of JSON; else the connection is broken, as what came is not the whole.
    """

    def __init__(self, produce: Callable[[Write], Awaitable[object]], media_type: str) -> None:
        """`make` gives the pieces to its argument."""
        headers = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
        super().__init__((), media_type=media_type, headers=headers)
        self._produce, self._begun, self._turn = produce, False, anyio.Lock()

    async def stream_response(self, send: Send) -> None:
        write = partial(self._write, send)
        try:
            async with own_tasks() as tasks:
                tasks.start_soon(self._keep_alive, write)
                await self._produce(write)
        except SandboxError as exc:
            if not self._begun:
                raise
            logger.info("an answer was cut short: %s", exc)
            if self.media_type != LINES:
                return
            await write(encode_line(error=describe_problem(exc)))
        await write(b"", more=False)

    async def _write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        async with self._turn:
            if not self._begun:
                self._begun = True
                start = {"status": self.status_code, "headers": self.raw_headers}
                await send({"type": "http.response.start", **start})
            with anyio.move_on_after(_STALLED_S) as limit:
                await send({"type": "http.response.body", "body": data, "more_body": more})
        if limit.cancelled_caught:
            raise ClientDisconnect

    async def _keep_alive(self, write: Write) -> None:
        while alive := _KEEPALIVE.get(self.media_type or ""):
            await anyio.sleep(_ALIVE_S)
            await write(alive)


async def _find_session(request: Request, id: str) -> Session:  # noqa: A002 - its name in the path
    found: Session = await request.app.state.control.session(request.scope, id)
    return found


CurrentSession = Annotated[Session, Depends(_find_session)]
work = APIRouter(prefix="/api/sandbox/{id}", tags=["work"], default_response_class=Json)


def encode_line(**fields: object) -> bytes:
    """Return one line of an answer in lines of JSON."""
    return bytes(Json(fields).body) + b"\n"


@work.post("/exec", response_class=StreamedAnswer, status_code=200)
async def run_command(session: CurrentSession, body: CommandRequest) -> StreamedAnswer:
    """Run a command; each line of the answer is JSON.

    `{"output": {"stream", "text"}}` as it is printed, with gaps if the client is slow; the last
    one is `{"data": …, "notices": […]}` or `{"error": …}`. If the client hangs up, the command
    and all that it started ends.
    """

    async def produce(write: Write) -> None:
        decoders = {
            name: getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")
        }

        async def show(stream: str, data: bytes) -> None:
            await write(
                encode_line(output={"stream": stream, "text": decoders[stream].decode(data)})
            )

        result = await session.exec(**body.model_dump(), on_output=show)
        answer = Answer[ExecResult](data=result).model_dump(mode="json")
        await write(encode_line(**answer, notices=await session.take_notices()))

    return StreamedAnswer(produce, LINES)


@work.delete("/processes/{process}")
async def stop_process(session: CurrentSession, process: str) -> Answer[ExecResult]:
    """Stop what goes on in the background, by the name that its result gave it."""
    return Answer(data=await session.processes.stop(process))


@work.get("/files", response_class=StreamedAnswer, status_code=200)
async def read_file(session: CurrentSession, path: Path) -> StreamedAnswer:
    """Return the bytes of a regular file; if they end early, the connection breaks."""
    return StreamedAnswer(partial(session.read_to, path), _BYTES)


@work.put("/files")
async def write_file(
    session: CurrentSession, request: Request, path: Path, append: bool = False
) -> Answer[WriteResult]:
    """Put the body into a file: all or nothing, up to the limit of the chat's files."""
    size = int(request.headers.get("content-length", 0))
    async with aclosing(_read_pieces(request)) as data:
        return Answer(data=await session.write_file(path, data, append=append, size=size))


@work.post("/upload")
async def upload_files(
    session: CurrentSession, files: list[UploadFile], path: str = "."
) -> Answer[list[WriteResult]]:
    """Put each file of a form into a folder, under its own name.

    The form has the size of a message at most (`http.max_body`): larger files go by PUT.
    """
    places = [f"{path}/{_check_name(each.filename)}" for each in files]
    pairs = zip(places, files, strict=True)
    return Answer(data=[await session.write_file(at, await each.read()) for at, each in pairs])


def _check_name(name: str | None) -> str:
    if not name or "/" in name or name in (".", ".."):
        raise InvalidArgument(f"{name!r} is no name of a file: leave its folders to `path`")
    return name


@work.post("/edit")
async def edit_file(session: CurrentSession, body: Edit) -> Answer[EditResult]:
    """Replace a text that is in a file once, or with `replaceAll` everywhere."""
    return Answer(data=await session.edit_file(**body.model_dump()))


@work.get("/list")
async def list_files(
    session: CurrentSession,
    path: Path = ".",
    depth: Annotated[int, Query(ge=1, le=10)] = 1,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 500,
    hidden: bool = True,
) -> Answer[Listing]:
    """List a directory."""
    return Answer(data=await session.list_files(path, depth=depth, limit=limit, hidden=hidden))


@work.post("/preview")
async def open_preview(session: CurrentSession, body: Port) -> Answer[Mapping[str, str]]:
    """Return the address at which a browser on the server's machine sees a port of the sandbox."""
    return Answer(data={"containerUrl": await session.previews.open(body.port)})


@work.post("/share")
async def share_file(session: CurrentSession, body: Share) -> Answer[Mapping[str, str]]:
    """Copy a file to the object store; return an address that downloads the copy."""
    return Answer(data={"url": await session.share(body.path, expires_s=body.expires_s)})


async def _read_pieces(request: Request) -> AsyncGenerator[bytes]:
    pieces = aiter(request.stream())
    while True:
        with anyio.move_on_after(_STALLED_S) as limit:
            piece = await anext(pieces, None)
        if limit.cancelled_caught:
            raise InvalidArgument(f"nothing of the file came for {_STALLED_S:g} s: send it again")
        if piece is None:
            return
        yield piece
