"""A fake API server that speaks the wire of Kubernetes; see `nodes` for what is behind it."""

import json
import os
import socket
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.from_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.kubernetes import schema
from tests.kubernetes.nodes import Node
from tests.kubernetes.store import KINDS, Failure, Json, Store

V5, V4 = "v5.channel.k8s.io", "v4.channel.k8s.io"
TOKEN = "a-token-of-tests"
Result = TypeVar("Result")
_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}


class Cluster:
    """One API server of one namespace, and what a test may do to it from its own thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store()
        self.node: Node
        self.portal: anyio.from_thread.BlockingPortal
        self.has_sandboxes: list[str] = []
        self.protocols = [V5, V4]
        self.requests: list[tuple[str, str]] = []
        # Answers instead of the next requests: (status, headers).
        self.answers: list[tuple[int, dict[str, str]]] = []
        # (verb, resource) that the user has no right to.
        self.forbidden: set[tuple[str, str]] = set()
        self.token = TOKEN
        self.away = threading.Event()
        self.streams: set[WebSocket] = set()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]

    def kubeconfig(self, **given: str) -> Path:
        """Write how to reach it."""
        named = {"server": f"http://127.0.0.1:{self.port}", "token": TOKEN, **given}
        cluster = {"name": "fake", "cluster": {"server": named["server"]}}
        user = {"name": "tester", "user": {"token": named["token"]}}
        context = {"name": "fake", "context": {"cluster": "fake", "user": "tester"}}
        found = {"apiVersion": "v1", "kind": "Config", "current-context": "fake"}
        file = self.folder / f"kubeconfig-{abs(hash(frozenset(named.items())))}"
        file.write_text(
            json.dumps({**found, "clusters": [cluster], "users": [user], "contexts": [context]})
        )
        return file

    def do(self, work: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        """Run something in the server's own thread."""
        return self.portal.call(work, *arguments)

    def reset(self) -> None:
        """Take back what a test did to it, and delete all but policies."""
        self.do(self._clear)
        self.answers.clear()
        self.forbidden.clear()
        self.store.quota, self.token, self.protocols = None, TOKEN, [V5, V4]
        self.has_sandboxes, self.node.full, self.node.enforces_policies = [], "", True
        self.store.watch_s, self.store.chunk, self.store.bookmarks = 3000.0, 500, True
        self.requests.clear()
        self.away.clear()

    async def _clear(self) -> None:
        objects = self.store.objects
        for plural in ("sandboxes", "pods", "persistentvolumeclaims"):
            for name in list(objects[plural]):
                self.store.mark_deleted(plural, name)
        await self._empty()

    async def _empty(self) -> None:
        objects = self.store.objects
        with anyio.fail_after(30):
            while any(objects[plural] for plural in ("pods", "persistentvolumeclaims")):
                await self.store.changed.wait()

    def wait_until_empty(self) -> None:
        self.do(self._empty)

    def cut(self) -> None:
        """Cut all execs, as an API server that is restarted."""

        async def close() -> None:
            for stream in list(self.streams):
                await stream.close(1001)

        self.do(close)

    def change(self, plural: str, name: str, news: Json) -> None:
        """Change an object as somebody with kubectl does."""

        async def patch() -> None:
            self.store.patch(plural, name, news)

        self.do(patch)

    def delete(self, plural: str, name: str) -> None:
        async def begin() -> None:
            _delete(self.store, plural, name)

        self.do(begin)

    def forget_trials(self) -> None:
        """Delete policies, so that whether they are enforced is tried again."""
        for name in self.names("networkpolicies"):
            self.delete("networkpolicies", name)

    def compact(self) -> None:
        async def forget() -> None:
            self.store.compact()

        self.do(forget)

    def names(self, plural: str) -> list[str]:
        return sorted(self.store.objects[plural])

    # The wire.

    def app(self) -> Starlette:
        rest = "/namespaces/{namespace}/{plural}"
        routes: list[Any] = [
            Route("/version", self._version),
            Route("/apis/agents.x-k8s.io", self._group),
        ]
        for base in ("/api/v1", "/apis/{group}/{version}"):
            methods = ["GET", "POST", "PATCH", "DELETE"]
            routes.append(WebSocketRoute(f"{base}{rest}/{{name}}/exec", self._exec))
            routes.append(Route(f"{base}{rest}/{{name}}", self._one, methods=methods))
            routes.append(Route(f"{base}{rest}", self._many, methods=methods))
            routes.append(Route(f"{base}/{{plural}}", self._review, methods=["POST"]))
        return Starlette(routes=routes, exception_handlers={Failure: _told})

    async def _version(self, request: Request) -> Response:
        self._admit(request, "version")
        return JSONResponse({"gitVersion": "v1.36.0", "major": "1", "minor": "36"})

    async def _group(self, request: Request) -> Response:
        self._admit(request, "groups")
        if not self.has_sandboxes:
            raise Failure(404, "the server could not find the requested resource")
        versions = [
            {"groupVersion": f"agents.x-k8s.io/{v}", "version": v} for v in self.has_sandboxes
        ]
        return JSONResponse({"kind": "APIGroup", "name": "agents.x-k8s.io", "versions": versions})

    async def _review(self, request: Request) -> Response:
        body = await request.json()
        self._admit(request, "selfsubjectaccessreviews")
        asked = body["spec"]["resourceAttributes"]
        resource = "/".join(filter(None, (asked["resource"], asked.get("subresource"))))
        body["status"] = {"allowed": (asked["verb"], resource) not in self.forbidden}
        return JSONResponse(body, 201)

    def _admit(self, request: Request, resource: str, verb: str = "") -> None:
        method = request.method
        self.requests.append((method, request.url.path))
        if self.away.is_set():
            raise Failure(503, "the server is currently unable to handle the request")
        if self.answers:
            status, headers = self.answers.pop(0)
            failure = Failure(status, f"planted {status}")
            failure.headers = headers  # type: ignore[attr-defined]
            raise failure
        if request.headers.get("authorization") != f"Bearer {self.token}":
            raise Failure(401, "Unauthorized", "Unauthorized")
        verb = verb or _VERBS[method]
        if (verb, resource) in self.forbidden:
            raise Failure(403, f'User "tester" cannot {verb} resource "{resource}"', "Forbidden")
        namespace = request.path_params.get("namespace")
        if namespace not in (None, "sandboxes"):
            raise Failure(404, f'namespaces "{namespace}" not found', "NotFound")

    async def _many(self, request: Request) -> Response:
        plural, query = request.path_params["plural"], dict(request.query_params)
        watches = query.get("watch") == "true"
        listing = request.method == "GET"
        self._admit(request, plural, "watch" if watches else "list" if listing else "")
        if plural not in KINDS:
            raise Failure(404, "the server could not find the requested resource")
        if watches:
            return StreamingResponse(self._events(plural, query), media_type="application/json")
        if listing:
            return JSONResponse(self.store.list(plural, query))
        body = await request.json()
        return JSONResponse(self.store.add(plural, body), 201)

    async def _events(self, plural: str, query: dict[str, str]) -> AsyncGenerator[bytes]:
        async for event in self.store.watch(plural, query):
            yield json.dumps(event).encode() + b"\n"

    async def _one(self, request: Request) -> Response:
        plural, name = request.path_params["plural"], request.path_params["name"]
        self._admit(request, plural)
        if request.method == "GET":
            return JSONResponse(self.store.get(plural, name))
        if request.method == "PATCH":
            assert request.headers["content-type"] == "application/merge-patch+json"
            return JSONResponse(self.store.patch(plural, name, await request.json()))
        return JSONResponse(_delete(self.store, plural, name))

    async def _exec(self, websocket: WebSocket) -> None:
        """Run a program in a pod's container, as the last step of a chain of proxies does."""
        offered = websocket.scope["subprotocols"]
        chosen = next((each for each in self.protocols if each in offered), None)
        name, words = websocket.path_params["name"], websocket.query_params.getlist("command")
        self.requests.append(("EXEC", websocket.url.path))
        refused = 0
        if ("create", "pods/exec") in self.forbidden:
            refused = 403
        elif self.away.is_set():
            refused = 503
        elif name not in self.store.objects["pods"]:
            refused = 404
        if refused:
            message = {"message": f'pods "{name}" cannot be reached: {refused}'}
            await websocket.send_denial_response(JSONResponse(message, refused))
            return
        await websocket.accept(chosen)
        self.streams.add(websocket)
        try:
            command = ["docker", "exec", "-i", self.node.container(name), *words]
            async with await anyio.open_process(command) as process:
                try:
                    await self._join(websocket, process, is_v5=chosen == V5)
                finally:
                    if process.returncode is None:
                        process.kill()
        except KeyError:
            await websocket.close(1011)
        finally:
            self.streams.discard(websocket)

    async def _join(self, websocket: WebSocket, process: anyio.abc.Process, *, is_v5: bool) -> None:
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                assert process.stdin
                try:
                    while True:
                        message = await websocket.receive_bytes()
                        if message[:1] == b"\x00":
                            await process.stdin.send(message[1:])
                        elif message == b"\xff\x00" and is_v5:
                            await process.stdin.aclose()
                except (WebSocketDisconnect, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    pass
                except (KeyError, RuntimeError):
                    pass
                tasks.cancel_scope.cancel()

            async def read(stream: anyio.abc.ByteReceiveStream, channel: bytes) -> None:
                async for data in stream:
                    await websocket.send_bytes(channel + data)

            tasks.start_soon(write)
            try:
                async with anyio.create_task_group() as outputs:
                    assert process.stdout
                    assert process.stderr
                    outputs.start_soon(read, process.stdout, b"\x01")
                    outputs.start_soon(read, process.stderr, b"\x02")
                await process.wait()
                await websocket.send_bytes(b"\x03" + _status(process.returncode or 0))
                await websocket.close()
            except* (WebSocketDisconnect, RuntimeError, OSError):
                pass
            tasks.cancel_scope.cancel()


def _status(code: int) -> bytes:
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    cause = {"reason": "ExitCode", "message": str(code)}
    found = {"metadata": {}, "status": "Failure", "reason": "NonZeroExitCode"}
    return json.dumps({**found, "details": {"causes": [cause]}}).encode()


def _delete(store: Store, plural: str, name: str) -> Json:
    found = store.mark_deleted(plural, name)
    if plural in ("networkpolicies", "events"):
        store.drop(plural, name)
    return found


async def _told(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, Failure)
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": exc.status}
    body = {**status, "message": exc.message, "reason": exc.reason}
    return JSONResponse(body, exc.status, headers=getattr(exc, "headers", None))


@asynccontextmanager
async def _serving(cluster: Cluster) -> AsyncGenerator[None]:
    config = uvicorn.Config(
        cluster.app(), port=cluster.port, ws="wsproto", log_level="critical", lifespan="off"
    )
    server = uvicorn.Server(config)
    stopped = anyio.Event()

    async def serve() -> None:
        await server.serve()
        stopped.set()

    async with anyio.create_task_group() as tasks:
        cluster.node = Node(cluster.store, cluster.folder, tasks)
        tasks.start_soon(serve)
        while not server.started:
            await anyio.sleep(0.01)
        try:
            yield
        finally:
            server.should_exit = server.force_exit = True
            with anyio.CancelScope(shield=True):
                await stopped.wait()
                await anyio.to_thread.run_sync(cluster.node.close)
            tasks.cancel_scope.cancel()


@contextmanager
def running(folder: Path) -> Generator[Cluster]:
    """Start a cluster in a thread of its own, and name it in KUBECONFIG."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    schema.warm_up()
    cluster = Cluster(folder)
    before = os.environ.get("KUBECONFIG")
    with anyio.from_thread.start_blocking_portal() as portal:
        cluster.portal = portal
        with portal.wrap_async_context_manager(_serving(cluster)):
            os.environ["KUBECONFIG"] = str(cluster.kubeconfig())
            try:
                yield cluster
            finally:
                os.environ.pop("KUBECONFIG", None)
                if before:
                    os.environ["KUBECONFIG"] = before
