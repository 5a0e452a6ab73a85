"""The platform of docs/platform.md, word by word, on a real server, object store and Redis."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from anyio import to_thread

from mcp_sandbox import RemoteSandbox
from tests.control.daemon import platform, token
from tests.rclone import S3Server
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "platform.md").read_text()

pytestmark = [pytest.mark.anyio, pytest.mark.s3, pytest.mark.bubblewrap]


async def test_the_platform_does_what_its_page_says(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    store = await to_thread.run_sync(S3Server, tmp_path / "s3" / "buckets")
    try:
        async with platform(tmp_path / "data", "bubblewrap", store.variables()) as here:
            secret = await token(here.place, "ada", "control")
            place = {"SANDBOX_URL": here.url, "SANDBOX_TOKEN": secret, "HOME": str(tmp_path)}
            known = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", program]
            run = partial(subprocess.run, command, timeout=50, check=False)
            run = partial(run, capture_output=True, text=True)
            done = await to_thread.run_sync(partial(run, env={**known, **place}))
            place["SANDBOX_TOKEN"] = "mcs_of_nobody"
            refused = await to_thread.run_sync(partial(run, env={**known, **place}))
        assert (refused.returncode, refused.stdout) == (1, "")
        assert "`mcp-sandbox token add USER`" in refused.stderr
        assert done.stderr == ""
        said = re.findall(r"print\(.*\)  # (.*)", program)
        assert done.stdout.split() == " ".join(said).split()
    finally:
        await to_thread.run_sync(store.close)


@pytest.mark.redis
async def test_a_runtime_hears_from_redis_that_its_sandbox_is_there(tmp_path: Path) -> None:
    server = await to_thread.run_sync(RedisServer)
    try:
        more = {"MCP_SANDBOX_FLEET__REDIS": server.url}
        async with platform(tmp_path, "bubblewrap", more) as here:
            secret = await token(here.place, "ada", "control")
            session = await here.prepare("told")
            async with RemoteSandbox(here.url, secret, redis=server.url) as sandbox:
                await sandbox.wait_and_connect(session)
                assert (await sandbox.run_command("echo here")).stdout == "here\n"
    finally:
        await to_thread.run_sync(server.close)
