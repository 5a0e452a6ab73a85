"""`mcp-sandbox`, in which SIGUSR1 blocks the event loop for longer than the watch of it allows."""

import asyncio
import runpy
import signal
import time


def block(*_: object) -> None:
    asyncio.get_running_loop().call_soon_threadsafe(time.sleep, 1.2)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, block)
    runpy.run_module("mcp_sandbox", run_name="__main__", alter_sys=True)
