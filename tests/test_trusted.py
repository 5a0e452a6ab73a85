"""What a server goes by or runs is refused, at its door, where others may change it."""

import stat
from pathlib import Path

import anyio
import pytest

from mcp_sandbox.agents.hooks import load_hooks
from mcp_sandbox.config import load_config
from mcp_sandbox.errors import ConfigError
from tests.daemon.running import command, in_chat, listening, place, running


@pytest.mark.parametrize(
    ("opened_up", "mode"),
    [
        (".config/mcp-sandbox/mcp-sandbox.yaml", 0o666),
        (".config/mcp-sandbox", 0o777),
        (".config", 0o777),
        ("rules.yaml", 0o606),
        ("programs", 0o757),
        ("ca.pem", 0o646),
        (".local/state/mcp-sandbox", 0o777),
        ("s", 0o777),
    ],
)
async def test_a_server_does_not_start_with_what_others_can_change(
    opened_up: str, mode: int, tmp_path: Path
) -> None:
    where, config = place(tmp_path), tmp_path / ".config" / "mcp-sandbox"
    for folder in (config, tmp_path / "programs", where.data, where.socket.parent):
        folder.mkdir(parents=True, mode=0o700)
    (tmp_path / ".local" / "state" / "mcp-sandbox").mkdir(parents=True, mode=0o700)
    (tmp_path / "rules.yaml").write_text("[]\n")
    (tmp_path / "ca.pem").touch()
    (config / "mcp-sandbox.yaml").write_text(
        f"policy: {{rules: [{tmp_path}/rules.yaml]}}\n"
        f"agents: {{programs: {tmp_path}/programs}}\n"
        f"egress: {{ca_bundle: {tmp_path}/ca.pem}}\n"
    )
    async with running(where), in_chat(where, "c") as client:
        assert await client.exec("echo works") == "works\n"
    wrong = tmp_path / opened_up
    wrong.chmod(mode)
    refused = await command(where, "serve", "--data", str(where.data))
    assert refused.code == 1
    assert f"others may write to {wrong}: run `chmod go-w {wrong}`" in refused.err


def test_hooks_that_others_can_change_are_not_run(tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("raise SystemError('it ran')\n")
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=f"chmod go-w {file}"):
        load_hooks(file)


def test_a_configuration_file_that_is_named_is_checked_too(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text("backend: bubblewrap\n")
    assert load_config(file, variables={}).config.backend == "bubblewrap"
    file.chmod(0o602)
    with pytest.raises(ConfigError, match=f"chmod go-w {file}"):
        load_config(file, variables={})


@pytest.mark.parametrize(
    "backend", ["unsafe-local", pytest.param("bubblewrap", marks=pytest.mark.bubblewrap)]
)
async def test_others_may_change_nothing_that_a_server_makes_whatever_its_umask(
    backend: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    where = place(tmp_path, backend)
    how = {"MCP_SANDBOX_DATA_DIR": str(where.data), "MCP_SANDBOX_BACKEND": backend}
    unmasked = ["sh", "-c", 'umask 0; exec "$@"', "sh"]
    with anyio.fail_after(50):
        # The relay starts the daemon, which inherits its umask.
        async with await anyio.open_process(
            [*unmasked, *where.command("connect", "--chat", "c")],
            env={**where.environment(), **how},
            stdin=-1,
        ) as relay:
            await listening(where)
            async with in_chat(where, "c") as client:
                said = await client.exec("umask; touch /workspace/a; mkdir -p deep/er; ls ..")
                assert said.startswith("0022")
                await client.call("write_file", path="b/c", content="x")
            assert (await command(where, "shutdown", "--all")).code == 0
            relay.terminate()
    made = [each for each in tmp_path.rglob("*") if not each.is_symlink()]
    assert len(made) > 20
    assert [
        f"{each} {stat.filemode(each.lstat().st_mode)}"
        for each in made
        if each.lstat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ] == []
