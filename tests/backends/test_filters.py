"""The filter of containers and the filter of bubblewrap let the same calls through."""

import re
from pathlib import Path

import pytest

from mcp_sandbox.backends.bubblewrap import seccomp
from mcp_sandbox.backends.docker.spec import profile
from tests.backends.test_bubblewrap_parts import ALLOW, verdict

HEADER = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
# Their arguments are looked into.
CONDITIONAL = {"socket", "socketpair", "clone", "personality"}


def allowed_in_containers() -> set[str]:
    rules = [rule for rule in profile()["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    return {name for rule in rules for name in rule["names"]}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_no_call_that_one_refuses_passes_the_other(machine: str) -> None:
    assert set(seccomp.REFUSED[machine]) & allowed_in_containers() == set()


def test_both_agree_on_every_call_of_the_kernels_headers() -> None:
    if not HEADER.exists():
        pytest.skip("the kernel's headers of x86-64 (linux-libc-dev) are not installed")
    calls = re.findall(r"#define __NR_(\w+) (\d+)\n", HEADER.read_text())
    assert len(calls) > 300
    allowed = allowed_in_containers()
    assert {
        name
        for name, number in calls
        if name not in CONDITIONAL
        and (name in allowed) != (verdict("x86_64", int(number)) == ALLOW)
    } == set()
