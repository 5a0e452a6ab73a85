"""What of ours is inside every sandbox: the runner and the relay, their files and their digest."""

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def runner_sources() -> list[Path]:
    """The files, all below `PACKAGE`."""
    found = [*(PACKAGE / "runner").rglob("*.py"), *(PACKAGE / "runner").glob("*.cjs")]
    return [*sorted(found), PACKAGE / "relay.py"]


def digest_of(sources: Iterable[Path]) -> str:
    """A digest of the names and contents of such files. Blocks."""
    digest = hashlib.sha256()
    for source in sources:
        data = source.read_bytes()
        digest.update(f"{source.relative_to(PACKAGE)} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


@cache
def runner_digest() -> str:
    """The digest of the files as this process found them: an image carries it as a label."""
    return digest_of(runner_sources())
