"""Tools: typed async methods that an agent may call, with the JSON schema and the checks derived from their signature.

Guarantees:

* The schema is the signature: names, types and defaults through pydantic, the description from the docstring's first
  paragraph, and a parameter's from its line `name: text` after it.
* `Toolbox.call` runs a tool only with arguments that fit. Whatever an agent gets wrong is a `ToolMistake` whose text is
  written for the agent; any other exception is the tool's own.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from envs.base import ToolCall, ToolSchema

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, str]])

_MARK = "_farmhand_tool"


class ToolMistake(Exception):
    """The agent's mistake; the message becomes its observation."""


def tool(function: F) -> F:
    """Mark an `async` method that returns its observation as a tool; its name is the method's."""
    declaration = _Declaration.of(function)
    setattr(function, _MARK, declaration)
    return function


@dataclass(frozen=True, slots=True)
class _Declaration:
    name: str
    schema: ToolSchema
    arguments: type[BaseModel]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> _Declaration:
        if not inspect.iscoroutinefunction(function):
            raise TypeError(f"tool {function.__name__}: expected an async function")
        description, notes = _split_docstring(inspect.getdoc(function) or "")
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        for parameter in list(inspect.signature(function).parameters.values()):
            if parameter.name == "self":
                continue
            if parameter.name not in hints or parameter.kind not in (
                parameter.POSITIONAL_OR_KEYWORD,
                parameter.KEYWORD_ONLY,
            ):
                raise TypeError(f"tool {function.__name__}: parameter {parameter.name} needs a type and a name of its own")
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[parameter.name] = (hints[parameter.name], Field(default, description=notes.get(parameter.name)))
        model = create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)
        schema = _without_titles(model.model_json_schema())
        schema.setdefault("properties", {})
        body = {"name": function.__name__, "description": description, "parameters": schema}
        return cls(function.__name__, {"type": "function", "function": body}, model)


class Toolbox:
    """The tools of one object: its marked methods, in the order of their definition."""

    def __init__(self, owner: object) -> None:
        self._tools: dict[str, tuple[_Declaration, Callable[..., Awaitable[str]]]] = {}
        for cls in reversed(type(owner).__mro__):
            for name, value in vars(cls).items():
                if (declaration := getattr(value, _MARK, None)) is not None:
                    self._tools[name] = (declaration, getattr(owner, name))

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        return tuple(declaration.schema for declaration, _ in self._tools.values())

    async def call(self, call: ToolCall) -> str:
        """Returns the observation. Raises `ToolMistake` for an unknown tool and for arguments that do not fit."""
        if call.name not in self._tools:
            raise ToolMistake(f"unknown tool {call.name[:80]!r}; the tools are {', '.join(self._tools)}")
        declaration, function = self._tools[call.name]
        return await function(**_checked(declaration, call.arguments))


def _checked(declaration: _Declaration, given: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if isinstance(value, str) and (problem := _unusable(value)):
            raise ToolMistake(f"{declaration.name}: {name} {problem}")
    try:
        model = declaration.arguments.model_validate(dict(given))
    except ValidationError as error:
        raise ToolMistake(_explain(declaration, error)) from error
    return {name: getattr(model, name) for name in declaration.arguments.model_fields}


def _unusable(text: str) -> str:
    """Why no file name, command or file of text can hold it."""
    if "\0" in text:
        return "holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid Unicode"
    return ""


def _explain(declaration: _Declaration, error: ValidationError) -> str:
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in item["loc"])[:80]
        if item["type"] == "missing":
            problems.append(f"{where} is missing")
        elif item["type"] == "extra_forbidden":
            problems.append(f"{where} is not an argument")
        else:
            problems.append(f"{where}: {item['msg']}")
    expected = ", ".join(
        f"{name}{'' if field.is_required() else ' (optional)'}" for name, field in declaration.arguments.model_fields.items()
    )
    return f"{declaration.name}: {'; '.join(problems)}; arguments: {expected or 'none'}"


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The first paragraph in one line, and the lines `name: text` of what follows."""
    first, _, rest = text.partition("\n\n")
    notes = {match[1]: match[2].strip() for match in re.finditer(r"^\s*(\w+): (.+)$", rest, re.MULTILINE)}
    return " ".join(first.split()), notes


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """Drop pydantic's titles; under `properties` the keys are names, and one may be `title`."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value, names=key == "properties")
            for key, value in schema.items()
            if names or key != "title"
        }
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    return schema
