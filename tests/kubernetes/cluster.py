"""A fake API server that speaks the wire of Kubernetes; see `nodes` for what is behind it."""

import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import anyio
import uvicorn
from anyio import to_thread
from anyio.abc import ByteReceiveStream, ByteSendStream, Process
from anyio.from_thread import BlockingPortal, start_blocking_portal
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.kubernetes.controllers import Controllers
from tests.kubernetes.nodes import Node
from tests.kubernetes.store import KINDS, Json, Store

Found = TypeVar("Found")
V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
TOKEN = "a-token-of-tests"
_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}
# How a stream is cut.
_CUT = (WebSocketDisconnect, RuntimeError, OSError)
_CUT_INPUT = (anyio.BrokenResourceError, anyio.ClosedResourceError)


class Cluster:
    """One API server of one namespace, and what a test may do to it from its own thread."""

    def __init__(self, folder: Path, portal: BlockingPortal) -> None:
        self._folder = folder
        self._portal = portal
        self.store = Store()
        self.node: Node
        self.execs: set[WebSocket] = set()
        self.away = threading.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        # Else an answer waits for what the client acknowledges late.
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._behave()

    def _behave(self) -> None:
        # Versions of Sandboxes that are served, and of the stream of an exec.
        self.has_sandboxes: list[str] = []
        self.protocols = [V5, V4]
        self.token, self.namespace = TOKEN, "sandboxes"
        # The paths of all requests.
        self.requests: list[str] = []
        # Answers instead of the next requests: (status, headers).
        self.answers: list[tuple[int, dict[str, str]]] = []
        # (verb, resource) that the user has no right to.
        self.forbidden: set[tuple[str, str]] = set()
        self.away.clear()

    def close(self) -> None:
        self.socket.close()

    def kubeconfig(self, server: str = "") -> Path:
        """Write how to reach it."""
        server = server or f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        found = {
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": server}}],
            "users": [{"name": "tester", "user": {"token": TOKEN}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "tester"}}],
        }
        file = self._folder / f"kubeconfig{server.rpartition(':')[2]}"
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **found}))
        return file

    # What a test does.

    def do(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Run something in the server's own thread."""
        return self._portal.call(work, *arguments)

    def wait(self, look: Callable[[], Found]) -> Found:
        """Return what `look` returns as soon as that is something, looking after each change."""

        async def wait() -> Found:
            with anyio.fail_after(30):
                while not (found := look()):
                    await self.store.changed.wait()
                return found

        return self._portal.call(wait)

    async def until(self, look: Callable[[], Found]) -> Found:
        return await to_thread.run_sync(self.wait, look)

    def reset(self) -> None:
        """Take back what a test did to it, and delete all but policies."""
        self.do(self._clear)
        self.wait(lambda: self.is_empty() and not self.execs)
        self._behave()
        self.store.behave()
        self.node.behave()

    def _clear(self) -> None:
        for plural in KINDS.keys() - {"networkpolicies"}:
            for name in self.names(plural):
                with suppress(HTTPException):
                    self.store.delete(plural, name)

    def is_empty(self) -> bool:
        return not (self.names("pods") or self.names("persistentvolumeclaims"))

    def cut(self) -> None:
        """Cut all execs, as an API server that is restarted."""
        for stream in list(self.execs):
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

    @asynccontextmanager
    async def serve(self) -> AsyncGenerator[None]:
        objects = "/{base:path}/namespaces/{namespace}/{plural}"
        routes = [
            Route("/version", self._version),
            Route("/apis/{group}", self._group),
            Route("/{base:path}/selfsubjectaccessreviews", self._review, methods=["POST"]),
            WebSocketRoute(f"{objects}/{{name}}/exec", self._exec),
            *(
                Route(f"{objects}{rest}", self._answer, methods=[*_VERBS])
                for rest in ("", "/{name}", "/{name}/{part}")
            ),
        ]
        handlers: Any = {HTTPException: _render_failure}
        app = Starlette(routes=routes, exception_handlers=handlers)
        config = uvicorn.Config(app, ws="wsproto", lifespan="off", log_level="critical")
        config.timeout_graceful_shutdown = 0
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as serving, anyio.create_task_group() as tasks:
            serving.start_soon(server.serve, [self.socket])
            self.node = Node(self.store, self._folder, tasks)
            Controllers(self.store, tasks)
            try:
                yield
            finally:
                server.should_exit = True
                tasks.cancel_scope.cancel()
        # What was being made is there now.
        await to_thread.run_sync(self.node.close)

    def _admit(self, request: HTTPConnection, resource: str, verb: str) -> None:
        self.requests.append(request.url.path)
        self.store.tell()
        if self.away.is_set():
            raise HTTPException(503, "the server is currently unable to handle the request")
        # An exec is not asked for again.
        if self.answers and resource != "pods/exec":
            status, headers = self.answers.pop(0)
            raise HTTPException(status, f"planted {status}", headers)
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise HTTPException(401, "Unauthorized")
        if (verb, resource) in self.forbidden:
            raise HTTPException(403, f'User "tester" cannot {verb} resource "{resource}"')
        namespace = request.path_params.get("namespace", self.namespace)
        if namespace != self.namespace:
            raise HTTPException(404, f'namespaces "{namespace}" not found')

    async def _version(self, request: Request) -> Response:
        self._admit(request, "version", "get")
        return JSONResponse({"gitVersion": "v1.36.0"})

    async def _group(self, request: Request) -> Response:
        self._admit(request, "groups", "get")
        if not (self.has_sandboxes and "agents.x-k8s.io" in request.path_params["group"]):
            raise HTTPException(404, "the server could not find the requested resource")
        return JSONResponse({"versions": [{"version": each} for each in self.has_sandboxes]})

    async def _review(self, request: Request) -> Response:
        self._admit(request, "selfsubjectaccessreviews", "create")
        body = await request.json()
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        status = {"allowed": (asked["verb"], resource) not in self.forbidden}
        return JSONResponse({**body, "status": status}, 201)

    async def _answer(self, request: Request) -> Response:
        """Do what is asked of an object, or of all of a kind."""
        given, query = request.path_params, request.query_params
        plural, name, verb = given["plural"], given.get("name", ""), _VERBS[request.method]
        if verb == "get" and not name:
            verb = "watch" if "watch" in query else "list"
        resource = f"{plural}/{given['part']}" if "part" in given else plural
        self._admit(request, resource, verb)
        if verb == "watch":
            return StreamingResponse(self.store.watch(plural, query))
        news = json.loads(await request.body() or "{}")
        match verb:
            case "list":
                found = self.store.list(plural, query)
            case "get":
                found = self.store.get(plural, name)
            case "create":
                found = self.store.add(plural, news)
            case "delete":
                last = news["propagationPolicy"] == "Foreground"
                found = self.store.delete(plural, name, last=last)
            case _:
                how = "json" if isinstance(news, list) else "merge"
                assert request.headers["content-type"] == f"application/{how}-patch+json"
                found = self.store.patch(resource, name, news)
        return JSONResponse(found, 201 if verb == "create" else 200)

    async def _exec(self, websocket: WebSocket) -> None:
        """Run a program in a pod's container, as the last step of a chain of proxies does."""
        self._admit(websocket, "pods/exec", "create")
        query, offered = websocket.query_params, websocket.scope["subprotocols"]
        container = self.node.container(websocket.path_params["name"], query["container"])
        chosen = next(each for each in self.protocols if each in offered)
        while self.node.hangs:
            await self.store.changed.wait()
        await websocket.accept(chosen)
        self.execs.add(websocket)
        self.store.tell()
        command = ["docker", "exec", "-i", container, *query.getlist("command")]
        try:
            # It gets what was sent before the end of a stream, and then that.
            async with await anyio.open_process(command) as process:
                try:
                    await self._join(websocket, process, is_v5=chosen == V5)
                finally:
                    self.execs.discard(websocket)
                    self.store.tell()
        except* (*_CUT, *_CUT_INPUT):
            pass

    async def _join(self, websocket: WebSocket, process: Process, *, is_v5: bool) -> None:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        # As a real one says that it has begun.
        await websocket.send_bytes(b"\x01")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_write, websocket, process.stdin, is_v5)
            async with anyio.create_task_group() as outputs:
                outputs.start_soon(self._read, websocket, process.stdout, b"\x01")
                outputs.start_soon(self._read, websocket, process.stderr, b"\x02")
            status = {"status": "Failure" if await process.wait() else "Success"}
            await websocket.send_bytes(b"\x03" + json.dumps(status).encode())
            await websocket.close()
            tasks.cancel_scope.cancel()

    async def _read(self, websocket: WebSocket, stream: ByteReceiveStream, channel: bytes) -> None:
        async for data in stream:
            while self.node.hangs:
                await self.store.changed.wait()
            await websocket.send_bytes(channel + data)


async def _write(websocket: WebSocket, stdin: ByteSendStream, is_v5: bool) -> None:
    while True:
        message = await websocket.receive_bytes()
        if message[:1] == b"\x00":
            await stdin.send(message[1:])
        elif message == b"\xff\x00" and is_v5:
            await stdin.aclose()


async def _render_failure(_: Request, exc: HTTPException) -> Response:
    body = {"kind": "Status", "code": exc.status_code, "message": exc.detail}
    return JSONResponse(body, exc.status_code, headers=exc.headers)


@contextmanager
def running(folder: Path) -> Generator[Cluster]:
    """Start a cluster in a thread of its own, and name it in KUBECONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    with start_blocking_portal() as portal, closing(Cluster(folder, portal)) as cluster:
        named = mock.patch.dict(os.environ, KUBECONFIG=str(cluster.kubeconfig()))
        with portal.wrap_async_context_manager(cluster.serve()), named:
            yield cluster
