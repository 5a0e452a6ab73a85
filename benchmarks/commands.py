"""Commands and code in a sandbox that runs already."""

import os
import subprocess
from functools import partial

import anyio

from benchmarks.measure import (
    Action,
    Goal,
    Measured,
    Row,
    clocked,
    rested,
    times_faster,
    times_slower,
)
from benchmarks.places import PYTHON, Failed, checked, engine_client, in_thread, on_host
from benchmarks.places import open_sandbox as sandbox_in
from mcp_sandbox.runner.wire.protocol import CHUNK
from mcp_sandbox.runtime.runtime import Runtime

_IN_FLIGHT = 32
_CALLS_EACH = 10
_PRINT = "print(1)"
_WHOLE = 200_000_000
_REST_S = 0.1


async def _exec_true(runtime: Runtime) -> None:
    checked(await runtime.exec(["true"]), "")


async def _run_print(runtime: Runtime) -> None:
    checked(await runtime.run_code(_PRINT, "python", timeout_s=30), "1\n")


async def _exec_against_host(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        ours = partial(_exec_true, sandbox.runtime)
        return await times_slower(clocked(ours), clocked(lambda: on_host(["true"], b"")), pairs)


async def _exec_against_docker(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        with engine_client() as client:
            container = client.containers.get(sandbox.id)

            def theirs() -> None:
                code = container.exec_run(["true"]).exit_code
                if code != 0:
                    raise Failed(f"exec_run ended with {code}")

            ours = rested(clocked(partial(_exec_true, sandbox.runtime)), _REST_S)
            other = rested(clocked(partial(in_thread, theirs)), _REST_S)
            return await times_faster(ours, other, pairs)


async def _shell_against_exec(pairs: int, *, functions: int = 0) -> Measured:
    async with sandbox_in("docker") as sandbox:
        named = ";".join(f"f{number}() {{ echo {number}; ls; }}" for number in range(functions))
        await sandbox.runtime.exec(f"x=1;{named}", shell="bench")

        async def ours() -> None:
            checked(await sandbox.runtime.exec("true", shell="bench"), "")

        async def plain() -> None:
            checked(await sandbox.runtime.exec("true"), "")

        return await times_slower(clocked(ours), clocked(plain), pairs)


async def _many_against_host(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        ours = partial(_at_once, partial(_exec_true, sandbox.runtime))
        theirs = partial(_at_once, lambda: on_host(["true"], b""))
        return await times_faster(clocked(ours), clocked(theirs), pairs)


async def _at_once(action: Action) -> None:
    async def one_after_another() -> None:
        for _ in range(_CALLS_EACH):
            await action()

    async with anyio.create_task_group() as tasks:
        for _ in range(_IN_FLIGHT):
            tasks.start_soon(one_after_another)


async def _whole_against_docker(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        checked(await sandbox.runtime.exec(f"head -c {_WHOLE} /dev/urandom > whole"), "")
        cat = ["cat", "/workspace/whole"]

        async def ours() -> None:
            taken = list[int]()

            async def take(data: bytes) -> None:
                taken.append(len(data))

            checked(await sandbox.runtime.exec(cat, take=take), "")
            _check_whole(sum(taken))

        def theirs() -> None:
            docker = ["docker", "exec", sandbox.id, *cat]
            with subprocess.Popen(docker, stdout=subprocess.PIPE) as process:
                assert process.stdout
                read = partial(os.read, process.stdout.fileno(), CHUNK)
                _check_whole(sum(len(data) for data in iter(read, b"")))

        other = clocked(partial(in_thread, theirs))
        return await times_faster(clocked(ours), other, pairs)


def _check_whole(size: int) -> None:
    if size != _WHOLE:
        raise Failed(f"{size} bytes came, of {_WHOLE}")


async def _code_against_host(pairs: int) -> Measured:
    async with sandbox_in("docker") as sandbox:
        ours = partial(_run_print, sandbox.runtime)
        theirs = partial(on_host, [PYTHON, "-c", _PRINT], b"1\n")
        return await times_slower(clocked(ours), clocked(theirs), pairs)


ROWS = (
    Row(
        "exec",
        "exec true in a container",
        "asyncio subprocess true on the host",
        Goal(1.2),
        _exec_against_host,
        pairs=300,
    ),
    Row(
        "exec-docker",
        "exec true in a container",
        "docker-py exec_run true in it",
        Goal(20, at_least=True),
        _exec_against_docker,
    ),
    Row(
        "exec-many",
        f"exec true, {_IN_FLIGHT} in flight",
        f"asyncio subprocesses, {_IN_FLIGHT} in flight",
        Goal(1.5, at_least=True),
        _many_against_host,
        calls=_IN_FLIGHT * _CALLS_EACH,
    ),
    Row(
        "exec-shell",
        "exec true in a shell that remembers",
        "exec true in a container",
        Goal(2.5),
        _shell_against_exec,
        pairs=200,
    ),
    Row(
        "exec-shell-400",
        "exec true in a shell with 400 functions",
        "exec true in a container",
        Goal(10),
        partial(_shell_against_exec, functions=400),
        pairs=100,
    ),
    Row(
        "whole",
        "all of cat's 200 MB taken, docker",
        "docker exec cat of it",
        Goal(1, at_least=True),
        _whole_against_docker,
    ),
    Row(
        "run-code",
        "run_code print(1) in a container",
        "python3 -c print(1) on the host",
        Goal(0.4),
        _code_against_host,
        pairs=100,
    ),
)
