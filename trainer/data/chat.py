"""Build training examples of conversations: only tokens of assistant turns count in the loss."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from trainer.data.chat_template import ChatTemplate
from trainer.data.column_values import check_columns, messages_value
from trainer.data.example_settings import (
    ExampleSettings,
    begin_segments,
    largest_added_id,
    token_segment,
)
from trainer.data.examples import Example, Segment
from trainer.data.ignored_parts import ignored_parts
from trainer.data.readers.reader import DataPiece, Record
from trainer.models.errors import PrepError
from trainer.models.json_types import JsonObject

if TYPE_CHECKING:
    from trainer.data.chat_rendering import ChatRenderer

ASSISTANT = "assistant"
MARKERS_HINT = (
    "put `{% generation %}` and `{% endgeneration %}` around the assistant's text in the template"
)

Spans = tuple[tuple[int, int], ...]


class ChatBuilder:
    """Builds an example of the messages of each record.

    A chat template renders the whole conversation as one text, and the text is tokenized at once.
    Text between the markers `{% generation %}` and `{% endgeneration %}` of the template counts in
    the loss. Without markers, the conversation is rendered up to each assistant turn, with and
    without the turn, and the difference counts.
    """

    has_weights = True

    def __init__(self, settings: ExampleSettings, template: ChatTemplate) -> None:
        self._settings = settings
        self._template = template
        self._renderer = load_renderer(template)
        self._bos_text = dict(template.special_tokens).get("bos_token", "")
        self.max_extra_token_id = largest_added_id(settings)

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record.

        Raises:
            PrepError: The record has no messages, the template rejects them, or the turns of the
                assistant cannot be found.
        """
        assert isinstance(piece, Record)
        column = self._settings.fields
        check_columns(piece, [column])
        messages = messages_value(piece, column)
        text, spans = self._renderer.render(messages, piece.place)
        if spans is None:
            spans = self._spans_by_prefix(messages, text, piece.place)
        begin: tuple[Segment, ...] = ()
        # Most templates write the begin token themselves.
        if not (self._bos_text and text.startswith(self._bos_text)):
            begin = begin_segments(self._settings)
        end = token_segment(self._settings.end_id)
        return Example(
            (*begin, Segment(text, loss_spans=spans), *end),
            piece.nbytes,
            ignored=tuple(ignored_parts(piece.values, messages)),
            stop_ids=self._settings.stop_ids,
        )

    def _spans_by_prefix(self, messages: list[JsonObject], text: str, place: str) -> Spans:
        """Return start and end of each assistant turn.

        The conversation is rendered up to each of them.
        """
        # A conversation of n messages is rendered up to n times, so the time is quadratic. The limits
        # of the template hold for each rendering.
        spans: list[tuple[int, int]] = []
        for number, message in enumerate(messages, start=1):
            if message["role"] == ASSISTANT:
                spans.append(self._turn_span(messages[:number], text, place))
        return tuple(spans)

    def _turn_span(self, messages: list[JsonObject], text: str, place: str) -> tuple[int, int]:
        """Return start and end of the text added by the last message to the messages before it."""
        start = ""
        if len(messages) == 1:
            start = self._turn_start(place)
        if start:
            return self._first_turn_span(messages, text, place, start=start)
        # E.g. messages [user "Hi", assistant "Hello"] of a template `<role>text</s>`: before is
        # `<user>Hi</s><assistant>`, after is `<user>Hi</s><assistant>Hello</s>`. The span is
        # `Hello</s>`: the prompt of the turn has no loss, its end token has.
        before, _ = self._renderer.render(messages[:-1], place, add_generation_prompt=True)
        after, _ = self._renderer.render(messages, place)
        if not (after.startswith(before) and text.startswith(after)):
            raise self._unknown_turn_error(len(messages), place)
        return len(before), len(after)

    def _first_turn_span(
        self, messages: list[JsonObject], text: str, place: str, *, start: str
    ) -> tuple[int, int]:
        """Return start and end of a turn of the assistant that begins the conversation."""
        # Many templates cannot render a conversation without messages, or put a system prompt before the first
        # message. The start of a turn is therefore the text that a template puts after a user's turn.
        # E.g. `<system>Be kind</s><assistant>Hello</s>` with the start `<assistant>` has the span `Hello</s>`.
        after, _ = self._renderer.render(messages, place)
        position = after.find(start)
        if position < 0 or not text.startswith(after):
            raise self._unknown_turn_error(1, place)
        return position + len(start), len(after)

    def _turn_start(self, place: str) -> str:
        """Return the text at the start of a turn of the assistant, or "" if the template has none."""
        user: list[JsonObject] = [{"role": "user", "content": "a"}]
        plain, _ = self._renderer.render(user, place)
        prompt, _ = self._renderer.render(user, place, add_generation_prompt=True)
        if prompt.startswith(plain):
            return prompt[len(plain) :]
        return ""

    def _unknown_turn_error(self, number: int, place: str) -> PrepError:
        what = f"{place}: the turns of the assistant cannot be found"
        why = f"{self._template.file} renders message {number} in another way with the messages after it"
        return PrepError(what, why, MARKERS_HINT)


def load_renderer(template: ChatTemplate, *, now: datetime | None = None) -> ChatRenderer:
    """Return a renderer of the template (see `ChatRenderer`).

    Raises:
        PrepError: jinja2 is not installed, or the template is not valid.
    """
    try:
        from trainer.data.chat_rendering import ChatRenderer
    except ImportError:
        what = "cannot render chat templates"
        raise PrepError(what, "jinja2 is not installed", "`pip install 'prepcli[chat]'`") from None
    return ChatRenderer(template, now=now)
