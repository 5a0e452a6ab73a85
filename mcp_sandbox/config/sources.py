"""Puts a configuration together: defaults < YAML file < environment < command-line flags.

Every value is carried with the words that say who gave it, so that an error can name the line.
"""

import difflib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import attrgetter, getitem
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, PlainSerializer, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mcp_sandbox.config.environment import (
    PREFIX,
    default_config_file,
    own_folders,
    setting_variables,
)
from mcp_sandbox.config.sections import Config
from mcp_sandbox.config.values import DAY_S, MIB, is_bare, show_duration, show_size
from mcp_sandbox.durable import check_trusted, make_folder, write_file
from mcp_sandbox.errors import ConfigError

logger = logging.getLogger(__name__)

# Read by the command line (the places of the file and the socket) and by the test suite; not
# settings.
_RESERVED = frozenset({"MCP_SANDBOX_CONFIG", "MCP_SANDBOX_SOCKET", "MCP_SANDBOX_REQUIRE"})
_LARGEST_FILE = 1 << 20
_FIRST_LINE = "# `mcp-sandbox config example` prints what can be set.\n"
Values = Mapping[str, Any] | None
Setting = tuple[object, str]
"""A value as it was given, and who gave it."""
Entry = tuple[str, yaml.Node, yaml.Node]  # Of a key: its name and its value.
_WORDS: Mapping[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Path: "an absolute path",
    tuple: 'a list, such as ["one", "two"]',
    dict: 'names with texts, such as {"NAME": "text"}',
    show_size: "a size such as 512m or 2g",
    show_duration: "a time such as 90, 10m or 1h30m",
}
_SHAPES = {
    "previews.listen": "HOST:PORT, such as 127.0.0.1:8081",
    "egress.allow": 'a list such as ["api.example.com", {"host": "db.example.net", "port": 5432}]',
    "connectors": 'NAME: {"url": "https://api.anthropic.com", "key": "command: pass show api"}',
    "secrets": 'NAME: {"from": "command: pass show api", "hosts": ["api.example.com"]}',
}
# Values of sandbox variables may be secrets, and so may what is given for a source of one.
_HIDDEN = frozenset({"env", "secrets", "connectors", "e2b.api_key", "fleet.redis"})
_HIDDEN |= {"storage.access_key", "storage.secret_key"}
_SANDBOX_EXEC = (
    "sandbox-exec confines programs of macOS, and a sandbox here needs the kernel of Linux: write "
    "bubblewrap on Linux, and docker on a Mac, whose engine brings such a kernel (deploy/)"
)
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most"}
# Settings of the version before: what they did, what to use instead, and the values that protected
# something, with which nothing starts. For one version.
_REMOVED: Mapping[str, tuple[str, str, frozenset[str]]] = {
    "skills.narrow": (
        "the allowed-tools of a skill refuse no calls any more",
        "write rules of the policy (policy.rules) for what must not run, and remove it",
        frozenset({"deny"}),
    ),
}


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration with the source of every value, by dotted key."""

    config: Config
    sources: Mapping[str, str]
    again: "Callable[[Values], LoadedConfig]"  # Loads it as it is now, with these variables.

    def rows(self, *names: str) -> Iterator[tuple[str, object, str, str]]:
        """Yield key, value, source and help of all settings, or of those named, also by section."""
        if unknown := [name for name in names if name not in {*KNOWN, *_SECTIONS}]:
            raise ConfigError(_unknown(unknown[0]))
        tree = self.config.model_dump(mode="json", by_alias=True)
        within = tuple(f"{name}." for name in names or KNOWN)
        for key in (key for key in KNOWN if f"{key}.".startswith(within)):
            source, about = self.sources.get(key, "default"), KNOWN[key].description or ""
            yield key, reduce(getitem, key.split("."), tree), source, about

    def variables(self) -> list[str]:
        """Return the variables that settings in use name as env:NAME."""
        used = (key for key in KNOWN if key in self.sources or key.startswith(self.config.backend))
        values = (str(attrgetter(key)(self.config)) for key in used)
        return [each.removeprefix("env:") for each in values if each.startswith("env:")]

    def differences(self, variables: Mapping[str, Any]) -> list[str]:
        """Say which settings would be others now, with the settings among these variables.

        Raises ConfigError: they cannot be used.
        """
        now = self.again({k: v for k, v in variables.items() if k.startswith(PREFIX)})
        pairs = zip(self.rows(), now.rows(), strict=True) if now.config != self.config else ()
        return [
            f"{key} is {mine!r}, yours is {other!r} ({source})"
            for (key, mine, *_), (_, other, source, _) in pairs
            if attrgetter(key)(self.config) != attrgetter(key)(now.config)
        ]


def load_config(
    file: Path | None = None, flags: Values = None, variables: Values = None, *, text: str = ""
) -> LoadedConfig:
    """Read every source and return the configuration that results.

    `file` must exist when it is given; `flags` are values by dotted key, None = not given;
    `variables` are the environment's, None = this process's own; `text` stands in for the file's.

    Raises ConfigError: a source cannot be read, or holds an unknown key or an unusable value.
    """
    variables = setting_variables() if variables is None else variables
    named = variables.get("MCP_SANDBOX_CONFIG")
    if named and not named.startswith("/"):
        raise ConfigError(f"MCP_SANDBOX_CONFIG is {named!r}: write an absolute path")
    settings = dict(_from_file(file or (Path(named) if named else None), text))
    settings.update(_from_environment(variables))
    for key, value in (flags or {}).items():
        if value is not None:
            settings[key] = (_make_absolute(key, value, Path.cwd()), "command line")
    for key, (value, source) in settings.items():
        _check_unit(key, value, source)
    tree: dict[str, Any] = {}
    for key, (value, _) in settings.items():
        *sections, name = key.split(".")
        reduce(lambda part, section: part.setdefault(section, {}), sections, tree)[name] = value
    try:
        config = Config.model_validate(tree)
        named = (config.egress.ca_bundle, config.agents.programs, config.kubernetes.template)
        for path in (*own_folders(), *config.policy.rules, *named):
            if path and path.exists():
                check_trusted(path)
    except PermissionError as exc:
        raise ConfigError(f"{exc.strerror}, or name another in the configuration") from exc
    except ValidationError as exc:
        sentences = dict.fromkeys(_sentence(error, settings) for error in exc.errors())
        raise ConfigError("\n".join(sentences)) from exc
    sources = {key: source for key, (_, source) in settings.items()}
    chosen = {"MCP_SANDBOX_CONFIG": str(file.absolute())} if file else {}
    return LoadedConfig(
        config, sources, lambda now: load_config(None, flags, {**chosen, **(now or {})})
    )


def set_value(file: Path, key: str, text: str, check: Callable[[Config], None]) -> None:
    """Write a setting into a file, which is made if need be; all else in it stays as it is.

    Raises ConfigError, as `check` does, if no server would start with it; nothing is written then.
    """
    if key not in KNOWN:
        raise ConfigError(_unknown(key))
    value = _make_absolute(key, _from_text(key, text, key), Path.cwd())
    # That of the environment goes before the file's.
    others = {name: each for name, each in setting_variables().items() if name != _spell(key)}
    try:
        status = file.stat() if file.exists() else None
        old = (_read(file).decode() if status else "") or _FIRST_LINE
        wanted = load_config(file, {key: value}, others, text=old)
        check(wanted.config)
        before, after = _around(old, file, key)
        for written in (text, json.dumps(value, ensure_ascii=False)):
            new = f"{before}{written}{after}"
            with suppress(ConfigError):
                found = load_config(file, None, others, text=new)
                if (found.config, {*found.sources}) == (wanted.config, {*wanted.sources}):
                    make_folder(file.resolve().parent)
                    write_file(file.resolve(), new.encode(), like=status)
                    return
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{file} cannot be changed: {exc}") from exc
    raise ConfigError(f"there is no telling where {key} belongs in {file}: write it there yourself")


def _around(text: str, path: Path, key: str) -> tuple[str, str]:
    """Return what is before a value and after it: where it is, or at the end of its section."""
    root, end = _compose(path, text), "\r\n" if "\r\n" in text else "\n"
    text += end * (not text.endswith("\n"))
    if root is None:
        return f"{text}{key}: ", end
    entries = [("", root, root), *_entries(root, path)]
    if here := [each for each in entries if each[0] == key]:
        _, name, node = here[-1]  # The last one counts.
        at, start = text.index(":", name.end_mark.index) + 1, node.start_mark.index
        return f"{text[:at]} ", text[at:start].rstrip() + text[_end(text, node) :]
    around = [each for each in entries if not each[0] or each[0].endswith(".")]
    section, _, node = max(around, key=lambda each: len(each[0]) * key.startswith(each[0]))
    rest, at = f"{key.removeprefix(section)}: ", node.start_mark.index + 1
    if text[at - 1] == "{":
        return text[:at] + rest, (", " if node.value else "") + text[at:]
    at = text.index("\n", _end(text, node)) + 1
    return text[:at] + " " * node.start_mark.column + rest, end + text[at:]


def _end(text: str, node: yaml.Node) -> int:
    """Return where a node ends, without the comments after it."""
    while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
        *_, node = node.value[-1] if isinstance(node, yaml.MappingNode) else node.value
    return len(text[: node.end_mark.index].rstrip())


def _known(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _known(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


KNOWN: Mapping[str, FieldInfo] = dict(_known(Config))
_SECTIONS = frozenset(key.rpartition(".")[0] for key in KNOWN if "." in key)
_PATHS = [k for k, v in KNOWN.items() if "Path" in repr(v.annotation)]


def _from_file(file: Path | None, text: str = "") -> Iterator[tuple[str, Setting]]:
    path = file or default_config_file()
    if not (file or text or path.exists()):
        return
    root = _compose(path, text or _read(path))
    for key, name, value in _entries(root, path) if root else ():
        if key in KNOWN:
            given = _make_absolute(key, _value(value, path), path.parent.absolute())
            yield key, (given, _place(path, name))


def _read(path: Path) -> bytes:
    try:
        if not S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path} is no file: give a configuration file")
        check_trusted(path)
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
    except OSError as exc:
        raise ConfigError(
            f"cannot read the configuration file {path}: {exc.strerror}; correct --config"
        ) from exc
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{path} is larger than 1 MiB: give a configuration file")
    return data


@lru_cache
def _compose(path: Path, text: str | bytes) -> yaml.Node | None:
    """Return the root of a file; a daemon asks for it whenever a client comes."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, UnicodeError, RecursionError) as exc:
        raise ConfigError(f"{path} is not valid YAML: {_where(exc)}; correct the file") from exc
    return node


def _where(exc: Exception) -> str:
    if isinstance(exc, yaml.MarkedYAMLError) and exc.problem_mark is not None:
        return f"line {exc.problem_mark.line + 1}: {exc.problem or exc.context}"
    return str(exc).splitlines()[0]


def _entries(node: yaml.Node, path: Path, prefix: str = "") -> Iterator[Entry]:
    """Yield the settings below a mapping node, and its sections, whose keys end with a dot."""
    if not isinstance(node, yaml.MappingNode):
        what = f"section {prefix.rstrip('.')!r}" if prefix else "the file"
        raise ConfigError(f"{_place(path, node)}: {what} must hold `name: value` lines")
    seen = set[str]()
    for name_node, value_node in node.value:
        key = f"{prefix}{name_node.value}"
        if key in seen:
            raise ConfigError(f"{_place(path, name_node)}: {key} is set twice; keep one")
        seen.add(key)
        if key in _SECTIONS:
            yield f"{key}.", name_node, value_node
            yield from _entries(value_node, path, f"{key}.")
        elif key in _REMOVED:
            _check_removed(key, _value(value_node, path), _place(path, name_node))
        elif key in KNOWN:
            yield key, name_node, value_node
        else:
            raise ConfigError(f"{_place(path, name_node)}: {_unknown(key)}")


def _place(path: Path, node: yaml.Node) -> str:
    return f"{path} line {node.start_mark.line + 1}"


def _value(node: yaml.Node, path: Path) -> object:
    try:
        return yaml.SafeLoader("").construct_document(node)
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{_place(path, node)}: {_where(exc)}; correct the value") from exc


def _make_absolute(key: str, value: object, folder: Path) -> object:
    if key in _PATHS and isinstance(value, list):
        return [_make_absolute(key, each, folder) for each in value]
    relative = key in _PATHS and isinstance(value, str) and value and not value.startswith("~")
    return str(folder / str(value)) if relative else value


def _from_environment(variables: Mapping[str, str]) -> Iterator[tuple[str, Setting]]:
    for name in sorted(variables.keys() - _RESERVED):
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if key in _REMOVED:
            _check_removed(key, variables[name], f"environment {name}")
            continue
        if key not in KNOWN:
            raise ConfigError(f"environment variable {name}: {_unknown(key, environment=True)}")
        value = _from_text(key, variables[name], f"environment variable {name}")
        yield key, (value, f"environment {name}")


def _from_text(key: str, text: str, place: str) -> object:
    kind = KNOWN[key].annotation
    try:
        return json.loads(text) if get_origin(kind) in (dict, tuple) else text
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{place}: write it as JSON, {_accepted(kind, ())}") from exc


def _spell(key: str) -> str:
    return PREFIX + key.upper().replace(".", "__")


def _unknown(key: str, *, environment: bool = False) -> str:
    if key == "isolation_mode":
        return f"{key} is called `backend` here, and its none unsafe-local; {_SANDBOX_EXEC}"
    near = difflib.get_close_matches(key, [*KNOWN, *_SECTIONS], n=1, cutoff=0.5)
    by_last_name = [known for known in KNOWN if known.endswith(f".{key.rpartition('.')[2]}")]
    below = [known for known in KNOWN if known.startswith(f"{key}.")]
    guess = [_spell(known) if environment else known for known in (*below, *by_last_name, *near)]
    advice = f"did you mean {guess[0]}?" if guess else "remove it"
    return f"there is no setting {key!r}; {advice} `mcp-sandbox config` lists all settings"


def _check_removed(key: str, value: object, source: str) -> None:
    """Warn of a setting that is gone; raise ConfigError where it was to protect something."""
    what, instead, protecting = _REMOVED[key]
    said = f"{key} {value!r} ({source}) is a setting no more: {what}; {instead}"
    if str(value) in protecting:
        raise ConfigError(said)
    _warn(said)


def _check_unit(key: str, value: object, source: str) -> None:
    """Refuse a number that may be meant in days or megabytes, and warn of a large one."""
    info = KNOWN[key]
    show = _shown_by(info.metadata)
    in_days = show is show_duration and info.default > DAY_S
    number = float(str(value)) if is_bare(value) and (in_days or show is show_size) else 0.0
    least, units = (DAY_S, "ds") if in_days else (MIB, "mb")
    if 0 < number < least:
        words = " or ".join(f"{value}{unit}" for unit in units)
        raise ConfigError(f"{key} {value} ({source}) is not usable: write {words}")
    if number:
        _warn(
            f"{key} {value} ({source}) has no unit, and will be refused: write {show(int(number))}"
        )


@lru_cache
def _warn(text: str) -> None:
    """Log it once: a daemon loads the configuration whenever a client comes."""
    logger.warning("%s", text)


def _sentence(error: ErrorDetails, settings: Mapping[str, Setting]) -> str:
    path = [str(part) for part in error["loc"]]
    dotted = [".".join(path[:n]) for n in (3, 2, 1)]
    # Where settings of a section do not go together, the first of them is named.
    own = (key for key in settings if key.startswith(f"{dotted[-1]}."))
    key = next((key for key in dotted if key in KNOWN), None) or next(own)
    info = KNOWN[key]
    value, source = settings.get(key, (error["input"], "environment S3_ENDPOINT"))
    reason = error["msg"]
    if error["type"] != "value_error":
        reason = f"write {_SHAPES.get(key) or _accepted(info.annotation, info.metadata)}"
    reason = _SANDBOX_EXEC if value == "sandbox-exec" else reason
    below = "".join(f".{part}" for part in path[key.count(".") + 1 :])
    given = below if key in _HIDDEN else f" {repr(value)[:80]}"
    return f"{key}{given} ({source}) is not usable: {reason}"


def _accepted(kind: object, marks: Sequence[object]) -> str:
    parts = [part for part in get_args(kind) if part is not type(None)]
    if get_origin(kind) is Literal:
        return " or ".join(parts)
    if get_origin(kind) is Annotated:
        return _accepted(parts[0], getattr(parts[1], "metadata", ()))
    if parts and get_origin(kind) not in _WORDS:
        return " or ".join(_accepted(part, marks) for part in parts)
    show = _shown_by(marks)
    # A type's own bounds come last, a setting's are tighter.
    bounds = {n: getattr(m, n) for n in _BOUNDS for m in reversed(marks) if hasattr(m, n)}
    words = _WORDS.get(show) or _WORDS.get(get_origin(kind) or kind, "text")
    return ", ".join([words, *(f"{_BOUNDS[n]} {show(value)}" for n, value in bounds.items())])


def _shown_by(marks: Sequence[object]) -> Callable[[Any], str]:
    shown_by = [mark.func for mark in marks if isinstance(mark, PlainSerializer)]
    return next((each for each in (show_size, show_duration) if each in shown_by), repr)
