"""Bearer tokens of users who connect over HTTP: shown once, kept as hashes in one private file.

The command line replaces the file and a running server reads it again, so changes count from the
next request on. If the file cannot be read, no token is accepted. Only `Tokens` does not block on
the disk.
"""

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from anyio import to_thread
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mcp_sandbox.durable import check_trusted, locked, write_file
from mcp_sandbox.errors import ConfigError, InvalidArgument, NotFound
from mcp_sandbox.models import ChatId, TokenGrant, TokenScope
from mcp_sandbox.workspace.layout import open_data_root, storage_errors

_LARGEST_FILE = 16 << 20


class TokenInfo(BaseModel):
    """What is stored of a token: all but the token itself. Times: seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(min_length=1)
    user: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: float
    expires: float | None = None
    scope: TokenScope = "mcp"

    def expired(self, now: float) -> bool:
        return self.expires is not None and self.expires <= now


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    tokens: tuple[TokenInfo, ...] = ()


class TokenFile:
    """The file of all tokens of a data root."""

    def __init__(self, data_root: Path) -> None:
        self._data_root = data_root
        self._path = data_root / "sandbox" / "tokens.json"

    def read(self) -> Sequence[TokenInfo]:
        """Return all tokens, the expired ones too.

        Raises:
            ConfigError: the file is damaged.
            StorageUnavailable: it cannot be read, or others may change it.
        """
        with storage_errors(self._data_root):
            try:
                check_trusted(self._path)
                descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except FileNotFoundError:
                return ()
            with os.fdopen(descriptor, "rb") as stream:
                data = stream.read(_LARGEST_FILE + 1)
        try:
            return _Content.model_validate_json(data[:_LARGEST_FILE]).tokens
        except ValidationError as exc:
            if any(error["type"] == "extra_forbidden" for error in exc.errors()):
                raise ConfigError(
                    f"{self._path} was written by a newer mcp-sandbox, so no token is accepted: "
                    "update this one, or revoke with the newer one the tokens only it knows"
                ) from exc
            raise ConfigError(
                f"{self._path} is damaged, so no token is accepted: "
                "move it away and make new tokens with `mcp-sandbox token add`"
            ) from exc

    def add(
        self, user: str, lifetime_s: float | None = None, scope: TokenScope = "mcp"
    ) -> tuple[TokenInfo, str]:
        """Make a token for a user; return what is stored, and the token, which is not stored.

        Raises:
            InvalidArgument: the user is not a valid id.
        """
        ChatId(user, "any")
        secret = f"mcs_{secrets.token_urlsafe(32)}"
        now = time.time()
        with self._lock_and_read() as tokens:
            taken = {token.id for token in tokens}
            while (token_id := secrets.token_hex(4)) in taken:
                pass
            token = TokenInfo(
                id=token_id,
                user=user,
                sha256=_hash_secret(secret),
                created=now,
                expires=None if lifetime_s is None else now + lifetime_s,
                scope=scope,
            )
            self._replace([*tokens, token])
        return token, secret

    def revoke(self, token_id: str) -> TokenInfo:
        """Remove the token whose id begins with `token_id`.

        Raises:
            NotFound: no id begins with it.
            InvalidArgument: several ids begin with it.
        """
        with self._lock_and_read() as tokens:
            found = [token for token in tokens if token_id and token.id.startswith(token_id)]
            if not found:
                raise NotFound(
                    f"there is no token {token_id[:40]!r}: `mcp-sandbox token list` shows their ids"
                )
            if len(found) > 1:
                ids = ", ".join(token.id for token in found[:10])
                raise InvalidArgument(f"several tokens begin with {token_id!r}: give one of {ids}")
            self._replace([token for token in tokens if token.id != found[0].id])
        return found[0]

    def signature(self) -> tuple[int, ...] | None:
        """Return values that change whenever the file is replaced; None if there is no file."""
        try:
            status = self._path.lstat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

    @contextmanager
    def _lock_and_read(self) -> Generator[Sequence[TokenInfo]]:
        """Yield the tokens, locked against changes by other processes."""
        with storage_errors(self._data_root):
            os.close(open_data_root(self._data_root))
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with locked(self._path.with_suffix(".lock")):
                yield self.read()

    def _replace(self, tokens: Sequence[TokenInfo]) -> None:
        # What is as usual is left out, so that older servers can read it.
        content = _Content(tokens=tuple(tokens)).model_dump_json(indent=1, exclude_defaults=True)
        write_file(self._path, content.encode())


class Tokens:
    """The tokens for a server; every call checks whether the file has changed."""

    def __init__(self, data_root: Path) -> None:
        self._file = TokenFile(data_root)
        self._last: tuple[tuple[int, ...] | None, Sequence[TokenInfo]] | None = None

    async def find(self, secret: str) -> TokenGrant | None:
        """Return the user of a token; None if it is unknown, revoked or expired.

        Raises as `TokenFile.read`.
        """
        tokens = await to_thread.run_sync(self._read_current)
        digest = _hash_secret(secret[:128])
        # All are compared, so that the time does not reveal how close a guess was.
        found = [token for token in tokens if hmac.compare_digest(token.sha256, digest)]
        valid = (
            TokenGrant(each.user, each.id, each.scope)
            for each in found
            if not each.expired(time.time())
        )
        return next(valid, None)

    async def still_valid(self, token_id: str) -> bool:
        """Return whether a token found earlier is neither revoked nor expired now."""
        tokens = await to_thread.run_sync(self._read_current)
        return any(each.id == token_id and not each.expired(time.time()) for each in tokens)

    async def exist(self) -> bool:
        """Return whether any token exists, expired or not. Raises as `find`."""
        return bool(await to_thread.run_sync(self._read_current))

    def _read_current(self) -> Sequence[TokenInfo]:
        signature = self._file.signature()
        if self._last is None or self._last[0] != signature:
            # The signature is taken first, so that a change in between causes another read.
            self._last = signature, self._file.read()
        return self._last[1]


def _hash_secret(secret: str) -> str:
    # 256 random bits need no slow hash: there is nothing to guess.
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
