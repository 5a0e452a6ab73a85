"""Talks to the API server of a cluster: the only file that imports the library for it.

The library finds the server and the credentials. Connections are made here: its own are at most
a hundred, fewer than channels, and all are closed when credentials are renewed.
"""

import json
import random
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import anyio
from anyio import to_thread

from mcp_sandbox.config import KubernetesConfig
from mcp_sandbox.config.environment import variable
from mcp_sandbox.errors import (
    BackendUnavailable,
    CapacityReached,
    ImageMissing,
    OperatorError,
    Unreachable,
)

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
Body = Mapping[str, Any] | list[Json]
WebSocket = httpx_ws.AsyncWebSocketSession
WEBSOCKET_ENDS = (httpx_ws.HTTPXWSException, httpx.HTTPError, ProtocolError, ExceptionGroup)
_PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
# What is no JSON was cut off by a proxy, or is a proxy's own.
_CUT = (httpx.HTTPError, OSError, ValueError)
_CALL_S = 10.0
_CONNECT_S = 5.0
# How long a cluster may take for all but a pod's start.
WAIT_S = 60.0
# How long one is tried again that is silent, or never answered: it may be misnamed, and somebody
# waits. Meanwhile others wait, and for a while they are told at once.
_ANSWERS_S, _FIRST_ANSWER_S, _KNOWN_S = 10.0, 5.0, 3.0
# Bookmarks come each minute: a watch that is quiet for longer may have lost its connection.
_QUIET_S = 90.0
_A_SECOND, _BURST_S = 20, 1.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_LOOK_AGAIN_S = 0.2
# Small, for what a chunk was read from stays among what is kept of it.
_CHUNK = "250"
_MESSAGE_BYTES = 1 << 20
# What a pod says waits here until it is read; then the cluster waits.
_MESSAGES = 16
_PING_S = 30.0
_VERBS = {"POST": "create", "GET": "get", "PATCH": "patch", "DELETE": "delete"}
# Answers that are about no single object: status, words in them, and what is told.
_REFUSALS: list[tuple[int, str, str]] = [
    (
        *(401, ""),
        "the Kubernetes API server does not know this user ({message}): its token has expired or "
        "is of another cluster; log in again, or set kubernetes.context",
    ),
    (
        *(403, ""),
        "this user may not {verb} {kind} in namespace {namespace} ({message}): apply the Role of "
        "`mcp-sandbox kubernetes manifests`, which allows {kind}: {verb}",
    ),
    (
        *(404, 'namespaces "{namespace}" not found'),
        "there is no namespace {namespace}: run `kubectl create namespace {namespace}`, or set "
        "kubernetes.namespace",
    ),
]
# What is told of a pod that does not begin, where no waiting helps, and what does.
_QUOTA, _PULL = "exceeded quota", "^(ErrImage|ImagePull|InvalidImage)"
_REMEDIES = {
    _PULL: "push the image, set kubernetes.image, or add imagePullSecrets to kubernetes.template",
    _QUOTA: "end a sandbox (`mcp-sandbox stop`), or raise the quota",
    "seccomp[ :/]": "put what `mcp-sandbox kubernetes seccomp` prints into that file on every node",
    "hostUsers|user namespace|idmap mount": "take hostUsers out of kubernetes.template",
    "storageclass.storage.k8s.io .* not found": "set kubernetes.storage_class to one that is there",
    "^(Template|WarmPool)NotFound": "apply the pool's manifests again",
    "^(CreateContainer|RunContainer|StartError)": "name another image",
    "is forbidden: (?!User)|is invalid: |denied the request|no runtime for": "change "
    "kubernetes.template, or what refuses it",
}
_RAISED = {_QUOTA: CapacityReached, _PULL: ImageMissing}


@dataclass(frozen=True)
class Kind:
    """A kind of objects, and where the API has it."""

    group: str
    plural: str
    name: str
    version: str = "v1"

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def body(self, name: str, metadata: Json, spec: Json) -> Json:
        """Return an object of this kind."""
        head = {"apiVersion": self.api_version, "kind": self.name}
        return {**head, "metadata": {"name": name, **metadata}, "spec": spec}


POD = Kind("", "pods", "Pod")


class Refused(BackendUnavailable):
    """The API server answered with an error that is about one object."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the cluster refused it: {message}")
        self.status = status


class ApiServer:
    """One namespace of an API server as one user, with limits on what is asked of it."""

    def __init__(self, config: KubernetesConfig) -> None:
        self._config = config
        self._http: httpx.AsyncClient | None = None
        self._opening = anyio.Lock()
        self._old: list[httpx.AsyncClient] = []
        self._free_at = 0.0
        self._has_answered = False
        # Until when nothing is asked again, and what is told at once if there was no answer at all.
        self._silence = 0.0, ""

    async def aclose(self) -> None:
        for client in (*self._old, *([self._http] if self._http else [])):
            await client.aclose()
        self._http, self._old = None, []

    def path(self, kind: Kind, name: str = "") -> str:
        """Return the path of an object of the namespace, or of all of a kind."""
        base = f"/apis/{kind.api_version}" if kind.group else "/api/v1"
        found = f"{base}/namespaces/{self._config.namespace}/{kind.plural}"
        return f"{found}/{name}" if name else found

    async def call(
        self,
        method: str,
        path: str,
        body: Body | None = None,
        params: Mapping[str, str] | None = None,
    ) -> Json:
        """Return the server's answer; ask again for a while when it has too much to do.

        Raises:
            Refused: it is about this object.
            CapacityReached: a quota is used up.
            Unreachable: no answer; BackendUnavailable: no right, no namespace.
        """
        began_s, wait_s, repeated = time.monotonic(), _FIRST_WAIT_S, False
        if not (again := began_s >= self._silence[0]) and self._silence[1]:
            raise Unreachable(self._silence[1])
        while True:
            until_s = began_s + (_ANSWERS_S if self._has_answered else _FIRST_ANSWER_S) * again
            try:
                response = await self._send(method, path, body, params or {})
                if not response.is_error:
                    return dict(response.json())
                status = response.status_code
                # Before it has read its roles, as it may have by now, it hides even its version.
                early = status == 403 == (await self._send("GET", "/version", None, {})).status_code
            except _CUT as exc:
                why, asked_s = f"{type(exc).__name__} {exc}".strip(), 0.0
            else:
                self._has_answered = True
                if status != 429 and status < 500 and not early:
                    error = self._explain(status, _message(response), _VERBS[method], path)
                    if status not in (401, 403) or repeated:
                        raise error
                    repeated = True
                    continue
                until_s = began_s + WAIT_S if status == 429 else until_s
                why = f"{status} {_message(response)}"
                asked = response.headers.get("retry-after", "")
                asked_s = float(asked) if asked.isdecimal() else 0.0
            wait_s = min(wait_s * 2, _LONGEST_WAIT_S)
            pause_s = max(asked_s, wait_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            if time.monotonic() + pause_s > until_s:
                raise self._note_silence((await self._client()).base_url, why)
            await anyio.sleep(pause_s)

    def _note_silence(self, server: httpx.URL, why: str) -> Unreachable:
        said = (
            f"the Kubernetes API server {server} does not answer ({why}): what runs goes on; try "
            "again when `kubectl get --raw /readyz` answers"
        )
        hangs = why.partition(" ")[0].endswith("Timeout")
        self._silence = time.monotonic() + _KNOWN_S, said if hangs else ""
        return Unreachable(said)

    async def get(self, kind: Kind, name: str) -> Json:
        return await self.call("GET", self.path(kind, name))

    async def pages(self, kind: Kind, **params: str) -> AsyncGenerator[tuple[list[Json], str]]:
        """Yield all objects in chunks, each with the version that a watch may begin at."""
        params["limit"] = _CHUNK
        while True:
            answer = await self.call("GET", self.path(kind), params=params)
            metadata = answer["metadata"]
            yield answer.get("items") or [], str(metadata["resourceVersion"])
            if not metadata.get("continue"):
                return
            params["continue"] = metadata["continue"]

    async def post(self, kind: Kind, body: Json) -> bool:
        """Create an object; wait for an older one of its name that ends. False: it does not."""
        name, deadline = body["metadata"]["name"], time.monotonic() + WAIT_S
        while True:
            try:
                await self.call("POST", self.path(kind), body)
            except Refused as exc:
                if exc.status != 409:
                    raise
            else:
                return True
            with suppress(Refused):
                if "deletionTimestamp" not in (await self.get(kind, name))["metadata"]:
                    return False
            if time.monotonic() > deadline:
                raise BackendUnavailable(f"an older {name} does not end: look at it with kubectl")
            await anyio.sleep(_LOOK_AGAIN_S)

    async def patch(self, kind: Kind, name: str, news: Body) -> None:
        """Merge `news` into an object, or do what a list says, which can take away, too."""
        await self.call("PATCH", self.path(kind, name), news)

    async def delete(self, kind: Kind, name: str) -> None:
        """Delete an object; gone already is fine."""
        # Else the next of its name might get the volume that its controller made of it.
        first = "Foreground" if kind.group else "Background"
        try:
            await self.call("DELETE", self.path(kind, name), {"propagationPolicy": first})
        except Refused as exc:
            if exc.status != 404:
                raise

    async def watch(self, kind: Kind, version: str, **params: str) -> AsyncGenerator[Json]:
        """Yield events from a version on, until the server ends the watch.

        Raises Refused with 410 for a version that is too old, Unreachable when it is cut.
        """
        params |= {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "3000"}
        params["resourceVersion"] = version
        client, path = await self._client(), self.path(kind)
        timeout = httpx.Timeout(_CONNECT_S, read=_QUIET_S)
        try:
            async with client.stream("GET", path, params=params, timeout=timeout) as response:
                if response.is_error:
                    await response.aread()
                    status, message = response.status_code, _message(response)
                    if status == 429 or status >= 500:
                        raise Unreachable(
                            f"the Kubernetes API server does not answer ({status} {message})"
                        )
                    raise self._explain(status, message, "watch", path)
                async for line in response.aiter_lines():
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        status = event["object"]
                        raise Refused(int(status.get("code", 500)), str(status.get("message")))
                    yield event
        except _CUT as exc:
            raise Unreachable(f"the watch of {kind.plural} was cut off: {exc!r}") from exc

    @asynccontextmanager
    async def exec(self, pod: str, container: str, command: list[str]) -> AsyncGenerator[WebSocket]:
        """Start a program in a container of a pod; raises Refused, and any of WEBSOCKET_ENDS."""
        # Some runtimes lose output where no input is asked for.
        flags = [(name, "true") for name in ("stdin", "stdout", "stderr")]
        params = [*flags, ("container", container), *(("command", word) for word in command)]
        path = f"{self.path(POD, pod)}/exec"
        for renewed in (False, True):
            client = await self._client()
            await self._take_turn()
            try:
                async with httpx_ws.aconnect_ws(
                    str(client.base_url.join(path)),
                    client,
                    subprotocols=_PROTOCOLS,
                    max_message_size_bytes=_MESSAGE_BYTES,
                    queue_size=_MESSAGES,
                    keepalive_ping_interval_seconds=_PING_S,
                    session_class=WebSocket,
                    params=params,
                ) as websocket:
                    yield websocket
                    return
            except httpx_ws.WebSocketUpgradeError as exc:
                status = exc.response.status_code
                error = self._explain(status, f"it answered {status}", "create", path)
                if status != 401 or renewed:
                    raise error from exc

    async def _send(
        self, method: str, path: str, body: Body | None, params: Mapping[str, str]
    ) -> httpx.Response:
        client = await self._client()
        await self._take_turn()
        patch = "json-patch+json" if isinstance(body, list) else "merge-patch+json"
        kind = patch if method == "PATCH" else "json"
        content = None if body is None else json.dumps(body)
        headers = {"Content-Type": f"application/{kind}"}
        return await client.request(method, path, content=content, params=params, headers=headers)

    async def _take_turn(self) -> None:
        """Wait until another request may be made; a second's worth may go at once."""
        now = anyio.current_time()
        self._free_at = max(self._free_at, now - _BURST_S) + 1 / _A_SECOND
        await anyio.sleep(max(0.0, self._free_at - now))

    async def _client(self) -> httpx.AsyncClient:
        async with self._opening:
            if self._http is None:
                self._http = await self._open()
            return self._http

    async def _open(self) -> httpx.AsyncClient:
        # Made by itself, for its factory leaves a connection open.
        auth = kr8s.asyncio.Api(bypass_factory=True, context=self._config.context or None).auth
        try:
            # It reads files in its event loop, so it gets one in a thread.
            await to_thread.run_sync(anyio.run, auth.reauthenticate)
            verify = await to_thread.run_sync(anyio.run, auth.ssl_context)
        except (ValueError, KeyError, IndexError, TypeError, OSError) as exc:
            given = variable("KUBECONFIG")
            raise BackendUnavailable(
                f"no cluster is configured ({exc}; KUBECONFIG is {given or 'not set'}): set it or "
                "kubernetes.context, or run the server in the cluster with a service account"
            ) from exc
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

    def _explain(self, status: int, message: str, verb: str, path: str) -> OperatorError:
        """Return the error for an answer."""
        if status == 401 and self._http:
            # Credentials are read anew for the next request; what is open stays open.
            self._old.append(self._http)
            self._http = None
        words, namespace = path.strip("/").split("/"), self._config.namespace
        inside = words[words.index(namespace) + 1 :] if namespace in words else words[-1:]
        kind = "/".join((inside[0], *inside[2:]))
        verb = "list" if verb == "get" and len(inside) == 1 else verb
        if status in (400, 403, 422) and (cause := self.explain([message])):
            return cause
        given = {"message": message, "namespace": namespace, "verb": verb, "kind": kind}
        for known, words_in_it, text in _REFUSALS:
            if status == known and words_in_it.format(**given) in message:
                return BackendUnavailable(text.format(**given))
        return Refused(status, message)

    def explain(self, told: Sequence[str], image: str = "") -> OperatorError | None:
        """Return the error for the first of what a cluster tells that no waiting mends."""
        for said, (sign, remedy) in product(told, _REMEDIES.items()):
            if re.search(sign, said):
                what = f"{image or self._config.image} in namespace {self._config.namespace}"
                error = _RAISED.get(sign, BackendUnavailable)
                return error(f"the cluster does not run {what} ({said.strip()}): {remedy}")
        return None


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
