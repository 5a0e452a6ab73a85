"""One bucket of an object store: put, get, list, delete, sign.

A server that refuses fails within a second, one that hangs within the limits below. Whatever the
library raises becomes StorageUnavailable here, with what to do.
"""

import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime, timedelta

import anyio

from mcp_sandbox.config.environment import variable
from mcp_sandbox.config.sections import StorageConfig
from mcp_sandbox.egress.secrets import SecretSource
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import ConfigError, OperatorError, StorageUnavailable
from mcp_sandbox.storage.breaker import CircuitBreaker

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store
except ModuleNotFoundError as exc:
    raise ConfigError(
        "storage is configured and needs more packages: run `pip install 'mcp-sandbox[s3]'`"
    ) from exc

Take = Callable[[bytes], Awaitable[None]]

# The smallest part that S3 takes; 10,000 of them are 48 GiB.
_PART = 5 << 20
_AT_ONCE = 2
_ANSWER_S = 5.0
# As many parts as are under way at once, over a line of 500 kB/s.
_PART_S = 20.0
_WHOLE_S = 4 * 3600.0
_GIVE_UP_S = 5.0
# Twice that is less than the minute after which all is saved when the store is back.
_MOST_PAUSE_S = 20.0
# What an error's text has, in the order of weight, and what each means. Names of objects are in
# that text too.
_CAUSES = {
    ">InvalidAccessKeyId<": "it does not know storage.access_key: correct it",
    ">SignatureDoesNotMatch<": "storage.secret_key is not that of storage.access_key: correct it",
    ">RequestTimeTooSkewed<": "this machine's clock differs from its clock: set it",
    ">NoSuchBucket<": "it has no bucket storage.bucket ({bucket}): create it there",
    ">AccessDenied<": "storage.access_key may not use the bucket {bucket}: allow it there",
    "status code: 403": "it refuses storage.access_key, or may not let it use the bucket {bucket}",
    "sending request": "it does not answer: check storage.endpoint and the network",
}


class ObjectStore:
    """The configured bucket; names are below the configured prefix.

    Every method raises StorageUnavailable: it cannot be used now; the message says why.
    """

    def __init__(self, settings: StorageConfig) -> None:
        """Raise ConfigError: a source of the keys cannot be understood."""
        self._settings = settings
        self._store: S3Store | None = None
        self.breaker = CircuitBreaker(most_s=_MOST_PAUSE_S)
        self._keys = _find_keys(settings, StorageUnavailable)

    @asynccontextmanager
    async def writing(self, name: str, *, shown_as: str = "") -> AsyncGenerator[Take]:
        """Yield a function that takes an object piece by piece; if the block fails, none is stored.

        `shown_as`: a browser downloads it under this name (as Content-Disposition has it).
        """
        shown = {"Content-Disposition": f"attachment; filename*=UTF-8''{shown_as}"}
        with self._translated(_ANSWER_S):
            writer = obstore.open_writer_async(
                await self._opened(),
                name,
                attributes=shown if shown_as else None,  # pyright: ignore[reportArgumentType]
                buffer_size=_PART,
                max_concurrency=_AT_ONCE,
            )

        async def write(data: bytes) -> None:
            with self._translated(_PART_S):
                await writer.write(data)

        try:
            yield write
        except BaseException:
            with anyio.move_on_after(_GIVE_UP_S, shield=True), suppress(BaseError, OSError):
                await writer.__aexit__(*sys.exc_info())
            raise
        with self._translated(2 * _PART_S):
            await writer.close()

    async def put_small(self, name: str, data: bytes) -> None:
        """Store a small object in one request."""
        with self._translated(_ANSWER_S):
            await obstore.put_async(await self._opened(), name, data, use_multipart=False)

    async def get_small(self, name: str, most: int) -> bytes:
        """Return a small object; b"" if there is none, or one of more than `most` bytes."""
        with self._translated(_ANSWER_S), suppress(FileNotFoundError):
            found = await obstore.get_async(await self._opened(), name)
            if found.meta["size"] <= most:
                return bytes(await found.bytes_async())
        return b""

    async def get(self, name: str) -> AsyncGenerator[bytes]:
        """Yield an object in parts, or nothing if there is none."""
        with self._translated(_ANSWER_S):
            try:
                found = await obstore.get_async(await self._opened(), name)
            except FileNotFoundError:
                return
        # Not by ranges: servers differ in how they answer these.
        parts = aiter(found.stream(min_chunk_size=_PART))
        while True:
            with self._translated(_PART_S):
                piece = await anext(parts, None)
            if piece is None:
                return
            yield bytes(piece)

    async def list(self, folder: str) -> Mapping[str, datetime]:
        """Return when each object whose name begins with `folder` and a slash was stored."""
        with self._translated(_ANSWER_S):
            rows = await obstore.list(await self._opened(), f"{folder}/").collect_async()
            return {row["path"]: row["last_modified"] for row in rows}

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; one that is gone already is not an error."""
        for name in names:
            with self._translated(_ANSWER_S), suppress(FileNotFoundError):
                await obstore.delete_async(await self._opened(), name)

    async def sign(self, name: str, expires_s: float) -> str:
        """Return a URL by which anybody who has it downloads the object, for so long."""
        with self._translated(_ANSWER_S):
            valid = timedelta(seconds=expires_s)
            return await obstore.sign_async(await self._opened(), "GET", name, valid)

    async def _opened(self) -> S3Store:
        if self._store is None:
            access, secret = [await key.value() for key in self._keys]
            connect, whole = timedelta(seconds=_ANSWER_S / 2), timedelta(seconds=_WHOLE_S)
            self._store = S3Store(
                self._settings.bucket,
                prefix=self._settings.prefix or None,
                endpoint=self._settings.endpoint,
                region=self._settings.region,
                access_key_id=access,
                secret_access_key=secret,
                virtual_hosted_style_request=False,
                client_options={"allow_http": True, "connect_timeout": connect, "timeout": whole},
                retry_config={"max_retries": 2, "retry_timeout": timedelta(seconds=_PART_S)},
            )
        return self._store

    @contextmanager
    def within(self, limit_s: float) -> Generator[None]:
        """Limit the time of what is asked in the block."""
        try:
            with anyio.fail_after(limit_s):
                yield
        except TimeoutError as exc:
            raise self._failed(f"did not answer within {limit_s:g} s: check that it runs") from exc

    @contextmanager
    def _translated(self, limit_s: float) -> Generator[None]:
        try:
            with self.within(limit_s):
                yield
        except (BaseError, OSError, ValueError) as exc:
            self._store = None  # The keys may be others now.
            text = str(exc).partition("\n\nDebug source")[0]
            known = next((why for sign, why in _CAUSES.items() if sign in text), "")
            why = known.format(bucket=self._settings.bucket) or text[:300]
            raise self._failed(f"cannot be used: {why}") from exc
        self.breaker.note_answer()

    def _failed(self, how: str) -> StorageUnavailable:
        self.breaker.note_failure(why := f"the object store at {self._settings.endpoint} {how}")
        return StorageUnavailable(why)


class KeySource:
    """Where a key comes from, as the configuration names it."""

    def __init__(self, setting: str, where: str, unreadable: type[OperatorError]) -> None:
        """Raise ConfigError: what the setting says cannot be understood."""
        self._setting, self._unreadable = setting, unreadable
        kind, _, self._variable = where.partition(":")
        self.is_command = kind == "command"
        try:
            self._source = None if kind == "env" else SecretSource(where, private=True)
        except ValueError as exc:
            raise ConfigError(f"{setting} cannot be understood: {exc}") from None

    async def value(self) -> str:
        """Return the key as it is now; raises the error for one that is `unreadable`."""
        passed_on = "`connect` hands it on to a server once `mcp-sandbox doctor` has noted its name"
        why = f"the variable {self._variable} is not set ({passed_on})"
        try:
            source = self._source
            found = (await source.value()).decode() if source else variable(self._variable)
            if found:
                return found
        except RefusedError as exc:
            why = str(exc)
        raise self._unreadable(f"{self._setting} cannot be read: {why}; correct it")


async def check_keys(settings: StorageConfig) -> None:
    """Raise ConfigError: a key cannot be read. What a command would answer is not asked here."""
    for key in _find_keys(settings, ConfigError):
        if not key.is_command:
            await key.value()


def _find_keys(settings: StorageConfig, unreadable: type[OperatorError]) -> list[KeySource]:
    sources = {"access_key": settings.access_key, "secret_key": settings.secret_key}
    return [KeySource(f"storage.{name}", where, unreadable) for name, where in sources.items()]
