"""Model services as they are configured, and their keys, which no repr, error or log line shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from mcp_sandbox.config import ConnectorConfig
from mcp_sandbox.egress.secrets import Source
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError

Protocol = Literal["anthropic", "openai"]


@dataclass(frozen=True)
class Connector:
    """A model service; `model` is asked for when nothing else is said, `models` () = any other."""

    name: str
    protocol: Protocol
    url: str
    model: str
    models: tuple[str, ...]
    auth: Literal["x-api-key", "bearer"]
    server_tools: bool
    source: Source | None = field(repr=False)

    async def key(self) -> bytes:
        """Return the key: 12 to 4,096 bytes of printable ASCII.

        Raises:
            OperatorError: there is none, or others can read it; the message has the remedy.
        """
        if not self.source:
            raise OperatorError(
                f"connector {self.name} has no key: add `key: file:PATH` or "
                f"`key: 'command: PROGRAM ARGS'` to connectors.{self.name} of the configuration"
            )
        try:
            return await self.source.value()
        except RefusedError as exc:
            raise OperatorError(
                f"the key of connectors.{self.name} cannot be had: {exc}; correct it, or its place"
            ) from None

    def address(self, path: str) -> str:
        """Return where a request for /v1/… goes; some addresses have the version in them."""
        return self.url + (path.removeprefix("/v1") if self.protocol == "openai" else path)


def connector_of(
    connectors: Mapping[str, ConnectorConfig], wanted: str = "", default: str = ""
) -> Connector:
    """Return the connector that NAME or NAME/MODEL means; for "" the default or the only one.

    Raises:
        InvalidArgument: there is no such connector, or it may not be asked for the model.
        ConfigError: its key's command cannot be understood.
    """
    if not connectors:
        raise InvalidArgument("there is no connector: configure `connectors: {NAME: {url, key}}`")
    known = ", ".join(connectors)
    chosen = wanted or default or ("".join(connectors) if len(connectors) == 1 else "")
    if not chosen:
        raise InvalidArgument(f"no connector is named, and agents.connector is empty: name {known}")
    name, _, model = chosen.partition("/")
    if name not in connectors:
        raise InvalidArgument(f"there is no connector {name[:80]!r}; there are {known}")
    found = connectors[name]
    model = model or found.model
    models = tuple(dict.fromkeys(filter(None, (found.model, *found.models))))
    if found.models and model and model not in models:
        raise InvalidArgument(
            f"connector {name} has no model {model[:80]!r}; it has {', '.join(models)}"
        )
    try:
        source = Source(found.key, private=True) if found.key else None
    except ValueError as exc:
        raise ConfigError(f"connectors.{name}.key is not usable: {exc}") from None
    return Connector(
        name,
        found.protocol,
        found.url,
        model,
        models if found.models else (),
        found.auth or ("bearer" if found.protocol == "openai" else "x-api-key"),
        found.server_tools,
        source,
    )
