"""The commands of a shell script, as bash would read it. Pure, linear, and never fails.

The parts of a word that are known only when it runs are DYNAMIC. Commands inside substitutions,
subshells and functions are listed among the others, in the order of the text.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from mcp_sandbox.reading.commands import DYNAMIC

_DEEPEST = 30
_PLAIN = re.compile(r"[^\s\\'\"`$;&|<>(){}#]+")
# A word without quotes and the like, with the blanks behind it.
_WORD = re.compile(r"([^\s\\'\"`$;&|<>()]+)(?:[ \t]+|(?=[\n;&|)]|\Z))")
_LITERAL = re.compile(r"'([^']*)'?")
_IN_QUOTES = re.compile(r'[^"$`\\]+')
_IN_BACKTICKS = re.compile(r"`([^`\\]*(?:\\.[^`\\]*)*)`?", re.DOTALL)
_ESCAPED = re.compile(r"'((?:[^'\\]++|\\.)*+)'?", re.DOTALL)
# Escapes that Python does not know, or warns about.
_NO_ESCAPE = re.compile(r"(\\\\)|\\([^abfnrtvxuU0-7\\'\"]|[4-7][0-7]{2})", re.DOTALL)
_RETURNS = re.compile(r"(?<!\r)\r++(?=\n|\Z)")
_DESCRIPTOR = re.compile(r"\d*-?")
_COPROCESS = re.compile(r"\s*+[A-Za-z_]\w*+(?=\s+[{(])")
_LONGEST_VALUE = 200
_VARIABLE = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(?:\[[^]]*\])?\+?=")
# A redirection, whose number is not in the group, or what separates commands.
_MARK = re.compile(
    r"[0-9]*(&>>|&>|<<<|<<-|<<|<>|<&|>>|>\||>&|[<>](?!\())[ \t]*|(;;&|;;|;&|&&|\|\||\|&|;|&|\|)"
)
# Words that stand before a command, and words that end a block.
_AROUND = frozenset(
    {"if", "then", "elif", "else", "while", "until", "do", "time", "coproc", "{", "!"}
    | {"fi", "done", "esac", "}"}
)
_DECLARES = frozenset({"export", "local", "declare", "readonly", "typeset"})


@dataclass
class SimpleCommand:
    """A simple command; `joined` is the operator before it, such as `&&`.

    `inner`: how many of the commands listed before it stand in its words. `writes`: the files of
    its redirections. `depth`: how many subshells it is in.
    """

    words: list[str] = field(default_factory=list[str])
    joined: str = ""
    heredoc: str = ""
    inner: int = 0
    writes: list[str] = field(default_factory=list[str])
    depth: int = 0


@dataclass
class Script:
    """What was read of a script; `cut`: it is nested deeper or longer than is read.

    `functions` maps each name to the number of commands before its body.
    """

    commands: list[SimpleCommand] = field(default_factory=list[SimpleCommand])
    functions: dict[str, int] = field(default_factory=dict[str, int])
    writes: list[str] = field(default_factory=list[str])
    cut: bool = False


@dataclass
class ParserState:
    """Where in a list of commands the reader is; `began`: how many commands stood before this."""

    command: SimpleCommand
    began: int
    cases: int = 0
    in_pattern: bool = False


@dataclass
class HereDocument:
    """A here-document that is still to be read: the line that ends it, and whose input it is."""

    end: str
    strips: bool
    literal: bool
    depth: int
    command: SimpleCommand | None = None


def read_script(text: str, values: Mapping[str, str] | None = None) -> Script:
    """Return the commands of a script, and of its substitutions.

    With `values` of variables, these and the ones that it assigns are known, and not DYNAMIC.
    """
    reader = _ShellReader(text, None if values is None else dict(values))
    reader.commands("", 0)
    return reader.script


def drop_returns(text: str) -> str:
    """Return a script without carriage returns at ends of lines outside of literal documents."""
    reader = _ShellReader(text, None)
    reader.commands("", 0)
    pieces, at = list[str](), 0
    for began, ended in [*reader.literals, (len(text), len(text))]:
        pieces += _RETURNS.sub("", text[at:began]), text[began:ended]
        at = ended
    return "".join(pieces)


class _ShellReader:
    def __init__(self, text: str, values: dict[str, str] | None) -> None:
        self.script = Script()
        self._values = values
        self._text = text
        self._at = 0
        self._documents: list[HereDocument] = []
        self.literals: list[tuple[int, int]] = []

    def commands(self, closing: str, depth: int) -> None:
        """Read on to `closing` or the end, unless it is nested too deep."""
        if depth >= _DEEPEST:
            self.script.cut = True
            return
        state = ParserState(SimpleCommand(depth=depth), len(self.script.commands))
        while self._at < len(self._text):
            char = self._text[self._at]
            if char == closing and not state.in_pattern:
                self._at += 1
                break
            self._step(char, state, depth)
        self._end(state, "")

    def _step(self, char: str, state: ParserState, depth: int) -> None:
        text, at = self._text, self._at
        if char in " \t\r" or text.startswith("\\\n", at):
            self._at += 1 + (char == "\\")
        elif char == "#":
            self._rest_of_line()
        elif char == "\n":
            self._at += 1
            self._end(state, ";")
            self._read_documents()
        elif char in "()":
            self._parenthesis(char, state, depth)
        elif state.command.words[:1] == ["[["]:
            self._in_test(state, depth)
        elif found := _MARK.match(text, at):
            self._at = found.end()
            if found[1]:
                self._redirect(found[1], state, depth)
            else:
                self._separate(found[2], state)
        else:
            self._take(self._word(depth), state)

    def _upto(self, closing: str) -> Iterator[str]:
        """Yield the character to be read next, up to `closing`, which is skipped."""
        while self._at < len(self._text) and (char := self._text[self._at]) != closing:
            yield char
        self._at += 1

    def _rest_of_line(self) -> str:
        began, end = self._at, self._text.find("\n", self._at)
        self._at = len(self._text) if end < 0 else end
        return self._text[began : self._at]

    def _parenthesis(self, char: str, state: ParserState, depth: int) -> None:
        self._at += 1
        if char == ")" or state.in_pattern:
            if char == ")":
                state.in_pattern = False
                state.command.words.clear()
        elif state.command.words and state.command.words[-1].endswith("="):
            self._array(depth)
        elif state.command.words and self._text.startswith(")", self._at):
            self._at += 1
            self.script.functions[state.command.words[-1]] = len(self.script.commands)
            state.command.words.clear()
        elif self._text.startswith("(", self._at) and state.command.words in ([], ["for"]):
            self._arithmetic(depth)
        elif not state.command.words:
            joined, state.command.joined = state.command.joined, ";"
            first = len(self.script.commands)
            self.commands(")", depth + 1)
            if first < len(self.script.commands):
                self.script.commands[first].joined = joined

    def _array(self, depth: int) -> None:
        """Read on behind `name=(` to its `)`."""
        for char in self._upto(")"):
            if char == "#":
                self._rest_of_line()
            else:
                self._word(depth)

    def _arithmetic(self, depth: int) -> None:
        """Read on behind `((` or `$((` to `))`; take in its variables and substitutions."""
        self._at += 1
        open_ = 2
        while self._at < len(self._text) and open_:
            char = self._text[self._at]
            if char in "$`":
                self._piece(char, depth + 1)
            else:
                open_ += (char == "(") - (char == ")")
                self._at += 1

    def _in_test(self, state: ParserState, depth: int) -> None:
        if self._text[self._at] in "<>|&;":
            self._at += 1
        else:
            word = self._word(depth)
            if word == "]]":
                state.command.words = ["[["]
                self._end(state, "")
            elif len(state.command.words) < 3:
                state.command.words.append(word)

    def _separate(self, mark: str, state: ParserState) -> None:
        if state.in_pattern:
            state.command.words.clear()
        else:
            self._end(state, mark)
            state.in_pattern = state.cases > 0 and mark in (";;", ";&", ";;&")

    def _take(self, word: str, state: ParserState) -> None:
        if state.in_pattern:
            if word == "esac":
                state.in_pattern, state.cases = False, max(0, state.cases - 1)
            return
        words = state.command.words
        if not words and word in _AROUND:
            if word == "coproc" and (name := _COPROCESS.match(self._text, self._at)):
                self._at = name.end()
            state.cases -= word == "esac" and state.cases > 0
        elif words and words[0] == "function" and len(words) == 1:
            self.script.functions[word] = len(self.script.commands)
            words.clear()
        elif words and words[0] == "case" and word == "in":
            words.clear()
            state.cases, state.in_pattern = state.cases + 1, True
        elif len(words) < 500:
            words.append(word)
        else:
            self.script.cut = True

    def _end(self, state: ParserState, mark: str) -> None:
        command, count = state.command, len(self.script.commands)
        if not command.words:
            command.writes, command.heredoc, state.began = [], "", count
            return
        command.inner = count - state.began
        self._keep(command)
        for document in self._documents:
            document.command = document.command or command
        state.began = len(self.script.commands)
        state.command = SimpleCommand(joined=mark, depth=command.depth)

    def _keep(self, command: SimpleCommand) -> None:
        first, script = command.words[0], self.script
        self._assigned(command.words)
        if first in ("for", "select", "read", "mapfile", "readarray", "getopts"):
            for name in filter(_VARIABLE.fullmatch, command.words[1:]):
                self._assign(name, "")
        if first in ("for", "select", "case", "function"):
            return
        if first == "alias":
            script.functions.update((word.partition("=")[0], -1) for word in command.words[1:])
        if len(script.commands) < 5_000:
            script.commands.append(command)
        else:
            script.cut = True

    def _assigned(self, words: Sequence[str]) -> None:
        declares = words[0] in _DECLARES
        for word in words:
            if found := _ASSIGNED.match(word):
                self._assign(found[1], word[len(found[1]) :])
            elif not declares:
                return

    def _assign(self, name: str, assigned: str) -> None:
        if self._values is None:
            return
        known = assigned[:1] == "=" and 1 < len(assigned) <= _LONGEST_VALUE
        if known and DYNAMIC not in assigned and len(self._values) < 500:
            self._values[name] = assigned[1:]
        else:
            self._values.pop(name, None)

    def _redirect(self, mark: str, state: ParserState, depth: int) -> None:
        began = self._at
        word = self._word(depth)
        if mark in ("<<", "<<-") and len(self._documents) < 20:
            literal = any(char in "'\"\\" for char in self._text[began : self._at])
            self._documents.append(HereDocument(word, mark == "<<-", literal, depth))
        elif mark == "<<<":
            state.command.heredoc = word
        elif ">" in mark and word and not (mark == ">&" and _DESCRIPTOR.fullmatch(word)):
            self.script.writes.append(word)
            state.command.writes.append(word)

    def _read_documents(self) -> None:
        documents, self._documents = self._documents, []
        for document in documents:
            lines, began = list[str](), self._at
            while self._at < len(self._text):
                line = self._rest_of_line()
                self._at += 1
                if (line.lstrip("\t") if document.strips else line).rstrip("\r") == document.end:
                    break
                lines.append(line)
            text = "\n".join(lines)
            if document.command:
                document.command.heredoc = text
            if document.literal:
                self.literals.append((began, began + len("\n".join([*lines, ""]))))
            else:
                # The shell expands substitutions in it, as within double quotes.
                self._within(': "' + text.replace('"', " "), document.depth)

    def _within(self, text: str, depth: int) -> None:
        reader = _ShellReader(text, self._values)
        reader.script = self.script
        reader.commands("", depth + 1)

    def _word(self, depth: int) -> str:
        if found := _WORD.match(self._text, self._at):
            self._at = found.end()
            return found[1]
        parts: list[str] = []
        began = self._at
        while self._at < len(self._text):
            char = self._text[self._at]
            if char in "<>" and self._text.startswith("(", self._at + 1):
                self._at += 2
                self.commands(")", depth + 1)
                parts.append(DYNAMIC)
            elif char in " \t\r\n;&|<>()":
                break
            else:
                parts.append(self._piece(char, depth))
        if self._at == began:
            self._at += 1
        return "".join(parts)

    def _piece(self, char: str, depth: int) -> str:
        if found := _PLAIN.match(self._text, self._at):
            self._at = found.end()
            return found[0]
        match char:
            case "'" if found := _LITERAL.match(self._text, self._at):
                self._at = found.end()
                piece = found[1]
            case '"':
                piece = self._quoted(depth)
            case "`":
                piece = self._backticks(depth)
            case "$":
                piece = self._dollar(depth)
            case _:
                self._at += 1 + (char == "\\")
                piece = self._text[self._at - 1 : self._at]
        return "" if char == "\\" and piece == "\n" else piece

    def _quoted(self, depth: int) -> str:
        self._at += 1
        parts: list[str] = []
        for char in self._upto('"'):
            if self._text.startswith(("$'", '$"'), self._at):
                parts.append(char)
                self._at += 1
            elif char in "$`\\":
                parts.append(self._piece(char, depth))
            else:
                found = _IN_QUOTES.match(self._text, self._at)
                parts.append(found[0] if found else char)
                self._at += len(parts[-1])
        return "".join(parts)

    def _dollar(self, depth: int) -> str:
        text, at = self._text, self._at
        if depth >= _DEEPEST:
            self.script.cut = True
            self._at += 1
        elif text.startswith("$((", at):
            self._at += 2
            self._arithmetic(depth)
        elif text.startswith("$(", at):
            self._at += 2
            self.commands(")", depth + 1)
        elif text.startswith("${", at):
            self._at += 2
            return self._parameter(depth + 1)
        elif text.startswith('$"', at):
            self._at += 1
            return self._quoted(depth)
        elif found := _ESCAPED.match(text, at + 1):
            self._at = found.end()
            inner = _NO_ESCAPE.sub(lambda each: each[1] or each[2], found[1])
            coded = inner.encode("latin-1", "backslashreplace")
            return coded.decode("unicode_escape", "replace").replace("\ufffd", DYNAMIC)
        elif found := _VARIABLE.match(text, at + 1):
            self._at = found.end()
            return (self._values or {}).get(found[0], DYNAMIC)
        else:
            self._at += 1 + (text[at + 1 : at + 2] in tuple("@*#?!$-0123456789"))
        return DYNAMIC

    def _parameter(self, depth: int) -> str:
        """Read on behind `${` to its `}`; return the value, if it is known."""
        name = ""
        while self._text.startswith(("!", "#"), self._at):
            self._at += 1
        if found := _VARIABLE.match(self._text, self._at):
            plain, self._at = self._text[self._at - 1] == "{", found.end()
            # What stands for an empty value is not used where one is known.
            known = plain and self._text.startswith(("}", ":-", ":?", "-", "?"), self._at)
            name = found[0] if known else ""
        for char in self._upto("}"):
            self._piece(char, depth)
        return (self._values or {}).get(name, DYNAMIC)

    def _backticks(self, depth: int) -> str:
        if found := _IN_BACKTICKS.match(self._text, self._at):
            self._at = found.end()
            self._within(found[1].replace("\\`", "`"), depth)
        return DYNAMIC
