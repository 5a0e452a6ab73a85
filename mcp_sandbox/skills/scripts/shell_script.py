"""What a shell script is made of, and where its reader is. No behaviour."""

from dataclasses import dataclass, field


@dataclass
class Command:
    """A simple command; `joined` is what stands before it.

    `closed` says that a block ended before it, `negated` that a `!` stands before it.
    """

    words: tuple[str, ...]
    joined: str = ""
    negated: bool = False
    closed: bool = False
    heredoc: str = ""


@dataclass
class Script:
    """What was read of a script; `cut`: it goes deeper or on longer than is looked at."""

    commands: list[Command] = field(default_factory=list[Command])
    functions: set[str] = field(default_factory=set[str])
    set_variables: set[str] = field(default_factory=set[str])
    read_variables: set[str] = field(default_factory=set[str])
    writes: list[str] = field(default_factory=list[str])
    cut: bool = False


@dataclass
class State:
    """Where in a list of commands the reader is."""

    words: list[str] = field(default_factory=list[str])
    joined: str = ""
    negated: bool = False
    closed: bool = False
    cases: int = 0
    in_pattern: bool = False


@dataclass
class Document:
    """A here-document that is still to be read: the line that ends it, and whose input it is."""

    end: str
    strips: bool
    literal: bool
    depth: int
    command: Command | None = None
