"""What the roots have, looked up once for all who ask at the same time. Blocking."""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.roots import Root, Whose, roots, shared_roots
from mcp_sandbox.skills.scan import Scanner

# What is remembered of the roots of users and chats that come no more is forgotten, oldest first.
_REMEMBERED = 64


class Shelves:
    """The roots of all chats. May be used from several threads."""

    def __init__(self, settings: SkillsConfig, data_dir: Path) -> None:
        self._settings = settings
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._shelves: OrderedDict[Root, _Shelf] = OrderedDict()

    def look(self, whose: Whose, since: float) -> list[Catalogue]:
        """What the roots of a chat or user have, by precedence.

        Who looked after `since` (in monotonic seconds) has looked for us too.
        """
        wanted = roots(self._settings, self._data_dir, whose)
        return [self._shelf(root).look(since) for root in wanted]

    def _shelf(self, root: Root) -> "_Shelf":
        with self._lock:
            if root not in self._shelves:
                self._shelves[root] = _Shelf(root, shared_roots(self._settings))
            self._shelves.move_to_end(root)
            if len(self._shelves) > _REMEMBERED + len(self._settings.folders):
                self._shelves.popitem(last=False)
            return self._shelves[root]


class _Shelf:
    """What one root has."""

    def __init__(self, root: Root, shared: Sequence[Root]) -> None:
        self._scanner = Scanner(root, shared)
        self._lock = threading.Lock()
        self._looked_at = float("-inf")
        self._catalogue = Catalogue()

    def look(self, since: float) -> Catalogue:
        with self._lock:
            if self._looked_at < since:
                began = time.monotonic()
                self._catalogue = self._scanner.scan()
                self._looked_at = began
            return self._catalogue
