"""Log lines: an event has a name and fields, and is one line whatever the fields hold."""

import fcntl
import json
import logging
import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]

_MOST_BYTES = 8 << 20
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class LogFile(logging.StreamHandler[TextIO]):
    """Writes to stderr, which is a file; a full one becomes FILE.1, and the next one stderr.

    Several processes may write to the file, and programs that they start to their stderr.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(sys.stderr)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        if os.fstat(2).st_size < _MOST_BYTES:
            return
        with suppress(OSError), Path("/proc/self/fd/2").open("ab") as full:
            fcntl.flock(full, fcntl.LOCK_EX)
            # Another process may have done so meanwhile.
            if is_stderr(self._file):
                self._file.rename(f"{self._file}.1")
            with open(self._file, "ab", opener=lambda path, how: os.open(path, how, 0o600)) as new:
                os.dup2(new.fileno(), 1)
                os.dup2(new.fileno(), 2)


def is_stderr(file: Path) -> bool:
    """Return whether what is written to stderr goes into a file."""
    return file.exists() and os.path.samestat(os.fstat(2), file.stat())


def configure(log_format: LogFormat, file: Path | None = None) -> None:
    """Send our log lines, and other people's warnings, to stderr; `file`, if it is that."""
    handler = LogFile(file) if file and is_stderr(file) else logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    if log_format == "json":
        from pythonjsonlogger.json import JsonFormatter  # noqa: PLC0415 - only who asks for it pays

        renamed = {"levelname": "level", "name": "logger", "message": "event"}
        fields = "{levelname}{name}{message}"
        formatter = JsonFormatter(fields, style="{", rename_fields=renamed, timestamp=True)
        handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mcp_sandbox").setLevel(logging.INFO)


def event(logger: logging.Logger, name: str, **fields: object) -> None:
    """Log what happened; a field that is None is left out."""
    if logger.isEnabledFor(logging.INFO):
        given = {key: value for key, value in fields.items() if value is not None}
        logger.info(name, extra={k: v[:200] if isinstance(v, str) else v for k, v in given.items()})


@contextmanager
def masked(mask: Callable[[str], str]) -> Generator[None]:
    """Write log lines, and tracebacks in them, as `mask` returns them while the block runs."""

    def mask_lines_of(handler: logging.Handler) -> None:
        format_record = handler.format
        vars(handler)["format"] = lambda record: mask(format_record(record))

    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        mask_lines_of(handler)
    try:
        yield
    finally:
        for handler in handlers:
            vars(handler).pop("format", None)


class TextFormatter(logging.Formatter):
    """`time LEVEL logger: event key=value …`; a value with spaces is written as JSON."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = (
            f" {key}={_written(value)}"
            for key, value in vars(record).items()
            if key not in _STANDARD
        )
        return super().formatMessage(record) + "".join(fields)


def _written(value: object) -> str:
    text = str(value)
    plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if plain and text else json.dumps(text)
