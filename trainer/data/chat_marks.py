"""Marks in the texts of a conversation, to find them in the text that a chat template renders.

A mark is a few Unicode noncharacters, which no text contains. Templates copy them with the text around them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from prepcli.core.json_values import JsonObject, JsonValue

ASSISTANT = "assistant"
TOOL_CALLS = "tool_calls"
# Keys of a message for the reasoning before its content, in the formats of several publishers.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

# Noncharacters around the parts of a rendered text that the assistant generates.
START_MARK = "\ufdd0"
END_MARK = "\ufdd1"
# Noncharacters: the start and the end of a mark, and the 16 digits of its number.
MARK_START = "\ufdd2"
MARK_END = "\ufdd3"
FIRST_DIGIT = 0xFDD4
MARK = re.compile("\ufdd2([\ufdd4-\ufde3]+)\ufdd3")
NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
# A block of reasoning in the content. Templates cut contents at their tags.
INLINE_BLOCK = re.compile(
    r"(?P<start><think>|\[THINK\])(?P<reasoning>.*?)(?P<end></think>|\[/THINK\])", re.S
)
# Reasoning in the content, in front of the answer.
INLINE_REASONING = re.compile(r"(<think>|\[THINK\])(?P<reasoning>.*)(</think>|\[/THINK\])", re.S)


class MessagePart(Enum):
    """The part of a message at a mark."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


# Keys of an item of a content with a text.
PART_KEYS = {"text": MessagePart.CONTENT, "thinking": MessagePart.REASONING}


@dataclass(frozen=True, slots=True)
class Mark:
    """A mark of a conversation.

    Attributes:
        message: Index of the message.
        part: The part of the message that the mark is at.
        tail: Blanks of the part after the mark. None if the mark is not at the end of the part.
    """

    message: int
    part: MessagePart
    tail: str | None = None


# A mark, and its position in a text, in characters.
FoundMark: TypeAlias = tuple[int, Mark]


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A rendered text without its marks, and where they were.

    Attributes:
        text: The text.
        found: The first place of each mark that the template copied, in order.
    """

    text: str
    found: tuple[FoundMark, ...]


class MessageMarker:
    """Puts marks into messages, and finds them again in rendered texts."""

    def __init__(self) -> None:
        self._marks: list[Mark] = []

    @property
    def marks(self) -> tuple[Mark, ...]:
        """All marks so far."""
        return tuple(self._marks)

    def mark_messages(
        self, messages: Sequence[JsonObject], roles: frozenset[str] | None
    ) -> list[JsonObject]:
        """Return messages with marks at both ends of each part.

        Args:
            messages: The messages of a conversation.
            roles: Roles of the messages to mark. None for all.
        """
        marked: list[JsonObject] = []
        for index, message in enumerate(messages):
            if roles is None or message["role"] in roles:
                message = self._mark_message(index, message)
            marked.append(message)
        return marked

    def find(self, rendered: str) -> MarkedText:
        """Return a rendered text without its marks, and the first place of each."""
        parts: list[str] = []
        found: dict[int, int] = {}
        length = 0
        # Pieces at odd positions of the split are the numbers of marks.
        for position, piece in enumerate(MARK.split(rendered)):
            if position % 2:
                # Templates may repeat a text later: the name of a tool stands before its results too.
                found.setdefault(_parse_number(piece), length)
            else:
                parts.append(piece)
                length += len(piece)
        places = tuple((place, self._marks[number]) for number, place in found.items())
        return MarkedText("".join(parts), places)

    def _mark_message(self, index: int, message: JsonObject) -> JsonObject:
        changed: JsonObject = dict(message)
        for key in REASONING_KEYS:
            value = message.get(key)
            if isinstance(value, str):
                changed[key] = self._mark_text(value, index, MessagePart.REASONING)
        content = message.get("content")
        if isinstance(content, str):
            changed["content"] = self._mark_content(content, index)
        elif isinstance(content, list):
            changed["content"] = [self._mark_item(item, index) for item in content]
        calls = message.get(TOOL_CALLS)
        if isinstance(calls, list):
            changed[TOOL_CALLS] = [self._mark_call(call, index) for call in calls]
        return changed

    def _mark_content(self, content: str, index: int) -> str:
        """Mark a content. Reasoning in it is a part of its own, so that templates can still cut it off."""
        marked: list[str] = []
        end = 0
        for match in INLINE_BLOCK.finditer(content):
            marked.append(self._mark_text(content[end : match.start()], index, MessagePart.CONTENT))
            marked.append(match["start"])
            marked.append(self._mark_text(match["reasoning"], index, MessagePart.REASONING))
            marked.append(match["end"])
            end = match.end()
        marked.append(self._mark_text(content[end:], index, MessagePart.CONTENT))
        return "".join(marked)

    def _mark_item(self, item: JsonValue, index: int) -> JsonValue:
        """Mark an item of a content of several parts, such as `{"type": "text", "text": "Hi"}`."""
        if isinstance(item, str):
            return self._mark_text(item, index, MessagePart.CONTENT)
        if not isinstance(item, dict):
            return item
        changed: JsonObject = dict(item)
        for key, part in PART_KEYS.items():
            value = item.get(key)
            if isinstance(value, str):
                changed[key] = self._mark_text(value, index, part)
        return changed

    def _mark_call(self, call: JsonValue, index: int) -> JsonValue:
        """Mark the name of a tool call, and the end of its arguments if they end with a text."""
        if not isinstance(call, dict):
            return call
        function = call.get("function")
        if isinstance(function, dict):
            return {**call, "function": self._mark_function(function, index)}
        return self._mark_function(call, index)

    def _mark_function(self, function: JsonObject, index: int) -> JsonObject:
        changed: JsonObject = dict(function)
        name = function.get("name")
        if isinstance(name, str) and name:
            changed["name"] = name + self._add(Mark(index, MessagePart.CALL))
        arguments = function.get("arguments")
        if isinstance(arguments, str) and arguments.endswith("}"):
            changed["arguments"] = (
                arguments[:-1] + self._add(Mark(index, MessagePart.CALL, "}")) + "}"
            )
        elif isinstance(arguments, dict) and arguments:
            key, value = list(arguments.items())[-1]
            if isinstance(value, str) and value.strip() == value != "":
                marked = value + self._add(Mark(index, MessagePart.CALL, ""))
                changed["arguments"] = {**arguments, key: marked}
        return changed

    def _mark_text(self, text: str, index: int, part: MessagePart) -> str:
        """Return a text with a mark before its first and after its last visible character.

        A template may remove the blanks around it, and may ask whether it is empty.
        """
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        tail = text[start + len(core) :]
        first = self._add(Mark(index, part))
        last = self._add(Mark(index, part, tail))
        return f"{text[:start]}{first}{core}{last}{tail}"

    def _add(self, mark: Mark) -> str:
        self._marks.append(mark)
        digits = f"{len(self._marks) - 1:x}"
        number = "".join(chr(FIRST_DIGIT + int(digit, 16)) for digit in digits)
        return f"{MARK_START}{number}{MARK_END}"


def _parse_number(digits: str) -> int:
    """Return the number of a mark."""
    return int("".join(f"{ord(digit) - FIRST_DIGIT:x}" for digit in digits), 16)


def inline_reasoning(message: JsonObject) -> tuple[str, str]:
    """Return the reasoning of a message between tags, with the blanks after it, and its answer.

    The reasoning is in its content, or in a key of its own.
    """
    content = message.get("content")
    if not isinstance(content, str):
        content = ""
    match = INLINE_REASONING.search(content)
    if match is None:
        reasoning = next(
            (value for key in REASONING_KEYS if isinstance(value := message.get(key), str)), ""
        )
        return f"<think>\n{reasoning.strip()}\n</think>\n\n", content.strip()
    answer = content[match.end() :]
    blanks = answer[: len(answer) - len(answer.lstrip())]
    return content[: match.end()].lstrip() + blanks, answer.strip()
