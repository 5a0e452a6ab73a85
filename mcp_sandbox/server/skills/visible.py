"""What the caller of a request may see: its own catalogue, files by their uris, lists in pages.

A cursor says after what to go on, so changes between do not shift it.
"""

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from mcp.server.context import ServerRequestContext
from mcp.server.mcpserver import Context
from mcp.shared.exceptions import MCPError
from mcp.types import INVALID_PARAMS

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.errors import UnknownSkill
from mcp_sandbox.server.identity import CallerOf
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.sessions.skills import Skills
from mcp_sandbox.skills.catalogue import Catalogue
from mcp_sandbox.skills.library import Library
from mcp_sandbox.skills.scan import Whose
from mcp_sandbox.skills.skill import Skill, SkillFile
from mcp_sandbox.skills.uris import DOCUMENT, SCHEME, file_uri

T = TypeVar("T")

Asked = ServerRequestContext[Any, Any]


def page(
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
class Visible:
    """The skills that callers may see, each its own."""

    skills: Skills
    caller_of: CallerOf
    settings: SkillsConfig

    @property
    def library(self) -> Library:
        return self.skills.library

    def whose(self, asked: Asked) -> Whose:
        """Return the chat that a request comes from, or its user if it names none."""
        caller = self.caller_of(Context(request_context=asked))
        return caller.chat or caller.user

    async def catalogue(self, asked: Asked) -> Catalogue:
        return await self.library.catalogue(self.whose(asked))

    async def has_tools(self, whose: Whose) -> bool:
        """Return whether the tools for skills are listed: only to callers who have skills."""
        # A chat may write its first skill itself, between two looks at the list of tools.
        return self.settings.workspace or bool(await self.skills.offered(whose))

    async def file(self, catalogue: Catalogue, uri: str) -> tuple[Skill, SkillFile]:
        """Return the file with that uri, and the innermost skill of the catalogue that has it.

        Only what a skill's contents name has a uri, so none leads to anything else.

        Raises UnknownSkill: no skill has it.
        """
        wanted = canonical(uri)
        for skill in around(catalogue, wanted):
            for file in (await self.library.contents(skill)).files:
                if file_uri(skill.uri, file.path) == wanted:
                    return skill, file
        raise UnknownSkill(f"there is no file of a skill at {shown(uri)}: resources/list has some")


def canonical(uri: str) -> str:
    """Return the one spelling that we give out of all uris that mean the same.

    Raises UnknownSkill: it is longer than any that we give out.
    """
    if len(uri) > 32_000 or uri.count("/") > 64:
        raise UnknownSkill(f"there is nothing at {shown(uri)}: no uri here is that long")
    scheme, _, rest = uri.partition("://")
    parts = (
        quote(unquote_to_bytes(part.encode("utf-8", "replace")), safe="")
        for part in rest.split("/")
    )
    return f"{scheme}://" + "/".join(parts)


def folder_uri(skill: Skill) -> str:
    """Return the uri of a skill's folder."""
    return skill.uri.removesuffix(f"/{DOCUMENT}")


def around(catalogue: Catalogue, uri: str) -> list[Skill]:
    """Return the skills in whose folder a uri lies, the innermost first."""
    parts = uri.removeprefix(SCHEME).split("/")
    heads = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    found = (catalogue.by_uri.get(f"{SCHEME}{head}/{DOCUMENT}") for head in heads)
    return [skill for skill in found if skill is not None]


def shown(uri: str) -> str:
    """Return a caller's uri, safe to repeat in an answer."""
    return clip(show_name(uri), 200)
