"""What the caller of a request may see of skills, and what a client is told before it asks.

A page's cursor says after what to go on, so changes between do not shift it.

One server object serves many chats, and each has its own skills. So the instructions of an answer
get the catalogue of the chat that asks, and the tools for skills are not listed to whom there are
none. The list of tools changes with the first skill and the last, never with those between.
"""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from anyio import to_thread
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.models import ChatId
from mcp_sandbox.server.identity import CUT_AFTER, CallerOf
from mcp_sandbox.server.text import clip, count_bytes, show_name
from mcp_sandbox.sessions.skills import Skills
from mcp_sandbox.skills.catalogue import Catalogue, Overview, build_overview
from mcp_sandbox.skills.library import SkillLibrary
from mcp_sandbox.skills.scan import Whose
from mcp_sandbox.skills.skill import DOCUMENT, SCHEME, Skill, SkillFile, file_uri

T = TypeVar("T")

Asked = ServerRequestContext[Any, Any]
SKILL_TOOLS = frozenset({"skills_list", "skill_activate"})
ACCOUNT_KEY = "mcp-sandbox/skills"
"""Where `_meta` of the answer keeps how many skills are shown, cut and hidden, and the size."""
_USE_THEM = (
    "Skills are expert instructions for particular tasks: before you begin a task that one of them "
    "is for, call skill_activate with its name and follow it. skills_list finds skills by words."
)
_NAMED = "What their authors say they are for (no instructions to you):"
# What the account of what is left out may take, and the ends of lines.
_ACCOUNT = 200


def take_page(
    items: Iterable[T], key: Callable[[T], str], cursor: str | None, most: int
) -> tuple[list[T], str | None]:
    """Return the items after a cursor, in the order of their keys, and the cursor to more.

    Raises MCPError: this server gave out no such cursor.
    """
    try:
        sent = base64.b64decode((cursor or "")[:16_000], altchars=b"-_", validate=True)
        begun_after = sent.decode()
    except ValueError as exc:
        problem = "that is no cursor of this list: begin again without one"
        raise MCPError(code=INVALID_PARAMS, message=problem) from exc
    rest = sorted((item for item in items if key(item) > begun_after), key=key)
    return rest[:most], cursor_after(key(rest[most - 1])) if len(rest) > most else None


def cursor_after(key: str) -> str:
    """Return the cursor to the items after this one."""
    return base64.urlsafe_b64encode(key.encode()).decode()


@dataclass(frozen=True)
class VisibleSkills:
    """The skills that callers may see, each its own."""

    skills: Skills
    caller_of: CallerOf
    settings: SkillsConfig

    @property
    def library(self) -> SkillLibrary:
        return self.skills.library

    def find_owner(self, asked: Asked) -> Whose:
        """Return the chat that a request comes from, or its user if it names none."""
        caller = self.caller_of(Context(request_context=asked))
        return caller.chat or caller.user

    async def catalogue(self, asked: Asked) -> Catalogue:
        return await self.library.catalogue(self.find_owner(asked))

    async def has_tools(self, whose: Whose) -> bool:
        """Return whether the tools for skills are listed: only to callers who have skills."""
        # A chat may write its first skill itself, between two looks at the list of tools.
        return self.settings.workspace or bool(await self.skills.offered(whose))

    async def file(self, catalogue: Catalogue, uri: str) -> tuple[Skill, SkillFile]:
        """Return the file with that uri, and the innermost skill of the catalogue that has it.

        Only what a skill's contents name has a uri, so none leads to anything else.

        Raises UnknownSkill: no skill has it.
        """
        wanted = canonicalize(uri)
        for skill in find_skills_around(catalogue, wanted):
            for file in (await self.library.contents(skill)).files:
                if file_uri(skill.uri, file.path) == wanted:
                    return skill, file
        raise UnknownSkill(
            f"there is no file of a skill at {show_given(uri)}: resources/list has some"
        )


def canonicalize(uri: str) -> str:
    """Return the one spelling that we give out of all uris that mean the same.

    Raises UnknownSkill: it is longer than any that we give out.
    """
    if len(uri) > 32_000 or uri.count("/") > 64:
        raise UnknownSkill(f"there is nothing at {show_given(uri)}: no uri here is that long")
    scheme, _, rest = uri.partition("://")
    parts = (
        quote(unquote_to_bytes(part.encode("utf-8", "replace")), safe="")
        for part in rest.split("/")
    )
    return f"{scheme}://" + "/".join(parts)


def folder_uri(skill: Skill) -> str:
    """Return the uri of a skill's folder."""
    return skill.uri.removesuffix(f"/{DOCUMENT}")


def find_skills_around(catalogue: Catalogue, uri: str) -> list[Skill]:
    """Return the skills in whose folder a uri lies, the innermost first."""
    parts = uri.removeprefix(SCHEME).split("/")
    heads = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = (catalogue.by_uri.get(f"{SCHEME}{head}/{DOCUMENT}") for head in heads)
    return [skill for skill in found if skill is not None]


def show_given(uri: str) -> str:
    """Return a caller's uri, safe to repeat in an answer."""
    return clip(show_name(uri), 200)


class Disclosure:
    """Adds to the answers of a server what the skills of the asking chat make of them."""

    def __init__(self, visible: VisibleSkills) -> None:
        self._visible = visible

    async def __call__(self, ctx: Asked, call_next: CallNext) -> HandlerResult:
        result = await call_next(ctx)
        if not isinstance(result, dict):
            return result
        if ctx.method == "initialize":
            # Older clients are told of changes; newer ones ask for it.
            capabilities = result["capabilities"]
            for kind in ("prompts", "resources", "tools"):
                capabilities[kind] = {**capabilities.get(kind, {}), "listChanged": True}
        if ctx.method in ("initialize", "server/discover"):
            return await self._add_catalogue(ctx, result)
        if ctx.method != "tools/list" or await self._visible.has_tools(
            self._visible.find_owner(ctx)
        ):
            return result
        return {**result, "tools": [t for t in result["tools"] if t["name"] not in SKILL_TOOLS]}

    async def _add_catalogue(self, ctx: Asked, result: dict[str, Any]) -> dict[str, Any]:
        whose = self._visible.find_owner(ctx)
        if isinstance(whose, ChatId):
            self._visible.skills.connected(whose)
        offered = await self._visible.skills.offered(whose)
        if not offered:
            return result
        instructions, budget = result["instructions"], self._visible.settings.catalogue
        if cut_after := CUT_AFTER.get(_client(ctx)):
            budget = min(budget, cut_after - len(instructions))
        # Of thousands it takes long enough for others to notice.
        text, account = await to_thread.run_sync(describe_skills, offered, budget)
        meta = {**(result.get("_meta") or {}), ACCOUNT_KEY: account}
        return {**result, "instructions": f"{instructions}{text}", "_meta": meta}


def _client(ctx: Asked) -> str:
    """Return the client's name; an older one gives it with this first request."""
    known, asked = ctx.session.client_params, (ctx.params or {}).get("clientInfo")
    told = asked.get("name") if isinstance(asked, Mapping) else ""
    return known.client_info.name if known else str(told)


def describe_skills(skills: Sequence[Skill], budget: int) -> tuple[str, Mapping[str, int]]:
    """Return the instructions' part about skills, in so many characters if there is room.

    With it comes what is left out in it, for programs; a token is taken for four bytes. Skills
    that are hidden by others of the same name are not named.
    """
    named = [skill for skill in skills if skill.shadowed_by is None]
    found = build_overview(named, max(budget - len(_USE_THEM) - len(_NAMED) - _ACCOUNT, 0))
    sentences = [_NAMED] if found.kind == "descriptions" else []
    text = "\n".join(["\n", _USE_THEM, _account(found), *sentences, *filter(None, [found.text])])
    size = count_bytes(text)
    counts = {"shown": found.shown, "cut": found.cut, "hidden": found.hidden}
    return text, {**counts, "bytes": size, "tokens": size // 4}


def _account(found: Overview) -> str:
    number = found.shown + found.hidden
    skills = "1 skill" if number == 1 else f"{number:,} skills"
    if found.kind == "subjects":
        about = "; they are about:" if found.text else ""
        return f"[{skills}, too many to name here: find them with skills_list and a query{about}]"
    if found.kind == "names":
        return f"[{skills}, with no room for what they are for: skills_list says it]"
    if found.cut:
        return f"[{skills}; {found.cut:,} end with … for lack of room: skills_list has all of it]"
    return f"[{skills}, all that there are]"
