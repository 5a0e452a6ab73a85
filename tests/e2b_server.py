"""E2B as far as its library asks for it: a control API, and envd in sandboxes that are real.

A sandbox is a control group of this machine's processes with folders of its own in place of those
that a sandbox has. `python -m tests.e2b_server FOLDER` prints its port; POST /fault makes it fail.
Needs root.
"""

import atexit
import base64
import functools
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from anyio import to_thread
from connectrpc.code import Code
from connectrpc.errors import ConnectError
from e2b.envd.process import process_connect as rpc
from e2b.envd.process import process_pb as pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from mcp_sandbox.backends.bubblewrap.arguments import show_host_root

KEY = "e2b_0123456789abcdef"
_FREEZER = Path("/sys/fs/cgroup/freezer")
_SHOWN = {
    "workspace": "/workspace",
    "home": "/home/sandbox",
    "ours": "/opt/mcp-sandbox",
    "skills": "/opt/skills",
    "run": "/run/mcp-sandbox",
}
_Event = pb.ProcessEvent


@dataclass
class Machine:
    """One sandbox."""

    id: str
    folder: Path
    asked: dict[str, Any]
    state: str = "running"
    ends_s: float = 0.0
    root: int = 0
    programs: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    cut: anyio.Event = field(default_factory=anyio.Event)

    @property
    def group(self) -> Path:
        return _FREEZER / f"e2b-{self.id}"

    def boot(self) -> None:
        for name in _SHOWN:
            (self.folder / name).mkdir(parents=True)
        self.group.mkdir()
        binds: list[str] = []
        for name, place in _SHOWN.items():
            binds += ["--bind", str(self.folder / name), place]
        for name in ("passwd", "group"):
            shutil.copy(f"/etc/{name}", self.folder / name)
            binds += ["--bind", str(self.folder / name), f"/etc/{name}"]
        root = show_host_root(list(_SHOWN.values()), "/tmp")
        # It begins when all is mounted.
        words = ["bwrap", *root, *binds, "--", "sh", "-c", "echo $$; exec sleep infinity"]
        self.programs[0] = first = self._inside(words, stdout=subprocess.PIPE)
        assert first.stdout is not None
        self.root = int(first.stdout.readline())

    def run(self, config: pb.ProcessConfig, *, stdin: bool) -> subprocess.Popen[bytes]:
        words = ["nsenter", f"--mount=/proc/{self.root}/ns/mnt", "--wdns=/", config.cmd]
        variables = {
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": "/",
            **config.envs,
        }
        given = subprocess.PIPE if stdin else subprocess.DEVNULL
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        program = self._inside([*words, *config.args], env=variables, stdin=given, **out)
        self.programs[program.pid] = program
        return program

    def _inside(self, words: list[str], **more: Any) -> subprocess.Popen[bytes]:
        join = ["sh", "-c", f'echo $$ > {self.group}/cgroup.procs; exec "$@"', "sh"]
        return subprocess.Popen([*join, *words], **more)

    def freeze(self, how: str) -> None:
        (self.group / "freezer.state").write_text(how)
        while (self.group / "freezer.state").read_text().strip() != how:
            time.sleep(0.002)

    def kill(self) -> None:
        self.freeze("FROZEN")
        for pid in (self.group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.freeze("THAWED")
        for program in [*self.programs.values()]:
            program.wait(10)
        while (self.group / "cgroup.procs").read_text():
            time.sleep(0.002)
        self.group.rmdir()
        shutil.rmtree(self.folder)

    def told(self) -> dict[str, Any]:
        made = {"templateID": self.asked["templateID"], "sandboxID": self.id, "clientID": "client"}
        return {**made, "envdVersion": "0.6.4", "envdAccessToken": "secret"}

    def listed(self) -> dict[str, Any]:
        at = "2026-01-01T00:00:00Z"
        size = {"cpuCount": 2, "memoryMB": 512, "diskSizeMB": 1024}
        more = {"state": self.state, "metadata": self.asked.get("metadata", {})}
        return {**self.told(), "startedAt": at, "endAt": at, **size, **more}


class Service:
    """All sandboxes. `fault` is the status of the next answers, and how many get it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.fault = (0, 0)
        self.requests: list[str] = []
        # How many requests to sandboxes are answered as if there were none.
        self.late = 0

    def found(self, request: Request) -> Machine | None:
        return self.machines.get(request.path_params["id"])

    def failing(self, request: Request) -> Response | None:
        self.requests.append(f"{request.method} {request.url.path}")
        status, left = self.fault
        if left:
            self.fault = (status, left - 1)
            return _refusal(status)
        return None if request.headers.get("x-api-key") == KEY else _refusal(401)

    async def create(self, request: Request) -> Response:
        machine = Machine(secrets.token_hex(10), self.folder, await request.json())
        machine.folder = self.folder / machine.id
        await to_thread.run_sync(machine.boot)
        self.machines[machine.id] = machine
        return JSONResponse(machine.told(), 201)

    async def connect(self, request: Request) -> Response:
        machine = self.found(request)
        if machine is None:
            return _refusal(404)
        if machine.state == "paused":
            await to_thread.run_sync(machine.freeze, "THAWED")
            machine.state, machine.cut = "running", anyio.Event()
        return JSONResponse(machine.told(), 200)

    async def pause(self, request: Request) -> Response:
        machine = self.found(request)
        if machine is None or machine.state == "paused":
            return _refusal(409 if machine else 404)
        machine.state = "paused"
        machine.cut.set()
        await to_thread.run_sync(machine.freeze, "FROZEN")
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        return Response(status_code=204 if self.found(request) else 404)

    async def look(self, request: Request) -> Response:
        machine = self.found(request)
        return JSONResponse(machine.listed()) if machine else _refusal(404)

    async def kill(self, request: Request) -> Response:
        machine = self.machines.pop(request.path_params["id"], None)
        if machine is None:
            return _refusal(404)
        machine.cut.set()
        await to_thread.run_sync(machine.kill)
        return Response(status_code=204)

    async def list(self, request: Request) -> Response:
        wanted = dict(
            part.split("=", 1)
            for part in request.query_params.get("metadata", "").split("&")
            if part
        )
        rows = [machine.listed() for machine in self.machines.values()]
        return JSONResponse([row for row in rows if wanted.items() <= row["metadata"].items()])

    async def set_fault(self, request: Request) -> Response:
        given = await request.json()
        self.fault = (given["status"], given["times"])
        self.late = given["late"]
        if given["cut"]:
            for machine in self.machines.values():
                machine.cut.set()
                machine.cut = anyio.Event()
        return JSONResponse(self.requests)

    async def health(self, request: Request) -> Response:
        return Response(status_code=204) if self.machine(request.headers) else _not_found()

    async def upload(self, request: Request) -> Response:
        machine, path = self.machine(request.headers), request.query_params["path"]
        if machine is None:
            return _not_found()
        async with request.form() as form:
            data = await form["file"].read()  # type: ignore[union-attr]
        inner = next(
            machine.folder / name / path[len(place) + 1 :]
            for name, place in _SHOWN.items()
            if path.startswith(place + "/")
        )
        await anyio.Path(inner).write_bytes(data)
        return JSONResponse([{"name": inner.name, "path": path, "type": "file"}])

    def machine(self, headers: Any) -> Machine | None:
        found = self.machines.get(headers.get("e2b-sandbox-id", ""))
        if self.late:
            self.late -= 1
            return None
        return found if found and found.state == "running" else None


class Envd(rpc.Process):
    """The processes of all sandboxes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _machine(self, ctx: Any) -> Machine:
        if machine := self._service.machine(ctx.request_headers):
            return machine
        raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")

    def _program(self, request: Any, ctx: Any) -> subprocess.Popen[bytes]:
        program = self._machine(ctx).programs.get(request.process.selector.value)
        if program is None:
            raise ConnectError(Code.NOT_FOUND, "process not found")
        return program

    async def start(self, request: pb.StartRequest, ctx: Any) -> AsyncIterator[pb.StartResponse]:
        machine = self._machine(ctx)
        user, _, _ = base64.b64decode(ctx.request_headers["authorization"].split()[1]).partition(
            b":"
        )
        assert user == b"root"
        assert request.process is not None
        program = machine.run(request.process, stdin=request.stdin)
        yield _response("start", _Event.StartEvent(pid=program.pid))
        gives, pieces = anyio.create_memory_object_stream[tuple[str, bytes] | None](4)
        async with anyio.create_task_group() as tasks:
            for name in ("stdout", "stderr"):
                tasks.start_soon(_copy, name, getattr(program, name), gives)
            tasks.start_soon(_wait, machine.cut, gives)
            left = 2
            while left and (piece := await pieces.receive()):
                left -= not piece[1]
                if piece[1]:
                    yield _response("data", _Event.DataEvent(output=Oneof(*piece)))  # type: ignore[arg-type]
            tasks.cancel_scope.cancel()
        if left:
            raise ConnectError(Code.UNAVAILABLE, "the connection to the sandbox ended")
        code = await to_thread.run_sync(program.wait)
        machine.programs.pop(program.pid, None)
        yield _response("end", _Event.EndEvent(exit_code=code, exited=True, status="exited"))

    async def send_input(self, request: pb.SendInputRequest, ctx: Any) -> pb.SendInputResponse:
        program = self._program(request, ctx)
        assert program.stdin is not None
        assert request.input is not None
        assert request.input.input is not None
        data, write = request.input.input.value, program.stdin

        def put() -> None:
            with suppress(BrokenPipeError):
                write.write(data)
                write.flush()

        await to_thread.run_sync(put)
        return pb.SendInputResponse()

    async def send_signal(self, request: pb.SendSignalRequest, ctx: Any) -> pb.SendSignalResponse:
        self._program(request, ctx).kill()
        return pb.SendSignalResponse()


async def _copy(name: str, pipe: Any, gives: Any) -> None:
    data = b"-"
    while data:
        await anyio.wait_readable(pipe)
        data = os.read(pipe.fileno(), 65536)
        await gives.send((name, data))


async def _wait(cut: anyio.Event, gives: Any) -> None:
    await cut.wait()
    await gives.send(None)


def _response(kind: Any, value: Any) -> pb.StartResponse:
    return pb.StartResponse(event=_Event(event=Oneof(kind, value)))


def _refusal(status: int) -> Response:
    return JSONResponse({"code": status, "message": f"refused with {status}"}, status)


def _not_found() -> Response:
    return JSONResponse({"message": "The sandbox was not found"}, 502)


def application(service: Service) -> Starlette:
    def asked(answer: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            return service.failing(request) or await answer(request)

        return endpoint

    def route(method: str, path: str, answer: Any) -> Route:
        return Route(path, asked(answer), methods=[method])

    @asynccontextmanager
    async def ends(_: Starlette) -> AsyncIterator[None]:
        yield
        for machine in service.machines.values():
            machine.cut.set()
            await to_thread.run_sync(machine.kill)

    envd = rpc.ProcessASGIApplication(Envd(service))
    return Starlette(
        lifespan=ends,
        routes=[
            route("POST", "/v2/sandboxes", service.create),
            route("GET", "/v2/sandboxes", service.list),
            route("POST", "/v2/sandboxes/{id}/connect", service.connect),
            route("POST", "/sandboxes/{id}/pause", service.pause),
            route("POST", "/sandboxes/{id}/timeout", service.timeout),
            route("GET", "/sandboxes/{id}", service.look),
            route("DELETE", "/sandboxes/{id}", service.kill),
            Route("/fault", service.set_fault, methods=["POST"]),
            Route("/health", service.health),
            Route("/files", service.upload, methods=["POST"]),
            Mount("/", envd),
        ],
    )


@functools.cache
def _shared() -> str:
    """Return the address of the server that all tests of this process have, until it ends."""
    folder = tempfile.TemporaryDirectory(prefix="mcp-sandbox-e2b-")
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.e2b_server", folder.name],
        stdout=subprocess.PIPE,
        text=True,
        # A path of a test in it would mark the server as one that the test left.
        env={"PATH": os.environ["PATH"]},
    )

    @atexit.register
    def end() -> None:
        server.terminate()
        server.communicate()
        folder.cleanup()

    assert server.stdout is not None
    return f"http://127.0.0.1:{int(server.stdout.readline())}"


@contextmanager
def serving() -> Iterator[str]:
    """Have the library ask such a server; yield its address. With a key: the real one."""
    if os.environ.get("E2B_API_KEY"):
        yield ""
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
            patch.setenv(name, _shared())
        patch.setenv("E2B_HTTP_VERSION", "1.1")
        patch.setenv("E2B_API_KEY", KEY)
        yield _shared()


def absent() -> str | None:
    """Return why it cannot run here, if it cannot."""
    if os.environ.get("E2B_API_KEY"):
        return None
    if os.geteuid() != 0 or not os.access(_FREEZER, os.W_OK):
        return "e2b: its sandboxes need root and the control groups of version 1, with a freezer"
    return None


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Accepted connections have it from here; without it each answer takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        settings = uvicorn.Config(
            application(Service(Path(sys.argv[1]))),
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
        uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
