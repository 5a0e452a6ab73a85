"""Arguments as a client sent them, checked against a tool's model; problems in plain words."""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mcp.server.mcpserver.utilities.func_metadata import ArgModelBase
from pydantic import ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from mcp_sandbox.errors import InvalidArgument
from mcp_sandbox.server.text import clip, show_name
from mcp_sandbox.server.words import PARAMETERS, offered

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
        return model.model_validate(_meant(arguments, schema["properties"])).model_dump_one_level()
    except ValidationError as exc:
        raise InvalidArgument(_told(exc.errors(include_url=False), schema)) from exc


def input_schema(model: type[ArgModelBase]) -> dict[str, Any]:
    """The JSON schema of the arguments, without the titles that only repeat the names."""
    schema = model.model_json_schema()
    for part in (schema, *schema["properties"].values()):
        part.pop("title", None)
    return schema


def _meant(arguments: Schema, properties: Schema) -> dict[str, Any]:
    """The arguments as their schemas have them; null and "" are an optional one left out."""
    schemas = {name: properties.get(name, {}) for name in arguments}
    read = {name: _read(arguments[name], schema) for name, schema in schemas.items()}
    left_out = {name for name in read if "default" in schemas[name] and read[name] in (None, "")}
    return {name: value for name, value in read.items() if name not in left_out}


def _read(value: object, schema: Schema) -> object:
    """What a value of another type can only mean for its parameter."""
    kinds = {branch.get("type", "string") for branch in schema.get("anyOf", [schema])}
    if isinstance(value, str) and "string" not in kinds:
        with suppress(ValueError, TypeError):
            value = from_json({"True": "true", "False": "false"}.get(value, value))
    if isinstance(value, dict) and "object" in kinds:
        return {name: _as_text(each) for name, each in value.items() if each is not None}
    # JSON does not tell 30.0 from 30.
    if isinstance(value, float) and value.is_integer() and "integer" in kinds:
        return int(value)
    return value


def _as_text(value: object) -> object:
    return json.dumps(value) if isinstance(value, int | float) else value


def _told(errors: Iterable[ErrorDetails], schema: Schema) -> str:
    properties: Schema = schema["properties"]
    found = [*errors]
    missing = [str(error["loc"][0]) for error in found if error["type"] == "missing"]
    # A value that fits no branch of an optional parameter is reported once per branch.
    sentences = dict.fromkeys(_sentence(error, properties, missing) for error in found[:99])
    return "\n".join([*sentences][:10])


def _sentence(error: ErrorDetails, properties: Schema, missing: Sequence[str]) -> str:
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return _unknown(name, properties, missing)
    allowed = _allowed(properties[name])
    if error["type"] == "missing":
        return f"{name} is missing: give {allowed}."
    if error["type"] == "value_error":
        return f"{name}: {error['ctx']['error']}."
    if len(error["loc"]) > 1:
        key = clip(show_name(str(error["loc"][1])), 60)
        return f"{name}: the value of {key!r} must be text, not {_shown(error['input'])}."
    return f"{name} must be {allowed}, not {_shown(error['input'])}.{_hint(name, error['input'])}"


def _hint(name: str, value: object) -> str:
    if name == "language":
        return " For others write a file, then exec gcc or what else runs it, if it is installed."
    if name.endswith("_s") and isinstance(value, int | float) and 1000 <= value < 1e9:
        return f" Milliseconds? It is seconds: {value / 1000:g}."
    return ""


def _unknown(name: str, known: Schema, missing: Sequence[str]) -> str:
    hint = offered(name, [*missing, *known], PARAMETERS)
    hint = hint or (f"did you mean {missing[0]}? " if missing else "")
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
    low = "1 to" if schema.get("minLength") else "at most"
    return f" of {low} {schema['maxLength']:,} characters" if "maxLength" in schema else ""


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
