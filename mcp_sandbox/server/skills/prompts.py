"""One prompt for each skill that users may invoke: its text, with their arguments put in."""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from anyio import to_thread
from mcp import types
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import SessionFor
from mcp_sandbox.server.skills.resources import TEMPLATE
from mcp_sandbox.server.skills.results import wrap_text
from mcp_sandbox.server.skills.visible import (
    Asked,
    VisibleSkills,
    folder_uri,
    show_given,
    take_page,
)
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.parse import ARGUMENTS
from mcp_sandbox.skills.skill import DOCUMENT, SCHEME, FrontMatter, Skill

# The argument of a skill that names none: everything that the user says, in one.
_ALL = "arguments"
_MOST_LISTED = 500
_MOST_SAID = 100_000
_MOST_FILLED = 1_000_000
_MOST = 100
# Of an argument hint such as "[add|remove] FILE", the words that stand to choose from.
_CHOICE = re.compile(r"(?<![\w.:-])[\w.:-]++(?:\s*+\|\s*+[\w.:-]++)+")


class SkillPrompts:
    """Answers requests about prompts, and about the arguments of prompts and templates."""

    def __init__(self, visible: VisibleSkills, session_for: SessionFor) -> None:
        self._visible = visible
        self._session_for = session_for

    async def list(
        self, asked: Asked, params: types.PaginatedRequestParams
    ) -> types.ListPromptsResult:
        """Return those that users may invoke, though a model may not."""
        known = list_invocable(await self._visible.catalogue(asked))
        found, cursor = take_page(known, str, params.cursor, _MOST_LISTED)
        prompts = [_prompt(name, known[name]) for name in found]
        return types.ListPromptsResult(prompts=prompts, next_cursor=cursor)

    async def get(
        self, asked: Asked, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        """Return the text of a skill, with the arguments where it wants them."""
        skill = list_invocable(await self._visible.catalogue(asked)).get(params.name)
        if skill is None:
            raise _refused(
                f"there is no prompt {show_given(params.name)!r}: prompts/list shows all"
            )
        arguments = params.arguments or {}
        if sum(map(len, arguments.values())) > _MOST_SAID:
            raise _too_long()
        text = await self._text(asked, skill, arguments)
        message = types.PromptMessage(
            role="user", content=types.TextContent(type="text", text=text)
        )
        return types.GetPromptResult(description=skill.front.description, messages=[message])

    async def _text(self, asked: Asked, skill: Skill, message: Mapping[str, str]) -> str:
        """Return the filled text; a chat also gets the skill's files into its sandbox."""
        if isinstance(self._visible.find_owner(asked), ChatId):
            session = await self._session_for(Context(request_context=asked))
            got = await session.skills.activate(skill.uri, by_user=True)
            body = got.body
        else:
            document = await self._visible.library.read(skill, DOCUMENT)
            got, body = None, document[skill.body_at :]
        # Up to a megabyte is searched for what the author chose.
        text = await to_thread.run_sync(
            fill_in, body.decode(errors="replace"), skill.front, message
        )
        return wrap_text(replace(got, body=text.encode(), repeated=False)) if got else text

    async def complete(
        self, asked: Asked, params: types.CompleteRequestParams
    ) -> types.CompleteResult:
        """Complete an argument: values that begin with the typed text, then ones with it inside."""
        sought = params.argument.value.casefold()
        ranked = sorted(
            (not value.casefold().startswith(sought), value)
            for value in await self._values(await self._visible.catalogue(asked), params)
            if sought in value.casefold()
        )
        values = [value for _, value in ranked]
        total = len(values)
        found = types.Completion(values=values[:_MOST], total=total, has_more=total > _MOST)
        return types.CompleteResult(completion=found)

    async def _values(
        self, catalogue: Catalogue, params: types.CompleteRequestParams
    ) -> Iterable[str]:
        if isinstance(params.ref, types.PromptReference):
            skill = list_invocable(catalogue).get(params.ref.name)
            if skill is None:
                raise _refused(f"there is no prompt {show_given(params.ref.name)!r}")
            found = _CHOICE.search(skill.front.argument_hint)
            return map(str.strip, found[0].split("|")) if found else ()
        if params.ref.uri != TEMPLATE:
            raise _refused(f"there is no template {show_given(params.ref.uri)!r}: use {TEMPLATE}")
        paths = {folder_uri(skill).removeprefix(SCHEME): skill for skill in catalogue.skills}
        if params.argument.name == "skill":
            return paths
        chosen = (params.context and params.context.arguments) or {}
        skill = paths.get(chosen.get("skill", ""))
        if skill is None or params.argument.name != "path":
            return ()
        return [file.path for file in (await self._visible.library.contents(skill)).files]


def list_invocable(catalogue: Catalogue) -> Mapping[str, Skill]:
    """Return the skills that users may invoke, by the names of their prompts.

    A skill whose name means another one goes by its path.
    """
    return {
        skill.name if skill.shadowed_by is None else folder_uri(skill).removeprefix(SCHEME): skill
        for skill in catalogue.skills
        if skill.front.user_invocable
    }


def fill_in(body: str, front: FrontMatter, given: Mapping[str, str]) -> str:
    """Return a body with arguments for `$ARGUMENTS`, `$0`, `$ARGUMENTS[0]` and `$name`.

    A body that wants none gets what was given at its end. Numbers count only in a skill that says
    it takes arguments: elsewhere a `$1` is some program's own.

    Raises InvalidArgument: there is more than a prompt can hold.
    """
    names = front.arguments[:ARGUMENTS]
    values = [given.get(name, "") for name in names]
    everything = " ".join(values) if names else given.get(_ALL, "")
    if not names:
        try:
            values = shlex.split(everything)
        except ValueError:
            # A quotation mark that is one of its own, as in "don't".
            values = everything.split()
    declared = bool(front.arguments or front.argument_hint)
    used = False

    def value(match: re.Match[str]) -> str:
        nonlocal used
        number = match["index"] or match["number"]
        if number is not None and not (declared or match["index"]):
            return match[0]
        used = True
        if number is not None:
            return values[int(number)] if int(number) < len(values) else ""
        name = match["name"]
        return everything if name == "ARGUMENTS" else values[names.index(name)]

    known = "|".join(map(re.escape, sorted(("ARGUMENTS", *names), key=len, reverse=True)))
    placeholders = re.compile(
        rf"\$(?:ARGUMENTS\[(?P<index>\d{{1,3}})\]|(?P<number>\d{{1,3}})\b|(?P<name>{known})\b)"
    )
    longest = max(map(len, (everything, *values)), default=0)
    if longest > _MOST_SAID or longest * len(placeholders.findall(body)) > _MOST_FILLED:
        raise _too_long()
    text = placeholders.sub(value, body)
    return text if used or not everything else f"{text.rstrip()}\n\nARGUMENTS: {everything}\n"


def _too_long() -> InvalidArgument:
    return InvalidArgument("the arguments are too long for this prompt: say it in a message")


def _prompt(name: str, skill: Skill) -> types.Prompt:
    front = skill.front
    names = front.arguments[:ARGUMENTS]
    hint = front.argument_hint or "what to do, in your own words"
    all_in_one = types.PromptArgument(name=_ALL, description=hint, required=False)
    arguments = [types.PromptArgument(name=each, required=False) for each in names] or [all_in_one]
    return types.Prompt(name=name, description=front.description, arguments=arguments)


def _refused(problem: str) -> MCPError:
    return MCPError(code=types.INVALID_PARAMS, message=problem)
