import subprocess
import sys

import pytest

import mcp_sandbox

PROMISED = [
    "CallerError",
    "ChatId",
    "CommandFailed",
    "Config",
    "ExecResult",
    "OperatorError",
    "RemoteSandbox",
    "SandboxError",
    "SandboxGone",
    "Session",
    "load_config",
    "open_agent",
    "open_session",
]


def test_public_names_are_the_promised_ones() -> None:
    assert sorted(mcp_sandbox.__all__) == PROMISED
    assert dir(mcp_sandbox) == PROMISED


@pytest.mark.parametrize("name", PROMISED)
def test_every_public_name_can_be_used_and_is_documented(name: str) -> None:
    assert getattr(mcp_sandbox, name).__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        mcp_sandbox.nothing  # noqa: B018


def imported_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_else_of_ours() -> None:
    modules = imported_after("import mcp_sandbox")
    assert {name for name in modules if name.startswith("mcp_sandbox")} == {"mcp_sandbox"}
    assert not modules & {"pydantic", "anyio", "mcp", "docker", "yaml"}


def test_command_line_starts_without_the_heavy_libraries() -> None:
    assert not imported_after("import mcp_sandbox.cli") & {"mcp", "docker", "mcp_sandbox.server"}


def test_one_machine_loads_nothing_of_several() -> None:
    rooms = ("app.daemon", "app.chats", "sessions.manager", "web.uvicorn_server", "doctor.machine")
    modules = imported_after("import " + ", ".join(f"mcp_sandbox.{room}" for room in rooms))
    assert not modules & {"redis", "obstore", "fastapi"}
    assert not {name for name in modules if name.endswith((".leases", ".passing_on"))}


def test_one_machine_alone_imports_no_library_of_what_it_does_not_use() -> None:
    opened = (
        "import anyio, tempfile, pathlib\n"
        "from mcp_sandbox.app.chats import open_manager\n"
        "from mcp_sandbox.config import Config\n"
        "async def main():\n"
        "    with tempfile.TemporaryDirectory() as folder:\n"
        "        config = Config(data_dir=pathlib.Path(folder), backend='noop')\n"
        "        async with open_manager(config): pass\n"
        "anyio.run(main)"
    )
    assert not imported_after(opened) & {"redis", "obstore", "fastapi", "e2b"}
