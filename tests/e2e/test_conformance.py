"""The protocol's own conformance suite against `mcp-sandbox serve --http`.

Scenarios that call for tools, resources or prompts of fixed names, which only a fixture has, are
left out; so are tools-call-error and tools-call-simple-text, which any server passes that answers
an unknown tool with text. The suite sends no token.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.daemon.http import serving
from tests.daemon.running import place
from tests.e2e import npm

OLDER, NEWER = "2025-11-25", "2026-07-28"
LISTS = ("tools-list", "resources-list", "prompts-list")
SHARED = (*LISTS, "server-sse-multiple-streams", "dns-rebinding-protection")
MISSING_RESOURCE = "sep-2164-resource-not-found"
SCENARIOS = {
    OLDER: (*SHARED, "server-initialize", "server-session-lifecycle", "ping"),
    NEWER: (
        *SHARED,
        "server-stateless",
        "caching",
        "http-header-validation",
        MISSING_RESOURCE,
        "sep-2640-skills-enumeration",
        "sep-2640-skills-manifest",
        "sep-2640-skills-directory",
    ),
}
# Checks that do not succeed, and why they say nothing about this server.
_NO_FIXTURE_TOOL = "needs a tool named test_missing_capability"
_NEVER_CHANGES = "the lists change with the skills, and not when a tool of a fixture is called"
EXCUSED: Mapping[tuple[str, str], Mapping[str, tuple[str, str]]] = {
    ("server-stateless", NEWER): {
        "sep-2575-server-rejects-undeclared-capability": ("FAILURE", _NO_FIXTURE_TOOL),
        "sep-2575-missing-capability-http-400": ("FAILURE", _NO_FIXTURE_TOOL),
        "sep-2575-server-sends-prompts-list-changed-on-subscription": ("WARNING", _NEVER_CHANGES),
        "sep-2575-server-sends-tools-list-changed-on-subscription": ("WARNING", _NEVER_CHANGES),
    },
    ("server-sse-multiple-streams", NEWER): {
        "server-sse-streams-functional": ("INFO", "quick answers are no streams"),
    },
}
_RESULT = re.compile(r"server-(.+)-\d{4}-\d\d-\d\dT[\w-]+")
# A check of every message, which succeeds also when nothing else was tried.
_OF_ALL = "wire-schema-valid"


async def checks(
    programs: Path, url: str, version: str, folder: Path, *which: str
) -> Mapping[str, Any]:
    """What the suite found out, by scenario."""
    command = [str(programs / "node"), str(programs / "conformance"), "server", "--url", url]
    command += ["--spec-version", version, "-o", str(folder), *which]
    with anyio.fail_after(90):
        done = await anyio.run_process(
            command, check=False, env={**os.environ, "HOME": str(folder.parent)}
        )
    found = {
        name[1]: json.loads(await path.read_text())
        async for path in anyio.Path(folder).glob("*/checks.json")
        if (name := _RESULT.fullmatch(path.parent.name))
    }
    assert found, done.stdout.decode() + done.stderr.decode()
    return found


@pytest.mark.bubblewrap
@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", SCENARIOS)
async def test_the_server_conforms(version: str, npm_cache: Path, tmp_path: Path) -> None:
    programs = npm.installed("conformance", npm_cache)
    home = place(tmp_path, "bubblewrap")
    short: dict[str, list[str]] = {}
    async with serving(home, "--allow-anonymous-loopback", limit_s=300) as served:
        # One process for all that it calls; each takes a second to load.
        found = {**await checks(programs, served.url, version, tmp_path / "all", "--suite", "all")}
        for scenario in set(SCENARIOS[version]) - found.keys():
            # Those of extensions belong to no version, and are left out unless they are forced.
            one = ("--scenario", scenario, "--force")
            found |= await checks(programs, served.url, version, tmp_path / scenario, *one)
        for scenario in SCENARIOS[version]:
            short[scenario] = problems(found[scenario], EXCUSED.get((scenario, version), {}))
    assert short == {scenario: [] for scenario in SCENARIOS[version]}


def problems(found: Any, excused: Mapping[str, tuple[str, str]]) -> list[str]:
    """Every check that came out otherwise than it should, and the lack of any that succeeded."""
    told = [
        f"{check['id']}: {check['status']} {check.get('errorMessage', '')}"
        for check in found
        if check["status"] != excused.get(check["id"], ("SUCCESS",))[0]
    ]
    tried = {check["id"] for check in found if check["status"] == "SUCCESS"} - {_OF_ALL}
    absent = excused.keys() - {check["id"] for check in found}
    told += [f"{name}: no longer checked" for name in absent]
    return told if tried else [*told, "vacuous"]


def test_a_scenario_that_tried_nothing_is_not_counted() -> None:
    assert problems([{"id": _OF_ALL, "status": "SUCCESS"}], {}) == ["vacuous"]
    assert problems([], {"x": ("INFO", "")}) == ["x: no longer checked", "vacuous"]
    good = {"id": "a", "status": "SUCCESS"}
    assert problems([good, {"id": "b", "status": "WARNING"}], {}) == ["b: WARNING "]
    assert problems([good, {"id": "b", "status": "INFO"}], {"b": ("INFO", "")}) == []
