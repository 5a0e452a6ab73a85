"""What attacks share: where they run, and how they are started inside."""

import json
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest

from mcp_sandbox.errors import CallerError, SandboxGone
from mcp_sandbox.models import ExecResult
from mcp_sandbox.sessions.session import Session
from tests.conftest import CLUSTER

DOCKER = pytest.param("docker", marks=pytest.mark.docker)
GVISOR = pytest.param("docker-runsc", marks=(pytest.mark.docker, pytest.mark.runsc))
BUBBLEWRAP = pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)
KUBERNETES = pytest.param("kubernetes", marks=[getattr(pytest.mark, each) for each in CLUSTER])

UNSAFE = pytest.param("unsafe-local", marks=pytest.mark.bubblewrap)
WHOLE = pytest.mark.whole


def if_whole(place: Any) -> Any:
    """A place where a test is repeated with --whole."""
    return pytest.param(*place.values, id=place.id, marks=(*place.marks, WHOLE))


# Attacks on what the kernel of the host enforces; gVisor has a kernel of its own.
on_the_host_kernel = pytest.mark.parametrize(
    "backend_name", [DOCKER, BUBBLEWRAP, KUBERNETES], indirect=True
)
# Attacks on code of ours, which is the same above every kernel.
on_gvisor_if_whole = pytest.mark.parametrize(
    "backend_name",
    [DOCKER, if_whole(GVISOR), BUBBLEWRAP, KUBERNETES],
    indirect=True,
)
on_docker_if_whole = pytest.mark.parametrize(
    "backend_name", [if_whole(DOCKER), BUBBLEWRAP], indirect=True
)
on_docker = pytest.mark.parametrize("backend_name", [DOCKER], indirect=True)
# Attacks on the server's own code, which is the same for all: the quickest place will do.
on_bubblewrap = pytest.mark.parametrize("backend_name", [BUBBLEWRAP], indirect=True)


def gap(reason: str) -> pytest.MarkDecorator:
    """An attack that still succeeds; once it is held off the test fails until this mark goes."""
    return pytest.mark.xfail(strict=True, reason=reason)


async def probe(session: Session, code: str, *, timeout_s: float = 30.0) -> Any:
    """Run Python inside that prints one JSON value, and return the value."""
    result = await session.run_code(code, timeout_s=timeout_s)
    assert result.exit_code == 0, result
    return json.loads(result.stdout)


async def attempt(call: Awaitable[Any]) -> str:
    """What a call showed: its result, or the refusal. Anything but a CallerError is a failure."""
    try:
        return repr(await call)
    except CallerError as exc:
        return f"{type(exc).__name__}: {exc}"


KEPT = b"what the chat had before"


async def all_is_well(session: Session) -> None:
    """The tools work, on the same files."""
    with anyio.fail_after(30):
        assert (await session.read_file("kept")).data == KEPT
        assert (await session.exec("echo fine; cat kept")).stdout == "fine\n" + KEPT.decode()
        assert (await session.run_code("print(6 * 7)")).stdout == "42\n"
        assert (await session.write_file("new", b"new")).written == 3


async def survive(call: Awaitable[ExecResult]) -> ExecResult | None:
    """An honest result, or None when the sandbox died and said so."""
    with anyio.fail_after(40):
        try:
            return await call
        except SandboxGone:
            return None
