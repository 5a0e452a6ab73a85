"""The headings of a skill's text, for the search only. Pure."""

import re

from mcp_sandbox.skills.front_matter import split

BEGINNING = 64 * 1024
"""Bytes of a document that are looked at."""
_MOST = 64
_LONGEST = 120
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}[ \t]+(\S.*)")


def headings(document: bytes) -> tuple[str, ...]:
    """The headings of a SKILL.md, outside of blocks of code; the first ones of very many."""
    body = split(document[:BEGINNING], cut=len(document) >= BEGINNING).body
    found: list[str] = []
    fence = ""
    for line in body.decode("utf-8", "replace").splitlines():
        if mark := _FENCE.match(line):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = ""
        elif not fence and (heading := _HEADING.match(line)):
            found.append(heading[1].rstrip("# \t")[:_LONGEST])
            if len(found) == _MOST:
                break
    return tuple(found)
