"""What stands in an HTML page: its links, its ids, and its mistakes. Used by check_site.py."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset(
    (
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "param",
        "source",
        "track",
        "wbr",
    )
)
# These may stay open in HTML: the next one, or the end of the parent, closes them.
CLOSED_BY_OTHERS = frozenset(
    (
        "p",
        "li",
        "dt",
        "dd",
        "option",
        "optgroup",
        "tr",
        "td",
        "th",
        "thead",
        "tbody",
        "tfoot",
        "colgroup",
        "rt",
        "rp",
        "html",
        "head",
        "body",
    )
)
LOADED = {
    "script": ("src",),
    "img": ("src",),
    "source": ("src",),
    "video": ("src", "poster"),
    "audio": ("src",),
    "iframe": ("src",),
    "embed": ("src",),
    "object": ("data",),
}
LOADING_RELS = frozenset(("stylesheet", "icon", "preload", "modulepreload", "manifest"))
UNLABELLED_INPUTS = frozenset(("hidden", "submit", "button", "reset", "image"))
CSS_URL = re.compile(r"""url\(\s*['"]?([^'")]+)['"]?\s*\)|@import\s+['"]([^'"]+)['"]""")


@dataclass(frozen=True)
class Link:
    """An address in a page. `loads`: a browser fetches it without a click."""

    target: str
    line: int
    loads: bool
    wants: str = ""


@dataclass
class Script:
    """JavaScript that stands in the page itself."""

    text: str
    line: int
    module: bool


@dataclass
class Element:
    """An element that is open while the page is read."""

    tag: str
    line: int
    named: bool = False


@dataclass
class Facts:
    links: list[Link] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    scripts: list[Script] = field(default_factory=list)
    problems: list[tuple[int, str, str]] = field(default_factory=list)


class Page(HTMLParser):
    """Reads one page; `facts` has what was found."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.facts = Facts()
        self._open: list[Element] = []
        self._doctype = False
        self._title: str | None = None
        self._charset = self._viewport = False
        self._fields: list[tuple[int, str | None]] = []
        self._labels: set[str] = set()

    def problem(self, code: str, text: str, line: int | None = None) -> None:
        self.facts.problems.append((line or self.getpos()[0], code, text))

    def handle_decl(self, decl: str) -> None:
        self._doctype = self._doctype or decl.lower().startswith("doctype html")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._note_id(given)
        self._note_links(tag, given)
        self._judge(tag, given)
        if tag not in VOID:
            named = any(given.get(name) for name in ("aria-label", "aria-labelledby", "title"))
            self._open.append(Element(tag, self.getpos()[0], named))
        elif tag == "img" and given.get("alt"):
            self._name_open()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID and self._open:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if tag not in [element.tag for element in self._open]:
            if tag != "p":
                self.problem("unexpected-close", f"</{tag}> closes nothing")
            return
        while self._open:
            element = self._open.pop()
            if element.tag == tag:
                self._judge_end(element)
                return
            self._left_open(element)

    def handle_data(self, data: str) -> None:
        inside = self._open[-1].tag if self._open else ""
        if inside == "title":
            self._title = (self._title or "") + data
        elif inside == "style":
            self._note_css(data)
        elif inside == "script" and self.facts.scripts:
            self.facts.scripts[-1].text += data
        if data.strip():
            self._name_open()

    def finish(self) -> Facts:
        self.close()
        while self._open:
            self._left_open(self._open.pop())
        for missing, code, text in (
            (not self._doctype, "no-doctype", "the page does not begin with <!doctype html>"),
            (not (self._title or "").strip(), "no-title", "the page has no <title>"),
            (not self._charset, "no-charset", 'no <meta charset="utf-8">'),
            (not self._viewport, "no-viewport", 'no <meta name="viewport">'),
        ):
            if missing:
                self.problem(code, text, 1)
        for line, name in self._fields:
            if name not in self._labels:
                self.problem("no-label", "a field has no label", line)
        self.facts.problems.sort()
        return self.facts

    def _name_open(self) -> None:
        for element in self._open:
            element.named = True

    def _note_id(self, given: dict[str, str]) -> None:
        name = given.get("id")
        if name:
            if name in self.facts.ids:
                self.problem("duplicate-id", f'id="{name}" is there twice')
            self.facts.ids.add(name)

    def _note_links(self, tag: str, given: dict[str, str]) -> None:
        line = self.getpos()[0]
        if tag in ("a", "area") and "href" in given:
            self.facts.links.append(Link(given["href"], line, loads=False))
            if given.get("name"):
                self.facts.ids.add(given["name"])
        if tag == "link" and given.get("href"):
            rels = set(given.get("rel", "").lower().split())
            wants = "css" if "stylesheet" in rels else ""
            self.facts.links.append(Link(given["href"], line, bool(rels & LOADING_RELS), wants))
        for name in LOADED.get(tag, ()):
            if given.get(name):
                wants = {"script": "javascript", "img": "image"}.get(tag, "")
                self.facts.links.append(Link(given[name], line, loads=True, wants=wants))
        for part in given.get("srcset", "").split(","):
            if part.strip():
                self.facts.links.append(Link(part.split()[0], line, loads=True, wants="image"))
        self._note_css(given.get("style", ""))

    def _note_css(self, text: str) -> None:
        for target in css_targets(text):
            self.facts.links.append(Link(target, self.getpos()[0], loads=True))

    def _judge(self, tag: str, given: dict[str, str]) -> None:
        line = self.getpos()[0]
        if tag == "html" and not given.get("lang"):
            self.problem("no-lang", "<html> has no lang")
        elif tag == "meta":
            self._charset = self._charset or given.get("charset", "").lower() == "utf-8"
            self._viewport = self._viewport or given.get("name", "").lower() == "viewport"
        elif tag == "img" and "alt" not in given:
            self.problem("no-alt", f"the picture {given.get('src', '')} has no alt")
        elif tag == "label" and given.get("for"):
            self._labels.add(given["for"])
        elif tag in ("input", "select", "textarea"):
            self._note_field(given, line)
        elif tag == "script" and not given.get("src"):
            kind = given.get("type", "").lower()
            if kind in ("", "module", "text/javascript", "application/javascript"):
                self.facts.scripts.append(Script("", line, kind == "module"))
            else:
                self.facts.scripts.append(Script("", 0, module=False))

    def _note_field(self, given: dict[str, str], line: int) -> None:
        in_label = any(element.tag == "label" for element in self._open)
        named = given.get("aria-label") or given.get("aria-labelledby") or given.get("title")
        if not (in_label or named or given.get("type", "").lower() in UNLABELLED_INPUTS):
            self._fields.append((line, given.get("id")))

    def _judge_end(self, element: Element) -> None:
        if element.tag in ("a", "button") and not element.named:
            self.problem("empty-control", f"<{element.tag}> has no text", element.line)

    def _left_open(self, element: Element) -> None:
        if element.tag not in CLOSED_BY_OTHERS:
            self.problem("unclosed", f"<{element.tag}> is never closed", element.line)


def css_targets(text: str) -> list[str]:
    return [(match[1] or match[2]).strip() for match in CSS_URL.finditer(text)]
