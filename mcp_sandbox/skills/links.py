"""Where links to folders of skills may lead. Blocking."""

import os
from collections.abc import Sequence
from pathlib import Path

from mcp_sandbox.skills.roots import Root


class Refused(Exception):
    """The link leads out of the roots in which it may end."""


def target_of(link: Path, allowed: Sequence[Root]) -> tuple[Root, str]:
    """The root in which a link ends, and the path there.

    Raises:
        Refused: in none of the roots that are allowed.
        OSError: it leads nowhere.
    """
    target = os.path.realpath(link, strict=True)
    for root in allowed:
        inner = os.path.relpath(target, os.path.realpath(root.folder))
        if inner != ".." and not inner.startswith("../"):
            return root, "" if inner == "." else inner
    raise Refused
