"""A real browser without a window, driven over a pipe by its DevTools protocol."""

import json
import shutil
from base64 import b64decode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

_SWITCHES = (
    *("--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--window-size=800,400", "--hide-scrollbars"),
    # Whatever is not of this machine finds nobody.
    "--proxy-server=http://127.0.0.1:9",
)
_LIMIT_S = 30
_LARGEST = 32 << 20


def absent() -> str | None:
    """Return why there is no browser; None if there is one."""
    missing = shutil.which("chromium") is None
    return "chromium: a large download; apt-get install chromium" if missing else None


@dataclass
class Page:
    """A tab."""

    process: Process
    _events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _target: dict[str, str] = field(default_factory=dict[str, str])
    _last_id: int = 0

    def __post_init__(self) -> None:
        assert self.process.stdout
        self._heard = BufferedByteReceiveStream(self.process.stdout)

    async def ask(self, method: str, **params: object) -> dict[str, Any]:
        """The browser's answer."""
        self._last_id += 1
        asked = {"id": self._last_id, "method": method, "params": params, **self._target}
        assert self.process.stdin
        with anyio.fail_after(_LIMIT_S):
            await self.process.stdin.send(json.dumps(asked).encode() + b"\0")
            while (answer := await self._next()).get("id") != self._last_id:
                self._events.append(answer)
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    async def begin(self) -> None:
        """Open the tab, and listen to what it does in the network."""
        target = (await self.ask("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._target = {"sessionId": attached["sessionId"]}
        await self.ask("Network.enable")
        await self.ask("Page.enable")

    async def open(self, url: str) -> None:
        """Go to an address; returns when the page is loaded."""
        self._events.clear()
        gone = await self.ask("Page.navigate", url=url)
        assert "errorText" not in gone, gone
        await self.evaluate("document.readyState === 'complete' || new Promise(r => onload = r)")

    async def evaluate(self, expression: str) -> object:
        """The value of an expression, or of its promise."""
        answer = await self.ask(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        value: object = answer["result"].get("value")
        return value

    async def until(self, condition: str) -> None:
        """Wait until a condition holds in the page."""
        look = f"const look = () => ({condition}) ? done() : setTimeout(look, 20)"
        await self.evaluate(f"new Promise(done => {{ {look}; look() }})")

    async def text(self) -> object:
        return await self.evaluate("document.body.innerText")

    async def picture(self) -> bytes:
        """What is seen, as PNG."""
        return b64decode((await self.ask("Page.captureScreenshot"))["data"])

    async def noticed(self, event: str) -> dict[str, Any]:
        """What came with the first event of a name since the page was opened."""
        with anyio.fail_after(_LIMIT_S):
            while not (found := [each for each in self._events if each["method"] == event]):
                self._events.append(await self._next())
        params: dict[str, Any] = found[0]["params"]
        return params

    async def _next(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(await self._heard.receive_until(b"\0", _LARGEST))
        return answer


@asynccontextmanager
async def browsing(profile: Path) -> AsyncGenerator[Page]:
    """A browser that knows nothing yet, with a tab; it is asked to end at the end."""
    # It listens on descriptor 3 and answers on 4.
    start = 'exec 3<&0 4>&1 </dev/null >/dev/null 2>&1; exec chromium "$@"'
    command = ["sh", "-c", start, "sh", *_SWITCHES, f"--user-data-dir={profile}"]
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=PIPE) as process:
        try:
            page = Page(process)
            await page.begin()
            yield page
            page._target = {}
            await page.ask("Browser.close")
            with anyio.fail_after(_LIMIT_S):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
