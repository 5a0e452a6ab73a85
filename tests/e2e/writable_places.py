"""Program: where code inside may write, and what the chat's meter says of it.

    python -m tests.e2e.writable_places BACKEND DATA_ROOT

It prints JSON: the places, each with the file system of its mount; how much was written to those
on a disk, and by how much the usage of the chat grew.
"""

import json
import sys
from pathlib import Path

import anyio

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.models import ChatId
from tests.conftest import configured

MIB = 1 << 20
LOOK = """
import json, os
mounts = [line.split() for line in open("/proc/self/mountinfo")]
kinds = {f[4].replace("\\\\040", " "): f[f.index("-") + 1] for f in mounts}

def mount_of(path):
    while path not in kinds and path != "/":
        path = os.path.dirname(path)
    return path

def is_writable(folder):
    try:
        # What it owns, code inside may open up.
        if os.stat(folder).st_uid == os.getuid():
            os.chmod(folder, 0o700)
    except OSError:
        pass
    try:
        path = os.path.join(folder, "planted")
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.unlink(path)
    except OSError:
        return False
    return True

found = {}
for folder, inner, _ in os.walk("/"):
    if folder == "/":
        inner[:] = [name for name in inner if name not in ("proc", "sys")]
    inner[:] = [name for name in inner if not os.path.islink(os.path.join(folder, name))]
    at = mount_of(folder)
    if at not in found and is_writable(folder):
        status = os.statvfs(folder)
        found[at] = [kinds.get(at), status.f_blocks * status.f_frsize, folder]
        if kinds.get(at) not in ("tmpfs", "mqueue"):
            with open(os.path.join(folder, "filled"), "wb") as file:
                file.write(os.urandom(4 << 20))
print(json.dumps(found))
"""


async def main(name: str, data_root: Path) -> None:
    async with open_manager(configured(name, data_root)) as manager:
        session = await manager.session(ChatId("mallory", "writes"))
        before = (await session.info()).usage.used_bytes
        result = await session.run_code(LOOK, timeout_s=60)
        assert result.exit_code == 0, result
        after = (await session.info()).usage.used_bytes
        await session.reset(keep_files=False)
    sys.stdout.write(json.dumps([json.loads(result.stdout), after - before]))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]))
