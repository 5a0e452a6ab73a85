"""What is to be known of an agent program to run it; `EXECUTORS` of this package lists all."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, Self

from pydantic import Field

from mcp_sandbox.agents.events import Event, Usage
from mcp_sandbox.agents.messages import Conversation

# What begins with a dash would be another option.
Word = Annotated[str, Field(pattern=r"^[^-\x00][^\x00]*$")]
Take = Callable[[bytes], Awaitable[None]]
Ask = Callable[[str, bytes, Take], Awaitable[tuple[int, str]]]
"""Takes METHOD PATH, the body, and what gets the answer's bytes; returns status and error."""


async def _unanswered(_what: str, _body: bytes, _take: Take) -> tuple[int, str]:
    return 404, "there is no service"


@dataclass(frozen=True)
class ModelAccess:
    """What the host has opened for a run: the address inside of its model, and a key of this run.

    `tools`: how the MCP server of the host's tools is started, if there are any: `tool_names`.
    `usage` says what the model has counted by now. `ask` is the way for this process itself.
    `online`: the sandbox has a network too.
    """

    url: str
    key: str = field(repr=False)
    model: str = ""
    protocol: str = "anthropic"
    ask: Ask = field(default=_unanswered, repr=False)
    tools: Mapping[str, object] = field(default_factory=dict[str, object])
    tool_names: Sequence[str] = ()
    usage: Callable[[], Usage] = Usage
    online: bool = False


@dataclass(frozen=True)
class Run:
    """One request to an agent. `folder` is its own, inside, and gone with it.

    `kept_as`: the id by which the program's record of it is found again. `record`: the one to go
    on with; "" begins anew.
    """

    folder: str
    conversation: Conversation
    way: ModelAccess
    kept_as: str = ""
    record: str = ""


@dataclass(frozen=True)
class Program:
    """What to start; `files` are put into the run's folder first, by their names."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(repr=False)
    stdin: bytes = field(repr=False)
    files: Mapping[str, bytes] = field(repr=False)


class Executor(Protocol):
    """Runs an agent program once; it is read from the arguments of the program.

    `image` has it; `protocols` are those it reaches its model by. `prepare` is shell code that
    makes the sandbox ready, and prints the last record of conversation $1.
    """

    name: ClassVar[str]
    image: ClassVar[str]
    protocols: ClassVar[Sequence[str]]
    prepare: ClassVar[str]

    @classmethod
    def read(cls, values: Mapping[str, Any], what: str) -> Self:
        """Raise InvalidArgument if the program has no such arguments."""
        ...

    def command(self, run: Run) -> Program:
        """Return what to start, once the sandbox is ready."""
        ...

    def events(self, line: bytes) -> Iterable[Event]:
        """Return what a line of its output means. The last Completion is the run's."""
        ...
