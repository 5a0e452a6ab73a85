"""Programs that nobody has told anything install and fetch through a list of hosts."""

import pytest

from tests.e2e.doors import PLAIN, READ, Served, undisturbed
from tests.world.stock import WORD

pytestmark = pytest.mark.timeout(180)

_APT = """
mkdir -p apt/lists/partial apt/cache/archives/partial
echo 'deb [trusted=yes] http://deb.debian.org/debian tiny main' > apt/sources.list
: > apt/status
apt-get update -o Dir::Etc=$PWD/apt -o Dir::Etc::SourceParts=/dev/null \
  -o Dir::State=$PWD/apt -o Dir::State::status=$PWD/apt/status -o Dir::Cache=$PWD/apt/cache \
  -o APT::Sandbox::User= 2>&1
"""
_INDEX = "--index-url https://pypi.org/simple"
# The pip that a venv gets, run as it is delivered: unpacking it takes many times longer.
_DELIVERED = (
    "python3 -m venv --without-pip venv && export PYTHONPATH=$(python3 -c 'import ensurepip, glob\n"
    'places = ensurepip.__path__[0] + "/_bundled", "/usr/share/python-wheels"\n'
    'print(*[name for each in places for name in glob.glob(each + "/pip-*.whl")])\') && '
    f"venv/bin/python -m pip install -q {_INDEX} tiny && venv/bin/python -m tiny"
)
# What each runs, and what its output or what it leaves says.
CLIENTS = {
    "curl": (f"curl -sSf https://{PLAIN}/a", '"path": "/a"'),
    "wget": (f"wget -q -O - https://{PLAIN}/a && wget -q -O - http://{PLAIN}/b", '"path": "/b"'),
    "git": ("git clone -q https://github.com/demo.git clone && cat clone/README", WORD),
    "pip": (
        f"python3 -m pip install -q --no-input {_INDEX} --target pip tiny && PYTHONPATH=pip "
        "python3 -m tiny",
        WORD,
    ),
    "venv": (
        f"python3 -m venv venv && venv/bin/pip install -q {_INDEX} tiny && venv/bin/python -m tiny",
        WORD,
    ),
    "apt": (_APT, "Reading package lists"),
    "urllib": (
        "python3 -c 'from urllib.request import urlopen\n"
        f'print(urlopen("https://{PLAIN}/a").read(), urlopen("http://{PLAIN}/b").read())\'',
        '"path": "/b"',
    ),
    "npm": (
        "mkdir -p npm && cd npm && npm install --registry https://registry.npmjs.org tiny && "
        "node -e 'require(\"tiny\")'",
        WORD,
    ),
    "node": (
        f"node -e 'fetch(\"https://{PLAIN}/a\").then(got => got.text()).then(console.log)'",
        '"path": "/a"',
    ),
}
# What each runs, and the exit codes that say that it failed.
WRITERS = {
    "git push": (
        "git init -q push && cd push && git commit -q --allow-empty -m One && "
        "git push https://bot:password123@github.com/demo.git HEAD:refs/heads/new",
        {1, 128},
    ),
    "curl -d": (f"curl -sS --fail-with-body -d stolen https://{READ}/", {22}),
    "publish": (
        "mkdir -p publish && cd publish && "
        'echo \'{"name": "tiny", "version": "2.0.0"}\' > package.json && '
        "npm publish --registry https://registry.npmjs.org "
        "--//registry.npmjs.org/:_authToken=stolen",
        {1},
    ),
}


async def skip_without(served: Served, program: str) -> None:
    """npm and Node are in the image; in bubblewrap they are the machine's, which may be old."""
    name = {"npm": "npm", "node": "node", "publish": "npm", "apt": "apt-get"}.get(program)
    if name is None or served.backend != "bubblewrap":
        return
    said = await served.chat.bash(f"command -v {name} && node --version")
    if "/" not in said:
        pytest.skip(f"this machine has no {name}")
    if program == "node" and [int(part) for part in said.split()[1][1:].split(".")[:2]] < [22, 21]:
        pytest.skip(f"this machine has Node {said.split()[1]}, which knows no proxy")


@pytest.mark.parametrize("name", CLIENTS)
async def test_it_works_as_it_does_anywhere(served: Served, name: str) -> None:
    await skip_without(served, name)
    command, expected = CLIENTS[name]
    if name == "venv" and served.backend != "docker":
        command = _DELIVERED
    with undisturbed(served.world):
        said = await served.chat.bash(f"({command}) 2>&1; echo exit $?", timeout_s=120)
    assert expected in said, said
    assert "exit 0" in said, said


@pytest.mark.parametrize("name", WRITERS)
async def test_it_is_told_that_it_may_only_read(served: Served, name: str) -> None:
    await skip_without(served, name)
    command, codes = WRITERS[name]
    with undisturbed(served.world), served.world.hearing("http") as heard:
        said = await served.chat.bash(f"({command}) 2>&1; echo exit $?", timeout_s=120)
    printed, _, ended = said.partition("exit ")
    assert int(ended.split()[0]) in codes, said
    assert "refused" in printed, said
    assert "read" in printed, said
    assert not [each for each in heard if each["method"] not in ("GET", "HEAD")]
    assert "stolen" not in str([each["body"] for each in heard])
