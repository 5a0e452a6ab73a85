"""A machine behind a company's proxy, with hosts of an authority that only the operator knows."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import forwarder
from tests.e2e.attacks import BUBBLEWRAP, DOCKER
from tests.e2e.doors import PLAIN, placed, served
from tests.world import COMPANY, COMPANY_AT, ROOT, World, entering

pytestmark = pytest.mark.timeout(120)
WHOLE, READ = (f"{name}.example.org:{COMPANY_AT[1]}" for name in ("whole", "read"))


@contextmanager
def company_proxy(world: World) -> Iterator[None]:
    """It listens in the world while the block lasts."""
    start = [*entering(world.pid), sys.executable, "-m", "benchmarks.forwarder"]
    with subprocess.Popen(start, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("backend", [DOCKER, BUBBLEWRAP])
async def test_what_a_company_trusts_is_trusted_and_all_goes_through_its_proxy(
    world: World, tmp_path: Path, backend: str
) -> None:
    host, _, port = READ.partition(":")
    allow = [PLAIN, WHOLE, {"host": host, "port": int(port), "read": True}]
    upstream = f"http://127.0.0.1:{forwarder.PORT}"
    egress = {
        "allow": allow,
        "ca_bundle": str(world.folder / COMPANY),
        "upstream_proxy": upstream,
    }
    where = placed(world, tmp_path, backend, {"egress": egress, "secrets": {}})
    fetch = "; ".join(
        f"curl -sS -o /dev/null -w '%{{http_code}} ' https://{each}/"
        for each in (PLAIN, WHOLE, READ)
    )
    async with served(world, where, backend) as opened:
        with company_proxy(world):
            assert (await opened.chat.bash(fetch)).startswith("200 200 200 "), "by the proxy"
        without = await opened.chat.bash(f"{fetch} 2>&1")
        assert "200" not in without
        assert f"refused {PLAIN}:443" in without
        # Names can be judged, addresses cannot: a person is told so.
        doctor = await opened.people("doctor", asks=False)
        assert upstream in doctor.out + doctor.err


async def test_without_its_authority_a_companys_host_is_not_trusted(
    world: World, tmp_path: Path
) -> None:
    where = placed(world, tmp_path, "bubblewrap", {"egress": {"allow": [WHOLE]}, "secrets": {}})
    async with served(world, where, "bubblewrap") as opened:
        said = await opened.chat.bash(f"curl -sS https://{WHOLE}/ 2>&1")
        assert "self-signed certificate" in said or "unable to get local issuer" in said, said
