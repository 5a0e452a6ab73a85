"""What the arguments of templates and prompts may be, as far as it is known."""

import re
from collections.abc import Iterable

from mcp.shared.exceptions import MCPError
from mcp.types import (
    INVALID_PARAMS,
    CompleteRequestParams,
    CompleteResult,
    Completion,
    PromptReference,
)

from mcp_sandbox.server.errors import protocol_errors
from mcp_sandbox.server.skills.prompts import invocable
from mcp_sandbox.server.skills.resources import TEMPLATE
from mcp_sandbox.server.skills.visible import Asked, Visible, folder_uri, shown
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.models import Skill
from mcp_sandbox.skills.uris import SCHEME

_MOST = 100
# Of an argument hint such as "[add|remove] FILE", the words that stand to choose from.
_CHOICE = re.compile(r"[\w.:-]+(?:\s*\|\s*[\w.:-]+)+")


class SkillCompletion:
    """Answers `completion/complete`."""

    def __init__(self, visible: Visible) -> None:
        self._visible = visible

    @protocol_errors
    async def complete(self, asked: Asked, params: CompleteRequestParams) -> CompleteResult:
        """Values that go on from what was typed, and then those that have it inside."""
        catalogue = await self._visible.catalogue(asked)
        known = await self._known(catalogue, params)
        return CompleteResult(completion=_matching(known, params.argument.value))

    async def _known(self, catalogue: Catalogue, params: CompleteRequestParams) -> Iterable[str]:
        if isinstance(params.ref, PromptReference):
            skill = invocable(catalogue).get(params.ref.name)
            if skill is None:
                raise _refused(f"there is no prompt {shown(params.ref.name)!r}")
            return _choices(skill)
        if params.ref.uri != TEMPLATE:
            raise _refused(f"there is no template {shown(params.ref.uri)!r}: use {TEMPLATE}")
        paths = {folder_uri(skill).removeprefix(SCHEME): skill for skill in catalogue.skills}
        if params.argument.name == "skill":
            return paths
        chosen = (params.context and params.context.arguments) or {}
        skill = paths.get(chosen.get("skill", ""))
        return await self._files(skill) if skill and params.argument.name == "path" else ()

    async def _files(self, skill: Skill) -> Iterable[str]:
        return [file.path for file in (await self._visible.library.contents(skill)).files]


def _choices(skill: Skill) -> Iterable[str]:
    found = _CHOICE.search(skill.front.argument_hint)
    return [word.strip() for word in found[0].split("|")] if found else ()


def _matching(known: Iterable[str], typed: str) -> Completion:
    sought = typed.casefold()
    ranked = sorted(
        (not value.casefold().startswith(sought), value)
        for value in known
        if sought in value.casefold()
    )
    values = [value for _, value in ranked]
    return Completion(values=values[:_MOST], total=len(values), has_more=len(values) > _MOST)


def _refused(problem: str) -> MCPError:
    return MCPError(code=INVALID_PARAMS, message=problem)
