"""Sandboxes that hold their files: those of unsafe-local without any folder of a chat.

Each has folders of its own, which outlive its processes and go when it is destroyed. A paused one
has no processes.

    {data root}/held/{sandbox id}/     workspace, home and skills, as it sees them
                                 state  what it was made from, its labels, and the one that runs
"""

import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest
from anyio import to_thread
from anyio.abc import ByteStream

from mcp_sandbox import models
from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.backends.bubblewrap import backend as bubblewrap
from mcp_sandbox.backends.sandbox_records import make_gone_error, new_id, sandbox_user
from mcp_sandbox.backends.skill_copy import pack, put_command
from mcp_sandbox.errors import SandboxGone

_SHOWN = {"workspace": "/workspace", "home": "/home/sandbox", "skills": "/opt/skills"}
_Unsafe = bubblewrap.BubblewrapBackend


@dataclass
class HeldSandbox:
    """One of them; `inner` is what runs now."""

    id: models.SandboxId
    inner: Sandbox
    labels: Mapping[str, str]
    _backend: "HoldingBackend" = field(repr=False)

    @property
    def token(self) -> bytes:
        return self.inner.token

    @property
    def facts(self) -> models.SandboxFacts:
        return self.inner.facts

    async def open_channel(self) -> ByteStream:
        return await self.inner.open_channel()

    async def pause(self) -> bool:
        await self._backend.inner.destroy(self.inner.id)
        return True

    async def ending(self, *, within_s: float = 0.0) -> models.Ending | None:
        return await self.inner.ending(within_s=within_s)

    async def show_skill(self, name: str, files: Mapping[str, bytes]) -> None:
        command = put_command(name, str(self._backend.root / self.id / "skills"))
        await anyio.run_process(command, input=pack(files))


class HoldingBackend:
    """Makes them."""

    holds_files, keeps_paused_files = True, False
    name: models.BackendName = "unsafe-local"

    def __init__(self, data_root: Path, *, walls: bool = True) -> None:
        self.inner = _Unsafe(data_root, walls=False)
        self.probe, self.origin = self.inner.probe, self.inner.origin
        self.root = data_root / "held"

    async def create(self, spec: models.SandboxSpec) -> HeldSandbox:
        sandbox_id = new_id()
        assert not spec.mounts
        await to_thread.run_sync(self._make_folders, sandbox_id)
        try:
            inner = await self._start(sandbox_id, spec)
        except BaseException:
            await self.destroy(sandbox_id)
            raise
        return HeldSandbox(sandbox_id, inner, spec.labels, self)

    async def attach(self, sandbox_id: models.SandboxId) -> HeldSandbox:
        spec, inner_id = await to_thread.run_sync(self._read, sandbox_id)
        try:
            inner: Sandbox = await self.inner.attach(inner_id)
        except SandboxGone:
            inner = await self._start(sandbox_id, spec)
        return HeldSandbox(sandbox_id, inner, spec.labels, self)

    async def running(self) -> Sequence[models.SandboxInfo]:
        alive = {info.id for info in await self.inner.running()}
        found: list[models.SandboxInfo] = []
        for sandbox_id in await to_thread.run_sync(self._list):
            with suppress(SandboxGone):
                spec, inner_id = await to_thread.run_sync(self._read, sandbox_id)
                state: models.SandboxState = "running" if inner_id in alive else "paused"
                found.append(models.SandboxInfo(sandbox_id, spec.labels, state))
        return found

    async def destroy(self, sandbox_id: models.SandboxId) -> None:
        with suppress(SandboxGone):
            await self.inner.destroy((await to_thread.run_sync(self._read, sandbox_id))[1])
        await to_thread.run_sync(lambda: shutil.rmtree(self.root / sandbox_id, ignore_errors=True))

    async def _start(self, sandbox_id: models.SandboxId, spec: models.SandboxSpec) -> Sandbox:
        place = self.root / sandbox_id
        mounts = tuple(models.Mount(place / name, at) for name, at in _SHOWN.items())
        inner = await self.inner.create(replace(spec, mounts=mounts))
        await to_thread.run_sync(self._write, sandbox_id, spec, inner.id)
        return inner

    def _make_folders(self, sandbox_id: models.SandboxId) -> None:
        for name in _SHOWN:
            (self.root / sandbox_id / name).mkdir(parents=True)
            os.chown(self.root / sandbox_id / name, *sandbox_user())

    def _list(self) -> list[models.SandboxId]:
        return [models.SandboxId(path.name) for path in self.root.glob("*")]

    def _read(self, sandbox_id: models.SandboxId) -> tuple[models.SandboxSpec, models.SandboxId]:
        try:
            found: tuple[models.SandboxSpec, models.SandboxId] = pickle.loads(
                (self.root / sandbox_id / "state").read_bytes()
            )
        except FileNotFoundError:
            raise make_gone_error(sandbox_id) from None
        return found

    def _write(
        self, sandbox_id: models.SandboxId, spec: models.SandboxSpec, inner: models.SandboxId
    ) -> None:
        new = self.root / sandbox_id / "state.new"
        new.write_bytes(pickle.dumps((spec, inner)))
        new.replace(self.root / sandbox_id / "state")


@contextmanager
def holding_files() -> Iterator[None]:
    """Have unsafe-local hold files in the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bubblewrap, "BubblewrapBackend", HoldingBackend)
        yield
