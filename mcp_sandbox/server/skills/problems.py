"""What is wrong with skills, as JSON of bounded size."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from mcp_sandbox.server.skills.entries import suits_hosts
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import Diagnostic

_MOST_CHARACTERS = 64_000
_REFUSED = Diagnostic(
    "refused-by-hosts",
    "note",
    "Hosts of skills over MCP refuse it, so skills/list leaves it out; all else has it.",
    "Mend what is said of its name, its description and the form of its front matter.",
)


def problems_as_json(catalogue: Catalogue) -> str:
    """First what is not offered at all, then the flaws of what is; `omitted` counts the rest."""
    told: list[dict[str, Any]] = []
    size = omitted = 0
    for problem in _problems(catalogue):
        if size > _MOST_CHARACTERS:
            omitted += 1
            continue
        told.append(problem)
        size += len(json.dumps(problem))
    return json.dumps({"problems": told, "omitted": omitted}, indent=1)


def _problems(catalogue: Catalogue) -> Iterator[dict[str, Any]]:
    for problem in catalogue.problems:
        # Where the root lies on the host is no business of a client.
        place = "/".join(problem.folder.parts[-2:])
        about = {"folder": place, "root": problem.root, "offered": False}
        for each in problem.diagnostics:
            reason = each.reason.replace(str(problem.folder), place)
            yield _told(about, replace(each, reason=reason))
    for skill in catalogue.skills:
        about = {"uri": skill.uri, "offered": True}
        yield from (_told(about, each) for each in skill.diagnostics)
        if not suits_hosts(skill):
            yield _told(about, _REFUSED)


def _told(about: dict[str, Any], diagnostic: Diagnostic) -> dict[str, Any]:
    return {**about, **{k: v for k, v in asdict(diagnostic).items() if v is not None}}
