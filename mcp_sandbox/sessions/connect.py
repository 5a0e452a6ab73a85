"""Connects to a sandbox's runner, and makes sure that it has the directories that it should."""

from anyio import to_thread
from anyio.abc import TaskGroup

from mcp_sandbox.backends.base import Sandbox
from mcp_sandbox.errors import SandboxGone
from mcp_sandbox.runtime.channel import Channel
from mcp_sandbox.runtime.runtime import Runtime
from mcp_sandbox.workspace.directory import ChatDirectories


async def connect(
    sandbox: Sandbox, directories: ChatDirectories, tasks: TaskGroup, keep_bytes: int
) -> Runtime:
    """Open a connection that is read in `tasks`.

    Raises:
        SandboxGone: the runner cannot be reached, or its workspace is another directory.
    """
    channel = Channel(await sandbox.open_channel(), sandbox.token)
    await channel.open(tasks)
    runtime = Runtime(channel, keep_bytes=keep_bytes)
    try:
        await _check(runtime, directories)
    except BaseException:
        await runtime.aclose()
        raise
    return runtime


async def _check(runtime: Runtime, directories: ChatDirectories) -> None:
    """The mount must show the chat's own directory, not what took its place meanwhile."""
    hello = runtime.hello
    if hello.workspace_inode != directories.workspace_inode:
        found = await to_thread.run_sync(directories.workspace.lstat)
        if hello.workspace_changed_ns != found.st_ctime_ns:
            raise SandboxGone("the sandbox came up without this chat's workspace; try again")
