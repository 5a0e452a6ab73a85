"""What a client learns of skills before it calls a tool.

One server object serves many chats, and each has its own skills. So the instructions of an answer
get the catalogue of the chat that asks, and the tools for skills are not listed to whom there are
none. The list of tools changes with the first skill and the last, never with those between.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from anyio import to_thread
from mcp.server.context import CallNext, HandlerResult
from mcp.types import CLIENT_INFO_META_KEY

from mcp_sandbox.models import ChatId
from mcp_sandbox.server.skills.visible import Asked, Visible
from mcp_sandbox.server.text import byte_length
from mcp_sandbox.skills.overview import Overview, overview
from mcp_sandbox.skills.skill import Skill

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
# Clients that cut off instructions, and after how many characters.
_CUT_AFTER = {"claude-code": 4096}


class Disclosure:
    """Adds to the answers of a server what the skills of the asking chat make of them."""

    def __init__(self, visible: Visible) -> None:
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
            return await self._greeting(ctx, result)
        if ctx.method != "tools/list" or await self._visible.has_tools(self._visible.whose(ctx)):
            return result
        return {**result, "tools": [t for t in result["tools"] if t["name"] not in SKILL_TOOLS]}

    async def _greeting(self, ctx: Asked, result: dict[str, Any]) -> dict[str, Any]:
        """Return the answer with the catalogue, and its machine-readable form."""
        whose = self._visible.whose(ctx)
        if isinstance(whose, ChatId):
            self._visible.skills.connected(whose)
        offered = await self._visible.skills.offered(whose)
        if not offered:
            return result
        said, budget = result["instructions"], self._visible.settings.catalogue
        if cut_after := _CUT_AFTER.get(_client(ctx)):
            budget = min(budget, cut_after - len(said))
        # Of thousands it takes long enough for others to notice.
        text, account = await to_thread.run_sync(about_skills, offered, budget)
        meta = {**(result.get("_meta") or {}), ACCOUNT_KEY: account}
        return {**result, "instructions": f"{said}{text}", "_meta": meta}


def _client(ctx: Asked) -> str:
    """Return the client's name; in the newer protocol each request carries it."""
    params = ctx.params or {}
    told = params.get("_meta")
    info = told.get(CLIENT_INFO_META_KEY) if isinstance(told, Mapping) else None
    info = info or params.get("clientInfo")
    return str(info.get("name")) if isinstance(info, Mapping) else ""


def about_skills(skills: Sequence[Skill], budget: int) -> tuple[str, Mapping[str, int]]:
    """Return the instructions' part about skills, in so many characters if there is room.

    With it comes what is left out in it, for programs; a token is taken for four bytes. Skills
    that are hidden by others of the same name are not named.
    """
    named = [skill for skill in skills if skill.shadowed_by is None]
    found = overview(named, max(budget - len(_USE_THEM) - len(_NAMED) - _ACCOUNT, 0))
    said = [_NAMED] if found.kind == "descriptions" else []
    text = "\n".join(["\n", _USE_THEM, _account(found), *said, *filter(None, [found.text])])
    size = byte_length(text)
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
