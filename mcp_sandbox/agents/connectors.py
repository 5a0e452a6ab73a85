"""The configured model services, and their keys, which no repr, error or log line shows."""

import secrets
from collections.abc import Mapping

from mcp_sandbox.config import ConnectorConfig, RunConfig
from mcp_sandbox.egress.process.gateway import Service
from mcp_sandbox.egress.secrets import SecretSource
from mcp_sandbox.egress.targets import RefusedError
from mcp_sandbox.errors import ConfigError, InvalidArgument, OperatorError

_REQUEST_S = 60.0  # For a request's head, and its body.


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
            kind, _, path = self.settings.key.partition(":")
            place = f" in {path}" if kind == "file" else ""  # Words of a command may be secret.
            key = f"the key of connectors.{self.name}{place}"
            raise OperatorError(f"{key} cannot be read: {exc}; correct its key setting") from None

    def service(self, limits: RunConfig, silent_s: float = 600) -> Service:
        """Return what the process of one run's way to it has to know; its token is a new one."""
        settings = self.settings
        auth = settings.auth or ("bearer" if settings.protocol == "openai" else "x-api-key")
        return Service(
            name=self.name,
            token=secrets.token_urlsafe(32),
            url=settings.url,
            protocol=settings.protocol,
            header="authorization" if auth == "bearer" else "x-api-key",
            models=self.models,
            server_tools=settings.server_tools,
            max_requests=limits.max_requests,
            max_output_tokens=limits.max_output_tokens,
            silent_s=silent_s,
            request_s=min(_REQUEST_S, silent_s),
        )


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
