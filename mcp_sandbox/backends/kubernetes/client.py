"""Talks to the API server of a cluster: the only file that imports the library for it.

The library finds the server and the credentials. Connections are made here: its own are at most
a hundred, fewer than channels, and all are closed when credentials are renewed.
"""

import json
import random
import ssl
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.errors import BackendUnavailable, CapacityReached, OperatorError

try:
    import httpx
    import httpx_ws
    import kr8s.asyncio
    from wsproto.utilities import ProtocolError
except ModuleNotFoundError as exc:
    raise BackendUnavailable(
        "the libraries for clusters are not installed: pip install 'mcp-sandbox[kubernetes]'"
    ) from exc

Json = dict[str, Any]
WebSocket = httpx_ws.AsyncWebSocketSession
WEBSOCKET_ENDS = (httpx_ws.HTTPXWSException, httpx.HTTPError, ProtocolError, ExceptionGroup)
PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
_CALL_S = 30.0
_CONNECT_S = 10.0
_A_SECOND, _BURST_S = 20, 1.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_MESSAGE_BYTES = 1 << 20
# What a pod says waits here until it is read; then the cluster waits.
_MESSAGES = 16
_PING_S = 30.0
_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}


@dataclass
class Refused(Exception):
    """The API server answered with an error that is about one object."""

    status: int
    message: str


class ApiServer:
    """One API server as one user, with limits on what is asked of it."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._http: httpx.AsyncClient | None = None
        self._opening = anyio.Lock()
        self._old: list[httpx.AsyncClient] = []
        self._free_at = 0.0
        self.requests = 0

    async def aclose(self) -> None:
        for client in (*self._old, *([self._http] if self._http else [])):
            await client.aclose()
        self._http, self._old = None, []

    def path(self, kind: str, name: str = "", base: str = "/api/v1") -> str:
        """Return the path of an object of the namespace, or of all of a kind."""
        found = f"{base}/namespaces/{self._config.namespace}/{kind}"
        return f"{found}/{name}" if name else found

    async def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Json:
        """Return the server's answer; ask again for a while when it has too much to do.

        Raises:
            Refused: it is about this object.
            CapacityReached: a quota is used up.
            BackendUnavailable: no answer, no right, no namespace.
        """
        deadline, wait_s = time.monotonic() + self._config.start_timeout, _FIRST_WAIT_S
        renewed = False
        while True:
            try:
                response = await self._send(method, path, body, params or {})
            except (httpx.HTTPError, ssl.SSLError, OSError) as exc:
                why, asked_s = f"{type(exc).__name__} {exc}".strip(), 0.0
            else:
                if response.status_code == 401 and not renewed:
                    renewed = True
                    await self._renew()
                    continue
                if response.status_code != 429 and response.status_code < 500:
                    return self._judge(response, method, path)
                why = f"{response.status_code} {_message(response)}"
                asked_s = _seconds(response.headers.get("retry-after"))
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
            pause_s = max(asked_s, wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            if time.monotonic() + pause_s > deadline:
                raise BackendUnavailable(
                    f"the Kubernetes API server does not answer ({why}): what runs goes on; try "
                    "again when `kubectl get --raw /readyz` answers"
                )
            await anyio.sleep(pause_s)

    async def pages(self, path: str, **params: str) -> AsyncGenerator[tuple[list[Json], str]]:
        """Yield all objects in chunks, each with the version that a watch may begin at."""
        more = {"limit": "500"}
        while True:
            answer = await self.call("GET", path, params={**params, **more})
            metadata = answer["metadata"]
            yield answer.get("items") or [], str(metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            more["continue"] = metadata["continue"]

    async def watch(self, path: str, version: str, **params: str) -> AsyncGenerator[Json]:
        """Yield events from a version on, until the server ends the watch.

        Raises Refused with 410 for a version that is too old, httpx.HTTPError, OSError.
        """
        given = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "3000"}
        client = await self._client()
        timeout = httpx.Timeout(_CONNECT_S, read=None)
        params = {**params, **given, "resourceVersion": version}
        async with client.stream("GET", path, params=params, timeout=timeout) as response:
            self.requests += 1
            if response.is_error:
                await response.aread()
                raise Refused(response.status_code, _message(response))
            async for line in response.aiter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise Refused(int(status.get("code", 500)), str(status.get("message")))
                yield event

    @asynccontextmanager
    async def exec(self, pod: str, command: list[str]) -> AsyncGenerator[WebSocket]:
        """Start a program in a pod; raises Refused, and any of WEBSOCKET_ENDS."""
        client = await self._client()
        await self._turn()
        # Some runtimes lose output where no input is asked for.
        flags = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        params = [*flags, ("container", "sandbox"), *(("command", word) for word in command)]
        opened: AbstractAsyncContextManager[WebSocket] = httpx_ws.aconnect_ws(
            str(client.base_url.join(f"{self.path('pods', pod)}/exec")),
            client,
            subprotocols=PROTOCOLS,
            max_message_size_bytes=_MESSAGE_BYTES,
            queue_size=_MESSAGES,
            keepalive_ping_interval_seconds=_PING_S,
            params=params,
            timeout=httpx.Timeout(_CALL_S, read=_CALL_S),
        )
        try:
            async with opened as websocket:
                yield websocket
        except httpx_ws.WebSocketUpgradeError as exc:
            answered = exc.response.status_code, f"it answered {exc.response.status_code}"
            told = explain_refusal(*answered, "create", "pods/exec", self._config.namespace)
            raise told or Refused(*answered) from exc

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, params: Mapping[str, str]
    ) -> httpx.Response:
        client = await self._client()
        await self._turn()
        kind = "merge-patch+json" if method == "PATCH" else "json"
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": f"application/{kind}"}
        return await client.request(method, path, content=content, params=params, headers=headers)

    async def _turn(self) -> None:
        """Wait until another request may be made; a second's worth may go at once."""
        now = anyio.current_time()
        self._free_at = max(self._free_at, now - _BURST_S) + 1 / _A_SECOND
        self.requests += 1
        await anyio.sleep(max(0.0, self._free_at - now))

    async def _client(self) -> httpx.AsyncClient:
        async with self._opening:
            if self._http is None:
                self._http = await self._open()
            return self._http

    async def _open(self) -> httpx.AsyncClient:
        # Made by itself, for its factory leaves a connection open.
        auth = kr8s.asyncio.Api(bypass_factory=True, context=self._config.context or None).auth
        with _explained():
            # It reads files in its event loop, so it gets one in a thread.
            await to_thread.run_sync(anyio.run, auth.reauthenticate)
            verify = await to_thread.run_sync(anyio.run, auth.ssl_context)
        extensions = {"sni_hostname": auth.tls_server_name} if auth.tls_server_name else {}

        async def name_server(request: httpx.Request) -> None:
            request.extensions = {**request.extensions, **extensions}

        return httpx.AsyncClient(
            base_url=auth.server,
            headers={"Authorization": f"Bearer {auth.token.strip()}"} if auth.token else {},
            verify=verify,
            proxy=auth.proxy,
            timeout=httpx.Timeout(_CALL_S, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            event_hooks={"request": [name_server]},
        )

    async def _renew(self) -> None:
        """Read the credentials anew at the next request; what is open stays open."""
        async with self._opening:
            if self._http:
                self._old.append(self._http)
            self._http = None

    def _judge(self, response: httpx.Response, method: str, path: str) -> Json:
        if not response.is_error:
            return dict(response.json())
        status, message = response.status_code, _message(response)
        words, namespace = path.strip("/").split("/"), self._config.namespace
        kind = words[words.index(namespace) + 1] if namespace in words else words[-1]
        if error := explain_refusal(status, message, _VERBS[method], kind, namespace):
            raise error
        raise Refused(status, message)


@contextmanager
def _explained() -> Generator[None]:
    """Raise BackendUnavailable for what the library says of a cluster that is not found."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, OSError) as exc:
        raise BackendUnavailable(
            f"no cluster is configured ({exc}): set KUBECONFIG or kubernetes.context, or run "
            "the server in the cluster with a service account"
        ) from exc


def explain_refusal(
    status: int, message: str, verb: str, kind: str, namespace: str
) -> OperatorError | None:
    """Return the error for an answer that is about no single object."""
    if status == 401:
        return BackendUnavailable(
            f"the Kubernetes API server does not know this user ({message}): its token has "
            "expired or is of another cluster; log in again, or set kubernetes.context"
        )
    if status == 403 and "exceeded quota" in message:
        return CapacityReached(
            f"the quota of namespace {namespace} is used up ({message}): end a sandbox with "
            "`mcp-sandbox stop`, or raise the quota"
        )
    if status == 403:
        return BackendUnavailable(
            f"this user may not {verb} {kind} in namespace {namespace} ({message}): "
            f"apply the Role of `mcp-sandbox kubernetes manifests`, which allows {kind}: "
            f"{verb}"
        )
    if status == 404 and f'namespaces "{namespace}" not found' in message:
        return BackendUnavailable(
            f"there is no namespace {namespace}: run `kubectl create namespace {namespace}`, or "
            "set kubernetes.namespace"
        )
    return None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]


def _seconds(text: str | None) -> float:
    return float(text) if text and text.isdecimal() else 0.0
