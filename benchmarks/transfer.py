"""Large files in and out of a sandbox."""

import io
import os
import tarfile
from functools import partial

from docker.models.containers import Container

from benchmarks.measure import Goal, Measured, Row, clocked, times_slower
from benchmarks.places import Failed, engine_client, in_thread, open_sandbox
from mcp_sandbox.runtime.files import Files

_SIZE = 100_000_000


async def _transfer(pairs: int) -> Measured:
    data = await in_thread(lambda: os.urandom(_SIZE))
    archive = await in_thread(lambda: _archive("theirs.bin", data))
    async with open_sandbox("docker") as sandbox:
        with engine_client() as client:
            container = client.containers.get(sandbox.id)
            ours = partial(_through_runtime, sandbox.runtime.files, data)
            theirs = partial(in_thread, partial(_through_archives, container, archive))
            return await times_slower(clocked(ours), clocked(theirs), pairs)


def _archive(name: str, data: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


async def _through_runtime(files: Files, data: bytes) -> None:
    await files.write("/workspace/ours.bin", data)
    if len(await files.read("/workspace/ours.bin")) != len(data):
        raise Failed("the runtime brought back another size")


def _through_archives(container: Container, archive: bytes) -> None:
    """What docker-py offers; packing and unpacking the archive is left out of the time."""
    if not container.put_archive("/workspace", archive):
        raise Failed("put_archive did not put")
    chunks, _ = container.get_archive("/workspace/theirs.bin")
    if len(b"".join(chunks)) < _SIZE:
        raise Failed("get_archive brought back less")


ROWS = (
    Row(
        "transfer",
        "write and read a file of 100 MB, docker",
        "docker-py put_archive and get_archive of it",
        Goal(2),
        _transfer,
    ),
)
