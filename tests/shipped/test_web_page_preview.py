"""A page is checked as a browser would fetch it, and becomes one file."""

import io
import re
import tarfile
from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from anyio import to_thread
from mcp import Client
from mcp.types import CallToolResult

from mcp_sandbox.sessions.session import Session
from tests.conftest import npm_folder
from tests.e2e import npm
from tests.e2e.attacks import on_docker_if_whole
from tests.server.scripted import text_of
from tests.shipped.conftest import META, call, learn, run
from tests.shipped.texts import SHIPPED, calls, commands

NAME = "web-page-preview"
SCRIPTS = f"python3 /opt/skills/{NAME}/scripts"
BAD = b"""\
<html><head><link rel="stylesheet" href="style.css"><script src="app.js" defer></script></head>
<body><h1>x<div><span>b</div></b><img src="p.png"><img src="q.png" alt="q">
<a href="no.html"></a><a href="index.html#zz">z</a><a href="/workspace/x">x</a>
<script src="https://cdn.example/x.js"></script><input><p id="i"><p id="i">
<script>let = = 3;</script><script src="text.txt"></script>
<a href="https://example.com">e</a></body></html>
"""
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width"><title>t</title>'
)


async def test_every_command_works_as_written(session: Session, client: Client) -> None:
    await learn(session, NAME)
    build, check, check_server, bundle, pack = commands(NAME)
    await run(session, f"{build}echo '<!-- mine -->' >> site/index.html")
    fine = "1 pages, 0 other files, 0 links to other hosts (not followed): no problems\n"
    assert (await run(session, check)).stdout == fine
    static, preview, *_ = calls(NAME)
    await call(client, static)
    assert (await run(session, check_server)).stdout == fine
    assert "<!-- mine -->" in await page_at(await call(client, preview))
    assert "outputs/page.html" in (await run(session, bundle)).stdout
    await run(session, pack)
    assert (await run(session, "unzip -Z1 outputs/site.zip")).stdout == "index.html\n"


async def test_a_python_server_is_shown_and_started_again_as_written(
    session: Session, client: Client
) -> None:
    (program,) = commands(NAME, language="python")
    await session.write_file("app.py", program)
    _, _, start, preview, _, _, stop = calls(NAME)
    begun = await call(client, start)
    shown = await call(client, preview)
    assert await page_at(shown) == "<h1>It works</h1>"
    await call(client, stop, id=(begun.meta or {})[META]["process"])
    await session.write_file("app.py", program.replace("It works", "Again"))
    await call(client, start)
    assert address_in(await call(client, preview)) == address_in(shown)
    assert await page_at(shown) == "<h1>Again</h1>"


@on_docker_if_whole
@pytest.mark.vite
async def test_a_vite_project_is_shown_as_written(
    session: Session, client: Client, pytestconfig: pytest.Config
) -> None:
    installed = npm.installed("vite", npm_folder(pytestconfig)).parent
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        # Node is there.
        for folder in sorted(installed.iterdir()):
            if not folder.name.startswith("node"):
                tar.add(folder, f"app/node_modules/{folder.name}")
    await session.write_file("app.tar", packed.getvalue())
    await run(session, "tar -xf app.tar && rm app.tar")
    await session.write_file("app/index.html", "<script type='module' src='/main.js'></script>")
    await session.write_file("app/main.js", "document.body.append('ready')")
    *_, start, preview, _ = calls(NAME)
    await call(client, start)
    assert "/@vite/client" in await page_at(await call(client, preview))


def address_in(result: CallToolResult) -> str:
    """The URL that a preview answers."""
    found = re.search(r"http://\S+", text_of(result))
    assert found
    return found[0]


async def page_at(result: CallToolResult) -> str:
    """What a browser gets at the URL of a preview: it looks for every *.localhost here."""
    url = urlsplit(address_in(result))

    def fetch() -> str:
        with closing(HTTPConnection("127.0.0.1", url.port or 80, timeout=20)) as connection:
            connection.request("GET", url.path, headers={"Host": url.netloc})
            answer = connection.getresponse()
            assert answer.status == 200
            return answer.read().decode()

    return await to_thread.run_sync(fetch)


@on_docker_if_whole
async def test_every_kind_of_problem_is_found_and_explained(session: Session) -> None:
    await learn(session, NAME)
    index = HEAD + '</head><body><a href="bad.html">b</a><a href="bad.html#i">i</a></body></html>'
    await session.write_file("site/index.html", index.encode())
    await session.write_file("site/bad.html", BAD + b"\xe9")
    await session.write_file("site/style.css", b"body{background:url(img/bg.png)}")
    await session.write_file("site/app.js", b"import './no.js';\n\nconst a = ;\n")
    await session.write_file("site/text.txt", b"no script")
    await session.write_file("site/p.png", b"\x89PNG\r\n")
    result = await run(session, f"{SCRIPTS}/check_site.py site", code=1)
    found = set(re.findall(r"^\S+: ([a-z0-9-]+): ", result.stdout, re.MULTILINE))
    limited = await run(session, f"{SCRIPTS}/check_site.py site --max-pages 1", code=1)
    found |= set(re.findall(r": (too-many): ", limited.stdout))
    text = (SHIPPED / NAME / "references/checks.md").read_text(encoding="utf-8")
    assert found == set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE))
    lines = result.stdout.splitlines()
    assert "bad.html:3: broken-link: no.html: answers 404" in lines
    assert "style.css: broken-link: img/bg.png: answers 404" in lines
    assert "bad.html:3: missing-anchor: nothing has id='zz'" in lines
    assert any(line.startswith("app.js:3: script-error: SyntaxError") for line in lines)
    assert any(line.startswith("bad.html:5: script-error: SyntaxError") for line in lines)


@on_docker_if_whole
async def test_without_a_page_or_a_server_it_says_so(session: Session) -> None:
    await learn(session, NAME)
    none = await run(session, f"{SCRIPTS}/check_site.py nosuch", code=2)
    assert none.stderr == "check_site.py: there is no nosuch\n"
    closed = await run(session, f"{SCRIPTS}/check_site.py http://127.0.0.1:9/", code=2)
    assert "Connection refused" in closed.stderr


@on_docker_if_whole
async def test_one_file_has_all_that_the_page_needs(session: Session) -> None:
    await learn(session, NAME)
    page = (
        HEAD + '<link rel="stylesheet" href="a/s.css"><script src="late.js" defer></script>'
        '<script src="now.js"></script></head><body><img alt="p" src="p.png"></body></html>\n'
    )
    await session.write_file("site/index.html", page.encode())
    await session.write_file("site/a/s.css", b"b{background:url('../p.png')}")
    await session.write_file("site/late.js", b"document.body; // </script>\n")
    await session.write_file("site/now.js", b"let now = 1;\n")
    await session.write_file("site/p.png", b"\x89PNG")
    bundle = f"{SCRIPTS}/bundle_page.py site/index.html"
    await run(session, f"{bundle} one.html")
    text = (await session.exec("cat one.html")).stdout
    assert text.count("data:image/png;base64,iVBORw==") == 2
    assert text.index("let now = 1;") < text.index("<body>") < text.index("document.body;")
    assert "<\\/script" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    checked = await run(session, f"{SCRIPTS}/check_site.py one.html")
    assert checked.stdout.startswith("1 pages, 0 other files")
    await session.write_file("secret.css", b"b{}")
    outside = page.replace("a/s.css", "../secret.css").replace("now.js", "https://x.example/n.js")
    await session.write_file("site/index.html", outside.encode())
    left = (await run(session, f"{bundle} two.html", code=1)).stdout
    assert "left outside: ../secret.css\n" in left
    assert "left outside: https://x.example/n.js\n" in left
