"""Find the turns of a conversation in its rendered text.

The conversation is rendered once more with marks in its messages. A mark is a few Unicode noncharacters, which no text
contains. Templates copy them with the text around them. The marks say where the texts of each message are, and shorter
renderings say what the template puts around them. A template may therefore render a turn in another way when more
messages follow.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from prepcli.core.errors import Key, PrepError, Text, text
from prepcli.core.json_values import JsonObject, JsonValue
from trainer.data.chat_template import HIDDEN_HINT, ChatRenderer, Conversation
from trainer.data.conversations import ASSISTANT, REASONING_KEYS, TOOL_CALLS

# Noncharacters: the start and the end of a mark, and the 16 digits of its number.
MARK_START = "\ufdd2"
MARK_END = "\ufdd3"
FIRST_DIGIT = 0xFDD4
MARK = re.compile("\ufdd2([\ufdd4-\ufde3]+)\ufdd3")
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
    """A mark of a conversation."""

    message: int  # Index of the message
    part: MessagePart  # The part of the message that the mark is at
    # Blanks of the part after the mark. None if the mark is not at the end of the part.
    tail: str | None = None


# A mark, and its position in a text, in characters.
FoundMark: TypeAlias = tuple[int, Mark]


class MessageMarker:
    """Puts marks into messages, and finds them again in rendered texts."""

    def __init__(self) -> None:
        self.marks: list[Mark] = []

    def mark_messages(
        self, messages: Sequence[JsonObject], roles: frozenset[str] | None
    ) -> list[JsonObject]:
        """Return messages with marks at both ends of each part, of some roles or of all."""
        marked: list[JsonObject] = []
        for index, message in enumerate(messages):
            if roles is None or message["role"] in roles:
                message = self._mark_message(index, message)
            marked.append(message)
        return marked

    def find(self, rendered: str) -> tuple[str, list[FoundMark]]:
        """Return a rendered text without its marks, and the first place of each."""
        parts: list[str] = []
        found: dict[int, int] = {}
        length = 0
        # Pieces at odd positions of the split are the numbers of marks.
        for position, piece in enumerate(MARK.split(rendered)):
            if position % 2:
                # Templates may repeat a text later: the name of a tool stands before its results too.
                number = "".join(f"{ord(digit) - FIRST_DIGIT:x}" for digit in piece)
                found.setdefault(int(number, 16), length)
            else:
                parts.append(piece)
                length += len(piece)
        return "".join(parts), [(place, self.marks[number]) for number, place in found.items()]

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
        """Return a text with marks around its visible part: a template may cut its blanks, or ask if it is empty."""
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        tail = text[start + len(core) :]
        first = self._add(Mark(index, part))
        last = self._add(Mark(index, part, tail))
        return f"{text[:start]}{first}{core}{last}{tail}"

    def _add(self, mark: Mark) -> str:
        self.marks.append(mark)
        digits = f"{len(self.marks) - 1:x}"
        number = "".join(chr(FIRST_DIGIT + int(digit, 16)) for digit in digits)
        return f"{MARK_START}{number}{MARK_END}"


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


# A tag that ends a turn, such as `<|im_end|>` and `</s>`.
END_TAG = re.compile(r"\s*<[^<>\s]+>")
TAG_ENDS = (">", "]", "\n")
# Limit of the work of all renderings that find the turns of a conversation: a constant (20 s), and some renderings.
# The work of a rendering is its characters and a constant per message, which takes as long as this many characters.
RENDERED_WORK = 1 << 29
RENDERINGS = 8
MESSAGE_WORK = 2048
# Blanks at the end of a text for which the text after them is kept.
MAX_TAIL = 8
# The roles whose messages are marked: all, else the assistant, for templates that ask how a text of a user begins.
MARKED_ROLES = (None, frozenset([ASSISTANT]))
TRAINING_HINT = text(
    "{} renders each turn as the last one", Key("data.chat_template", "training", is_override=True)
)


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of a message in a rendered text, in characters."""

    start: int  # Start of what its author writes: after the text at the start of a turn
    end: int  # End of the turn, with the text that ends it
    answer: int  # Start of what follows the reasoning. `start` without reasoning.
    hides_reasoning: bool = False  # Whether the message has reasoning that the text does not show

    def shifted(self, distance: int) -> Turn:
        """Return the turn in a text with `distance` more characters before it."""
        return replace(
            self,
            start=self.start + distance,
            end=self.end + distance,
            answer=self.answer + distance,
        )


class TurnFinder:
    """Finds the turns of conversations that one template renders.

    It keeps what the template puts after a message, so that the time is linear in the number of messages.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self._renderer = renderer
        self._kept_ends: dict[tuple[str, MessagePart, str], str] = {}
        self._kept_prompts: dict[str, str] = {}
        self._work_left = 0

    def find(
        self, conversation: Conversation, rendered: str, indices: Iterable[int]
    ) -> dict[int, Turn]:
        """Return the turns of messages in the text of a conversation, by their index.

        Raises:
            PrepError: The text does not show a message, or the place of its turn is not clear.
        """
        self._start_count(conversation)
        view = self._view(conversation, rendered)
        return {index: self._turn(view, index) for index in indices}

    def count_hidden_reasoning(
        self, conversation: Conversation, rendered: str, indices: Iterable[int]
    ) -> int:
        """Return how many of some messages have reasoning that the text does not show.

        It is 0 for a template that renders other texts when the messages have marks.

        Raises:
            PrepError: The text does not show the content or a tool call of one of them.
        """
        self._start_count(conversation)
        view = self._matching_view(conversation, rendered)
        if view is None:
            return 0
        return sum(self._hides_reasoning(view, index) for index in indices)

    def join_last_turns(self, conversation: Conversation) -> tuple[str, dict[int, Turn]]:
        """Render a conversation so that each turn of the assistant is as it is when it comes last.

        E.g. a template shows the reasoning of the last turn only. Then the joined text shows all reasoning.

        Returns:
            The text, and the turns of the assistant by the index of their message.

        Raises:
            PrepError: The template fails, or the place of a turn is not clear.
        """
        self._start_count(conversation)
        # Checked before the first rendering. A turn has two renderings with all messages before it, one
        # without and one with marks.
        sizes = [MESSAGE_WORK + len(json.dumps(message)) for message in conversation.messages]
        until = [*itertools.accumulate(sizes)]
        if 2 * sum(until[index] for index in conversation.assistant_indices) > self._work_left:
            raise _too_long_error(conversation)
        pieces: list[str] = []
        turns: dict[int, Turn] = {}
        length = 0
        before = -1
        for index in [*conversation.assistant_indices, len(conversation.messages) - 1]:
            if index == before:
                # The last message is the assistant's.
                continue
            part = conversation.until(index)
            view = self._view(part, self._render(part))
            begin = self._end(view, before)
            if part.messages[index]["role"] == ASSISTANT:
                view, turn = _with_reasoning(view, self._turn(view, index))
                turns[index] = turn.shifted(length - begin)
            pieces.append(view.text[begin:])
            length += len(pieces[-1])
            before = index
        return "".join(pieces), turns

    def _start_count(self, conversation: Conversation) -> None:
        size = conversation.num_chars + MESSAGE_WORK * len(conversation.messages)
        self._work_left = RENDERED_WORK + RENDERINGS * size

    def _render(self, conversation: Conversation, *, add_generation_prompt: bool = False) -> str:
        """Render a conversation, with a limit for all renderings of a conversation together."""
        rendered, _ = self._renderer.render(
            conversation, add_generation_prompt=add_generation_prompt
        )
        self._work_left -= len(rendered) + MESSAGE_WORK * len(conversation.messages)
        if self._work_left < 0:
            raise _too_long_error(conversation)
        return rendered

    def _view(self, conversation: Conversation, rendered: str) -> _View:
        """Return the marks of a rendered text."""
        view = self._matching_view(conversation, rendered)
        if view is None:
            why = f"{self._renderer.file} renders other texts when the messages have marks"
            raise _unknown_turns_error(conversation, why)
        return view

    def _matching_view(self, conversation: Conversation, rendered: str) -> _View | None:
        """Return the marks of a rendered text, or None if the template renders other words because of the marks."""
        for roles in MARKED_ROLES:
            view = self._marked_view(conversation, roles)
            if view.text == rendered:
                self._check_shown(view)
                return view
        return None

    def _check_shown(self, view: _View) -> None:
        """Raise PrepError if the text leaves out a message of another role than the assistant."""
        # E.g. the template of gpt-oss shows a message of the system at the start only.
        for index, message in enumerate(view.conversation.messages):
            if message["role"] == ASSISTANT or MessagePart.CONTENT not in view.hidden_parts(index):
                continue
            what = f"{view.conversation.place}: message {index + 1} has the role `{message['role']!s:.40}`"
            why = f"{self._renderer.file} does not show it, or not all of it"
            raise PrepError(what, why, HIDDEN_HINT)

    def _marked_view(self, conversation: Conversation, roles: frozenset[str] | None) -> _View:
        marker = MessageMarker()
        marked = replace(conversation, messages=marker.mark_messages(conversation.messages, roles))
        text_, found = marker.find(self._render(marked))
        return _View(conversation, text_, found, marker.marks, roles)

    def _turn(self, view: _View, index: int) -> Turn:
        """Return the turn of a message."""
        hides_reasoning = self._hides_reasoning(view, index)
        end = self._end(view, index)
        start = self._start(view, index, end)
        answer = start
        if view.shows(index, MessagePart.REASONING):
            answer = view.answer_start(index)
        if not start <= answer <= end:
            why = f"{self._renderer.file} does not render the parts of message {index + 1} in their order"
            raise _unknown_turns_error(view.conversation, why)
        return Turn(start, end, answer, hides_reasoning)

    def _hides_reasoning(self, view: _View, index: int) -> bool:
        """Return whether the text hides the reasoning of a message. Raise PrepError for a content or a tool call."""
        hidden = view.hidden_parts(index)
        if hidden <= {MessagePart.REASONING}:
            return bool(hidden)
        part = "the content"
        if MessagePart.CALL in hidden:
            part = "all tool calls" if view.shows(index, MessagePart.CALL) else "the tool calls"
        why = f"the text that {self._renderer.file} renders does not show {part} of message {index + 1}"
        raise _unknown_turns_error(view.conversation, why, HIDDEN_HINT)

    def _end(self, view: _View, index: int) -> int:
        """Return the end of a turn. -1 is before the first message."""
        if index < 0:
            return 0
        if index == len(view.conversation.messages) - 1:
            return len(view.text)
        anchor, mark = view.last_mark(index)
        # The kind of text after the mark. None if it may differ between messages of one kind.
        key = None
        tail = None if mark is None or mark.message != index else mark.tail
        if mark is not None and tail is not None and len(tail) <= MAX_TAIL:
            role = str(view.conversation.messages[index]["role"])
            key = (role, mark.part, tail)
        kept = self._kept_ends.get(key) if key else None
        if kept is not None and view.text.startswith(kept, anchor):
            return anchor + len(kept)
        shorter = self._marked_view(view.conversation.until(index), view.roles)
        ending = shorter.text[shorter.last_mark(index)[0] :]
        if key:
            self._kept_ends[key] = ending
        if view.text.startswith(ending, anchor):
            return anchor + len(ending)
        # E.g. gpt-oss ends the last turn with `<|return|>`, and others with `<|end|>`.
        tag = END_TAG.match(view.text, anchor)
        if tag and END_TAG.match(ending):
            return tag.end()
        why = f"{self._renderer.file} ends message {index + 1} in another way with the messages after it"
        raise _unknown_turns_error(view.conversation, why)

    def _start(self, view: _View, index: int, end: int) -> int:
        """Return the start of what the author of a message writes."""
        limit = min((place for place, _ in view.marks_of(index)), default=end)
        if view.conversation.messages[index]["role"] != ASSISTANT:
            return limit
        begin = self._end(view, index - 1)
        prompt = self._prompt(view.conversation, index)
        # The template may write a part of the prompt only. E.g. the prompt of a model that reasons is
        # `<assistant><think>`, and an earlier turn is `<assistant>Hello`.
        for start in (prompt, "".join(prompt.splitlines(keepends=True)[:1])):
            place = view.text.find(start, begin, limit)
            if start and place >= 0:
                return place + len(start)
        return begin + _common_length(prompt, view.text[begin:limit])

    def _prompt(self, conversation: Conversation, index: int) -> str:
        """Return the text at the start of a turn of the assistant, as the template writes it for a model."""
        role = "user"
        if index:
            role = str(conversation.messages[index - 1]["role"])
        if role not in self._kept_prompts:
            before = conversation.until(index - 1)
            if not index:
                # Many templates cannot render a conversation without messages, or put a system prompt before the
                # first message, so the start is the one after a message of a user.
                before = replace(conversation, messages=[{"role": "user", "content": "a"}])
            plain = self._render(before)
            prompted = self._render(before, add_generation_prompt=True)
            # Phi-3.5 ends a text without this start with `</s>`.
            self._kept_prompts[role] = prompted[_common_length(plain, prompted) :]
        return self._kept_prompts[role]


class _View:
    """A rendered conversation, its text without marks, their places, and the roles of the marked messages."""

    def __init__(
        self,
        conversation: Conversation,
        text: str,
        found: Iterable[FoundMark],
        made: Iterable[Mark],
        roles: frozenset[str] | None,
    ) -> None:
        self.conversation = conversation
        self.text = text
        self.roles = roles
        self._found: dict[int, list[FoundMark]] = {}
        for place, mark in found:
            self._found.setdefault(mark.message, []).append((place, mark))
        self._made: dict[int, Counter[MessagePart]] = {}
        for mark in made:
            # A part has one mark at its start.
            if mark.tail is None:
                self._made.setdefault(mark.message, Counter())[mark.part] += 1

    def marks_of(self, index: int) -> list[FoundMark]:
        """Return the marks of a message in the text, in order."""
        return self._found.get(index, [])

    def shows(self, index: int, part: MessagePart) -> bool:
        """Return whether the text shows a part of a message."""
        return any(mark.part is part for _, mark in self.marks_of(index))

    def hidden_parts(self, index: int) -> set[MessagePart]:
        """Return the parts of a message that the text does not show: all contents and calls, and one reasoning.

        A message has its reasoning in several keys. A template reads one.
        """
        shown = Counter(mark.part for _, mark in self.marks_of(index) if mark.tail is None)
        return {
            part
            for part, count in self._made.get(index, Counter()).items()
            if shown[part] < (1 if part is MessagePart.REASONING else count)
        }

    def last_mark(self, index: int) -> tuple[int, Mark | None]:
        """Return the last mark of a message, or of the last message before it that has one, else the start."""
        for number in range(index, -1, -1):
            if found := self.marks_of(number):
                return found[-1]
        return 0, None

    def answer_start(self, index: int) -> int:
        """Return the start of what follows the reasoning of a message: its content or calls."""
        marks = self.marks_of(index)
        after = max(place for place, mark in marks if mark.part is MessagePart.REASONING)
        return min(
            (
                place
                for place, mark in marks
                if mark.part is not MessagePart.REASONING and place >= after
            ),
            default=after,
        )


def _with_reasoning(view: _View, turn: Turn) -> tuple[_View, Turn]:
    """Return a rendering with the reasoning of its last message, if the template leaves it out of last turns too."""
    # A model that writes its reasoning continues after the start of a turn, so the reasoning comes first.
    if not turn.hides_reasoning:
        return view, turn
    index = len(view.conversation.messages) - 1
    reasoning, answer = inline_reasoning(view.conversation.messages[index])
    contents = [place for place, mark in view.marks_of(index) if mark.part is MessagePart.CONTENT]
    first = min(contents, default=turn.start)
    last = max(contents, default=turn.start)
    # Blanks between the start of the turn and the answer belong to the text that is replaced.
    while first > turn.start and view.text[first - 1].isspace():
        first -= 1
    inserted = reasoning + answer
    changed_text = view.text[:first] + inserted + view.text[last:]
    changed = _View(view.conversation, changed_text, (), (), view.roles)
    end = turn.end + len(inserted) - (last - first)
    return changed, Turn(turn.start, end, first + len(reasoning))


def _common_length(first: str, second: str) -> int:
    """Return the number of equal characters at the start of two texts, without a part of a tag or a line."""
    pairs = enumerate(zip(first, second))
    length = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
    if length == len(first):
        return length
    return max(first.rfind(end, 0, length) + 1 for end in TAG_ENDS)


def _too_long_error(conversation: Conversation) -> PrepError:
    what = f"{conversation.place}: the conversation is too long"
    why = "each of its turns is rendered with all messages before it"
    return PrepError(what, why, "split it into shorter ones")


def _unknown_turns_error(
    conversation: Conversation, why: str, hint: Text | str = TRAINING_HINT
) -> PrepError:
    what = f"{conversation.place}: the turns with loss cannot be found"
    return PrepError(what, why, hint)
