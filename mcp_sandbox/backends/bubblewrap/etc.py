"""The /etc of a bubblewrap sandbox: our own small files and what programs of /usr need.

Nothing else of the host's /etc appears inside: it holds names, keys and credentials.
"""

import stat
from dataclasses import dataclass
from pathlib import Path

from mcp_sandbox.models import Network

_MOST_BYTES = 4 * 1024 * 1024
_COPIED = (
    "ld.so.cache",
    "localtime",
    "mime.types",
    "protocols",
    "services",
    "ssl/openssl.cnf",
    "debian_version",
)
_BOUND = ("alternatives", "fonts")
# Of use only with a network; each costs a start some time.
_COPIED_OPEN = ("resolv.conf",)
_BOUND_OPEN = ("ssl/certs", "pki/tls/certs", "pki/ca-trust/extracted")


@dataclass(frozen=True)
class Etc:
    """`files` are made new, from their bytes; `bound` directories are the host's, read-only."""

    files: dict[str, bytes]
    bound: tuple[str, ...]


def etc(uid: int, gid: int, network: Network, host: Path = Path("/etc")) -> Etc:
    """What /etc holds for a user of that number. Blocks on the disk."""
    is_open = network == "open"
    copied = (*_COPIED, *_COPIED_OPEN) if is_open else _COPIED
    binds = (*_BOUND, *_BOUND_OPEN) if is_open else _BOUND
    found = {f"/etc/{name}": _public(host / name) for name in copied}
    files = _own(uid, gid) | {name: data for name, data in found.items() if data is not None}
    bound = tuple(f"/etc/{name}" for name in binds if (host / name).is_dir())
    return Etc(files, bound)


def _own(uid: int, gid: int) -> dict[str, bytes]:
    text = {
        "passwd": f"sandbox:x:{uid}:{gid}:sandbox:/home/sandbox:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        "group": f"sandbox:x:{gid}:\nnogroup:x:65534:\n",
        "hosts": "127.0.0.1 localhost sandbox\n::1 localhost sandbox\n",
        "hostname": "sandbox\n",
        "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    return {f"/etc/{name}": content.encode() for name, content in text.items()}


def _public(path: Path) -> bytes | None:
    """A small file that every user of the host may read, else None."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or not found.st_mode & stat.S_IROTH:
            return None
        return path.read_bytes() if found.st_size <= _MOST_BYTES else None
    except OSError:
        # What a host lacks, its sandboxes lack too.
        return None
