"""A tool of ours: checks the arguments, finds the session, answers every failure with text."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from mcp.server.mcpserver.tools import Tool
from mcp.server.mcpserver.utilities.func_metadata import FuncMetadata
from mcp.types import CallToolResult, ToolAnnotations
from pydantic import BaseModel, ConfigDict, Field, create_model

from mcp_sandbox.server.arguments import Arguments, check_arguments, input_schema
from mcp_sandbox.server.errors import readable_errors
from mcp_sandbox.server.identity import Request, SessionFor
from mcp_sandbox.server.observer import Observer
from mcp_sandbox.server.results import with_news

ToolFunction = Callable[..., Awaitable[CallToolResult]]

_INJECTED = ("session", "request")


class SandboxTool(Tool):
    """A tool whose function takes the caller's session first, then the arguments."""

    session_for: Callable[..., Awaitable[Any]] = Field(exclude=True)
    observer: Observer = Field(default_factory=Observer, exclude=True)

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def observed_by(self, observer: Observer) -> "SandboxTool":
        """Return the same tool, with calls that `observer` sees."""
        return self.model_copy(update={"observer": observer})

    @readable_errors
    async def run(
        self, arguments: dict[str, Any], context: Request, convert_result: bool = False
    ) -> CallToolResult:
        with self.observer.call(self.name, context) as seen:
            checked = check_arguments(self.fn_metadata.arg_model, self.parameters, arguments)
            if self.context_kwarg is not None:
                checked[self.context_kwarg] = context
            session = seen.session = await self.session_for(context)
            session.skills.check_call(self.name, checked)
            result: CallToolResult = await self.fn(session, **checked)
            if convert_result:
                self.fn_metadata.convert_result(result)
            # Clients show a model nothing but the structured part of a result that has one.
            return result if result.structured_content else with_news(result, session.take_news())


def build_tool(
    function: ToolFunction,
    session_for: SessionFor,
    *,
    title: str,
    annotations: ToolAnnotations,
    output: type[BaseModel] | None = None,
    note: str = "",
) -> SandboxTool:
    """The tool that `function` describes: its name, docstring and parameters are what clients see.

    `note` is added to the description.
    """
    model = _arguments_of(function)
    return SandboxTool(
        fn=function,
        name=function.__name__.rstrip("_"),
        title=title,
        description="\n".join(filter(None, [inspect.cleandoc(function.__doc__ or ""), note])),
        parameters=input_schema(model),
        fn_metadata=FuncMetadata(arg_model=model, output_model=output),
        is_async=True,
        context_kwarg="request" if "request" in inspect.signature(function).parameters else None,
        annotations=annotations,
        session_for=session_for,
    )


def _arguments_of(function: ToolFunction) -> type[Arguments]:
    fields: dict[str, Any] = {
        name: (
            parameter.annotation,
            ... if parameter.default is inspect.Parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in _INJECTED
    }
    return create_model(f"{function.__name__}_arguments", __base__=Arguments, **fields)
