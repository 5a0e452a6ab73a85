"""A fake API server that speaks the wire of Kubernetes; see `nodes` for what is behind it."""

import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import uvicorn
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.from_thread import BlockingPortal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.kubernetes.controllers import Controllers
from tests.kubernetes.nodes import Node
from tests.kubernetes.store import KINDS, Json, Store

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
TOKEN = "a-token-of-tests"
_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}
_READS = ("list", "watch")
_CUT = (WebSocketDisconnect, RuntimeError, OSError, KeyError)
_CUT_INPUT = (*_CUT, anyio.BrokenResourceError, anyio.ClosedResourceError)


class Cluster:
    """One API server of one namespace, and what a test may do to it from its own thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store()
        self.node: Node
        self._portal: BlockingPortal
        self._runs = threading.Event()
        self._streams: set[WebSocket] = set()
        self.requests: list[tuple[str, str]] = []
        # Answers instead of the next requests: (status, headers).
        self.answers: list[tuple[int, dict[str, str]]] = []
        # (verb, resource) that the user has no right to.
        self.forbidden: set[tuple[str, str]] = set()
        self.away = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        # Else an answer waits for what the client acknowledges late.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._behave()

    def _behave(self) -> None:
        # Versions of Sandboxes that are served, and of the stream of an exec.
        self.has_sandboxes: list[str] = []
        self.protocols = [V5, V4]
        self.token = TOKEN
        for changed in (self.answers, self.forbidden, self.requests, self.away):
            changed.clear()

    def kubeconfig(self, **given: str) -> Path:
        """Write how to reach it."""
        server = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        named = {"server": server, "token": TOKEN, **given}
        found = {
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": named["server"]}}],
            "users": [{"name": "tester", "user": {"token": named["token"]}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "tester"}}],
        }
        file = self.folder / f"kubeconfig-{abs(hash(frozenset(named.items())))}"
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **found}))
        return file

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run something in the server's own thread."""
        return self._portal.call(work, *arguments)

    def reset(self) -> None:
        """Take back what a test did to it, and delete all but policies."""
        self.do(self._clear)
        self._behave()
        self.store.behave()
        self.node.behave()

    async def _clear(self) -> None:
        for plural in KINDS.keys() - {"networkpolicies"}:
            for name in self.names(plural):
                with suppress(HTTPException):
                    self.store.delete(plural, name)
        await self._empty()

    async def _empty(self) -> None:
        with anyio.fail_after(30):
            while self.names("pods") or self.names("persistentvolumeclaims"):
                await self.store.changed.wait()

    def wait_until_empty(self) -> None:
        self.do(self._empty)

    def cut(self) -> None:
        """Cut all execs, as an API server that is restarted."""
        for stream in list(self._streams):
            self.do(stream.close, 1001)

    def change(self, plural: str, name: str, news: Json) -> None:
        """Change an object as somebody with kubectl does."""
        self.do(self.store.patch, plural, name, news)

    def delete(self, plural: str, name: str) -> None:
        self.do(self.store.delete, plural, name)

    def forget_trials(self) -> None:
        """Delete policies, so that whether they are enforced is tried again."""
        for name in self.names("networkpolicies"):
            self.delete("networkpolicies", name)

    def names(self, plural: str) -> list[str]:
        return sorted(self.store.objects[plural])

    # The wire.

    def app(self) -> Starlette:
        base, every = "/{base:path}/namespaces/{namespace}", [*_VERBS]
        routes = [
            Route("/version", self._version),
            Route("/apis/{group}", self._group),
            Route("/{base:path}/selfsubjectaccessreviews", self._review, methods=["POST"]),
            WebSocketRoute(f"{base}/pods/{{name}}/exec", self._exec),
            Route(f"{base}/{{plural}}/{{name}}/ephemeralcontainers", self._add, methods=["PATCH"]),
            Route(f"{base}/{{plural}}/{{name}}", self._one, methods=every),
            Route(f"{base}/{{plural}}", self._many, methods=every),
        ]
        handlers: Any = {HTTPException: _render_failure}
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._run)

    @asynccontextmanager
    async def _run(self, _: Starlette) -> AsyncGenerator[None]:
        async with BlockingPortal() as self._portal, anyio.create_task_group() as tasks:
            self.node = Node(self.store, self.folder, tasks)
            Controllers(self.store, tasks)
            self._runs.set()
            yield
            await anyio.to_thread.run_sync(self.node.close)
            tasks.cancel_scope.cancel()

    def _admit(self, request: Request, resource: str, verb: str = "") -> None:
        verb = verb or _VERBS[request.method]
        self.requests.append((request.method, request.url.path))
        if self.away.is_set():
            raise HTTPException(503, "the server is currently unable to handle the request")
        if self.answers:
            status, headers = self.answers.pop(0)
            raise HTTPException(status, f"planted {status}", headers)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise HTTPException(401, "Unauthorized")
        if (verb, resource) in self.forbidden:
            raise HTTPException(403, f'User "tester" cannot {verb} resource "{resource}"')
        if (namespace := request.path_params.get("namespace", "sandboxes")) != "sandboxes":
            raise HTTPException(404, f'namespaces "{namespace}" not found')

    async def _version(self, request: Request) -> Response:
        self._admit(request, "version")
        return JSONResponse({"gitVersion": "v1.36.0"})

    async def _group(self, request: Request) -> Response:
        self._admit(request, "groups")
        if not (self.has_sandboxes and "agents.x-k8s.io" in request.path_params["group"]):
            raise HTTPException(404, "the server could not find the requested resource")
        return JSONResponse({"versions": [{"version": each} for each in self.has_sandboxes]})

    async def _review(self, request: Request) -> Response:
        self._admit(request, "selfsubjectaccessreviews")
        body = await request.json()
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        status = {"allowed": (asked["verb"], resource) not in self.forbidden}
        return JSONResponse({**body, "status": status}, 201)

    async def _many(self, request: Request) -> Response:
        plural, query = request.path_params["plural"], dict(request.query_params)
        watches = query.get("watch") == "true"
        self._admit(request, plural, _READS[watches] if request.method == "GET" else "")
        if request.method == "POST":
            return JSONResponse(self.store.add(plural, await request.json()), 201)
        if watches:
            return StreamingResponse(self._events(plural, query))
        return JSONResponse(self.store.list(plural, query))

    async def _one(self, request: Request) -> Response:
        plural, name = request.path_params["plural"], request.path_params["name"]
        self._admit(request, plural)
        if request.method == "PATCH":
            news = await request.json()
            how = "json" if isinstance(news, list) else "merge"
            assert request.headers["content-type"] == f"application/{how}-patch+json"
            return JSONResponse(self.store.patch(plural, name, news))
        if request.method == "DELETE":
            last = (await request.json())["propagationPolicy"] == "Foreground"
            return JSONResponse(self.store.delete(plural, name, last=last))
        return JSONResponse(self.store.get(plural, name))

    async def _add(self, request: Request) -> Response:
        """Add containers to a pod that runs."""
        self._admit(request, "pods/ephemeralcontainers")
        name, news = request.path_params["name"], await request.json()
        assert news["spec"].keys() == {"ephemeralContainers"}
        return JSONResponse(self.store.patch("pods", name, news, also="ephemeralContainers"))

    async def _events(self, plural: str, query: dict[str, str]) -> AsyncGenerator[bytes]:
        async for event in self.store.watch(plural, query):
            yield json.dumps(event).encode() + b"\n"

    async def _exec(self, websocket: WebSocket) -> None:
        """Run a program in a pod's container, as the last step of a chain of proxies does."""
        offered = websocket.scope["subprotocols"]
        chosen = next((each for each in self.protocols if each in offered), None)
        name, query = websocket.path_params["name"], websocket.query_params
        words, of = query.getlist("command"), query["container"]
        self.requests.append(("EXEC", websocket.url.path))
        forbidden = ("create", "pods/exec") in self.forbidden
        absent = 404 if name not in self.store.objects["pods"] else 0
        if refused := 403 if forbidden else 503 if self.away.is_set() else absent:
            message = {"message": f'pods "{name}" cannot be reached: {refused}'}
            await websocket.send_denial_response(JSONResponse(message, refused))
            return
        await websocket.accept(chosen)
        self._streams.add(websocket)
        try:
            command = ["docker", "exec", "-i", self.node.container(name, of), *words]
            async with await anyio.open_process(command) as process:
                await _join(websocket, process, is_v5=chosen == V5)
                with suppress(ProcessLookupError):
                    process.kill()
        except KeyError:
            await websocket.close(1011)
        finally:
            self._streams.discard(websocket)


async def _join(websocket: WebSocket, process: Process, *, is_v5: bool) -> None:
    assert process.stdin
    assert process.stdout
    assert process.stderr
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_write, websocket, process.stdin, is_v5, tasks.cancel_scope)
        with suppress(*_CUT):
            async with anyio.create_task_group() as outputs:
                outputs.start_soon(_read, websocket, process.stdout, b"\x01")
                outputs.start_soon(_read, websocket, process.stderr, b"\x02")
            await websocket.send_bytes(b"\x03" + _render_end(await process.wait()))
            await websocket.close()
        tasks.cancel_scope.cancel()


async def _write(
    websocket: WebSocket, stdin: ByteSendStream, is_v5: bool, scope: anyio.CancelScope
) -> None:
    with suppress(*_CUT_INPUT):
        while True:
            message = await websocket.receive_bytes()
            if message[:1] == b"\x00":
                await stdin.send(message[1:])
            elif message == b"\xff\x00" and is_v5:
                await stdin.aclose()
    scope.cancel()


async def _read(websocket: WebSocket, stream: ByteReceiveStream, channel: bytes) -> None:
    with suppress(*_CUT):
        async for data in stream:
            await websocket.send_bytes(channel + data)


def _render_end(code: int) -> bytes:
    cause = {"reason": "ExitCode", "message": str(code)}
    failed = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": [cause]}}
    return json.dumps(failed if code else {"status": "Success"}).encode()


async def _render_failure(_: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    body = {"kind": "Status", "code": exc.status_code, "message": exc.detail}
    return JSONResponse(body, exc.status_code, headers=exc.headers)


@contextmanager
def running(folder: Path) -> Generator[Cluster]:
    """Start a cluster in a thread of its own, and name it in KUBECONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    cluster = Cluster(folder)
    config = uvicorn.Config(
        cluster.app(), ws="wsproto", log_level="critical", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([cluster.socket],))
    thread.start()
    cluster._runs.wait(30)
    try:
        with mock.patch.dict(os.environ, KUBECONFIG=str(cluster.kubeconfig())):
            yield cluster
    finally:
        server.should_exit = True
        thread.join()
