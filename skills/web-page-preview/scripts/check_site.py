#!/usr/bin/env python3
"""Check a static site, or a running server, as a browser would fetch it; without a browser.

SITE is a folder (it is served on a free port of loopback meanwhile), one HTML file in its folder,
or an address such as http://127.0.0.1:8000/. Links to other hosts are counted, never followed.

Exit codes: 0 = no problems, 1 = problems, 2 = there is nothing to check or the call is wrong.
"""

from __future__ import annotations

import argparse
import http.server
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from page import Facts, Link, Page, css_targets

TIMEOUT_S = 10
LARGEST = 32 * 1024 * 1024
NOT_FETCHED = ("mailto:", "tel:", "data:", "javascript:", "blob:", "about:")
IMPORT = re.compile(r"""^\s*(?:import|export)\b[^'"();]*['"](\.{0,2}/[^'"]+)['"]""", re.MULTILINE)
TYPES = {"css": "text/css", "javascript": "javascript", "image": "image/"}


class Answer:
    """What an address answered: status, kind and bytes."""

    def __init__(self, status: int, kind: str, body: bytes, address: str) -> None:
        self.status = status
        self.kind = kind
        self.body = body
        self.address = address

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")


# Never by a proxy: what is checked is on this machine.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fetch(address: str) -> Answer:
    try:
        with OPENER.open(address, timeout=TIMEOUT_S) as response:
            kind = response.headers.get_content_type()
            return Answer(response.status, kind, response.read(LARGEST), response.url)
    except urllib.error.HTTPError as exc:
        with exc:
            return Answer(exc.code, "", b"", address)
    except (OSError, ValueError) as exc:
        return Answer(0, str(getattr(exc, "reason", exc)), b"", address)


class Check:
    """Goes through a site, page by page."""

    def __init__(self, start: str, max_pages: int) -> None:
        self.start = start
        self.origin = urllib.parse.urlsplit(start)[:2]
        self.max_pages = max_pages
        self.answers: dict[str, Answer] = {}
        self.pages: dict[str, Facts] = {}
        self.anchors: list[tuple[str, int, str, str]] = []
        self.elsewhere: set[str] = set()
        self.problems: list[str] = []

    def run(self) -> None:
        waiting = deque([self.start])
        while waiting:
            address = waiting.popleft()
            answer = self.answer(address)
            if address in self.pages or answer.kind != "text/html":
                continue
            if len(self.pages) == self.max_pages:
                self._problem(address, 0, "too-many", f"only {self.max_pages} pages were checked")
                break
            waiting.extend(self._read_page(address, answer))
        for address, line, target, name in self.anchors:
            page = self.pages.get(target)
            if page is not None and name not in page.ids and name.lower() != "top":
                self._problem(address, line, "missing-anchor", f"nothing has id={name!r}")

    def answer(self, address: str) -> Answer:
        if address not in self.answers:
            self.answers[address] = fetch(address)
        return self.answers[address]

    def _problem(self, address: str, line: int, code: str, text: str) -> None:
        path = urllib.parse.unquote(urllib.parse.urlsplit(address).path).lstrip("/") or "/"
        where = f"{path}:{line}" if line else path
        report = f"{where}: {code}: {text}"
        if report not in self.problems:
            self.problems.append(report)

    def _read_page(self, address: str, answer: Answer) -> list[str]:
        """Check a page; returns the addresses that its links lead to."""
        page = Page()
        page.feed(answer.text)
        facts = self.pages[address] = page.finish()
        if "\ufffd" in answer.text:
            self._problem(address, 0, "not-utf8", "the page holds bytes that are not UTF-8")
        for line, code, text in facts.problems:
            self._problem(address, line, code, text)
        for script in facts.scripts:
            if script.line:
                self._check_script(address, script.text, script.line, module=script.module)
        return [found for link in facts.links if (found := self._follow(address, link))]

    def _follow(self, page: str, link: Link) -> str | None:
        """Check where a link leads; returns the address when it is of this site."""
        target = link.target.strip()
        if target.lower().startswith(NOT_FETCHED):
            return None
        try:
            whole, name = urllib.parse.urldefrag(urllib.parse.urljoin(page, target))
            parts = urllib.parse.urlsplit(whole)
        except ValueError as exc:
            self._problem(page, link.line, "broken-link", f"{target}: {exc}")
            return None
        if parts.scheme == "file" or target.startswith(("/workspace", "/home", "/tmp")):
            self._problem(page, link.line, "outside", f"{target} is a path of this machine")
            return None
        if parts[:2] != self.origin:
            self.elsewhere.add(whole)
            if link.loads:
                self._problem(page, link.line, "loaded-from-network", target)
            return None
        address = urllib.parse.quote(whole, safe=":/?&=%#~+,;@!$'()*[]")
        if name:
            self.anchors.append((page, link.line, address, urllib.parse.unquote(name)))
        new = address not in self.answers
        self._check_answer(page, link, self.answer(address))
        if new:
            self._look_inside(address, self.answer(address))
        return address

    def _check_answer(self, page: str, link: Link, answer: Answer) -> None:
        if answer.status != 200:
            said = f"answers {answer.status}" if answer.status else answer.kind
            self._problem(page, link.line, "broken-link", f"{link.target}: {said}")
        elif link.wants and TYPES[link.wants] not in answer.kind:
            self._problem(page, link.line, "wrong-type", f"{link.target} is {answer.kind}")

    def _look_inside(self, address: str, answer: Answer) -> None:
        """Check what a style or script loads in its turn."""
        targets: list[str] = []
        if answer.kind == "text/css":
            targets = css_targets(answer.text)
        elif "javascript" in answer.kind:
            targets = IMPORT.findall(answer.text)
            module = bool(re.search(r"^\s*(import|export)\b", answer.text, re.MULTILINE))
            self._check_script(address, answer.text, 1, module=module)
        for target in targets:
            self._follow(address, Link(target, 0, loads=True))

    def _check_script(self, address: str, text: str, line: int, *, module: bool) -> None:
        for number, message in script_errors("\n" * (line - 1) + text, module=module):
            self._problem(address, number, "script-error", message)


def script_errors(text: str, *, module: bool) -> list[tuple[int, str]]:
    """Ask node, if it is there, whether JavaScript parses; it is not run."""
    node = shutil.which("node")
    if node is None or not text.strip():
        return []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ("script.mjs" if module else "script.cjs")
        file.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [node, "--check", str(file)], capture_output=True, text=True, timeout=60, check=False
        )
    if done.returncode == 0:
        return []
    place = re.search(r"script\.[cm]js:(\d+)", done.stderr)
    message = re.search(r"^\w*Error: .*", done.stderr, re.MULTILINE)
    return [(int(place[1]) if place else 0, message[0] if message else "it does not parse")]


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and keeps no log."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


Quiet.extensions_map = {
    **http.server.SimpleHTTPRequestHandler.extensions_map,
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".webp": "image/webp",
    ".avif": "image/avif",
    ".json": "application/json",
}


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback; yields the address."""
    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()


def check(start: str, max_pages: int) -> int:
    found = Check(start, max_pages)
    first = found.answer(start)
    if first.status != 200 or first.kind != "text/html":
        said = f"answers {first.status} {first.kind}" if first.status else first.kind
        print(f"check_site.py: {start} is no page: {said}", file=sys.stderr)
        return 2
    found.run()
    print(*found.problems, sep="\n", end="\n" if found.problems else "")
    others = sum(1 for a in found.answers.values() if a.status == 200) - len(found.pages)
    outcome = f"{len(found.problems)} problems" if found.problems else "no problems"
    elsewhere = f"{len(found.elsewhere)} links to other hosts (not followed)"
    print(f"{len(found.pages)} pages, {others} other files, {elsewhere}: {outcome}")
    if shutil.which("node") is None:
        print("JavaScript was not checked: there is no node")
    return 1 if found.problems else 0


def wait_for(address: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while fetch(address).status == 0 and time.monotonic() < until:
        time.sleep(0.1)


def check_files(site: Path, given: argparse.Namespace) -> int:
    folder, page = (site, "index.html") if site.is_dir() else (site.parent, site.name)
    if not (folder / page).is_file():
        print(f"check_site.py: there is no {folder / page}", file=sys.stderr)
        return 2
    with served(folder) as address:
        return check(address + urllib.parse.quote(page), given.max_pages)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="check_site.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("site", metavar="SITE")
    parser.add_argument("--max-pages", type=int, default=200, help="default: 200")
    parser.add_argument(
        "--wait", type=float, default=0, metavar="SECONDS", help="wait for a server to come up"
    )
    given = parser.parse_args()
    if not given.site.startswith(("http://", "https://")):
        return check_files(Path(given.site), given)
    wait_for(given.site, given.wait)
    return check(given.site, given.max_pages)


if __name__ == "__main__":
    sys.exit(main())
