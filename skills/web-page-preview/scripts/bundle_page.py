#!/usr/bin/env python3
"""Make one HTML file of a page: its own styles, scripts and pictures are put into it.

Files are taken from the page's folder and the folders below it alone.

Exit codes: 0 = everything is inside, 1 = written, but what is named stays outside, 2 = the page
cannot be read, or the call is wrong.
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
import re
import sys
import urllib.parse
from html import escape
from html.parser import HTMLParser
from pathlib import Path

from page import CSS_URL

ELSEWHERE = re.compile(r"(?i)[a-z][a-z0-9+.-]*:|//|#")
ATTRIBUTE = r"""(?is)(\s{name}\s*=\s*)("[^"]*"|'[^']*'|[^\s>]+)"""


class Bundle(HTMLParser):
    """Rewrites a page; everything that is not replaced stays as it was, byte for byte."""

    def __init__(self, page: Path) -> None:
        super().__init__(convert_charrefs=False)
        self.root = page.resolve().parent
        self.outside: list[str] = []
        self.source = page.read_text(encoding="utf-8")
        self._starts = [0]
        for line in self.source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._edits: list[tuple[int, int, str]] = []
        self._in_style = self._late = False
        self._deferred: list[str] = []

    def result(self) -> str:
        self.feed(self.source)
        self.close()
        text, at = [], 0
        for start, end, new in self._edits:
            text += [self.source[at:start], new]
            at = end
        return "".join((*text, self.source[at:], *self._deferred))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        rels = given.get("rel", "").lower().split()
        self._in_style = tag == "style"
        if tag == "link" and "stylesheet" in rels:
            self._style(given)
        elif tag == "link" and "icon" in rels:
            self._attribute("href", given)
        elif tag == "script":
            self._script(given)
        elif tag in ("img", "source", "video", "audio", "embed"):
            self._attribute("src", given)
            if given.get("srcset"):
                self.outside.append(f"srcset={given['srcset']}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_data(self, data: str) -> None:
        if self._in_style:
            start = self._here()
            self._edits.append((start, start + len(data), self._css(data, self.root)))

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
        start = self._here()
        if tag == "script" and self._late:
            self._late = False
            end = self.source.index(">", start) + 1
            self._edits.append((start, end, ""))
        elif tag == "body":
            self._edits.append((start, start, "".join(self._deferred)))
            self._deferred.clear()

    def _here(self) -> int:
        line, column = self.getpos()
        return self._starts[line - 1] + column

    def _replace_tag(self, new: str) -> None:
        start = self._here()
        self._edits.append((start, start + len(self.get_starttag_text() or ""), new))

    def _style(self, given: dict[str, str]) -> None:
        file = self._file(given.get("href", ""), self.root)
        if file is not None:
            css = self._css(file.read_text(encoding="utf-8-sig"), file.parent)
            media = f' media="{escape(given["media"])}"' if given.get("media") else ""
            self._replace_tag(f"<style{media}>\n{shielded(css, 'style')}</style>")

    def _script(self, given: dict[str, str]) -> None:
        file = self._file(given.get("src", ""), self.root) if given.get("src") else None
        if file is None:
            return
        code = file.read_text(encoding="utf-8-sig")
        if re.search(r"""(?m)^\s*(import|export)\b[^;]*?['"]\.{0,2}/""", code):
            self.outside.append(f"{given['src']} imports other files")
            return
        attributes = "".join(
            f' {name}="{escape(value)}"'
            for name, value in given.items()
            if name not in ("src", "async", "defer")
        )
        element = f"<script{attributes}>\n{shielded(code, 'script')}\n"
        # One that waited for the whole page goes to its end: `defer` does nothing without `src`.
        self._late = "defer" in given and given.get("type") != "module"
        if self._late:
            self._deferred.append(f"{element}</script>\n")
        self._replace_tag("" if self._late else element)

    def _attribute(self, name: str, given: dict[str, str]) -> None:
        uri = self._data_uri(given.get(name, ""), self.root) if given.get(name) else None
        if uri is not None:
            tag = self.get_starttag_text() or ""
            pattern = ATTRIBUTE.format(name=name)
            self._replace_tag(re.sub(pattern, lambda m: f'{m[1]}"{uri}"', tag, count=1))

    def _css(self, text: str, folder: Path) -> str:
        def inlined(match: re.Match[str]) -> str:
            if match[1] is None:
                self.outside.append(f"@import {match[2]}")
                return match[0]
            uri = self._data_uri(match[1].strip(), folder)
            return match[0] if uri is None else f'url("{uri}")'

        return CSS_URL.sub(inlined, text)

    def _data_uri(self, target: str, folder: Path) -> str | None:
        file = self._file(target, folder)
        if file is None:
            return None
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"

    def _file(self, target: str, folder: Path) -> Path | None:
        """The page's own file that an address means, or None, which is noted if it is needed."""
        if target.startswith(("data:", "#")):
            return None
        path = urllib.parse.unquote(re.split("[?#]", target, maxsplit=1)[0])
        file = (folder / path).resolve()
        inside = self.root in file.parents and not ELSEWHERE.match(target)
        if not inside or not file.is_file():
            self.outside.append(target)
            return None
        return file


def shielded(text: str, tag: str) -> str:
    """Text that may stand in an element: nothing in it closes the element."""
    return text.replace(f"</{tag}", f"<\\/{tag}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bundle_page.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("page", metavar="PAGE", type=Path)
    parser.add_argument("output", metavar="OUTPUT", type=Path)
    given = parser.parse_args()
    try:
        bundle = Bundle(given.page)
        text = bundle.result()
        given.output.write_text(text, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        print(f"bundle_page.py: {exc}", file=sys.stderr)
        return 2
    print(f"{given.output}: {len(text.encode()):,} bytes")
    for target in bundle.outside:
        print(f"left outside: {target}")
    return 1 if bundle.outside else 0


if __name__ == "__main__":
    sys.exit(main())
