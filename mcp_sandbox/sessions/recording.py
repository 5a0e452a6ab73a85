"""Records each call in the audit: before it runs, and before its answer is sent."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from time import perf_counter

import anyio
from anyio import to_thread

from mcp_sandbox.audit import Audit
from mcp_sandbox.errors import ConsentNeeded, NotPermitted, StorageUnavailable
from mcp_sandbox.telemetry.calls import CallRecord

Arguments = Mapping[str, object]
# A password or token in an address.
IN_ADDRESS = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")

# How many characters of the arguments are recorded, and how many are searched for secrets: more,
# so that the longest secret, percent-encoded, is found even if it begins at the cut.
_SHOWN, _SEARCHED = 2048, 2048 + 3 * 4096
_LARGE = 1 << 16


def _text(value: object) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


_encoded = json.JSONEncoder(ensure_ascii=False, sort_keys=True, default=_text).encode


async def refused(
    audit: Audit, arguments: Arguments, record: CallRecord, why: NotPermitted
) -> None:
    """Record a call that does not run, or not before the user has allowed it."""
    kind = "asked" if isinstance(why, ConsentNeeded) else "refused"
    if audit.enabled:
        told = await _told(audit, arguments, record)
        await audit.write(kind, **_whose(record), **told, why=audit.mask(str(why)[:_SHOWN]))


class RecordedCall:
    """Record a call that runs in the block. Its last line has `of`, the number of its first.

    Raises:
        StorageUnavailable: it cannot be recorded, so it must not run or not be answered.
    """

    def __init__(self, audit: Audit, arguments: Arguments, record: CallRecord) -> None:
        self._audit, self._arguments, self._record = audit, arguments, record
        self._number, self._began_s = 0, 0.0

    async def __aenter__(self) -> None:
        if self._audit.enabled:
            told = await _told(self._audit, self._arguments, self._record)
            self._number = await self._audit.write("begun", **_whose(self._record), **told)
            self._began_s = perf_counter()

    async def __aexit__(
        self, kind: type[BaseException] | None, _value: object, _trace: object
    ) -> None:
        record, outcome = self._record, kind.__name__ if kind else "ok"
        if kind and issubclass(kind, anyio.get_cancelled_exc_class()):
            outcome = "cancelled"
        try:
            await self._audit.write(
                "ended",
                of=self._number,
                **_whose(record),
                outcome=outcome,
                exit=record.exit_code,
                ms=round(1000 * (perf_counter() - self._began_s), 1),
                bytes=record.output_bytes,
                changed=record.changed,
                sandbox=record.sandbox,
            )
        except StorageUnavailable as exc:
            # A failed call raises its own error rather than this one.
            if not kind:
                raise StorageUnavailable(f"the call has run, but {exc}") from exc


def _whose(record: CallRecord) -> dict[str, object]:
    chat = record.chat
    return {"user": chat and chat.user, "chat": chat and chat.chat, "tool": record.what}


async def _told(audit: Audit, arguments: Arguments, record: CallRecord) -> dict[str, object]:
    given = {name: value for name, value in arguments.items() if value is not None}
    large = sum(len(each) for each in given.values() if isinstance(each, str | bytes)) > _LARGE
    digested = to_thread.run_sync(_digested, given) if large else None
    text, digest = await digested if digested else _digested(given)
    return {
        "client": record.client,
        "digest": digest,
        "arguments": audit.mask(IN_ADDRESS.sub("***", text))[:_SHOWN],
        "level": record.level,
        "decision": record.decision,
        "rule": record.rule,
        "backend": record.backend,
    }


def _digested(given: Arguments) -> tuple[str, str]:
    """Return the beginning of the arguments as JSON, and the SHA-256 of all of it in UTF-8."""
    text = _encoded(given)
    digest = sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    if isinstance(env := given.get("env"), Mapping):
        # Values in an environment are often keys.
        text = _encoded({**given, "env": sorted(map(str, env))})
    return text[:_SEARCHED], digest
