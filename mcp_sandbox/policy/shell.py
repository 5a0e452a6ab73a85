"""What a command line does: programs with their arguments, and what they are given to run. Pure."""

import posixpath
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, dropwhile, pairwise

from mcp_sandbox.policy.rules import Code, Fact
from mcp_sandbox.reading.commands import DYNAMIC, drop_assignments, names, unwrap_command
from mcp_sandbox.reading.shell import Script, read_script

# Variables with assumed values: the home is `~`, and words are split at blanks.
_VALUES = {"HOME": "~", "IFS": " ", "PWD": "."}
# Programs that run an argument as code: its language, and the options before it.
_SHELL = ("shell", re.compile(r"-[a-z]*c|--command"))
_PYTHON = ("python", re.compile(r"-[A-Za-z]*c"))
_NODE = ("javascript", re.compile(r"-p?e|-p|--eval|--print|eval"))
_NOTHING = re.compile(r"(?!)")
_UNREAD = ("", re.compile(r"-\w*[eErR]"))
_READERS: Mapping[str, tuple[str, re.Pattern[str]]] = {
    **dict.fromkeys(names("sh bash dash zsh ksh ash fish su runuser script"), _SHELL),
    **dict.fromkeys(names("python pypy"), _PYTHON),
    **dict.fromkeys(names("node nodejs bun deno"), _NODE),
    **dict.fromkeys(names("perl ruby php lua Rscript"), _UNREAD),
}
_VERSION = re.compile(r"(python|pypy|perl|ruby|php|lua)[\d.]+")
_FETCHES = names("curl wget aria2c http https xh fetch")
_COPIES = names("tee cp install mv dd shred")
# Programs whose `run` runs the rest, and options that take the next word.
_RUNNERS = names("uv poetry pipenv pdm rye hatch")
_TAKES = {
    "git": names("-C -c --git-dir --work-tree"), "npm": names("--prefix -w --workspace"),
    "docker": names("--context -H"), "gh": names("-R --repo"), "aws": names("--profile --region"),
    **dict.fromkeys(_RUNNERS, names("--with --python -p --extra --group --directory --project")),
}  # fmt: skip
_DEEPEST = 10
_Given = tuple[list[Code], tuple[str, ...]]


def read_commands(text: str, cwd: str = "") -> Iterator[Fact | Code]:
    """Yield what a script does that starts in the folder `cwd`, as far as its text tells."""
    script = read_script(text, _VALUES)
    yield from _ActionReader(script, cwd).read()
    if script.cut:
        yield Code("", "")  # The rest, which was not read.


class _ActionReader:
    def __init__(self, script: Script, cwd: str) -> None:
        self._script = script
        self._cwds = [cwd]  # The working folder of each subshell.
        self._makers: list[tuple[str, ...]] = []  # What made the output of each command.
        self._texts: list[str] = []  # The output itself, where it is known.
        self._fetched: set[str] = set()

    def read(self) -> Iterator[Fact | Code]:
        for at, command in enumerate(self._script.commands):
            del self._cwds[command.depth + 1 :]
            self._cwds += self._cwds[-1:] * (command.depth + 1 - len(self._cwds))
            source = at - command.inner - 1
            piped = command.joined in ("|", "|&") and source >= 0
            self._inside = tuple(chain(*self._makers[source + 1 : at]))
            self._piped = self._makers[source][-20:] if piped else ()
            self._text = command.heredoc or (self._texts[source] if piped else "")
            self._makers.append(self._piped)
            self._texts.append("")
            for each in self._command(list(command.words)):
                yield replace(each, folder=self._cwds[-1])
            # A function that begins by calling itself, into a pipe or the background.
            after = self._script.commands[at + 1 : at + 2]
            calls_itself = self._script.functions.get(command.words[0]) == at
            if calls_itself and after and after[0].joined in ("|", "&"):
                yield Fact("shell", command.words[0], {"program": ("fork-bomb",)})
        for path in self._script.writes:
            yield Fact("shell", path, {"writes": (self._full(path),)})

    def _command(self, words: list[str], depth: int = 0) -> Iterator[Fact | Code]:
        # Options stand before a command behind `time`, and behind the file of `flock`.
        words = list(dropwhile(lambda word: word[:1] == "-", drop_assignments(words)))
        if words and " " in words[0]:
            words[:1] = words[0].split()
        if not words or depth > _DEEPEST:
            return
        path, *given = words
        program = _VERSION.sub(r"\1", path.rsplit("/", 1)[-1])
        rest = _find_wrapped_command(program, given)
        yield from self._program(program, given[: len(given) - len(rest)], path)
        if program == "env" and given[:1] == ["-S"]:
            yield Code("shell", shlex.join(given[1:]) if given[2:] else "".join(given[1:]))
        elif rest:
            yield from self._command(rest, depth + 1)

    def _program(self, program: str, given: list[str], path: str) -> Iterator[Fact | Code]:
        words = _drop_options(program, given)
        full = [self._full(word.removeprefix("of=")) for word in words]
        copied = full if program in _COPIES else ()
        values = {
            "program": (program,),
            "subcommand": tuple([" ".join(words[:count]) for count in (1, 2, 3)]),
            "flags": tuple([word for word in given if word[:1] == "-"]),
            "argument": (*words, *full, " ".join(words)),
            "writes": tuple([path for path in copied if path.startswith("/dev/")]),
        }
        yield Fact("shell", " ".join(given), values)
        self._remember(program, given, words)
        texts, sources = self._given(program, given, words)
        yield from texts
        if self._fetched & {self._full(path), *full[: program in _READERS]}:
            sources = ("curl",)
        if sources:
            yield Fact("shell", " ".join(sources), {"piped from": sources})

    def _remember(self, program: str, given: Sequence[str], words: Sequence[str]) -> None:
        """Note where a command changes to, what it prints, and what it fetches."""
        command = self._script.commands[len(self._texts) - 1]
        self._makers[-1] = (*self._makers[-1], *self._inside[-20:], program)
        if program in ("cd", "pushd"):
            self._cwds[-1] = self._full((*words, "~")[0])
        elif program in ("echo", "printf"):
            self._texts[-1] = " ".join(given).lstrip("-enE ").replace("\\n", "\n")
        elif program == "cat":
            self._texts[-1] = self._text
        elif program in _FETCHES:
            files = (*(word.rsplit("/", 1)[-1] for word in words), *words, *command.writes)
            self._fetched |= {self._full(file) for file in files if file and "://" not in file}

    def _given(self, program: str, given: list[str], words: list[str]) -> _Given:
        """Return the code that a program is given, and what produces code that is not known."""
        if program in ("eval", "trap", "alias"):
            aliases = [word.partition("=")[2] for word in words]
            lines = {"eval": [" ".join(given)], "trap": words[:1]}.get(program, aliases)
            return [Code("shell", line) for line in lines], self._unknown(*lines)
        language, option = _READERS.get(program, ("", _NOTHING))
        options = [word for word in given if word != "--"] if program in _READERS else ()
        for word, after in pairwise(options):
            if option.fullmatch(word):
                return [Code(language, after)] if language else [], self._unknown(after)
        reads = program in _READERS and program not in ("su", "runuser") and "-m" not in given
        if words[:1] == [DYNAMIC] and (reads or program in (".", "source")):
            return [], self._inside
        if not reads or (words and words[0] != "-" and "-s" not in given):
            return [], ()
        known = [Code(language, self._text)] if language and self._text else []
        return known, () if known and DYNAMIC not in self._text else self._piped

    def _unknown(self, *texts: str) -> tuple[str, ...]:
        return self._inside if any(DYNAMIC in text for text in texts) else ()

    def _full(self, path: str) -> str:
        """Return the path from the root or the home, if it is known where it begins."""
        if path[:1] not in ("/", "~"):
            path = posixpath.join(self._cwds[-1], path)
        full = posixpath.normpath(path)
        return full[1:] if full.startswith("//") else full


def _find_wrapped_command(program: str, given: list[str]) -> list[str]:
    if program in _RUNNERS and given[:1] == ["run"]:
        rest = _drop_options(program, given)[1:2]
        return given[given.index(rest[0]) :] if rest else []
    if program in ("python", "pypy") and "-m" in given[:3]:
        return given[given.index("-m") + 1 :]
    return unwrap_command(program, given)


def _drop_options(program: str, given: Sequence[str]) -> list[str]:
    takes, found, skips = _TAKES.get(program, frozenset()), list[str](), False
    for at, word in enumerate(given):
        if word == "--":
            return [*found, *given[at + 1 :]]
        if not skips and (not word.startswith("-") or word == "-"):
            found.append(word)
        skips = not skips and word in takes
    return found
