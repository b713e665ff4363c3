"""Messages to tokens and back, around a chat template, without ever tokenising twice.

Guarantees:

* What the policy sampled is kept as it is. A new turn's tokens are bridged onto it: the end of the turn if the policy did
  not emit it, the template's text between turns, the new messages, the generation prompt. For a text that tokenises as it
  was sampled, the whole equals the template's own rendering of the conversation.
* A template that would rewrite history is refused at construction, with its name.
* The content of a message never becomes a control token: neither a special token of the tokenizer, nor (in user and tool
  messages) one that the template or the tool-call format gives a meaning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from tokenizers import Tokenizer

from envs.base import Action, Message, Reset, Role, ToolSchema
from envs.toolcalls import format_named, parse, system_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_TURN, _TURN_2 = "assistantsaidthis", "assistantsaidthat"
"""Stand where the policy's text would, to find what the template puts after it. The first occurrence is the one."""

_PROBES = (
    "",
    "x",
    " x ",
    "\n\nx\n\n",
    "<think>x</think>y",
    "x</think>\n\ny",
    '{"x": [1]}',
    "<tool_response>\nx\n</tool_response>",
)
"""Contents that some template treats in a way of its own: trims, splits at its marks, or reads as JSON."""

_FRAMED = 8
"""Messages after one turn whose frame is kept; more are rare."""

_RESPONSE = ("<tool_response>", "</tool_response>")
"""Around a tool's answer where the template has no role for it."""

_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))


class UnsupportedTemplate(Exception):
    """A tokenizer whose chat template cannot carry an episode; the message names it and says why."""


class ChatRenderer:
    """For one tokenizer and one tool-call format. Raises `UnsupportedTemplate`. Safe for use by many episodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, tool_format: str) -> None:
        self._tokenizer = tokenizer
        self._format = tool_format
        marks = (*format_named(tool_format).marks, *_RESPONSE)
        self._name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.is_fast:
            raise self._unsupported("has no fast tokenizer (tokenizer.json)")
        if not isinstance(tokenizer.chat_template, str | dict):
            raise self._unsupported("has no chat template; expected `chat_template` in its tokenizer_config.json")
        # A copy of our own: transformers sets truncation and padding on the shared one from call to call.
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()

        self._frames: dict[tuple[Role, ...], list[str] | None] = {}

        added = {token.content: token for token in self._backend.get_added_tokens_decoder().values()}
        source = str(tokenizer.chat_template)
        special = [text for text, token in added.items() if token.special]
        meaningful = [text for text in added if text.strip() and (text.strip() in source or any(m in text for m in marks))]
        self._cuts: dict[str, re.Pattern[str] | None] = {"system": _any_of(special), "assistant": _any_of(special)}
        self._cuts["user"] = self._cuts["tool"] = _any_of([*special, *meaningful])

        self._has_tool_role = self._shows("tool")
        self._has_system_role = self._shows("system")
        self._teaches_tools = self._template_teaches_tools(format_named(tool_format).marks)
        self._lead, self._end_text, self._end_id = self._find_end_of_turn(special)
        stops = {self._end_id, tokenizer.eos_token_id}
        self._stops = frozenset(token for token in stops if token is not None)
        self._check_append_only()

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end the policy's turn."""
        return tuple(sorted(self._stops))

    def open(self, reset: Reset) -> list[int]:
        """The opening: system and user messages, the tools, and the prompt for the first turn."""
        messages = list(reset.messages)
        tools = reset.tools if self._teaches_tools else ()
        if reset.tools and not self._teaches_tools:
            described: Message = {"role": "system", "content": system_text(reset, self._format)}
            messages = [described, *(message for message in messages if message["role"] != "system")]
        text, cut = self._text(messages, tools)
        return self._encode(text, cut)

    def bridge(self, sampled: Sequence[int], finish_reason: str, messages: Sequence[Message]) -> list[int]:
        """Tokens to append after `sampled`, a turn that ended for `finish_reason`, so that the policy can answer `messages`.

        A turn that was cut ("length", "abort") is closed with the template's end-of-turn token.
        """
        text, cut = self._text(messages, turn=True)
        after = text[len(self._lead) + len(self._end_text) :]
        tokens = self._encode(after, cut)
        last = sampled[-1] if len(sampled) else None
        closed = last == self._end_id or (finish_reason == "stop" and last in self._stops)
        return tokens if closed else [self._end_id, *tokens]

    def parse(self, sampled: Sequence[int], tools: Sequence[ToolSchema] = ()) -> Action:
        """Read a turn. Never raises for what the policy sampled."""
        tokens = list(sampled)
        if tokens and tokens[-1] in self._stops:
            tokens.pop()
        return parse(self._backend.decode(tokens, skip_special_tokens=False), self._format, schemas=tools)

    def encode_assistant(self, text: str) -> list[int]:
        """A turn of the assistant that was written and not sampled (a demonstration), its end-of-turn token included."""
        pieces, cut = self._cut([{"role": "assistant", "content": text}])
        return [*self._encode(pieces[0]["content"], cut), self._end_id]

    # Text.

    def _text(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), *, turn: bool = False
    ) -> tuple[str, str | None]:
        """What the template makes of `messages`, with the prompt for the next turn; with `turn`, after a turn of the policy.

        Also returns the mark that stands in the text wherever tokens must not run across, if there is one.
        """
        cut_messages, cut = self._cut(messages)
        fitted = self._fit(cut_messages)
        if not turn:
            return self._render(fitted, tools), cut
        roles = tuple(message["role"] for message in fitted)
        if roles not in self._frames:
            self._frames[roles] = self._frame(roles)
        frame = self._frames[roles]
        if frame is None:
            return self._after_turn(fitted), cut
        contents = [*(message["content"] for message in fitted), ""]
        return "".join(itertools.chain.from_iterable(zip(frame, contents, strict=True))), cut

    def _after_turn(self, messages: Sequence[Message]) -> str:
        start: list[Message] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _TURN}]
        return self._render([*start, *messages]).partition(_TURN)[2]

    def _frame(self, roles: tuple[Role, ...]) -> list[str] | None:
        """The template's text around the contents of messages of these roles; None if it does more than put them there.

        A template takes longer than all the rest of a turn, and most of them only concatenate.
        """
        if len(roles) > _FRAMED or "assistant" in roles:
            return None
        marks = [f"contentnumber{i}mark" for i in range(len(roles))]
        rest = self._after_turn([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        frame = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            if not found:
                return None
            frame.append(before)
        frame.append(rest)
        for probe in _PROBES:
            filled = "".join(part + probe for part in frame[:-1]) + frame[-1]
            if self._after_turn([{"role": role, "content": probe} for role in roles]) != filled:
                return None
        return frame

    def _cut(self, messages: Sequence[Message]) -> tuple[list[Message], str | None]:
        """Put a mark into each text that would become a control token, after its first character."""
        found = [_cut_points(message["content"], self._cuts[message["role"]]) for message in messages]
        if not any(found):
            return list(messages), None
        present = set().union(*(message["content"] for message in messages))
        mark = next(chr(code) for codes in _PRIVATE_USE for code in codes if chr(code) not in present)
        return [
            {"role": message["role"], "content": mark.join(_split_at(message["content"], points))}
            for message, points in zip(messages, found, strict=True)
        ], mark

    def _fit(self, messages: Sequence[Message]) -> list[Message]:
        """Say in the user's name what the template has no role for; what then stands side by side becomes one message."""
        fitted: list[Message] = []
        merge = False
        for message in messages:
            role, content = message["role"], message["content"]
            if role == "tool" and not self._has_tool_role:
                role, content, merge = "user", "\n".join((_RESPONSE[0], content, _RESPONSE[1])), True
            elif role == "system" and not self._has_system_role:
                role, merge = "user", True
            if merge and fitted and fitted[-1]["role"] == role == "user":
                content = f"{fitted.pop()['content']}\n\n{content}"
            fitted.append({"role": role, "content": content})
        return fitted

    def _render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str:
        try:
            return cast(
                str,
                self._tokenizer.apply_chat_template(
                    cast(list[Any], messages),
                    tools=cast(list[Any], tools) or None,
                    add_generation_prompt=True,
                    tokenize=False,
                ),
            )
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages)
            raise self._unsupported(f"fails on messages of the roles {roles}: {error}") from error

    # Tokens.

    def _encode(self, text: str, cut: str | None) -> list[int]:
        """Tokens of `text` as it would stand after a special token. No token runs across `cut`."""
        tokens: list[int] = []
        for piece in text.split(cut) if cut else (text,):
            # Some tokenizers put a space before what stands first: the end-of-turn token takes that place.
            ids = self._backend.encode(self._end_text + piece, add_special_tokens=False).ids
            tokens += ids[ids.index(self._end_id) + 1 :]
        return tokens

    # What the template can do.

    def _shows(self, role: Role) -> bool:
        """Whether a message of that role comes out under a name of its own."""
        user: Message = {"role": "user", "content": "x"}
        probe: Message = {"role": role, "content": "probethis"}
        turn: Message = {"role": "assistant", "content": _TURN}
        messages = [probe, user] if role == "system" else [user, turn, probe]
        try:
            return "probethis" in self._render(messages)
        except UnsupportedTemplate:
            return False

    def _template_teaches_tools(self, marks: Sequence[str]) -> bool:
        """Whether the template tells of the tools, and in the format that is to be parsed."""
        body = {"name": "probetool", "description": "", "parameters": {"type": "object", "properties": {}}}
        user: Message = {"role": "user", "content": "x"}
        try:
            text = self._render([user], [{"type": "function", "function": body}])
        except UnsupportedTemplate:
            return False
        return "probetool" in text and all(mark in text for mark in marks)

    def _find_end_of_turn(self, special: Sequence[str]) -> tuple[str, str, int]:
        """(blanks before it, its text, its id)"""
        text, _ = self._text([{"role": "user", "content": "x"}], turn=True)
        stripped = text.lstrip()
        ends = [token for token in special if stripped.startswith(token)]
        if not ends:
            raise self._unsupported(f"does not close a turn with a special token; after a turn it has {text[:30]!r}")
        end = max(ends, key=len)
        (end_id,) = self._backend.encode(end, add_special_tokens=False).ids
        return text[: len(text) - len(stripped)], end, end_id

    def _check_append_only(self) -> None:
        """Two turns bridged one after the other must be what the template writes for all of it."""
        opening: list[Message] = [{"role": "user", "content": "x"}]
        for role in ("tool", "user"):
            said: list[Message] = [{"role": role, "content": "answer"}]
            answer = self._fit(said)
            first: list[Message] = [*opening, {"role": "assistant", "content": _TURN}, *answer]
            whole = self._render([*first, {"role": "assistant", "content": _TURN_2}, *answer])
            between, _ = self._text(said, turn=True)
            begun = self._render(first)
            # Some templates have a blank before a turn, which the policy is to sample.
            if not whole.startswith(begun) or whole[len(begun) :].lstrip() != _TURN_2 + between:
                raise self._unsupported(f"rewrites earlier turns when a {role} message is added, so nothing can be appended")

    def _unsupported(self, why: str) -> UnsupportedTemplate:
        return UnsupportedTemplate(f"the chat template of {self._name} {why} (setting policy.model)")


@cache
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(re.escape(text) for text in texts)) if texts else None


def _any_of(texts: Sequence[str]) -> re.Pattern[str] | None:
    """A pattern for any of the texts, tried longest first."""
    return _pattern(tuple(sorted(dict.fromkeys(texts), key=lambda text: (-len(text), text))))


def _cut_points(text: str, forbidden: re.Pattern[str] | None) -> list[int]:
    """Positions at which to split `text` so that no piece holds a forbidden text: after each one's first character."""
    points: list[int] = []
    found = forbidden.search(text) if forbidden else None
    while forbidden and found:
        points.append(found.start() + 1)
        found = forbidden.search(text, found.start() + 1)
    return points


def _split_at(text: str, points: Sequence[int]) -> list[str]:
    edges = [0, *points, len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]
