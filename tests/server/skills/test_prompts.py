"""Skills as prompts that users invoke, and what completes their arguments."""

import json
import time
from pathlib import Path

import pytest
from mcp import Client, MCPError
from mcp.types import (
    INVALID_PARAMS,
    PromptReference,
    ResourceTemplateReference,
    TextContent,
    TextResourceContents,
)

from tests.server.scripted import text_of
from tests.server.skills.conftest import in_pods_too
from tests.server.skills.shelves import client_of, offering, write_skill
from tests.server.skills.taught import taught

pytestmark = pytest.mark.bubblewrap

MODES = pytest.mark.parametrize("mode", ["auto", "legacy"])
TEMPLATE = "skill://{+skill}/{+path}"


def document(name: str, body: str, more: str = "") -> dict[str, str]:
    return {"SKILL.md": f"---\nname: {name}\ndescription: About {name}.\n{more}---\n{body}"}


async def text(client: Client, name: str, **arguments: str) -> str:
    (message,) = (await client.get_prompt(name, arguments)).messages
    assert message.role == "user"
    assert isinstance(message.content, TextContent)
    return message.content.text


@MODES
async def test_each_skill_that_users_may_invoke_is_a_prompt(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    write_skill(tmp_path / "a", "pdf")
    write_skill(tmp_path / "a", "for-models", more="user-invocable: false\n")
    write_skill(tmp_path / "a", "for-users", more="disable-model-invocation: true\n")
    write_skill(data_root / "skills" / "alice", "pdf")
    async with offering(data_root, tmp_path / "a") as web, client_of(web, mode) as client:
        prompts = {each.name: each for each in (await client.list_prompts()).prompts}
        resources = {each.name for each in (await client.list_resources()).resources}
        with pytest.raises(MCPError, match="no prompt 'for-models'") as caught:
            await client.get_prompt("for-models")
    assert caught.value.error.code == INVALID_PARAMS
    assert prompts.keys() == {"pdf", "user/pdf", "for-users"}
    assert prompts["pdf"].description == "About pdf."
    assert "for-users" not in resources
    assert "for-models" in resources


@in_pods_too
@MODES
async def test_a_prompt_puts_the_skill_into_the_sandbox_and_is_active_from_then_on(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    hidden = "disable-model-invocation: true\n"
    files = document("fix", "Run fix.sh for $ARGUMENTS.\n", hidden)
    write_skill(tmp_path / "a", "fix", {**files, "fix.sh": "echo fixed\n"})
    write_skill(tmp_path / "a", "other")
    async with taught(data_root, tmp_path / "a", mode=mode) as agent:
        said = await text(agent.client, "fix", arguments="7")
        assert "lies at /opt/skills/fix, read-only" in said
        assert "\nRun fix.sh for 7.\n\n</skill_content digest=" in said
        run = {"command": "bash /opt/skills/fix/fix.sh"}
        assert text_of(await agent.client.call_tool("exec", run)) == "fixed\n"
        (found,) = (await agent.client.read_resource("skills://active")).contents
        assert isinstance(found, TextResourceContents)
        (active,) = json.loads(found.text)["active"]
    assert active["uri"] == "skill://assistant/fix/SKILL.md"
    assert active["path_in_sandbox"] == "/opt/skills/fix"
    assert f'digest="{active["digest"]}"' in said


async def test_what_the_user_says_stands_where_the_skill_wants_it(
    data_root: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "a"
    body = "Fix $ARGUMENTS, first $0, then $ARGUMENTS[1]; not $ARGUMENTSX, $10\n"
    hint = "argument-hint: '[issue] [branch]'\n"
    write_skill(folder, "fix", document("fix", body, hint))
    write_skill(folder, "awk", document("awk", "awk '{print $1}'\n"))
    named = "arguments: [issue, branch]\n"
    write_skill(folder, "named", document("named", "$issue on $branch: $ARGUMENTS ($1)\n", named))
    async with offering(data_root, folder) as web, client_of(web, chat=None) as client:
        said = await text(client, "fix", arguments="7 'my branch' $0")
        assert said == ("Fix 7 'my branch' $0, first 7, then my branch; not $ARGUMENTSX, \n")
        assert await text(client, "fix", arguments="don't") == (
            "Fix don't, first don't, then ; not $ARGUMENTSX, \n"
        )
        assert await text(client, "awk") == "awk '{print $1}'\n"
        assert await text(client, "awk", arguments="a b") == (
            "awk '{print $1}'\n\nARGUMENTS: a b\n"
        )
        assert await text(client, "named", issue="#7", branch="x") == "#7 on x: #7 x (x)\n"
        prompts = {each.name: each for each in (await client.list_prompts()).prompts}
    (only,) = prompts["fix"].arguments or []
    assert (only.name, only.description) == ("arguments", "[issue] [branch]")
    assert [each.name for each in prompts["named"].arguments or []] == ["issue", "branch"]


async def test_a_prompt_does_not_grow_beyond_what_can_be_sent(
    data_root: Path, tmp_path: Path
) -> None:
    write_skill(tmp_path / "a", "many", document("many", "$ARGUMENTS " * 50_000))
    async with offering(data_root, tmp_path / "a") as web, client_of(web, chat=None) as client:
        assert len(await text(client, "many", arguments="x")) == 2 * 50_000
        with pytest.raises(MCPError, match="too long") as caught:
            await client.get_prompt("many", {"arguments": "x" * 90_000})
    assert caught.value.error.code == INVALID_PARAMS


@pytest.mark.parametrize("said", ["x" * 1_000_000, "x " * 500_000, "'" * 999_999])
async def test_endless_arguments_are_refused_before_they_are_read(
    data_root: Path, tmp_path: Path, said: str
) -> None:
    write_skill(tmp_path / "a", "fix", document("fix", "$ARGUMENTS\n", "argument-hint: it\n"))
    async with offering(data_root, tmp_path / "a") as web, client_of(web, chat=None) as client:
        began = time.monotonic()
        with pytest.raises(MCPError, match="too long"):
            await client.get_prompt("fix", {"arguments": said})
        assert time.monotonic() - began < 5


async def test_a_skill_of_thousands_of_arguments_takes_the_first_and_says_so(
    data_root: Path, tmp_path: Path
) -> None:
    more = f"arguments: {' '.join(f'a{n}' for n in range(2800))}\n"
    body = "$" * 900_000 + " $a1 $a31 $a32\n"
    write_skill(tmp_path / "a", "many", document("many", body, more))
    async with offering(data_root, tmp_path / "a") as web, client_of(web, chat=None) as client:
        (prompt,) = (await client.list_prompts()).prompts
        assert len(prompt.arguments or []) == 32
        began = time.monotonic()
        filled = await text(client, "many", a1="one", a31="last", a32="none")
        assert time.monotonic() - began < 10
        assert filled.endswith("$ one last $a32\n")
        (found,) = (await client.read_resource("skills://diagnostics")).contents
        assert isinstance(found, TextResourceContents)
        assert "too-many-arguments" in found.text


@MODES
async def test_skills_and_their_files_complete_the_template(
    data_root: Path, tmp_path: Path, mode: str
) -> None:
    for number in range(120):
        write_skill(tmp_path / "a", f"tool-{number}")
    write_skill(tmp_path / "a", "pdf", {"references/forms.md": "x", "run.py": "x"})
    reference = ResourceTemplateReference(type="ref/resource", uri=TEMPLATE)
    async with offering(data_root, tmp_path / "a") as web, client_of(web, mode) as client:
        (template,) = (await client.list_resource_templates()).resource_templates
        assert template.uri_template == TEMPLATE

        async def completed(name: str, value: str, **chosen: str) -> list[str]:
            found = await client.complete(reference, {"name": name, "value": value}, chosen)
            return found.completion.values

        assert await completed("skill", "PD") == ["assistant/pdf"]
        assert await completed("path", "f", skill="assistant/pdf") == ["references/forms.md"]
        assert await completed("path", "", skill="assistant/none") == []
        assert await completed("path", "") == []
        many = (await client.complete(reference, {"name": "skill", "value": "tool"})).completion
        assert (len(many.values), many.total, many.has_more) == (100, 120, True)
        other = ResourceTemplateReference(type="ref/resource", uri="file://{x}")
        with pytest.raises(MCPError, match="no template") as caught:
            await client.complete(other, {"name": "x", "value": ""})
    assert caught.value.error.code == INVALID_PARAMS


async def test_a_hint_that_gives_a_choice_completes_the_argument(
    data_root: Path, tmp_path: Path
) -> None:
    write_skill(tmp_path / "a", "todo", more="argument-hint: '[add|remove | list] WHAT'\n")
    write_skill(tmp_path / "a", "free")
    async with offering(data_root, tmp_path / "a") as web, client_of(web) as client:

        async def completed(name: str, value: str) -> list[str]:
            reference = PromptReference(type="ref/prompt", name=name)
            found = await client.complete(reference, {"name": "arguments", "value": value})
            return found.completion.values

        assert await completed("todo", "") == ["add", "list", "remove"]
        assert await completed("todo", "r") == ["remove"]
        assert await completed("free", "") == []
        with pytest.raises(MCPError, match="no prompt"):
            await completed("none", "")
