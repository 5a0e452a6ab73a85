"""What came to the servers of a world, one line of JSON each, written before it is answered."""

import json
import threading
from typing import IO


class Heard:
    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._lock = threading.Lock()

    def note(self, kind: str, **what: object) -> None:
        with self._lock:
            self._file.write(json.dumps({"kind": kind, **what}) + "\n")
            self._file.flush()
