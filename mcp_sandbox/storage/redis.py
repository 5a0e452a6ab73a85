"""The Redis of a platform: where it reads that the sandbox of a session is made.

Each request has an end of our own: the library's retries alone would hold a call for 25 s.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.driver_info import DriverInfo
from redis.exceptions import RedisError

from mcp_sandbox import __version__
from mcp_sandbox.errors import ConfigError, StorageUnavailable

_ANSWER_S = 3.0
_SOCKET_S = 1.0
_KEPT_S = 24 * 3600


class Bridge:
    """What is said of a session's sandbox under `sandbox:{session id}`, for 24 hours.

    Every method raises StorageUnavailable: Redis does not answer, or not as one that can be used.
    """

    def __init__(self, url: str) -> None:
        """Raise ConfigError: it is no address of a Redis."""
        # One retry: the first request after a restart meets a connection that is dead.
        retry = Retry(NoBackoff(), 1)
        options: Any = {"socket_timeout": _SOCKET_S, "socket_connect_timeout": _SOCKET_S}
        # Else the library reads its own version from the disk at each connection.
        options["driver_info"] = DriverInfo(name="mcp-sandbox", lib_version=__version__)
        try:
            self._redis: Any = Redis.from_url(url, retry=retry, **options)
        except ValueError as exc:
            raise ConfigError(f"fleet.redis is no address of a Redis: {exc}") from None

    async def aclose(self) -> None:
        await self._redis.aclose()

    async def put(self, session_id: str, value: Mapping[str, Any]) -> None:
        """Write it, and tell those who wait."""
        key, text = _key(session_id), json.dumps(value)
        async with self._asked(), self._redis.pipeline(transaction=True) as pipe:
            pipe.set(key, text, ex=_KEPT_S)
            pipe.publish(key, text)
            await pipe.execute()

    async def remove(self, session_id: str) -> None:
        async with self._asked():
            await self._redis.delete(_key(session_id))

    async def wait(
        self, session_id: str, within_s: float = 5.0, tries: int = 10
    ) -> Mapping[str, Any] | None:
        """Return it once it is there; None if it does not come in time.

        It is asked for `tries` times; between these a message that is published is enough.
        """
        key = _key(session_id)
        async with self._redis.pubsub() as news:
            async with self._asked():
                await news.subscribe(key)
            for _ in range(tries):
                async with self._asked():
                    found = await self._redis.get(key)
                if found is not None:
                    value: Mapping[str, Any] = json.loads(found)
                    return value
                with anyio.move_on_after(within_s / tries):
                    await self._hear(news)
        return None

    async def _hear(self, news: Any) -> None:  # noqa: ANN401 - the library's is generic
        """Return when a message came."""
        while True:
            async with self._asked():
                message = await news.get_message(ignore_subscribe_messages=True, timeout=0.5)
            if message:
                return

    @asynccontextmanager
    async def _asked(self) -> AsyncGenerator[None]:
        try:
            with anyio.fail_after(_ANSWER_S):
                yield
        except (RedisError, OSError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {_ANSWER_S:g} s"
            raise StorageUnavailable(f"the Redis of fleet.redis cannot be used: {why}") from exc


def _key(session_id: str) -> str:
    return f"sandbox:{session_id}"
