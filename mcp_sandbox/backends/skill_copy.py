"""Skills where sandboxes have no mounts: who may write to their place runs a program for that."""

import marshal
from collections.abc import Mapping

from mcp_sandbox.models import SKILLS

# Its input need not end. It says that all is done as a relay does that has reached its runner.
_PUT = """
import ctypes, marshal, os, pathlib, shutil, sys
place, name, new, old = *sys.argv[1:], f".{os.getpid()}", f".{os.getpid()}-old"
os.chdir(place)
for path, data in marshal.load(sys.stdin.buffer).items():
    file = pathlib.Path(new, path)
    file.parent.mkdir(0o755, True, True)
    file.write_bytes(data)
    file.chmod(0o555 if data[:2] == b"#!" else 0o444)
if not os.path.lexists(name):
    os.rename(new, name)
elif ctypes.CDLL(None).renameat2(-100, new.encode(), -100, name.encode(), 2):
    # Not every kernel exchanges two (RENAME_EXCHANGE): then there is none for a moment.
    os.rename(name, old)
    os.rename(new, name)
for left in (new, old):
    shutil.rmtree(left, True)
os.write(2, b"connected\\n")
"""


def put_command(name: str, place: str = SKILLS) -> list[str]:
    """Return the command that makes what it reads the skill of that name."""
    return ["python3", "-I", "-S", "-c", _PUT, place, name]


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return what the command reads."""
    return marshal.dumps(dict(files), 2)
