"""The configured model services, and their keys, which no repr, error or log line shows."""

from collections.abc import Mapping

from mcp_sandbox.config import ConnectorConfig
from mcp_sandbox.egress.secrets import SecretSource
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError


class Connector:
    """A model service; `model` is used if a request names none.

    Raises:
        InvalidArgument: the configuration does not allow that model.
        ConfigError: its key's command cannot be understood.
    """

    def __init__(self, name: str, settings: ConnectorConfig, model: str = "") -> None:
        self.name, self.settings, self.model = name, settings, model or settings.model
        known = (settings.model, *settings.models) if settings.models else ()
        self.models = [*dict.fromkeys(filter(None, known))]  # None is any.
        if self.models and self.model and self.model not in self.models:
            has = ", ".join(self.models)
            raise InvalidArgument(f"connector {name} has no model {model[:80]!r}; it has {has}")
        try:
            self._source = SecretSource(settings.key, private=True) if settings.key else None
        except ValueError as exc:
            raise ConfigError(f"connectors.{name}.key is not usable: {exc}") from None

    async def key(self) -> bytes:
        """Return the key: 12 to 4,096 bytes of printable ASCII.

        Raises OperatorError: there is none, or others can read it; the message has the remedy.
        """
        if not self._source:
            raise OperatorError(
                f"connector {self.name} has no key: add `key: file:PATH` or "
                f"`key: 'command: PROGRAM ARGS'` to connectors.{self.name} of the configuration"
            )
        try:
            return await self._source.value()
        except RefusedError as exc:
            raise OperatorError(
                f"the key of connectors.{self.name} cannot be read: {exc}; correct its key setting"
            ) from None

    def header(self, key: bytes) -> dict[bytes, bytes]:
        """Return the header with which the key is sent."""
        usual = "bearer" if self.settings.protocol == "openai" else "x-api-key"
        bearer = (self.settings.auth or usual) == "bearer"
        return {b"authorization": b"Bearer " + key} if bearer else {b"x-api-key": key}

    def address(self, path: str) -> str:
        """Return the URL of a request for /v1/…; openai services have /v1 in their `url`."""
        version = "/v1" if self.settings.protocol == "openai" else ""
        return self.settings.url + path.removeprefix(version)


def find_connector(
    connectors: Mapping[str, ConnectorConfig], wanted: str = "", default: str = ""
) -> Connector:
    """Return the connector called NAME or NAME/MODEL; for "" the default or the only one.

    Raises InvalidArgument: there is no such connector; else as Connector.
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
    return Connector(name, connectors[name], model)
