"""A tool: checks the arguments, finds the session, answers every failure with text.

The types of its parameters say what is allowed: arguments are checked against them as a client
sent them, before the tool runs.
"""

import difflib
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

from anyio import CancelScope
from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase, FuncMetadata
from mcp.types import CallToolResult, InputRequiredResult, ToolAnnotations
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)
from pydantic_core import ErrorDetails, from_json

from mcp_sandbox.errors import ConsentNeeded, InvalidArgument, NotPermitted
from mcp_sandbox.json_size import check_json_size
from mcp_sandbox.models import Language
from mcp_sandbox.server.consent import Consent
from mcp_sandbox.server.errors import readable_errors, sole_error, text_for_model
from mcp_sandbox.server.identity import Request, suit_client
from mcp_sandbox.server.results import RESULT_KEY, texts, with_notices
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.sessions.approvals import asks
from mcp_sandbox.telemetry.calls import CallRecord, Count, recorded

MAX_CODE_CHARS = 1 << 20
MAX_CONTENT_CHARS = 8 << 20

_ALIASES = {
    **dict.fromkeys(("sh", "shell"), "bash"),
    **dict.fromkeys(("js", "node", "nodejs"), "javascript"),
    **dict.fromkeys(("py", "python3"), "python"),
}
_FENCED = re.compile(r"\s*(`{3,}|~{3,})[ \w+#.-]*\r?\n(.*\n) *\1\s*", re.DOTALL)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")
# The kernel refuses longer single strings.
_MAX_ENV_VALUE_BYTES = 128 * 1024 - 512
Schema = Mapping[str, Any]
READS = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
CHANGES = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=False, open_world_hint=False
)
PARAMETERS = {
    "code": "cmd command input script snippet source",
    "command": "cmd code commands script bash_command",
    "content": "contents text file_text data body value",
    "cwd": "workdir working_dir working_directory dir directory path",
    "destination": "dst dest to target new_path new_name",
    "glob": "include include_pattern file_pattern type",
    "id": "process process_id pid shell_id bash_id task_id session_id",
    "limit": "head_limit max_results max_count num_lines end_line",
    "new": "new_string new_str new_text replace replacement",
    "offset": "start_line line start view_range",
    "old": "old_string old_str old_text search find",
    "path": "file_path filename file target_file uri dir directory folder",
    "pattern": "regex regexp query search glob",
    "source": "src from old_path path",
    "tail": "lines num_lines limit",
    "timeout_s": "timeout timeout_ms timeout_seconds max_time",
    "wait_s": "wait run_in_background background block yield_time_ms",
}
# What tools of other agents take besides, and what changes nothing here.
_IDLE = {
    *("description", "explanation", "justification", "goal", "intent", "summary"),
    *("require_user_approval", "requires_approval"),
}
_TO_BACKGROUND = ("run_in_background", "is_background", "isBackground", "background")
# Clients parse such arguments if they hold JSON.
_WHOLE = ("content", "stdin")
_TOLD = 1_000
_KINDS = {
    "string": "text",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list of texts",
    "object": "an object with text values",
    "null": "null",
}
TOOLS = {
    "delete_file": "rm remove remove_file unlink",
    "edit_file": "multiedit str_replace str_replace_editor str_replace_based_edit_tool apply_patch",
    "exec": "bash sh shell terminal cmd run local_shell run_command run_terminal_cmd",
    "glob": "find file_search",
    "grep": "search rg ripgrep search_files search_file_content codebase_search",
    "list_files": "ls dir list_dir list_directory",
    "move_file": "mv rename",
    "preview": "open_browser browser_preview preview_start open_port expose_port serve",
    "process": "bashoutput bash_output killshell kill_shell kill ps jobs background taskoutput",
    "read_file": "cat open view view_file open_file notebookread",
    "run_code": "python run_python ipython jupyter code_interpreter python_repl_ast node "
    "notebookedit",
    "skill_activate": "skill",
    "write_file": "create save create_file",
}


def _without_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not contain a NUL character: leave it out, or write an escape")
    return text


def _without_fence(text: str) -> str:
    """Return the code inside, when all of it is in one pair of Markdown fences."""
    whole = _FENCED.fullmatch(text)
    return whole[2] if whole else text


def _known_language(value: object) -> object:
    return _ALIASES.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _settable(env: Mapping[str, str] | None) -> Mapping[str, str] | None:
    for name, value in (env or {}).items():
        if not _ENV_NAME.fullmatch(name):
            raise ValueError(f"{name[:60]!r} cannot be a variable's name; use letters, digits, '_'")
        if "\0" in value or len(value.encode()) > _MAX_ENV_VALUE_BYTES:
            raise ValueError(f"the value of {name} must be shorter than 128 KiB, without NUL")
    return env


Path = Annotated[
    str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_without_nul)
]
Pattern = Path
Text = Annotated[str, StringConstraints(max_length=MAX_CONTENT_CHARS)]
Code = Annotated[
    str,
    StringConstraints(min_length=1, max_length=MAX_CODE_CHARS),
    AfterValidator(_without_nul),
    AfterValidator(_without_fence),
]
EnvValue = Annotated[str, StringConstraints(max_length=_MAX_ENV_VALUE_BYTES)]
Env = Annotated[dict[str, EnvValue] | None, AfterValidator(_settable)]
LanguageName = Annotated[Language, BeforeValidator(_known_language)]
Limit = Annotated[int, Field(ge=1, le=10_000)]
Line = Annotated[int, Field(ge=1, le=2**31)]


@dataclass
class ClientTimeout:
    """Of a client with a call: `leave` is cancelled when it is `lost`, by its own time limit."""

    leave: CancelScope = field(default_factory=CancelScope)
    lost: bool = False


class Arguments(ArgModelBase, extra="forbid", strict=True, allow_inf_nan=False):
    """Base of the arguments of every tool: exact types, no unknown names."""


class SandboxTool(Tool, arbitrary_types_allowed=True):
    """A tool whose function takes the caller's session first, then the arguments.

    The server that offers it gives it `session_for`, and `count` for the records of its calls.
    """

    session_for: Callable[..., Awaitable[Any]] | None = Field(default=None, exclude=True)
    count: Count | None = Field(default=None, exclude=True)

    async def run(
        self, arguments: dict[str, Any], context: Request, convert_result: bool = False
    ) -> CallToolResult | InputRequiredResult:
        counted = recorded(self.name, self.count, call=str(context.request_id))
        with readable_errors():
            try:
                with counted as record, sole_error():
                    result = await self._answer(arguments, context, record)
                    if convert_result:
                        self.fn_metadata.convert_result(result)
                    return result
            except NotPermitted as exc:
                if record.level is None:
                    raise
                # A program that reads results finds the refusal where it finds ends.
                refused = texts([text_for_model(exc)], {"exit_code": -1, **_grade(record)})
                return refused.model_copy(update={"is_error": True})

    async def _answer(
        self, arguments: dict[str, Any], context: Request, record: CallRecord
    ) -> CallToolResult | InputRequiredResult:
        model, properties = self.fn_metadata.arg_model, self.parameters["properties"]
        try:
            checked = model.model_validate(_meant(arguments, properties)).model_dump_one_level()
        except ValidationError as exc:
            raise InvalidArgument(
                _describe_problems(exc.errors(include_url=False), properties)
            ) from exc
        if self.context_kwarg is not None:
            checked[self.context_kwarg] = context
        assert self.session_for  # noqa: S101
        session = await self.session_for(context)
        record.chat, record.backend = session.chat, session.backend
        if client := context.session.client_params:
            record.client = clip(f"{client.client_info.name} {client.client_info.version}", 80)
        consent = Consent(context)
        asked = asks.set(consent.ask)
        try:
            result: CallToolResult = await self.fn(session, **checked)
        except ConsentNeeded:
            if consent.round is None:
                raise
            return consent.round
        finally:
            asks.reset(asked)
        # Clients show a model nothing but the structured part of a result that has one.
        news = [] if result.structured_content else await session.take_notices()
        news += [
            f"{name} came as {_shown(arguments[name])} and was taken as JSON: give it as text to "
            "choose how it is written"
            for name in _WHOLE
            if isinstance(arguments.get(name), dict | list)
        ]
        if find_client_timeout(context).lost:
            # Of an answer that comes too late they show nothing: it comes with the next one.
            text = "\n".join(each.text for each in result.content if each.type == "text")
            news.append(f"{self.name}, for which your client did not wait: {text[-_TOLD:]}")
            while news:
                session.tell_news(news.pop(0))
        result = with_notices(_add_grade(result, record), news)
        return suit_client(result, client.client_info.name) if client else result


def _add_grade(result: CallToolResult, record: CallRecord) -> CallToolResult:
    if record.level not in ("medium", "high", "critical"):
        return result
    meta = result.meta or {}
    graded = {**meta.get(RESULT_KEY, {}), **_grade(record)}
    return result.model_copy(update={"meta": {**meta, RESULT_KEY: graded}})


def _grade(record: CallRecord) -> dict[str, Any]:
    return {"level": record.level, "patterns": [*record.patterns]}


def find_client_timeout(request: Request) -> ClientTimeout:
    """Return the patience of a request's client; not every client says when it gives up."""
    given = request.request_context.request
    return given if isinstance(given, ClientTimeout) else ClientTimeout()


def build_tool(
    function: Callable[..., Awaitable[CallToolResult]],
    *,
    title: str,
    annotations: ToolAnnotations,
    output: type[BaseModel] | None = None,
    note: str = "",
    bounds: Mapping[str, tuple[Any, Any]] | None = None,
) -> SandboxTool:
    """Return the tool of `function`, whose name, docstring and parameters are what clients see.

    `note` is added to the description. `bounds`: type and default of parameters that are set.
    """
    parameters = inspect.signature(function).parameters
    fields: dict[str, Any] = {
        name: (each.annotation, ... if each.default is each.empty else each.default)
        for name, each in parameters.items()
        if name not in ("session", "request")
    }
    fields |= {name: bound for name, bound in (bounds or {}).items() if name in fields}
    model = create_model(f"{function.__name__}_arguments", __base__=Arguments, **fields)
    schema = model.model_json_schema()
    # Titles only repeat the names.
    for part in (schema, *schema["properties"].values()):
        part.pop("title", None)
    return SandboxTool(
        fn=function,
        name=function.__name__.rstrip("_"),
        title=title,
        description="\n".join(filter(None, [inspect.cleandoc(function.__doc__ or ""), note])),
        parameters=schema,
        fn_metadata=FuncMetadata(arg_model=model, output_model=output),
        is_async=True,
        context_kwarg="request" if "request" in parameters else None,
        annotations=annotations,
    )


def _meant(arguments: Schema, properties: Schema) -> dict[str, Any]:
    """Convert arguments to the types of their schemas; null and "" omit an optional one.

    What other agents' tools take besides is left out where it changes nothing.
    """
    given = {each: arguments[each] for each in arguments if each in properties or each not in _IDLE}
    waits = "wait_s" in properties and "action" not in properties
    for name in _TO_BACKGROUND if waits else ():
        if isinstance(value := _read(given.get(name), {"type": "boolean"}), bool):
            del given[name]
            if value:
                given.setdefault("wait_s", 0)
    schemas = {name: properties.get(name, {}) for name in given}
    read = {name: _read(given[name], schema) for name, schema in schemas.items()}
    for name in _WHOLE:
        if name in properties and isinstance(whole := read.get(name), dict | list):
            read[name] = json.dumps(whole, indent=2, ensure_ascii=False) + "\n"
    left_out = {name for name in read if "default" in schemas[name] and read[name] in (None, "")}
    return {name: value for name, value in read.items() if name not in left_out}


def _read(value: object, schema: Schema) -> object:
    """Convert a value of another type if it can mean only one thing for its parameter."""
    kinds = {branch.get("type", "string") for branch in schema.get("anyOf", [schema])}
    if isinstance(value, str) and "string" not in kinds:
        with suppress(ValueError, TypeError):
            check_json_size(value.encode("utf-8", "replace"))
            value = from_json({"True": "true", "False": "false"}.get(value, value))
    if isinstance(value, str) and "array" in kinds:
        return [value]
    if isinstance(value, dict) and "object" in kinds:
        return {
            name: json.dumps(each) if isinstance(each, int | float) else each
            for name, each in value.items()
            if each is not None
        }
    # JSON does not tell 30.0 from 30.
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    return value


def _describe_problems(found: Sequence[ErrorDetails], properties: Schema) -> str:
    missing = [str(error["loc"][0]) for error in found if error["type"] == "missing"]
    # A value that fits no branch of an optional parameter is reported once per branch.
    sentences = dict.fromkeys(_sentence(error, properties, missing) for error in found[:99])
    return "\n".join([*sentences][:10])


def _sentence(error: ErrorDetails, properties: Schema, missing: Sequence[str]) -> str:
    name = str(error["loc"][0])
    if len(error["loc"]) > 1:
        key = clip(show_name(".".join(map(str, error["loc"][1:]))), 60)
        wrong = {"missing": "is missing in", "model_type": "must be an object, not"}
        must = wrong.get(error["type"], "must be text, not")
        return f"{name}: the value of {key!r} {must} {_shown(error['input'])}."
    if error["type"] == "extra_forbidden":
        return _unknown(name, properties, missing)
    allowed = _allowed(properties[name])
    if error["type"] == "missing":
        return f"{name} is missing: give {allowed}."
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}."
    return f"{name} must be {allowed}, not {_shown(error['input'])}.{_hint(name, error['input'])}"


def _hint(name: str, value: object) -> str:
    if name == "language":
        return " For others write a file, then exec gcc or what else runs it, if it is installed."
    if name.endswith("_s") and isinstance(value, int | float) and 1000 <= value < 1e9:
        return f" Milliseconds? It is seconds: {value / 1000:g}."
    return ""


def _unknown(name: str, known: Schema, missing: Sequence[str]) -> str:
    hint = offer(name, [*missing, *known], PARAMETERS)
    hint = hint or (f"did you mean {missing[0]}? " if missing else "")
    takes = f"this tool takes {', '.join(known)}" if known else "this tool takes no arguments"
    return f"There is no parameter {clip(show_name(name), 60)!r}: {hint}{takes}."


def _allowed(schema: Schema) -> str:
    if "anyOf" in schema:
        given = [branch for branch in schema["anyOf"] if branch.get("type") != "null"]
        return " or ".join(map(_allowed, given))
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if schema.get("items", {"type": "string"}).get("type") != "string":
        return f"a list of objects{_bounds(schema)}"
    return f"{_KINDS.get(schema.get('type', ''), 'an object')}{_bounds(schema)}"


def _bounds(schema: Schema) -> str:
    if "maxLength" in schema:
        low = "1 to" if schema.get("minLength") else "at most"
        return f" of {low} {schema['maxLength']:,} characters"
    if "maxItems" in schema:
        return f" with {schema.get('minItems', 0):,} to {schema['maxItems']:,} of them"
    if "maximum" in schema:
        return f" from {schema['minimum']:,} to {schema['maximum']:,.15g}"
    return f" of at least {schema['minimum']:,}" if "minimum" in schema else ""


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > 60:
        return f"{len(value):,} characters beginning with {show_name(value[:40])!r}"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return clip(show_name(json.dumps(value, ensure_ascii=False)), 60)


def offer(name: str, ours: Iterable[str], table: Mapping[str, str]) -> str:
    """Return a question that offers the first of `ours` that fits; empty if none does."""
    word, known = name.lower(), [*ours]
    called = [each for each in known if word in table.get(each, "").split()]
    # The letters alone tell only of a slip.
    likely = called or difflib.get_close_matches(word[:100], known, n=1, cutoff=0.6)
    return f"did you mean {likely[0]}? " if likely else ""
