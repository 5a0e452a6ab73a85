"""A secret reaches the hosts it is for, and nothing inside ever has it."""

import base64
import json
import re

import anyio
import pytest
from anyio import to_thread

from tests.daemon.running import Done
from tests.e2e.doors import (
    BOUND,
    BROKEN,
    CODE,
    GIT_TOKEN,
    PLAIN,
    TOKEN,
    Served,
    in_bubblewrap,
    statuses,
    undisturbed,
)

pytestmark = pytest.mark.timeout(120)
CURL = f'curl -sS -H "Authorization: Bearer $API_TOKEN" https://{BOUND}'


def sent(heard: list[dict[str, object]], name: str) -> list[str]:
    """The values of a header of requests that came."""
    return [
        value
        for each in heard
        for header, value in each["headers"]  # type: ignore[attr-defined]
        if header.lower() == name
    ]


def forms(value: str) -> set[bytes]:
    """A value in every way that a search should find."""
    raw = value.encode()
    found = {raw, json.dumps(value)[1:-1].encode()}
    found.add("".join(f"%{each:02X}" for each in raw).encode())
    for offset in range(3):
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            # What stands at both ends mixes with what is beside it.
            found.add(encode(b"-" * offset + raw)[4:-4])
    return found


def assert_nowhere(value: str, said: str) -> None:
    found = [form for form in forms(value) if form in said.encode()]
    assert not found, (found, said)


async def test_the_bound_host_gets_it_and_the_sandbox_a_placeholder(served: Served) -> None:
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(
            f"echo $API_TOKEN; {CURL}/bearer\n"
            f'curl -sS -u "bot:$API_TOKEN" https://{BOUND}/basic\n'
            f'curl -sS -H "X-Api-Key: $KEY_TOKEN" https://{BOUND}/key'
        )
    assert re.match(r"mcps_API_TOKEN_[0-9a-f]{32}\n", said)
    bearer, basic = sent(heard, "authorization")
    assert bearer == f"Bearer {TOKEN}"
    assert base64.b64decode(basic.removeprefix("Basic ")).decode() == f"bot:{TOKEN}"
    assert sent(heard, "x-api-key") == [TOKEN]
    assert_nowhere(TOKEN, said)


@in_bubblewrap
async def test_a_request_too_long_to_be_filled_in_harms_no_one(served: Served) -> None:
    # Six bytes for each of these: some of them are just too long with what is put in.
    begun = f"GET / HTTP/1.1\r\nHost: {BOUND}\r\nX: ".encode()
    heads = [begun + b"\xff" * size + b"\r\n\r\n" for size in range(21_780, 21_840)]
    assert set(statuses(await served.chat.knock(*heads, tls=BOUND, most=99))) <= {0, 200, 502}
    assert '"path": "/after"' in await served.chat.bash(f"{CURL}/after")


async def test_git_pushes_with_it(served: Served) -> None:
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(
            "git init -q secret && cd secret && git commit -q --allow-empty -m One && "
            f"git push -q https://bot:$GIT_TOKEN@{CODE}/demo.git "
            f"HEAD:refs/heads/{served.backend} 2>&1; echo exit $?"
        )
    assert "exit 0" in said, said
    expected = base64.b64encode(f"bot:{GIT_TOKEN}".encode()).decode()
    assert set(sent(heard, "authorization")) == {f"Basic {expected}"}
    assert_nowhere(GIT_TOKEN, said)


@in_bubblewrap
@pytest.mark.parametrize(
    "form",
    [
        *("plain", "json", "percent", "bytewise", "header", "location", "gzip"),
        *(f"{kind}-{offset}" for kind in ("base64", "urlsafe") for offset in range(3)),
    ],
)
async def test_what_gives_it_back_is_masked(served: Served, form: str) -> None:
    said = await served.chat.bash(f"{CURL}/said/{form} -D - -o body; cat body; wc -c < body")
    assert_nowhere(TOKEN, said)
    if form == "gzip":
        assert " 502 " in said
    else:
        assert re.search(r" (200|302) ", said), said


async def test_it_is_nowhere_inside_nor_in_what_we_keep(served: Served) -> None:
    await served.chat.bash(f"{CURL}/a; {CURL}/said/plain")
    # In two halves, so that the searching program does not find itself.
    said = await served.chat.python(_SEARCH.format(halves=[[t[:7], t[7:]] for t in _VALUES]))
    found, looked, has_placeholder = json.loads(said.splitlines()[0])
    assert not found
    assert looked > 50
    assert has_placeholder > 0, "the memory of a process could be read"
    kept = await to_thread.run_sync(_searched, served)
    assert not kept
    if served.backend != "bubblewrap":
        inspected = await to_thread.run_sync(_inspected, served)
        assert "mcp-sandbox" in inspected
        assert not [value for value in _VALUES if value in inspected]


_VALUES = (TOKEN, GIT_TOKEN)
_SEARCH = """
import json, os, subprocess, sys
needles = ["".join(each).encode() for each in {halves}]
found, looked, placeholder, has_placeholder = [], 0, os.environ["API_TOKEN"].encode(), 0
# It has sent the secret, read what was said of it, and is still there to be looked into.
user = subprocess.Popen([sys.executable, "-c", '''
import os, urllib.request
headers = {{"Authorization": "Bearer " + os.environ["API_TOKEN"]}}
for path in ("a", "said/plain", "said/header", "said/base64-1"):
    request = urllib.request.Request("https://api.example.com/" + path, headers=headers)
    urllib.request.urlopen(request).read()
print(flush=True)
input()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
user.stdout.readline()

def look(path):
    global looked
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        data = os.read(fd, 1 << 20)
    except OSError:
        return
    finally:
        os.close(fd)
    looked += 1
    if any(needle in data for needle in needles):
        found.append(path)

def look_into(pid):
    global looked, has_placeholder
    try:
        memory = open(f"/proc/{{pid}}/mem", "rb", 0)
        parts = open(f"/proc/{{pid}}/maps").read().splitlines()
    except OSError:
        return
    for part in parts:
        try:
            start, end = (int(each, 16) for each in part.split()[0].split("-"))
            memory.seek(start)
            data = memory.read(min(end - start, 64 << 20))
        except (OSError, ValueError, OverflowError):
            continue
        looked += 1
        has_placeholder += placeholder in data
        if any(needle in data for needle in needles):
            found.append(f"memory of {{pid}}: {{part}}")

for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {{str(os.getpid())}}:
    look_into(pid)
    for name in ("environ", "cmdline"):
        look(f"/proc/{{pid}}/{{name}}")
for top in ("/workspace", "/home", "/tmp", "/run", "/etc", "/opt", "/var/tmp"):
    for folder, _, names in os.walk(top):
        for name in names:
            look(os.path.join(folder, name))
user.kill()
print(json.dumps([found, looked, has_placeholder]))
"""


def _searched(served: Served) -> list[str]:
    """Our own files that hold a value, beside the sources; and the log. Blocks."""
    needles = [form for value in _VALUES for form in forms(value)]
    files = [path for path in served.place.data.rglob("*") if path.is_file()]
    found = [str(path) for path in files if any(each in path.read_bytes() for each in needles)]
    if any(needle in served.daemon.log.encode() for needle in needles):
        found.append("the log")
    return found


def _inspected(served: Served) -> str:
    import docker

    engine = docker.from_env()
    try:
        known = engine.containers.list(filters={"label": "app=mcp-sandbox"})
        return json.dumps([each.attrs for each in known])
    finally:
        engine.close()


async def test_elsewhere_the_placeholder_goes_out_as_it_is(served: Served) -> None:
    bearer = '-H "Authorization: Bearer $API_TOKEN"'
    with undisturbed(served.world), served.world.hearing("http") as heard:
        await served.chat.bash(
            f'curl -sS -H "X-Other: $API_TOKEN" https://{BOUND}/header\n'
            f'curl -sS -d "$API_TOKEN" https://{BOUND}/body\n'
            f'curl -sS "https://{BOUND}/url?$API_TOKEN"\n'
            f"curl -sS {bearer} https://{PLAIN}/host\n"
            f"curl -sS {bearer} http://{BOUND}/http\n"
            f"curl -sSL --location-trusted {bearer} "
            f"https://{BOUND}/redirect?https%3A%2F%2F{PLAIN}%2Fredirected\n"
            f'curl -sS -H "Authorization: Bearer $ANNS_TOKEN" https://{BOUND}/user\n'
        )
        (mine,) = (await served.chat.bash("echo $API_TOKEN")).split()[:1]
        async with served.other("thief") as thief:
            said = await thief.bash(
                f'curl -sS -H "Authorization: Bearer {mine}" https://{BOUND}/stolen; '
                "echo $API_TOKEN"
            )
    reached = {each["path"].partition("?")[0]: json.dumps(each) for each in heard}
    expected = {"header", "body", "url", "host", "http", "redirected", "user", "stolen"}
    assert {f"/{each}" for each in expected} <= set(reached)
    # The one request that may have it is the one that is answered by the redirect.
    del reached["/redirect"]
    assert not [each for each in reached.values() if json.dumps(TOKEN)[1:-1] in each]
    assert mine not in said.splitlines()[-1]
    for path in ("/header", "/body", "/url", "/host", "/http", "/redirected", "/stolen"):
        assert mine in reached[path], path


@in_bubblewrap
async def test_people_see_which_secrets_can_be_had_and_an_agent_what_is_wrong(
    served: Served,
) -> None:
    checked: list[Done] = []

    async def check() -> None:
        checked.append(await served.people("secrets check", asks=False))

    with anyio.fail_after(40):
        # A source may take ten seconds: all of them at once.
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(check)
            said = await served.chat.bash(
                "".join(
                    f'curl -sS -i -H "Authorization: Bearer ${name.upper()}_TOKEN" '
                    f"https://broken-{name}.example.net/ > {name} &\n"
                    for name in BROKEN
                )
                + f"wait; grep -H . {' '.join(BROKEN)}"
            )
    answers, _, told = said.partition("[network:")
    for name in BROKEN:
        variable = f"{name.upper()}_TOKEN"
        assert f"{name}:HTTP/1.1 502 " in answers, said
        assert re.search(rf"{name}:.*{variable}", answers), said
        assert variable in checked[0].out, checked
    assert "_TOKEN" in told
    assert checked[0].code == 1, "broken sources are among them"
    assert str(len(TOKEN)) in checked[0].out
    listed = await served.people("secrets list", asks=False)
    for done in (listed, *checked):
        assert "API_TOKEN" in done.out, done
        assert BOUND in done.out
        assert_nowhere(TOKEN, done.out + done.err)
        assert_nowhere(GIT_TOKEN, done.out + done.err)
