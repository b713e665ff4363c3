"""Tools: the schema is the signature, and an agent's mistakes are sentences it can act on."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from envs.base import ToolCall
from envs.tools import Toolbox, ToolMistake, tool


class Desk:
    def __init__(self) -> None:
        self.done: list[Any] = []

    @tool
    async def paint(
        self, title: str, size: Annotated[int, Field(ge=1)] = 3, colour: Literal["red", "blue"] | None = None
    ) -> str:
        """Paint a picture
        of something.

        title: what to paint
        size: in metres
        """
        self.done.append((title, size, colour))
        return f"painted {title}"

    async def helper(self) -> str:
        return "not a tool"

    @tool
    async def stop(self) -> str:
        """Stop."""
        raise RuntimeError("the desk broke")


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_schemas_come_from_signature_and_docstring(desk: Desk) -> None:
    paint, stop = Toolbox(desk).schemas
    assert paint["type"] == "function"
    function = paint["function"]
    assert function["name"] == "paint"
    assert function["description"] == "Paint a picture of something."
    properties = function["parameters"]["properties"]
    assert properties["title"] == {"type": "string", "description": "what to paint"}
    assert properties["size"] == {"type": "integer", "minimum": 1, "default": 3, "description": "in metres"}
    assert properties["colour"]["anyOf"] == [{"enum": ["red", "blue"], "type": "string"}, {"type": "null"}]
    assert function["parameters"]["required"] == ["title"]
    assert function["parameters"]["additionalProperties"] is False
    assert stop["function"]["parameters"]["properties"] == {}


async def test_a_call_runs_with_defaults_and_converted_values(desk: Desk) -> None:
    tools = Toolbox(desk)
    assert await tools.call(ToolCall("paint", {"title": "sea"})) == "painted sea"
    await tools.call(ToolCall("paint", {"title": "sky", "size": "12", "colour": "blue"}))
    assert desk.done == [("sea", 3, None), ("sky", 12, "blue")]


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("draw", {}, "unknown tool 'draw'; the tools are paint, stop"),
        ("helper", {}, "unknown tool"),
        ("paint", {}, "title is missing"),
        ("paint", {"title": "a", "depth": 1}, "depth is not an argument"),
        ("paint", {"title": 3}, "title: Input should be a valid string"),
        ("paint", {"title": "a", "size": 0}, "size: Input should be greater than or equal to 1"),
        ("paint", {"title": "a", "size": "many"}, "size: Input should be a valid integer"),
        ("paint", {"title": "a\0b"}, "NUL"),
        ("paint", {"title": "\ud800"}, "not valid Unicode"),
        ("stop", {"now": True}, "arguments: none"),
    ],
)
async def test_what_does_not_fit_is_explained_and_not_run(
    desk: Desk, name: str, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(ToolMistake) as caught:
        await Toolbox(desk).call(ToolCall(name, arguments))
    assert said in str(caught.value)
    assert desk.done == []


async def test_a_fault_of_the_tool_itself_is_no_mistake_of_the_agent(desk: Desk) -> None:
    with pytest.raises(RuntimeError, match="the desk broke"):
        await Toolbox(desk).call(ToolCall("stop", {}))


def test_a_method_without_types_or_not_async_cannot_be_a_tool() -> None:
    with pytest.raises(TypeError, match="parameter x needs a type"):

        @tool
        async def lost(self, x) -> str:
            return ""

    with pytest.raises(TypeError, match="async"):

        @tool
        def slow(self) -> str:
            return ""
