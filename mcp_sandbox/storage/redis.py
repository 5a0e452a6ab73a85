"""The one file that speaks to Redis: what platforms read there, and what servers share.

    sandbox:{session id}    read by a platform: the sandbox of a session is made
    born                    when this Redis began to know leases, by its own clock, in ms
    lease:{user}/{chat}     which server answers for a chat; ends by itself
    server:{name}           a server that lives; `servers` names them all
    chat:{user}/{chat}      the record of a chat; `chats` says when each was used last
    tried:{run}             is written to see whether it can be, for a moment

Each request has an end of our own: the library's retries alone would hold a call for 25 s.
"""

import json
import logging
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import anyio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from mcp_sandbox import __version__
from mcp_sandbox.errors import ConfigError, InvalidArgument, StorageUnavailable
from mcp_sandbox.models import ChatId
from mcp_sandbox.storage.breaker import CircuitBreaker

logger = logging.getLogger(__name__)

LeaseState = Literal["own", "ending", "gone"]

_ANSWER_S = 3.0
_SOCKET_S = 1.0
# How long a Redis that did not answer is taken for one that does not.
_PAUSE_S = 1.0
_PUBLISHED_S = 24 * 3600
# A chat that nobody used for so long is known by its files and backups alone.
_RECORD_S = 90 * 24 * 3600
_BORN, _SERVERS, _CHATS = "born", "servers", "chats"

# KEYS: lease, born. ARGV: name, run, url, ms, epoch, state. Returns the lease as it is then.
# An epoch is that of the lease which the server has or had; 0 takes one, of its own name too.
# While this Redis is younger than a lease, a server may hold one that it does not know.
_CLAIM = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local ms, epoch, state = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local born = tonumber(redis.call('GET', KEYS[2]) or '')
if not born or born > now then
  born = now
  redis.call('SET', KEYS[2], string.format('%.0f', now))
end
local found, lease = redis.call('GET', KEYS[1]), {}
if found then
  local parsed
  parsed, lease = pcall(cjson.decode, found)
  if not (parsed and type(lease) == 'table' and lease.owner == ARGV[1]) then return found end
  if epoch > 0 and not (lease.run == ARGV[2] and lease.epoch == epoch) then return found end
elseif state == 'gone' or (epoch == 0 and now < born + ms) then
  return false
end
if state == 'gone' then
  redis.call('DEL', KEYS[1])
  return false
end
if not found or epoch == 0 then
  epoch = math.max(now, epoch + 1, (tonumber(lease.epoch) or 0) + 1)
end
lease = {owner = ARGV[1], run = ARGV[2], url = ARGV[3], state = state, epoch = epoch}
local text = cjson.encode(lease)
redis.call('SET', KEYS[1], text, 'PX', ms)
return text
"""


class SandboxBoard:
    """What is said of a session's sandbox under `sandbox:{session id}`, for 24 hours.

    Every method raises StorageUnavailable: Redis does not answer, or not as one that can be used.
    """

    def __init__(self, url: str) -> None:
        """Raise ConfigError: it is no address of a Redis."""
        self._redis = _open(url)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def put(self, session_id: str, value: Mapping[str, Any]) -> None:
        """Write it, and tell those who wait."""
        key, text = f"sandbox:{session_id}", json.dumps(value)
        async with _bounded(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, text, ex=_PUBLISHED_S)
            pipe.publish(key, text)
            await pipe.execute()

    async def remove(self, session_id: str) -> None:
        async with _bounded():
            await self._redis.delete(f"sandbox:{session_id}")

    async def wait(
        self, session_id: str, within_s: float = 5.0, tries: int = 10
    ) -> Mapping[str, Any] | None:
        """Return it once it is there; None if it does not come in time.

        It is asked for `tries` times; between these a message that is published is enough.
        """
        key = f"sandbox:{session_id}"
        async with self._redis.pubsub(ignore_subscribe_messages=True) as news:
            async with _bounded():
                await news.subscribe(key)
                await news.get_message(timeout=_SOCKET_S)
            for _ in range(tries):
                async with _bounded():
                    if found := await self._redis.get(key):
                        value: Mapping[str, Any] = json.loads(found)
                        return value
                async with _bounded(within_s / tries):
                    await news.get_message(timeout=within_s / tries)
        return None


@dataclass(frozen=True)
class Server:
    """A server as the others see it; `run` is its process, `place` its data root.

    `free`: how many sandboxes it can open without closing any. `load`: how many chats it has.
    """

    name: str
    url: str
    run: str
    place: str
    free: int = 0
    load: int = 0


@dataclass(frozen=True)
class Lease:
    """Which server answers for a chat. The epoch grows whenever a server takes it."""

    owner: str
    run: str
    url: str
    epoch: int
    state: LeaseState


class FleetStore:
    """What the servers of a fleet share.

    Every method raises StorageUnavailable: Redis does not answer, or not as one that can be used.
    When it has just failed to answer, it is not asked.
    """

    def __init__(self, url: str, server: Server, lease_s: float, *, serves: bool = True) -> None:
        """Raise ConfigError: it is no address of a Redis. `serves`: others can send clients."""
        self.server, self.place = server, re.sub("^.*@|^[a-z]+://", "", url)
        self._serves = serves
        self._redis = _open(url)
        self._ms = round(1000 * lease_s)
        self._claim = self._redis.register_script(_CLAIM)
        self._breaker = CircuitBreaker(most_s=_PAUSE_S)

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def check(self) -> None:
        """Raise ConfigError: it is no Redis that servers can share, or our name is taken."""
        try:
            for other in await self.servers():
                if other.name == self.server.name and other.place != self.server.place:
                    raise ConfigError(
                        f"fleet.name: {other.url} is named {other.name} too; give each server its "
                        "own (after this one has moved, wait until the lease is over)"
                    )
            async with self._guarded():
                born, _ = await self._redis.get(_BORN), await self._redis.zcard(_CHATS)
                await self._redis.set(f"tried:{self.server.run}", "", px=1)
            if not (born or "0").isdecimal():
                raise ConfigError(f"fleet.redis: the key {_BORN} there is another program's")
        except StorageUnavailable as exc:
            if isinstance(exc.__cause__, AuthenticationError | ResponseError):
                raise ConfigError(
                    f"fleet.redis cannot be used ({exc.__cause__}): it needs the right password, a "
                    "Redis that may be written, and a database without other programs' keys"
                ) from exc
            raise

    async def take(self, chat: ChatId, former: int = 0) -> Lease | None:
        """Take the lease if no other server has it; return the one that holds then.

        None: Redis is too young to know who has it. A `former` holder need not wait for that.
        """
        async with self._guarded():
            found = await self._claim(**self._request(chat, former, "own"))
        return _read_lease(chat, found)

    def _request(self, chat: ChatId, epoch: int, state: LeaseState) -> dict[str, Any]:
        server = self.server
        args = (server.name, server.run, server.url, self._ms, epoch, state)
        return {"keys": [f"lease:{chat}", _BORN], "args": args}

    async def look(self, chats: Sequence[ChatId]) -> Sequence[Lease | None]:
        """Return the leases of chats as they are."""
        if not chats:
            return ()
        async with self._guarded():
            found = await self._redis.mget([f"lease:{chat}" for chat in chats])
        return [_read_lease(chat, text) for chat, text in zip(chats, found, strict=True)]

    async def renew(
        self, leases: Sequence[tuple[ChatId, int, LeaseState]], *, free: int, load: int = 0
    ) -> Sequence[Lease | None]:
        """Renew all of these, and tell that this server lives; return the leases that hold then.

        One that Redis has lost is taken again. None: nobody has it, or it cannot be read.
        """
        alive = json.dumps(asdict(replace(self.server, free=free, load=load)))
        async with self._guarded(), self._redis.pipeline(transaction=False) as pipe:
            for lease in leases:
                await self._claim(**self._request(*lease), client=pipe)
            if self._serves:
                pipe.set(f"server:{self.server.name}", alive, px=self._ms)
                pipe.sadd(_SERVERS, self.server.name)
            return [_parse_lease(text) for text in (await pipe.execute())[: len(leases)]]

    async def servers(self) -> Sequence[Server]:
        """Return the servers that live."""
        async with self._guarded():
            names = sorted(await self._redis.smembers(_SERVERS))
            found = await self._redis.mget([f"server:{name}" for name in names]) if names else ()
        servers: list[Server] = []
        for text in found:
            with suppress(ValueError, TypeError):
                servers.append(Server(**json.loads(text or "")))
        return servers

    async def read(self, chat: ChatId) -> tuple[dict[str, Any], float] | None:
        """Return a chat's record, and when it was used last; None if there is none."""
        async with self._guarded(), self._redis.pipeline(transaction=False) as pipe:
            pipe.get(f"chat:{chat}")
            pipe.zscore(_CHATS, str(chat))
            text, used_s = await pipe.execute()
        return _read_note(text, used_s)

    async def write(self, chat: ChatId, note: Mapping[str, Any], used_s: float) -> None:
        async with self._guarded(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(f"chat:{chat}", json.dumps(note), ex=_RECORD_S)
            pipe.zadd(_CHATS, {str(chat): used_s})
            await pipe.execute()

    async def touch(self, used: Mapping[ChatId, float]) -> None:
        """Move times of use forward; a chat without a record gets none."""
        async with self._guarded(), self._redis.pipeline(transaction=False) as pipe:
            for chat, used_s in used.items():
                pipe.zadd(_CHATS, {str(chat): used_s}, gt=True, xx=True)
                pipe.expire(f"chat:{chat}", _RECORD_S)
            await pipe.execute()

    async def list(self) -> Mapping[ChatId, tuple[dict[str, Any], float]]:
        """Return every record."""
        async with self._guarded():
            times = await self._redis.zrange(_CHATS, 0, -1, withscores=True)
            names = [f"chat:{name}" for name, _ in times]
            texts = await self._redis.mget(names) if names else ()
        found = dict[ChatId, tuple[dict[str, Any], float]]()
        for (name, used_s), text in zip(times, texts, strict=True):
            with suppress(InvalidArgument):
                if note := _read_note(text, used_s):
                    found[ChatId(*name.split("/", 1))] = note
        return found

    async def remove(self, chat: ChatId) -> None:
        async with self._guarded(), self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(f"chat:{chat}")
            pipe.zrem(_CHATS, str(chat))
            await pipe.execute()

    @asynccontextmanager
    async def _guarded(self) -> AsyncGenerator[None]:
        if self._breaker.is_open:
            raise self.disagreement()
        try:
            async with _bounded():
                yield
        except StorageUnavailable as exc:
            if not self._breaker.failures:
                logger.warning("%s; chats that are open go on until their leases end", exc)
            self._breaker.note_failure(str(exc))
            raise self.disagreement() from exc.__cause__
        self._breaker.note_answer()

    def disagreement(self) -> StorageUnavailable:
        """Return the error of a server that cannot tell whether another one has a chat."""
        why = self._breaker.why.rstrip(".") or "this server was not heard of for too long"
        return StorageUnavailable(
            f"the servers cannot agree who has this chat: {why}. Files are kept; call again when "
            f"Redis at {self.place} answers"
        )


def _open(url: str) -> Any:  # noqa: ANN401 - the library's is generic
    # One retry: the first request after a restart meets a connection that is dead.
    retry = Retry(NoBackoff(), 1)
    options: Any = {"socket_timeout": _SOCKET_S, "socket_connect_timeout": _SOCKET_S}
    # Else the library reads its own version from the disk at each connection.
    options["driver_info"] = DriverInfo(name="mcp-sandbox", lib_version=__version__)
    try:
        return Redis.from_url(url, retry=retry, decode_responses=True, **options)
    except ValueError as exc:
        raise ConfigError(f"fleet.redis is no address of a Redis: {exc}") from None


@asynccontextmanager
async def _bounded(waits_s: float = 0.0) -> AsyncGenerator[None]:
    try:
        with anyio.fail_after(waits_s + _ANSWER_S):
            yield
    except (RedisError, OSError, TimeoutError) as exc:
        why = str(exc) or f"no answer within {_ANSWER_S:g} s"
        raise StorageUnavailable(f"the Redis of fleet.redis cannot be used: {why}") from exc


def _parse_lease(text: str | None) -> Lease | None:
    with suppress(ValueError, TypeError, AttributeError):
        lease = Lease(**json.loads(text or ""))
        return lease if isinstance(lease.epoch, int) and lease.url.startswith("http") else None
    return None


def _read_lease(chat: ChatId, text: str | None) -> Lease | None:
    lease = _parse_lease(text)
    if text and not lease:
        raise StorageUnavailable(
            f"lease:{chat} in the Redis of fleet.redis is no lease of a server: look who wrote it, "
            "then remove that key"
        )
    return lease


def _read_note(text: str | None, used_s: float | None) -> tuple[dict[str, Any], float] | None:
    with suppress(ValueError, TypeError):
        return dict(json.loads(text or "")), used_s or 0.0
    return None
