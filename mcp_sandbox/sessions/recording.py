"""What the audit gets of a call: before it runs, and before its answer is sent."""

import json
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
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

# Of the arguments this many characters are shown. A secret that is cut there cannot be found in
# less than this many, the longest one as percent-encoding.
_SHOWN, _SEARCHED = 2048, 2048 + 3 * 4096
_LARGE = 1 << 16
_encoded = json.JSONEncoder(
    ensure_ascii=False,
    sort_keys=True,
    default=lambda value: (
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    ),
).encode


async def refused(
    audit: Audit, arguments: Arguments, record: CallRecord, why: NotPermitted
) -> None:
    """Record a call that does not run, or not before a person has allowed it."""
    kind = "asked" if isinstance(why, ConsentNeeded) else "refused"
    if audit.enabled:
        told = await _told(audit, arguments, record)
        await audit.write(kind, **_whose(record), **told, why=audit.mask(str(why)[:_SHOWN]))


@asynccontextmanager
async def recorded_call(
    audit: Audit, arguments: Arguments, record: CallRecord
) -> AsyncGenerator[None]:
    """Record a call that runs in the block. Its last line has `of`, the number of its first.

    Raises:
        StorageUnavailable: it cannot be recorded, so it must not run or not be answered.
    """
    if not audit.enabled:
        yield
        return
    told, whose = await _told(audit, arguments, record), _whose(record)
    number, began_s, outcome = await audit.write("begun", **whose, **told), perf_counter(), "ok"
    try:
        yield
    except BaseException as exc:
        cancelled = isinstance(exc, anyio.get_cancelled_exc_class())
        outcome = "cancelled" if cancelled else type(exc).__name__
        raise
    finally:
        ended = {"exit": record.exit_code, "bytes": record.output_bytes, "changed": record.changed}
        ms = round(1000 * (perf_counter() - began_s), 1)
        ended |= {"sandbox": record.sandbox, "outcome": outcome}
        try:
            await audit.write("ended", of=number, **whose, **ended, ms=ms)
        except StorageUnavailable as exc:
            # Why a call has failed goes before that its end cannot be recorded.
            if outcome == "ok":
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
    """The beginning of arguments as JSON, and SHA-256 of all of it in UTF-8."""
    text = _encoded(given)
    return text[:_SEARCHED], sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
