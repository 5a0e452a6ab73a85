"""Folders of skills on the disk, and a server that offers them, with clients of both eras."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mcp import Client
from mcp.types import PaginatedRequestParams, Request, RequestParams, Result
from pydantic import ConfigDict

from mcp_sandbox.config import SkillsConfig
from mcp_sandbox.server.identity import make_caller_finder
from mcp_sandbox.server.skills.visible import VisibleSkills
from mcp_sandbox.sessions.skills import Skills
from mcp_sandbox.skills.library import RefreshPace, SkillLibrary
from tests.web.clients import Web, nobody, served

EVERY_BYTE = bytes(range(256))


def write_skill(
    folder: Path, name: str, files: Mapping[str, str | bytes] | None = None, *, more: str = ""
) -> Path:
    """A skill in a folder of that name; `more` are lines of its front matter."""
    head = f"---\nname: {name}\ndescription: About {name}.\n{more}---\n# {name}\n"
    for path, content in {"SKILL.md": head, **(files or {})}.items():
        place = folder / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / name


class UriParams(RequestParams):
    uri: str
    cursor: str | None = None


class Anything(Result):
    """A result as it comes."""

    model_config = ConfigDict(extra="allow")


class ListSkills(Request[PaginatedRequestParams, Literal["skills/list"]]):
    method: Literal["skills/list"] = "skills/list"


class GetSkill(Request[UriParams, Literal["skills/get"]]):
    method: Literal["skills/get"] = "skills/get"


class ReadDirectory(Request[UriParams, Literal["resources/directory/read"]]):
    method: Literal["resources/directory/read"] = "resources/directory/read"


@dataclass(frozen=True)
class SkillsClient:
    """A client that knows the extension."""

    client: Client

    async def page(self, cursor: str | None = None) -> dict[str, Any]:
        params = PaginatedRequestParams(cursor=cursor)
        return _raw(await self.client.session.send_request(ListSkills(params=params), Anything))

    async def all(self) -> list[dict[str, Any]]:
        """The entries of all pages."""
        found = await self.page()
        entries = found["skills"]
        while "nextCursor" in found:
            found = await self.page(found["nextCursor"])
            entries += found["skills"]
        return list(entries)

    async def get(self, uri: str) -> dict[str, Any]:
        request = GetSkill(params=UriParams(uri=uri))
        return _raw(await self.client.session.send_request(request, Anything))

    async def directory(self, uri: str, cursor: str | None = None) -> dict[str, Any]:
        request = ReadDirectory(params=UriParams(uri=uri, cursor=cursor))
        return _raw(await self.client.session.send_request(request, Anything))


def _raw(result: Anything) -> dict[str, Any]:
    return result.model_dump(by_alias=True, exclude_none=False)


@asynccontextmanager
async def offering(
    data_root: Path, *folders: Path, kind: type[SkillLibrary] = SkillLibrary
) -> AsyncGenerator[Web]:
    """A server over HTTP whose skills are those in the folders, and its users' own."""
    config = SkillsConfig(folders=folders, shipped=False)
    library = kind(config, data_root, pace=RefreshPace(poll_s=0.02, settle_s=0.05))
    visible = VisibleSkills(Skills(library), make_caller_finder(nobody), config)
    async with served(data_root, skills=visible) as web:
        yield web


@asynccontextmanager
async def client_of(
    web: Web, mode: str = "auto", user: str = "alice", chat: str | None = "work"
) -> AsyncGenerator[Client]:
    """The SDK's client of a user."""
    named = {} if chat is None else {"Mcp-Sandbox-Chat": chat}
    async with web.client(mode, await web.headers(user, **named)) as client:
        yield client
