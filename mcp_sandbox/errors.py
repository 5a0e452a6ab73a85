"""Every error this package raises on purpose.

    SandboxError
    ├── CallerError       the agent can call differently
    │   ├── InvalidArgument · Unsupported · UnknownSkill
    │   ├── NotFound · AlreadyExists · WrongKind
    │   ├── NoMatch · Ambiguous
    │   ├── NotPermitted ── ConsentNeeded
    │   ├── TooLarge · WorkspaceFull · Busy
    │   └── CommandFailed
    ├── OperatorError     a person has to mend something
    │   ├── ConfigError
    │   ├── BackendUnavailable ── Unsaved · Unreachable
    │   ├── ImageMissing · InsecureSandbox
    │   ├── CapacityReached · StorageUnavailable · BackupDamaged
    │   ├── AlreadyServed · NoDaemon · Draining · ChatElsewhere
    │   └── SourceUnavailable · UnusableSkill
    └── SandboxGone       the sandbox has died; the next call gets a new one
        └── CutOff        it goes on; the next call connects to it again

A message says what happened and what to do next. A non-zero exit code, a timeout with partial
output and truncated output are results, not errors.
"""

import re
from typing import Any

_FOREIGN = re.compile(r"\[Errno -?\d+\] |Value error, |Input (?=should)")


class SandboxError(Exception):
    """Base of every error of this package; as text it leaves out the words of libraries."""

    def __str__(self) -> str:
        return _FOREIGN.sub("", super().__str__())


class CallerError(SandboxError):
    """The agent can fix it by calling differently."""


class InvalidArgument(CallerError, ValueError):
    """A value that no call can accept."""


class NotFound(CallerError):
    """No such file or directory."""


class AlreadyExists(CallerError):
    """The destination is taken."""


class WrongKind(CallerError):
    """A directory where a file is needed, or the other way round."""


class NoMatch(CallerError):
    """The text to replace is not in the file."""


class Ambiguous(CallerError):
    """The text to replace is in the file more than once."""


class NotPermitted(CallerError):
    """The sandbox user may not do this."""


class ConsentNeeded(NotPermitted):
    """Only with a person's consent, which is not given yet."""


class TooLarge(CallerError):
    """Over a size limit of this call."""


class WorkspaceFull(CallerError):
    """No space left in the workspace."""


class UnknownSkill(CallerError):
    """No skill of that name, or no such file in it."""


class Unsupported(CallerError):
    """This sandbox lacks the language or program."""


class Busy(CallerError):
    """Too many calls at once in this sandbox."""


class CommandFailed(CallerError):
    """A command that had to succeed did not; `result` is its ExecResult."""

    def __init__(self, message: str, result: Any) -> None:  # noqa: ANN401 - values are above us
        super().__init__(message)
        self.result = result

    __str__ = Exception.__str__  # Not ours: what it quotes is the command's own.


class OperatorError(SandboxError):
    """A person must fix it."""


class ConfigError(OperatorError):
    """The configuration cannot be used."""


class BackendUnavailable(OperatorError):
    """The engine or program that isolates does not answer or does not work."""


class Unsaved(BackendUnavailable):
    """A sandbox holds files that cannot be saved now, so it was not ended."""


class Unreachable(BackendUnavailable):
    """The place of a sandbox does not answer now; what is in it may go on."""


class ImageMissing(OperatorError):
    """The sandbox image is absent or carries another version of the runner."""


class InsecureSandbox(OperatorError):
    """A sandbox came out weaker than asked for; it was destroyed."""


class CapacityReached(OperatorError):
    """No further sandbox may be opened."""


class StorageUnavailable(OperatorError):
    """The data directory cannot be used or is out of space."""


class BackupDamaged(OperatorError):
    """A backup is not as it was saved, or not of this chat."""


class AlreadyServed(OperatorError):
    """Another daemon serves this data directory or socket."""


class NoDaemon(OperatorError):
    """No daemon answers on the socket."""


class Draining(OperatorError):
    """The server is about to end and takes no further call."""


class ChatElsewhere(OperatorError):
    """Another server has the chat."""


class SourceUnavailable(OperatorError):
    """What a skill shall come from is not there or cannot be read."""


class UnusableSkill(OperatorError):
    """A skill's files cannot be accepted; nothing was installed."""


class SandboxGone(SandboxError):
    """The sandbox died; the next call gets a new one, on the files that outlive it."""


class CutOff(SandboxGone):
    """The connection broke during a call; the sandbox itself goes on."""
