import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.attacks import BUBBLEWRAP, DOCKER, GVISOR, UNSAFE, if_whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend_name",
    # In bubblewrap it is run for the README.
    [DOCKER, *(if_whole(place) for place in (BUBBLEWRAP, GVISOR, UNSAFE))],
    indirect=True,
)
def test_demonstration_goes_from_a_client_into_a_sandbox_and_back(
    backend_name: str, tmp_path: Path
) -> None:
    file = tmp_path / "mcp-sandbox.yaml"
    backend = "docker" if backend_name == "docker-runsc" else backend_name
    runtime = "runsc" if backend_name == "docker-runsc" else ""
    file.write_text(yaml.safe_dump({"backend": backend, "docker": {"runtime": runtime}}))
    done = subprocess.run(
        [sys.executable, "-m", "mcp_sandbox", "demo", "--config", str(file)],
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"Backend: {backend}" in done.stdout
    assert "37550402023" in done.stdout
    assert done.stdout.count("Hello, sandbox!") >= 4
    assert done.stdout.endswith("Done: nothing was left running.\n")
    assert list(tmp_path.glob("mcp-sandbox-*")) == []
