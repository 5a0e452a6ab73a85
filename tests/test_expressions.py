"""No regular expression of the product takes more than linear time, whatever text it is given.

Each is pumped: for every repetition in it, texts are made that reach it, go round it n times, and
then fail. What takes far more than four times as long for 4n is quadratic or worse.
"""

import ast
import importlib
import pkgutil
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import mcp_sandbox
from mcp_sandbox.policy.rules import read_rules

parser: Any = importlib.import_module("re._parser")
compiler: Any = importlib.import_module("re._compiler")
ROOT = Path(mcp_sandbox.__file__).parent
LETTERS = [*map(chr, range(256)), "\u2028", "\u3042"]
# What begins a search at every place, and what begins none.
METHODS: dict[str, Callable[[Any, Any], object]] = {
    "match": lambda pattern, text: pattern.match(text),
    "fullmatch": lambda pattern, text: pattern.fullmatch(text),
    "search": lambda pattern, text: pattern.search(text),
    "finditer": lambda pattern, text: sum(1 for _ in pattern.finditer(text)),
}
SAME = {"findall": "finditer", "sub": "finditer", "subn": "finditer", "split": "finditer"}
FLAG = re.compile(r"\bre\.([A-Z]+)\b")
REPEATS = ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
STEPS, ENDLESS = (*range(12, 60, 6), *range(60, 400, 35), 400), 20_000_000
MANY = 100
"""A repetition of fewer rounds is taken for a bounded one."""


def parts(node: Any) -> list[Any]:
    """The sequences below a node of a parsed expression."""
    kind, value = str(node[0]), node[1]
    if kind in REPEATS:
        return [value[2]]
    if kind == "BRANCH":
        return list(value[1])
    if kind == "SUBPATTERN":
        return [value[3]]
    if kind == "ATOMIC_GROUP":
        return [value]
    return [value[1]] if kind in ("ASSERT", "ASSERT_NOT") else []


def is_letter(node: Any) -> bool:
    return str(node[0]) in ("LITERAL", "NOT_LITERAL", "ANY", "IN")


class Pumped:
    """A parsed expression, and the letters that it tells from each other."""

    def __init__(self, pattern: "re.Pattern[Any]") -> None:
        self.pattern = pattern
        self.is_bytes = isinstance(pattern.pattern, bytes)
        self.tree = parser.parse(pattern.pattern, pattern.flags)
        self.random = random.Random(1)
        sets = [self.set_of(node) for node in self.letters(self.tree)]
        told = {tuple(each in one for one in sets): each for each in reversed(LETTERS[:256])}
        told |= {tuple(each in one for one in sets): each for each in "\n0aA "}
        self.told = sorted(told.values())
        self.sets: dict[int, list[str]] = {}

    def compiled(self, nodes: Sequence[Any]) -> "re.Pattern[Any]":
        tree = parser.SubPattern(self.tree.state, list(nodes))
        found: re.Pattern[Any] = compiler.compile(tree, self.pattern.flags)
        return found

    def encoded(self, text: str) -> Any:
        return text.encode("latin-1", "replace") if self.is_bytes else text

    def set_of(self, node: Any) -> frozenset[str]:
        matches = self.compiled([node]).fullmatch
        return frozenset(each for each in LETTERS if matches(self.encoded(each)))

    def letters(self, nodes: Any) -> Iterator[Any]:
        for node in nodes:
            if is_letter(node):
                yield node
            for part in parts(node):
                yield from self.letters(part)

    def sample(self, nodes: Any) -> str:
        return "".join(map(self.sample_one, nodes))

    def sample_one(self, node: Any) -> str:
        if is_letter(node):
            if id(node) not in self.sets:
                found = self.set_of(node)
                self.sets[id(node)] = [e for e in self.told if e in found] or sorted(found)
            return self.random.choice(self.sets[id(node)] or [""])
        kind = str(node[0])
        if kind in REPEATS:
            least, most, body = node[1]
            count = min(least + self.random.randint(0, 1), most)
            return "".join(self.sample(body) for _ in range(count))
        if kind in ("ASSERT", "ASSERT_NOT"):
            return ""
        return self.sample(self.random.choice(below)) if (below := parts(node)) else ""

    def repeats(self, nodes: Any, before: Any = (), after: Any = ()) -> Iterator[Any]:
        """What comes before each long repetition, its body, and what comes after it."""
        for at, node in enumerate(nodes):
            reached, rest = (*before, *nodes[:at]), (*nodes[at + 1 :], *after)
            if str(node[0]) in REPEATS and int(node[1][1]) >= MANY:
                yield reached, node[1][2], rest
            for part in parts(node):
                yield from self.repeats(part, reached, rest)

    def texts(self) -> Iterator[Callable[[int], Any]]:
        """Functions that make a text with a number of rounds."""
        pairs = [one + other for one in self.told for other in self.told]
        for before, body, after in self.repeats(self.tree):
            heads = {self.sample(before) for _ in range(3)}
            one_round = self.compiled(body).fullmatch
            pumps = {each for each in self.told if one_round(self.encoded(each))}
            pumps |= {self.sample(body) for _ in range(4)} | heads
            pumps |= {self.sample(before) + self.sample(body) for _ in range(2)}
            ends = ["", *self.random.sample(self.told, min(6, len(self.told)))]
            ends += self.random.sample(pairs, min(60, len(pairs)))
            ends += [self.sample(after) + end for end in ends[:6]]
            for head in sorted(heads):
                for pump in self.some(pumps - {""}, 12):
                    for end in ends:
                        yield self.text(head, pump, end)

    def some(self, among: set[str], most: int) -> list[str]:
        return self.random.sample(sorted(among), min(most, len(among)))

    def text(self, head: str, pump: str, end: str) -> Callable[[int], Any]:
        return lambda n: self.encoded(head + pump * (n // len(pump)) + end)


def spent(act: Callable[[Any, Any], object], pattern: Any, text: Any, times: int) -> int:
    """The least processor time of several runs, in ns; of one where it is far too long."""
    found = list[int]()
    for _ in range(times):
        began = time.thread_time_ns()
        act(pattern, text)
        found.append(time.thread_time_ns() - began)
        if found[-1] > 50 * ENDLESS:
            break
    return min(found)


def worse_than_linear(pattern: "re.Pattern[Any]", method: str) -> str:
    """A beginning of a text for which an expression takes more than linear time, or ""."""
    act, pumped, suspects = METHODS[method], Pumped(pattern), []
    texts = list(pumped.texts())
    for text in pumped.random.sample(texts, min(len(texts), 3000)):
        took = 0
        for n in STEPS:
            if took < ENDLESS:
                took = spent(act, pattern, text(n), 1)
        # Nothing linear takes so long for so little.
        if took > 30_000:
            suspects.append((took, text))
        if took > ENDLESS:
            break
    suspects.sort(key=lambda each: -each[0])
    return next(
        (f"{method} {text(40)!r}" for _, text in suspects[:6] if grows(act, pattern, text)), ""
    )


def grows(act: Callable[[Any, Any], object], pattern: Any, text: Callable[[int], Any]) -> bool:
    """Whether it takes more than linear time, measured again so that a disturbance is none."""
    for n in (*STEPS, 1000):
        if (took := spent(act, pattern, text(n), 3)) > ENDLESS:
            return True
    return took > 50_000 and all(
        spent(act, pattern, text(4000), 3) > 8 * spent(act, pattern, text(1000), 3)
        for _ in range(3)
    )


@cache
def modules() -> list[Any]:
    names = [each.name for each in pkgutil.walk_packages([str(ROOT)], "mcp_sandbox.")]
    return [importlib.import_module(name) for name in names if not name.endswith("__main__")]


def found_in(value: object, seen: set[int]) -> Iterator["re.Pattern[Any]"]:
    """The expressions that a value has: in classes, functions, lists, and what they have."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, re.Pattern):
        yield value
        return
    below: list[object] = []
    if isinstance(value, dict):
        below = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        below = list(value)
    elif isinstance(self := getattr(value, "__self__", None), re.Pattern):
        below = [self]
    elif str(getattr(value, "__module__", "")).startswith("mcp_sandbox"):
        below = [getattr(value, "__dict__", None), getattr(value, "__defaults__", None)]
        below += [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
        below += [each.cell_contents for each in getattr(value, "__closure__", None) or ()]
        below += [getattr(value, "__wrapped__", None)]
    for each in below:
        yield from found_in(each, seen)


@cache
def sources() -> dict[str, ast.AST]:
    files = sorted(ROOT.rglob("*.py"))
    return {str(file): ast.parse(file.read_text()) for file in files}


@cache
def uses(module: str, name: str) -> set[str]:
    """What an expression is asked for; one with a public name also in other modules."""
    found = set[str]()
    for file, tree in sources().items():
        if name.startswith("_") and file != module:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                at = getattr(node.value, "id", "") or getattr(node.value, "attr", "")
                if at == name and (method := SAME.get(node.attr, node.attr)) in METHODS:
                    found.add(method)
    return found


def called(module: str) -> Iterator[tuple[str, "re.Pattern[Any]"]]:
    """The expressions that stand in calls of `re`, and what they are asked for."""
    for node in ast.walk(sources()[module]):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("re."):
            name = ast.unparse(node.func).removeprefix("re.")
            if node.args and isinstance(first := node.args[0], ast.Constant):
                given = [*node.args, *(each.value for each in node.keywords)]
                flags = [f for each in map(ast.unparse, given) for f in FLAG.findall(each)]
                number = re.RegexFlag(0)
                for each in flags:
                    number |= re.RegexFlag[each]
                asked = METHODS if name == "compile" else {SAME.get(name, name)} & {*METHODS}
                for method in asked:
                    yield method, re.compile(first.value, number)


@cache
def expressions() -> list[tuple[str, "re.Pattern[Any]"]]:
    """Each expression of the product with what it is asked for."""
    found = dict[tuple[str, str], "re.Pattern[Any]"]()
    for module in modules():
        named = {id(value) for value in vars(module).values() if isinstance(value, re.Pattern)}
        for name, value in vars(module).items():
            for pattern in found_in(value, set()):
                asked = uses(module.__file__, name) if id(value) in named else ()
                for method in sorted(asked or METHODS):
                    found.setdefault((method, repr(pattern)), pattern)
    known = {pattern.pattern for pattern in found.values()}
    for file in sources():
        for method, pattern in called(file):
            if pattern.pattern not in known:
                found.setdefault((method, repr(pattern)), pattern)
    for pattern in found_in(vars(read_rules()), set()):
        found["fullmatch", repr(pattern)] = pattern
    return [(method, pattern) for (method, _), pattern in found.items()]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", range(4))
def test_no_expression_takes_more_than_linear_time(part: int) -> None:
    assert len(expressions()) > 200
    slow = {
        pattern.pattern: text
        for method, pattern in expressions()[part::4]
        if (text := worse_than_linear(pattern, method))
    }
    assert not slow


@pytest.mark.parametrize(
    ("method", "expression"),
    [
        ("fullmatch", rb"(?i)http://([^/?]*)([\x21\x22\x24-\x7e]*)"),
        ("fullmatch", r"mcp__.+__(\w+)"),
        ("finditer", r"(\d+(?:\.\d+)?)(ms|[dhms])"),
        ("search", r"[\w.:-]+(?:\s*\|\s*[\w.:-]+)+"),
        (
            "search",
            r"\b(chrom\w+|google-chrome\S*|firefox)\b.{0,20}: (?:command )?not found"
            r"|Cannot find (?:module|package) '(playwright|puppeteer)\S*'",
        ),
        ("search", r"(?m)^# /// script\r?\n((?:#(?: [^\n]*)?\r?\n)*?)# ///\r?$"),
        ("search", r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----\s*\n\s*[A-Za-z0-9+/]{20}"),
        ("finditer", "\x02([^\x03]*)\x03"),
        ("finditer", "'?<<(.*?)>>'?"),
        ("finditer", "//.*@"),
        ("finditer", r"(?<=.)@[^/]*$"),
        ("finditer", ".*@|^[a-z]+://"),
        ("search", r"(a|aa)+$"),
        ("match", r"(?:x+x+)+y"),
    ],
)
def test_one_that_does_is_found(method: str, expression: str | bytes) -> None:
    assert worse_than_linear(re.compile(expression), method)


@pytest.mark.parametrize(
    ("method", "expression"),
    [
        ("fullmatch", rb"(?i)http://([^/?]*+)([\x21\x22\x24-\x7e]*+)"),
        ("finditer", r"\w+|\s+|."),
        ("search", r"(?m)^[ \t]*#.*$"),
    ],
)
def test_one_that_does_not_passes(method: str, expression: str | bytes) -> None:
    assert not worse_than_linear(re.compile(expression), method)
