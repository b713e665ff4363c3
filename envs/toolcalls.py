"""Tool calls as text, in the formats that models are trained on: `hermes` (JSON) and `qwen3` (XML, as qwen3-coder writes).

Guarantees:

* `parse` returns for any text, within time linear in its length. What is malformed is in `Action.errors`, in words meant
  for the agent; good calls beside it are kept. After `MAX_ERRORS` malformed calls the rest of the text is not read.
* `parse(render(calls), schemas=...)` gives the calls back, or `render` has raised `Unrenderable`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envs.base import Action, Reset, ToolCall, ToolSchema

OPEN, CLOSE = "<tool_call>", "</tool_call>"

MAX_ERRORS = 4
"""Bounds both the answer to a turn of nothing but malformed calls and the time to read it."""


class Unrenderable(ValueError):
    """The format has no way to write this call."""


@dataclass(frozen=True, slots=True)
class Format:
    """`marks` are the texts by which the format is told apart, and which no observation may bring in as control tokens."""

    marks: tuple[str, ...]
    example: str
    parse_one: Callable[[str, int, Mapping[str, ToolSchema]], tuple[ToolCall | str, int]]
    """(text, position after `<tool_call>`, schemas) -> (the call, or what is wrong with it; position after the body)."""
    render_one: Callable[[ToolCall], str]


def parse(text: str, tool_format: str, *, schemas: Iterable[ToolSchema] = ()) -> Action:
    """Read an assistant turn. `schemas` give the `qwen3` format the types of its parameters; without, they stay strings."""
    form = format_named(tool_format)
    by_name = {schema["function"]["name"]: schema for schema in schemas}
    calls: list[ToolCall] = []
    errors: list[str] = []
    position, number = text.find(OPEN), 0
    while position >= 0 and len(errors) < MAX_ERRORS:
        number += 1
        found, end = form.parse_one(text, position + len(OPEN), by_name)
        if isinstance(found, ToolCall):
            rest = _skip_space(text, end)
            if text.startswith(CLOSE, rest) or rest == len(text):
                calls.append(found)
            else:
                errors.append(f"tool call {number}: {CLOSE} is missing")
            position = text.find(OPEN, end)
        else:
            errors.append(f"tool call {number}: {found}; expected {form.example}")
            closed = text.find(CLOSE, end)
            position = text.find(OPEN, end if closed < 0 else closed)
    if not number and CLOSE in text:
        errors.append(f"{CLOSE} without {OPEN}")
    if position >= 0:
        errors.append("too many malformed tool calls: the rest was not read")
    return Action(text, tuple(calls), tuple(errors))


def render(calls: Iterable[ToolCall], tool_format: str) -> str:
    """The text of an assistant turn that makes these calls."""
    form = format_named(tool_format)
    return "\n".join(f"{OPEN}\n{form.render_one(call)}\n{CLOSE}" for call in calls)


def describe(tools: Sequence[ToolSchema], tool_format: str) -> str:
    """What a system message says of the tools, for chat templates that do not say it themselves."""
    if not tools:
        return ""
    lines = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in tools)
    return f"# Tools\n{lines}\nTo use one, answer with {format_named(tool_format).example}"


def system_text(reset: Reset, tool_format: str) -> str:
    """The system message of an opening, with the tools described in it."""
    parts = [message["content"] for message in reset.messages if message["role"] == "system"]
    return "\n\n".join(part for part in (*parts, describe(reset.tools, tool_format)) if part)


def frames(tools: Sequence[ToolSchema], tool_format: str) -> list[str]:
    """The constant texts around the arguments of each tool's call, required arguments alone: one token each if one likes."""
    hole = "\ue000"
    found: dict[str, None] = {}
    for schema in tools:
        required = schema["function"]["parameters"].get("required", [])
        call = ToolCall(schema["function"]["name"], dict.fromkeys(required, hole))
        found |= dict.fromkeys(render([call], tool_format).split(hole))
    return list(found)


def format_named(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"unknown tool format {name!r} (setting policy.tool_format); known: {', '.join(FORMATS)}")
    return FORMATS[name]


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position


# hermes

_DECODER = json.JSONDecoder()


def _parse_hermes(text: str, position: int, schemas: Mapping[str, ToolSchema]) -> tuple[ToolCall | str, int]:
    start = _skip_space(text, position)
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or too long"
        return f"not JSON ({reason})", start
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "no JSON object with a name", end
    if not isinstance(arguments := value.get("arguments", {}), dict):
        return "arguments is not a JSON object", end
    if unknown := sorted(set(value) - {"name", "arguments"}):
        return f"unknown key {unknown[0][:40]!r}", end
    return ToolCall(value["name"], arguments), end


def _render_hermes(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


# qwen3

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>\n?")
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"


def _parse_qwen3(text: str, position: int, schemas: Mapping[str, ToolSchema]) -> tuple[ToolCall | str, int]:
    head = _FUNCTION.match(text, position)
    if head is None:
        return "no <function=NAME>", position
    name = head[1]
    types = _types(schemas.get(name))
    arguments: dict[str, Any] = {}
    end = head.end()
    while (opened := _PARAMETER.match(text, end)) is not None:
        closed = text.find(_PARAMETER_END, opened.end())
        if closed < 0:
            return f"parameter {opened[1]} is not closed", opened.end()
        value = text[opened.end() : closed]
        arguments[opened[1]] = _typed(value.removesuffix("\n"), types.get(opened[1]))
        end = _skip_space(text, closed + len(_PARAMETER_END))
    if not text.startswith(_FUNCTION_END, end):
        return f"{_FUNCTION_END} is missing", end
    return ToolCall(name, arguments), end + len(_FUNCTION_END)


def _types(schema: ToolSchema | None) -> dict[str, frozenset[str]]:
    """Parameter to the names of its JSON types; empty where the schema leaves them open."""
    if schema is None:
        return {}
    properties = schema["function"]["parameters"].get("properties", {})
    return {
        name: frozenset(t for option in spec.get("anyOf", [spec]) if isinstance(t := option.get("type"), str))
        for name, spec in properties.items()
    }


def _typed(value: str, types: frozenset[str] | None) -> Any:
    if not types or "string" in types:
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _render_qwen3(call: ToolCall) -> str:
    lines = [f"<function={_name(call.name)}>"]
    for name, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if _PARAMETER_END in text:
            raise Unrenderable(f"tool call {call.name}: {name} holds {_PARAMETER_END}, which ends it in the qwen3 format")
        lines.append(f"<parameter={_name(name)}>\n{text}\n{_PARAMETER_END}")
    return "\n".join((*lines, _FUNCTION_END))


def _name(name: str) -> str:
    if not re.fullmatch(r"[^<>\n]+", name):
        raise Unrenderable(f"the name {name!r} cannot be written in the qwen3 format")
    return name


FORMATS: Mapping[str, Format] = {
    "hermes": Format(
        marks=(OPEN, CLOSE),
        example=f'{OPEN}\n{{"name": NAME, "arguments": {{...}}}}\n{CLOSE}',
        parse_one=_parse_hermes,
        render_one=_render_hermes,
    ),
    "qwen3": Format(
        marks=(OPEN, CLOSE, "<function=", _FUNCTION_END, "<parameter=", _PARAMETER_END),
        example=(f"{OPEN}\n<function=NAME>\n<parameter=ARGUMENT>\nvalue\n{_PARAMETER_END}\n{_FUNCTION_END}\n{CLOSE}"),
        parse_one=_parse_qwen3,
        render_one=_render_qwen3,
    ),
}
