"""`mcp-sandbox`, whose event loop SIGUSR1 blocks by waiting, and SIGUSR2 by computing."""

import asyncio
import runpy
import signal
import time


def block(*_: object) -> None:
    asyncio.get_running_loop().call_soon_threadsafe(time.sleep, 1.2)


async def compute() -> None:
    end_s = time.thread_time() + 0.3
    while time.thread_time() < end_s:
        pass


def busy(*_: object) -> None:
    loop = asyncio.get_running_loop()
    loop.call_soon_threadsafe(lambda: setattr(loop, "computed", loop.create_task(compute())))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, block)
    signal.signal(signal.SIGUSR2, busy)
    runpy.run_module("mcp_sandbox", run_name="__main__", alter_sys=True)
