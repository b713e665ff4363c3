"""Tool-call formats: what is written can be read back, and any text whatever can be read."""

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.base import Reset, ToolCall, ToolSchema
from envs.toolcalls import FORMATS, Unrenderable, describe, frames, parse, render, system_text

FORMAT_NAMES = sorted(FORMATS)

NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_characters="<>"), min_size=1, max_size=12)
TEXTS = st.text(max_size=40) | st.sampled_from(["</tool_call>", "<tool_call>", "\n", "\n</function>\n", "{}", '"', "\\", ""])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def schema(name: str, **types: str) -> ToolSchema:
    properties = {key: {"type": value} for key, value in types.items()}
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it.",
            "parameters": {"type": "object", "properties": properties, "required": list(properties)},
        },
    }


BASH, SUBMIT = schema("bash", command="string"), schema("submit")
MIXED = schema("mixed", text="string", number="number", whole="integer", flag="boolean", items="array", thing="object")


@given(st.lists(st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, JSON, max_size=3)), max_size=3))
def test_hermes_calls_survive(calls: list[ToolCall]) -> None:
    action = parse(render(calls, "hermes"), "hermes")
    assert list(action.calls) == calls
    assert not action.errors


VALUES = st.fixed_dictionaries(
    {},
    optional={
        "text": TEXTS,
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "whole": st.integers(),
        "flag": st.booleans(),
        "items": st.lists(JSON, max_size=3),
        "thing": st.dictionaries(TEXTS, JSON, max_size=3),
    },
)


@given(st.lists(st.builds(ToolCall, st.just("mixed"), VALUES), max_size=3))
def test_qwen3_calls_survive_with_the_types_of_the_schema(calls: list[ToolCall]) -> None:
    action = parse(render(calls, "qwen3"), "qwen3", schemas=[MIXED])
    assert list(action.calls) == calls
    assert not action.errors


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<function=bash>", "</function>", "<parameter=command>", "</parameter>", "\n", " "),
        *('{"name": "bash"', ', "arguments": {', '"command": "ls"', "}}", "[" * 3000, "text", "\ud800", "\0"),
    ]
)


@pytest.mark.parametrize("tool_format", FORMAT_NAMES)
@given(text=st.text() | st.lists(PIECES, max_size=12).map("".join))
def test_any_text_is_survived(tool_format: str, text: str) -> None:
    action = parse(text, tool_format, schemas=[BASH])
    assert action.text == text
    if "<tool_call>" in text:
        assert action.calls or action.errors


@pytest.mark.parametrize("tool_format", FORMAT_NAMES)
def test_a_long_hostile_text_is_read_in_linear_time(tool_format: str) -> None:
    for piece in (
        "<tool_call>",
        "<tool_call>{",
        "<tool_call><function=a><parameter=b>",
        "<tool_call>\n" + " " * 20,
        "\n</tool_call>",
    ):
        begun = time.process_time()
        action = parse(piece * 20_000, tool_format)
        assert time.process_time() - begun < 1
        assert 1 <= len(action.errors) <= 5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}\n</tool_call>', "tool call 1: not JSON"),
        ("<tool_call>\nls\n</tool_call>", "not JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "no JSON object with a name"),
        ('<tool_call>["bash"]</tool_call>', "no JSON object with a name"),
        ('<tool_call>{"name": "bash", "arguments": "ls"}</tool_call>', "arguments is not a JSON object"),
        ('<tool_call>{"name": "bash", "args": {}}</tool_call>', "unknown key 'args'"),
        ('<tool_call>{"name": "bash", "arguments": {}} and more', "</tool_call> is missing"),
        ('{"name": "bash"}\n</tool_call>', "without <tool_call>"),
    ],
)
def test_hermes_mistakes_are_named(text: str, said: str) -> None:
    action = parse(text, "hermes")
    assert not action.calls
    assert said in action.errors[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "bash"}</tool_call>', "no <function=NAME>"),
        ("<tool_call><function=bash><parameter=command>ls</function></tool_call>", "parameter command is not closed"),
        ("<tool_call><function=bash><parameter=command>ls</parameter></tool_call>", "</function> is missing"),
        ("<tool_call><function=bash></function>", None),
    ],
)
def test_qwen3_mistakes_are_named(text: str, said: str | None) -> None:
    action = parse(text, "qwen3")
    if said is None:
        assert action.calls == (ToolCall("bash", {}),)
    else:
        assert not action.calls
        assert said in action.errors[0]


def test_good_calls_are_kept_beside_a_bad_one() -> None:
    good = render([ToolCall("bash", {"command": "ls"})], "hermes")
    action = parse(f"I look.\n{good}\n<tool_call>oops</tool_call>\n{good}", "hermes")
    assert [call.arguments for call in action.calls] == [{"command": "ls"}] * 2
    assert len(action.errors) == 1
    assert action.errors[0].startswith("tool call 2: ")


def test_a_call_that_ends_with_the_text_needs_no_closing_tag() -> None:
    assert parse('<tool_call>{"name": "submit"}\n', "hermes").calls == (ToolCall("submit", {}),)


def test_qwen3_keeps_the_lines_of_a_value() -> None:
    text = "<tool_call>\n<function=bash>\n<parameter=command>\n\n  a\nb\n\n</parameter>\n</function>\n</tool_call>"
    assert parse(text, "qwen3", schemas=[BASH]).calls == (ToolCall("bash", {"command": "\n  a\nb\n"}),)


def test_qwen3_leaves_what_is_not_of_its_type_to_the_validation() -> None:
    text = render([ToolCall("mixed", {"whole": "many"})], "qwen3")
    assert parse(text, "qwen3", schemas=[MIXED]).calls[0].arguments == {"whole": "many"}


@pytest.mark.parametrize(
    "call", [ToolCall("bash", {"command": "a</parameter>b"}), ToolCall("a>b", {}), ToolCall("f", {"a\nb": 1})]
)
def test_qwen3_refuses_to_write_what_it_could_not_read(call: ToolCall) -> None:
    with pytest.raises(Unrenderable):
        render([call], "qwen3")


@pytest.mark.parametrize("tool_format", FORMAT_NAMES)
def test_frames_put_together_are_the_call(tool_format: str) -> None:
    found = frames([BASH, SUBMIT], tool_format)
    assert found[0] + "ls -l" + found[1] == render([ToolCall("bash", {"command": "ls -l"})], tool_format)
    assert found[2] == render([ToolCall("submit", {})], tool_format)


@pytest.mark.parametrize("tool_format", FORMAT_NAMES)
def test_the_description_names_every_tool_and_shows_the_format(tool_format: str) -> None:
    text = describe([BASH, SUBMIT], tool_format)
    assert '"bash"' in text
    assert '"submit"' in text
    assert all(mark in text for mark in FORMATS[tool_format].marks)
    assert describe([], tool_format) == ""


def test_the_system_text_joins_the_environments_own_words_and_the_tools() -> None:
    reset = Reset([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}], [BASH])
    text = system_text(reset, "hermes")
    assert text.startswith("Be brief.\n\n")
    assert '"bash"' in text
    assert "Go." not in text


def test_an_unknown_format_names_the_setting() -> None:
    with pytest.raises(ValueError, match=r"'json' \(setting policy\.tool_format\); known: hermes, qwen3"):
        parse("", "json")


def test_arguments_keep_their_json_types() -> None:
    arguments: dict[str, Any] = {"a": [1, None, {"b": False}], "c": 1.5}
    assert parse(render([ToolCall("x", arguments)], "hermes"), "hermes").calls[0].arguments == arguments
