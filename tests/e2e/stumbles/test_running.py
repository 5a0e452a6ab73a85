"""What running something says: no network, missing packages, colours, progress bars, JavaScript."""

import pytest

from tests.e2e.attacks import WHOLE
from tests.e2e.stumbles.conftest import Agent
from tests.server.scripted import text_of

OFFLINE = "[this computer has no network: nothing can be downloaded; sandbox_info lists what is"
OPEN = pytest.mark.parametrize("settings", [{"network": "open"}])


async def failed(agent: Agent, command: str) -> str:
    """The text of a command that does not exit with 0."""
    result = await agent.call("exec", command=command)
    assert result.meta["mcp-sandbox/result"]["exit_code"] != 0, text_of(result)
    return text_of(result)


async def javascript(agent: Agent, code: str) -> str:
    return await agent.told("run_code", code=code, language="javascript")


@pytest.mark.parametrize(
    "command",
    [
        "pip install requests",
        pytest.param("python3 -m venv v && v/bin/pip install requests", marks=WHOLE),
        "git clone https://github.com/a/b",
        "curl -sS https://example.com",
        "curl -sS http://192.0.2.1",
        "wget https://example.com",
        "apt-get update",
        "apt-get install -y cowsay",
        "npm --version || exec curl -sS https://a.example; npm install left-pad",
        """python3 -c 'import urllib.request as r; r.urlopen("https://example.com")'""",
        """python3 -c 'import socket; socket.create_connection(("192.0.2.1", 80))'""",
        """node -e 'fetch("https://example.com")'""",
    ],
)
async def test_what_cannot_be_downloaded_says_that_there_is_no_network(
    agent: Agent, command: str
) -> None:
    result = await agent.call("exec", command=command)
    assert OFFLINE in text_of(result)
    assert "Retrying" not in text_of(result)
    assert "certificate" not in text_of(result)


@pytest.mark.parametrize(
    "command",
    [
        "curl -sS http://localhost:9; false",
        """python3 -c 'import urllib.request as r; r.urlopen("http://localhost:9")'""",
        """node -e 'fetch("http://localhost:9")'""",
        "git clone file:///workspace/nowhere there",
        "pip install ./nowhere",
        "echo 'Connection refused'; exit 3",
    ],
)
async def test_local_mistakes_do_not_blame_the_network(agent: Agent, command: str) -> None:
    assert "no network" not in await failed(agent, command)


async def test_a_command_that_succeeds_says_nothing_of_the_network(agent: Agent) -> None:
    said = await agent.told("exec", command="echo Could not resolve host: example.com")
    assert said == "Could not resolve host: example.com\n"


@OPEN
async def test_an_open_network_is_not_said_to_be_missing(agent: Agent) -> None:
    said = await failed(agent, "echo Could not resolve host: typo.example >&2; exit 6")
    assert "no network" not in said


@pytest.mark.parametrize("module", ["numpy", "PIL", "bs4", "docx"])
async def test_a_well_known_module_says_what_has_it(agent: Agent, module: str) -> None:
    said = text_of(await agent.call("run_code", code=f"import {module}_x, {module}"))
    assert "the operator can" not in said
    said = text_of(await agent.call("run_code", code=f"import {module}"))
    assert f"[{module} is not installed: the operator can make" in said


@OPEN
async def test_with_a_network_a_module_says_how_pip_calls_it(agent: Agent) -> None:
    said = text_of(await agent.call("run_code", code="import PIL.Image"))
    assert "[PIL is not installed: `pip install pillow` may help, or the operator" in said


@pytest.mark.parametrize(
    "command",
    [
        "printf 'int main() { return 0; }' > a.c && gcc a.c -o a && ./a",
        "printf '#include <map>\\nint main() { std::map<int, int> m; }' > a.cc && g++ a.cc",
        "printf 'all:\\n\\t@true\\n' > Makefile && make",
    ],
)
async def test_compilers_are_in_the_image_or_said_to_be_missing(
    agent: Agent, backend_name: str, command: str
) -> None:
    result = await agent.call("exec", command=command)
    if result.meta["mcp-sandbox/result"]["exit_code"] != 0:
        assert backend_name == "bubblewrap", text_of(result)
        assert "the operator can make an image" in text_of(result)


_PACKAGE = (
    """mkdir p; echo '{"name": "hello", "version": "1.0.0", "bin": "h.js"}' > p/package.json; """
    "printf '#!/usr/bin/env node\\nconsole.log(42)\\n' > p/h.js; "
)


@pytest.mark.parametrize(
    "command",
    [
        "npm install -g ./p && hello",
        "cd p && npm link && hello",
        "cd p && npm link && mkdir ../q && cd ../q && npm link hello && node_modules/.bin/hello",
        "npm pack -s ./p && npm install -g hello-1.0.0.tgz && cd p && hello",
    ],
)
async def test_a_program_that_npm_installs_for_all_is_on_path(agent: Agent, command: str) -> None:
    said = await agent.told("exec", command=f"{{ {_PACKAGE} }} && {command}")
    assert "\n42\n" in said
    others = await agent.told("exec", command="echo $CARGO_INSTALL_ROOT/bin $GOBIN $PNPM_HOME")
    assert others.split() == ["/home/sandbox/.local/bin"] * 3


async def test_there_is_a_python_on_path(agent: Agent) -> None:
    made = "python -m venv --without-pip v && v/bin/python -c 'import sys; print(sys.prefix)'"
    assert await agent.told("exec", command=f"{made} && rm -r v") == "/workspace/v\n"


async def test_what_is_run_is_told_that_no_person_watches(agent: Agent) -> None:
    said = await agent.told("exec", command="echo $TERM $PAGER; git var GIT_EDITOR")
    assert said == "dumb cat\ntrue\n"


@pytest.mark.parametrize("colour", ["FORCE_COLOR=1", "FORCE_COLOR=3"])
async def test_colours_may_be_asked_for_without_a_warning(agent: Agent, colour: str) -> None:
    assert await agent.told("exec", command=f"{colour} node -e 'console.log(1)'") == "1\n"


PROXIED = {"network": "allowlist", "egress": {"allow": ["api.example.com"]}}


@pytest.mark.parametrize("settings", [PROXIED])
@pytest.mark.parametrize(
    "command",
    [
        "python3 -c 'import socket; socket.create_connection((\"api.example.com\", 443))'",
        'node -e \'require("net").connect(443, "api.example.com")\'',
        "git clone git@api.example.com:a/b",
        "curl -sS --noproxy '*' https://api.example.com",
    ],
)
async def test_what_knows_no_proxy_is_told_what_works(agent: Agent, command: str) -> None:
    said = await failed(agent, command)
    assert "[no names are looked up here, and connections go by the proxy in HTTPS_PROXY" in said
    assert OFFLINE not in said


async def test_git_merges_amends_and_rebases_without_an_editor(agent: Agent) -> None:
    command = (
        "cd $(mktemp -d) && git init -q -b main . && git config user.email a@example.com && "
        "git config user.name a && git commit -q --allow-empty -m first && git checkout -q -b side "
        "&& echo a > a && git add a && git commit -q -m side && git checkout -q main && echo b > b "
        "&& git add b && git commit -q -m main && git merge --no-ff side >&2 && "
        "git commit -q --amend && git rebase -q -i HEAD~1 && git log --oneline | wc -l"
    )
    assert (await agent.told("exec", command=command)).startswith("3\n")


async def test_colours_are_left_out(agent: Agent) -> None:
    said = await agent.told(
        "run_code", language="bash", code=r"printf '\e[1;31mred\e[0m\e[K plain\e[?25h\n'"
    )
    assert said == "red plain\n"


async def test_of_a_progress_bar_the_last_state_is_shown(agent: Agent) -> None:
    command = r"""for i in $(seq 100); do printf '\r %s%%' $i; done; printf '\nend\r\n'"""
    shown, _, left = (await agent.told("exec", command=command)).partition("\n\n[")
    assert (shown, left.partition(",")[0]) == (" 100%\nend", "99 lines left out")
    command = r"""for i in $(seq 100); do printf '%s%%\r' $i >&2; done"""
    shown, _, left = (await agent.told("exec", command=command)).partition("\n[99")
    assert (shown, left.partition(",")[0]) == ("[stderr]\n100%", " lines left out")


async def test_a_file_is_shown_with_its_escapes(agent: Agent) -> None:
    await agent.told("write_file", path="bar.log", content="1%\r2%\x1b[31m\n")
    assert await agent.told("read_file", path="bar.log") == "     1\t1%␍2%␛[31m"


@pytest.mark.parametrize(
    "code",
    [
        "import fs from 'fs'; console.log(typeof fs.statSync)",
        "const fs = require('fs'); console.log(typeof fs.statSync)",
        "const fs = require('fs'); await null; console.log(typeof fs.statSync)",
        "import 'fs'; const {statSync} = require('fs'); console.log(typeof statSync)",
        "import {createRequire} from 'module'; const require = createRequire(import.meta.url); "
        "console.log(typeof require('./local.cjs').f)",
        "import {f} from './local.mjs'; console.log(typeof f)",
        "import('./local.mjs').then(m => console.log(typeof m.f))",
        "console.log(typeof require('./local.cjs').f)",
        "console.log(typeof require('pkg').f)",
        "import {f} from 'pkg'; console.log(typeof f)",
        "function main() { console.log(typeof main) }\nif (require.main === module) main()",
        "#!/usr/bin/env node\nsloppy = 5; with ({f() {}}) console.log(typeof f)",
        "module.exports = {f() {}}; console.log(typeof module.exports.f); return",
        "const {Worker} = require('worker_threads'); const f = \"console.log('function')\"; "
        "new Worker(f, {eval: true})",
        "require('fs').writeFileSync('/tmp/c.js', \"console.log('function')\"); "
        "require('child_process').fork('/tmp/c.js')",
        "import path from 'path'; const __filename = new URL(import.meta.url).pathname; "
        "console.log(path.dirname(__filename) === __dirname ? 'function' : __dirname)",
    ],
)
async def test_import_require_and_await_work_side_by_side(agent: Agent, code: str) -> None:
    await agent.told("write_file", path="local.mjs", content="export function f() {}\n")
    for path in ("local.cjs", "node_modules/pkg/index.js"):
        await agent.told("write_file", path=path, content="exports.f = function () {}\n")
    assert await javascript(agent, code) == "function\n"


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        ("\nfunction f() { null.x }\nf()", 2, "TypeError: Cannot read properties of null"),
        ("import 'fs'\n\nthrow new RangeError('far')", 3, "RangeError: far"),
        ("await null\nnope()", 2, "ReferenceError: nope is not defined"),
        ("const a = 1\nconst b = ;", 2, "SyntaxError: Unexpected token ';'"),
        ("\nPromise.reject(new Error('no'))", 2, "Error: no"),
    ],
)
async def test_javascript_errors_have_their_line_and_not_nodes_own(
    agent: Agent, code: str, line: int, error: str
) -> None:
    said = await javascript(agent, code)
    assert f"/workspace/[eval1]:{line}" in said
    assert error in said
    assert "node:" not in said
    assert "Node.js v" not in said
    assert "/opt/" not in said


@pytest.mark.parametrize("code", ["require('nope')", "import 'nope'"])
async def test_a_missing_package_of_node_is_short(agent: Agent, code: str) -> None:
    said = await javascript(agent, code)
    assert "nope" in said
    assert "node:" not in said
    assert said.count("\n") < 11, said


async def test_javascript_is_not_seen_in_the_list_of_processes(agent: Agent) -> None:
    code = "console.log(require('fs').readFileSync('/proc/self/cmdline', 'utf8'))"
    assert "cmdline" not in await javascript(agent, code)
