"""The same files under further paths, the same on every backend that has mounts."""

from mcp_sandbox.app.chats import open_manager
from mcp_sandbox.config import Config
from mcp_sandbox.models import ChatId

_ALIASES = (
    "/workspace/{user}/chat-{chat}",
    "/mnt/user-data/workspace",
    "/mnt/user-data/uploads=uploads",
    "/mnt/user-data/outputs=outputs",
)


async def test_every_alias_shows_the_same_bytes_and_takes_writes(config: Config) -> None:
    workspace = config.workspace.model_copy(update={"aliases": _ALIASES})
    aliased = config.model_copy(update={"workspace": workspace})
    async with open_manager(aliased) as manager:
        session = await manager.session(ChatId("ann", "7"))
        await session.write_file("/mnt/user-data/uploads/in.txt", b"uploaded")
        await session.exec("cat uploads/in.txt > /mnt/user-data/outputs/out.txt")
        for path in (
            "outputs/out.txt",
            "/workspace/outputs/out.txt",
            "/workspace/ann/chat-7/outputs/out.txt",
            "/mnt/user-data/workspace/outputs/out.txt",
            "/mnt/user-data/outputs/out.txt",
        ):
            assert (await session.read_file(path)).data == b"uploaded", path
        found = await session.grep("uploaded", "/mnt/user-data/workspace/uploads")
        assert found.matches == 1


async def test_a_new_workspace_gets_its_directories_when_asked(config: Config) -> None:
    workspace = config.workspace.model_copy(update={"subdirectories": True})
    async with open_manager(config.model_copy(update={"workspace": workspace})) as manager:
        session = await manager.session(ChatId("ann", "8"))
        names = {entry.path for entry in (await session.list_files(depth=2)).entries}
        assert {"code", "data", "output", "artifacts", "temp", ".memory"} <= names
        assert ".memory/task_plan.md" in names
        assert (await session.exec("echo fine > code/x && cat code/x")).stdout == "fine\n"
