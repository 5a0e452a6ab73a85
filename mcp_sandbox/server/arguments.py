"""Arguments as a client sent them, checked against a tool's model; problems in plain words."""

import difflib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase
from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.server.text import clip, show_name

Schema = Mapping[str, Any]


class Arguments(ArgModelBase):
    """Base of the arguments of every tool: exact types, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def check_arguments(
    model: type[ArgModelBase], schema: Schema, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments as keyword arguments of the tool's function.

    Raises:
        InvalidArgument: one sentence per problem, naming the parameter and what is allowed.
    """
    try:
        return model.model_validate(dict(arguments)).model_dump_one_level()
    except ValidationError as exc:
        raise InvalidArgument(_told(exc.errors(include_url=False), schema)) from exc


def input_schema(model: type[ArgModelBase]) -> dict[str, Any]:
    """The JSON schema of the arguments, without the titles that only repeat the names."""
    schema = model.model_json_schema()
    for part in (schema, *schema["properties"].values()):
        part.pop("title", None)
    return schema


def _told(errors: Iterable[ErrorDetails], schema: Schema) -> str:
    properties: Schema = schema["properties"]
    # A value that fits no branch of an optional parameter is reported once per branch.
    sentences = dict.fromkeys(_sentence(error, properties) for error in errors)
    return "\n".join([*sentences][:10])


def _sentence(error: ErrorDetails, properties: Schema) -> str:
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return _unknown(name, properties)
    allowed = _allowed(properties[name])
    if error["type"] == "missing":
        return f"{name} is missing: give {allowed}."
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}."
    if len(error["loc"]) > 1:
        key = clip(show_name(str(error["loc"][1])), 60)
        return f"{name}: the value of {key!r} must be text, not {_shown(error['input'])}."
    return f"{name} must be {allowed}, not {_shown(error['input'])}."


def nearest(name: str, known: Iterable[str]) -> str:
    """A question that offers the known name most like `name`; empty when none is."""
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""


def _unknown(name: str, known: Iterable[str]) -> str:
    hint = nearest(name, known)
    takes = f"this tool takes {', '.join(known)}" if known else "this tool takes no arguments"
    return f"There is no parameter {clip(show_name(name), 60)!r}: {hint}{takes}."


def _allowed(schema: Schema) -> str:
    if "anyOf" in schema:
        return " or ".join(_allowed(branch) for branch in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    words = {
        "string": f"text{_at_most(schema)}",
        "integer": f"a whole number{_range(schema)}",
        "number": f"a number{_range(schema)}",
        "boolean": "true or false",
        "object": "an object with text values",
        "null": "null",
    }
    return words[schema["type"]]


def _at_most(schema: Schema) -> str:
    return f" of at most {schema['maxLength']:,} characters" if "maxLength" in schema else ""


def _range(schema: Schema) -> str:
    if "maximum" in schema:
        return f" from {schema['minimum']:,} to {schema['maximum']:,}"
    return f" of at least {schema['minimum']:,}" if "minimum" in schema else ""


def _shown(value: object) -> str:
    if isinstance(value, str) and len(value) > 60:
        return f"{len(value):,} characters beginning with {show_name(value[:40])!r}"
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return clip(show_name(json.dumps(value, ensure_ascii=False)), 60)
