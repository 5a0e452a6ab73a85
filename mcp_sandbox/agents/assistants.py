"""Assistants: how agents behave, each a folder of the operator's.

NAME/assistant.yaml   what it is (or package.yao, the same as JSON with comments)
     prompts.yml      instructions, a list of {role: system, content}
     mcps/SERVER.yaml MCP servers of the host, beside those of bridge.servers
     skills/          skills for its chats alone
     hooks.py         code of the operator's before and after a run
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import json5
import yaml
from pydantic import BaseModel, Field, RootModel, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from mcp_sandbox.agents.executors import find_executor
from mcp_sandbox.config import BridgeServerConfig, Duration, Section, Size
from mcp_sandbox.durable import check_trusted
from mcp_sandbox.errors import ConfigError, InvalidArgument

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MOST_CHARS = 1 << 20
_M = TypeVar("_M", bound=BaseModel)


class SandboxOptions(Section):
    """The computer of an assistant's chats, and the program that works in it."""

    command: str = ""
    image: str = ""
    max_memory: Size | None = Field(default=None, ge=64 << 20)
    max_cpu: float | None = Field(default=None, gt=0, le=1024, allow_inf_nan=False)
    timeout: Duration | None = None
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])

    @field_validator("arguments")
    @classmethod
    def _check_by_program(cls, given: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if command := info.data.get("command") or info.context:
            try:
                find_executor(command).read(given, f"the arguments of {command}")
            except InvalidArgument as exc:
                raise ValueError(str(exc)) from exc
        return given


class _Server(Section):
    server_id: str
    tools: tuple[str, ...] = ()


class _Mcp(Section):
    servers: tuple[_Server, ...] = ()


class _Written(Section):
    name: str = ""
    connector: str = ""
    sandbox: SandboxOptions | None = None
    mcp: _Mcp = _Mcp()
    access: tuple[str, ...] = ("local",)


class _Prompt(Section):
    role: Literal["system"] = "system"
    content: str


_Prompts = RootModel[tuple[_Prompt, ...]]


class Assistant:
    """An assistant as it is used: no repr, pickle or JSON shows what it has found.

    `sandbox` is None where it only talks to its model. `tools` are those of the host that it may
    use, by server; `servers` are its own. `skills`, the folder of those that are `taught`, and
    `hooks` are None where it has none.
    """

    def __init__(self, name: str, folder: Path, written: _Written) -> None:
        self.name, self.connector, self.sandbox = name, written.connector, written.sandbox
        self.tools = {each.server_id: each.tools for each in written.mcp.servers}
        prompts, hooks = folder / "prompts.yml", folder / "hooks.py"
        turns = _read(prompts, _Prompts).root if prompts.exists() else ()
        self.prompts: Sequence[Mapping[str, str]] = [each.model_dump() for each in turns]
        files = sorted(folder.glob("mcps/*.y*ml"))
        self.servers = {each.stem: _read(each, BridgeServerConfig) for each in files}
        skills = sorted(folder.glob("skills/*/SKILL.md"))
        self.skills = skills[0].parents[1] if skills else None
        self.taught = [each.parent.name for each in skills]
        self.hooks = hooks if hooks.is_file() else None

    def __reduce__(self) -> str:
        raise TypeError("an assistant may hold secrets: name it instead")


def read_assistant(folders: Sequence[Path], name: str, user: str, command: str = "") -> Assistant:
    """Read an assistant that the user may use; "" is one that has a sandbox and nothing else.

    `command` is the program where it names none. Blocks on the disk.

    Raises:
        InvalidArgument: there is none of that name for the user.
        ConfigError: a file of it cannot be used; the message names the line.
    """
    if not name:
        return Assistant("", Path(os.devnull), _Written(sandbox=SandboxOptions()))
    if file := _found(folders).get(name):
        written = _read(file, _Written, command)
        if user in written.access:
            return Assistant(name, file.parent, written)
    known = ", ".join(list_assistants(folders, user)) or "none, in agents.folders"
    raise InvalidArgument(f"there is no assistant {name[:80]!r}; there are {known}")


def list_assistants(folders: Sequence[Path], user: str) -> list[str]:
    """Return the names of those that the user may use. Blocks on the disk; raises ConfigError."""
    return [name for name, file in _found(folders).items() if user in _read(file, _Written).access]


def _found(folders: Sequence[Path]) -> dict[str, Path]:
    """Find the file of each assistant; of two of a name, the first counts."""
    found: dict[str, Path] = {}
    for root in folders:
        if not root.is_dir():
            raise ConfigError(f"agents.folders: there is no folder {root}")
        for folder in sorted(root.iterdir()):
            files = [folder / name for name in ("assistant.yaml", "package.yao")]
            if _NAME.fullmatch(folder.name) and (file := next(filter(Path.is_file, files), None)):
                found.setdefault(folder.name, file)
    return found


def _read(file: Path, model: type[_M], context: str = "") -> _M:
    """Return what a file holds, checked. Raises ConfigError."""
    node = None
    try:
        text = _text(file)
        if file.suffix == ".yao":
            return model.model_validate(json5.loads(text), context=context)
        node = yaml.compose(text, yaml.SafeLoader)
        value = node and yaml.SafeLoader("").construct_document(node)
        return model.model_validate(value, context=context)
    except ValidationError as exc:
        wrong = [_explain(file, node, model, error) for error in exc.errors()]
        raise ConfigError("\n".join(wrong[:10])) from exc
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc


def _text(file: Path) -> str:
    check_trusted(file)
    with file.open(encoding="utf-8") as stream:
        text = stream.read(_MOST_CHARS + 1)
    if len(text) > _MOST_CHARS:
        raise ValueError(f"it has over {_MOST_CHARS:,} characters")
    return text


def _explain(
    file: Path, node: yaml.Node | None, model: type[BaseModel], error: ErrorDetails
) -> str:
    place = str(file)
    for key in error["loc"]:
        if isinstance(node, yaml.MappingNode):
            pairs = {name.value: (name, value) for name, value in node.value}
            at, node = pairs.get(str(key), (node, None))
            place = f"{file} line {at.start_mark.line + 1}"
        elif isinstance(node, yaml.SequenceNode) and isinstance(key, int):
            node = node.value[key]
            place = f"{file} line {node.start_mark.line + 1}"
    key = ".".join(map(str, error["loc"]))
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        message = f"there is no such key; there are {', '.join(model.model_fields)}"
    return f"{place}: {key}: {message}"
