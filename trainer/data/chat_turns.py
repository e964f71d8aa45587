"""Find the turns of a conversation in its rendered text.

The conversation is rendered once more with marks in its messages (`trainer.data.chat_marks`). They say where the
texts of each message are, and shorter renderings say what the template puts around them. A template may therefore
render a turn in another way when more messages follow.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from prepcli.core.errors import Key, PrepError, Text, text
from trainer.data.chat_marks import (
    ASSISTANT,
    FoundMark,
    Mark,
    MarkedText,
    MessageMarker,
    MessagePart,
    inline_reasoning,
)
from trainer.data.chat_rendering import HIDDEN_HINT, ChatRenderer, Conversation

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
    """The place of a message in a rendered text, in characters.

    Attributes:
        start: Start of what its author writes: after the text at the start of a turn.
        end: End of the turn, with the text that ends it.
        answer: Start of what follows the reasoning. `start` without reasoning.
        hides_reasoning: Whether the message has reasoning that the text does not show.
    """

    start: int
    end: int
    answer: int
    hides_reasoning: bool = False

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
        """Return the turns of messages, by their index.

        Args:
            conversation: The conversation.
            rendered: Its text, as the template renders it.
            indices: The messages.

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

        Args:
            conversation: The conversation.
            rendered: Its text, as the template renders it.
            indices: The messages.

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
        self._check_joined_work(conversation)
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

    def _check_joined_work(self, conversation: Conversation) -> None:
        """Raise PrepError before the first rendering if those of all turns are too much work.

        A turn has two renderings with all messages before it, one without and one with marks.
        """
        sizes = [MESSAGE_WORK + len(json.dumps(message)) for message in conversation.messages]
        until = [*itertools.accumulate(sizes)]
        if 2 * sum(until[index] for index in conversation.assistant_indices) > self._work_left:
            raise _too_long_error(conversation)

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
        """Raise PrepError if the text leaves out a message of another role than the assistant.

        E.g. the template of gpt-oss shows a message of the system at the start only.
        """
        for index, message in enumerate(view.conversation.messages):
            if message["role"] == ASSISTANT or MessagePart.CONTENT not in view.hidden_parts(index):
                continue
            what = f"{view.conversation.place}: message {index + 1} has the role `{message['role']!s:.40}`"
            why = f"{self._renderer.file} does not show it, or not all of it"
            raise PrepError(what, why, HIDDEN_HINT)

    def _marked_view(self, conversation: Conversation, roles: frozenset[str] | None) -> _View:
        marker = MessageMarker()
        marked = replace(conversation, messages=marker.mark_messages(conversation.messages, roles))
        found = marker.find(self._render(marked))
        return _View(conversation, found, marker.marks, roles)

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
        """Return whether the text does not show the reasoning of a message.

        Raises:
            PrepError: The text does not show a content or a tool call of it.
        """
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
        key = view.end_key(index, mark)
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
    """A rendered conversation with the places of its marks.

    Attributes:
        conversation: The conversation.
        text: Its rendered text, without marks.
        roles: Roles of the marked messages. None for all.
    """

    def __init__(
        self,
        conversation: Conversation,
        marked: MarkedText,
        made: tuple[Mark, ...],
        roles: frozenset[str] | None,
    ) -> None:
        self.conversation = conversation
        self.text = marked.text
        self.roles = roles
        self._found: dict[int, list[FoundMark]] = {}
        for place, mark in marked.found:
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

    def end_key(self, index: int, mark: Mark | None) -> tuple[str, MessagePart, str] | None:
        """Return the kind of text after a mark, or None if it may differ between messages of one kind."""
        if mark is None or mark.message != index or mark.tail is None or len(mark.tail) > MAX_TAIL:
            return None
        return str(self.conversation.messages[index]["role"]), mark.part, mark.tail

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

    def with_text(self, start: int, end: int, inserted: str) -> _View:
        """Return a view of the text with a part replaced. It has no marks."""
        text_ = self.text[:start] + inserted + self.text[end:]
        return _View(self.conversation, MarkedText(text_, ()), (), self.roles)


def _with_reasoning(view: _View, turn: Turn) -> tuple[_View, Turn]:
    """Return a rendering with the reasoning of its last message, if the template leaves it out of last turns too.

    A model that writes its reasoning continues after the start of a turn, so the reasoning comes first.
    """
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
    changed = view.with_text(first, last, inserted)
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
