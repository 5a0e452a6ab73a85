"""Finds the skills of one root, again and again, reading only what changed. Blocking."""

import errno
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mcp_sandbox.skills import problems
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import Problem, Skill
from mcp_sandbox.skills.reading import Reading
from mcp_sandbox.skills.roots import Root, opened
from mcp_sandbox.skills.sweep import UNTRUSTED, Limits, Seen, Sweep
from mcp_sandbox.skills.uris import unused


class Scanner:
    """The skills of a root. Not for two threads at once."""

    def __init__(
        self, root: Root, shared: Sequence[Root] = (), limits: Limits | None = None
    ) -> None:
        """`shared` are the roots that links may lead into."""
        self._root = root
        self._allowed = (root, *shared) if root.trusted else ()
        self._limits = limits or (Limits() if root.trusted else UNTRUSTED)
        self._seen = Seen()
        self._catalogue = Catalogue()

    def scan(self) -> Catalogue:
        """What the root has now; the same object as before if nothing changed."""
        try:
            with opened(self._root.folder, self._root.anchor) as directory:
                sweep = Sweep(directory, self._root, self._allowed, self._limits, self._seen)
                seen = sweep.run()
        except OSError as exc:
            seen = self._absent(exc)
        if (seen.found, seen.problems) != (self._seen.found, self._seen.problems):
            self._catalogue = _catalogue(seen.found, seen.problems)
        self._seen = seen
        return self._catalogue

    def _absent(self, error: OSError) -> Seen:
        if self._root.optional and error.errno == errno.ENOENT:
            return Seen()
        diagnostic = problems.absent(str(self._root.folder), error)
        return Seen(problems=[Problem(self._root.name, self._root.folder, (diagnostic,))])


def _catalogue(found: Sequence[Reading], noticed: Sequence[Problem]) -> Catalogue:
    """The catalogue of one root: by name, of the same name those near the root first."""
    broken = [each.result for each in found if isinstance(each.result, Problem)]
    pairs = [(each.result, each) for each in found if isinstance(each.result, Skill)]
    # The search goes from the root downwards, and sorting keeps that order where names are equal.
    pairs.sort(key=lambda pair: pair[0].front.name)
    versions: dict[str, object] = {skill.uri: reading.stamp for skill, reading in pairs}
    if len(versions) < len(pairs):
        pairs = list(_told_apart(pairs))
        versions = {skill.uri: reading.stamp for skill, reading in pairs}
    return Catalogue(tuple(skill for skill, _ in pairs), (*broken, *noticed), versions)


def _told_apart(pairs: Sequence[tuple[Skill, Reading]]) -> Iterable[tuple[Skill, Reading]]:
    """Give each a uri of its own.

    Two want the same only where a folder has the name of the skill in its parent: then the one
    whose folder has its name keeps it.
    """
    taken = {skill.uri: skill for skill, read in pairs if skill.name == read.folders[-1]}
    for skill, reading in pairs:
        if taken.setdefault(skill.uri, skill) is skill:
            yield skill, reading
            continue
        uri = unused((*reading.folders, skill.name), taken, skill.root)
        taken[uri] = skill
        yield replace(skill, uri=uri), reading
