"""Conversations as training examples, where only tokens of chosen turns count in the loss, and as prompts."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, JsonValue, is_utf8
from trainer.data.chat_forms import MessageForms, load_forms
from trainer.data.chat_template import (
    ChatTemplate,
    Conversation,
    load_chat_template,
)
from trainer.data.chat_turns import Turn, TurnFinder
from trainer.data.columns import SURROGATE_CAUSE
from trainer.data.conversations import (
    ASSISTANT,
    REASONING_KEYS,
    TOOL_CALLS,
    message_reader,
    message_weight,
    messages_value,
    tool_schemas,
    tools_value,
)
from trainer.data.examples import (
    EMPTY_TURN,
    HIDDEN_REASONING,
    TOOLS,
    Example,
    ExampleSettings,
    LossSpan,
    Segment,
    begin_segments,
    largest_added_id,
    token_segment,
)
from trainer.data.readers.reader import DataPiece, Record
from trainer.data.tokenizer import TextTokenizer


class ChatBuilder:
    """Builds an example of the messages of each record.

    A chat template renders the whole conversation as one text, and the text is tokenized at once.
    Text between the markers `{% generation %}` and `{% endgeneration %}` of the template counts in
    the loss. Without markers, the turns are found by the texts of their messages.
    """

    has_weights = True

    def __init__(self, settings: ExampleSettings, template: ChatTemplate) -> None:
        self._settings = settings
        self._messages = message_reader(settings.chat_format, settings.fields)
        self._forms = load_forms(template)
        self._renderer = self._forms.renderer
        self._finder = TurnFinder(self._renderer)
        self._bos_text = template.bos_text
        self.max_extra_token_id = largest_added_id(settings)

    def build(self, piece: DataPiece) -> Example:
        """Return the example of a record.

        Raises:
            PrepError: The record has no messages, the template rejects them, or the turns with loss
                cannot be found.
        """
        assert isinstance(piece, Record)
        messages = self._messages(piece)
        tools = tools_value(piece)
        conversation = self._forms.conversation(messages, tools, piece.place)
        ignored: Counter[str] = Counter()
        if tools and not self._renderer.takes_tools:
            ignored[TOOLS] = 1
        weights = {
            index: message_weight(conversation.messages[index], conversation.place)
            for index in self._settings.loss.select(conversation.messages)
        }
        text, spans, n_hidden = self._render(conversation, weights)
        ignored[HIDDEN_REASONING] = n_hidden
        ignored[EMPTY_TURN] = sum(
            weight > 0 and _is_empty_turn(conversation.messages[index])
            for index, weight in weights.items()
        )
        begin: tuple[Segment, ...] = ()
        # Most templates write the begin token themselves.
        if not (self._bos_text and text.startswith(self._bos_text)):
            begin = begin_segments(self._settings)
        end = token_segment(self._settings.end_id)
        return Example(
            (*begin, Segment(text, loss_spans=spans), *end),
            piece.nbytes,
            ignored=tuple(ignored.elements()),
            stop_ids=self._settings.stop_ids,
        )

    def _render(
        self, conversation: Conversation, weights: Mapping[int, float]
    ) -> tuple[str, tuple[LossSpan, ...], int]:
        """Return the text of a conversation, its parts with loss, and how many turns hide their reasoning."""
        rule = self._settings.loss
        if self._settings.joins_last_turns:
            text, turns = self._finder.join_last_turns(conversation)
            return text, self._spans(text, turns, weights), 0
        text, generated = self._renderer.render(conversation)
        if rule.roles is None:
            assistant = conversation.assistant_indices
            n_hidden = self._finder.count_hidden_reasoning(conversation, text, assistant)
            return text, self._all_spans(conversation, text, weights), n_hidden
        indices = [index for index, weight in weights.items() if weight]
        is_uniform = all(weight == 1 for weight in weights.values())
        if generated is not None and rule.is_default and is_uniform:
            n_hidden = self._finder.count_hidden_reasoning(conversation, text, indices)
            return text, tuple((start, end, 1.0) for start, end in generated), n_hidden
        turns = self._finder.find(conversation, text, indices)
        spans = self._spans(text, turns, weights)
        if generated is not None:
            # The parts of spans that the template marks as generated.
            both = itertools.product(spans, generated)
            spans = tuple(
                (max(start, first), min(end, last), weight)
                for (start, end, weight), (first, last) in both
                if max(start, first) < min(end, last)
            )
        return text, spans, sum(turn.hides_reasoning for turn in turns.values())

    def _all_spans(
        self, conversation: Conversation, text: str, weights: Mapping[int, float]
    ) -> tuple[LossSpan, ...]:
        """Return the spans of a text that all has loss, but for messages with another weight, and for reasoning."""
        others = [index for index, weight in weights.items() if weight != 1]
        if not self._settings.loss.has_reasoning:
            others = sorted({*others, *conversation.assistant_indices})
        turns = self._finder.find(conversation, text, others)
        reasoning: list[LossSpan] = []
        if not self._settings.loss.has_reasoning:
            reasoning = [
                (turn.start, turn.answer, 0.0)
                for turn in turns.values()
                if turn.start < turn.answer
            ]
        return ((0, len(text), 1.0), *reasoning, *self._spans(text, turns, weights))

    def _spans(
        self, text: str, turns: Mapping[int, Turn], weights: Mapping[int, float]
    ) -> tuple[LossSpan, ...]:
        """Return the spans of turns that have weights."""
        spans: list[LossSpan] = []
        for index, turn in turns.items():
            if index not in weights:
                continue
            start = turn.start if self._settings.loss.has_reasoning else turn.answer
            spans.append((start, self._stop_end(text, start, turn.end), weights[index]))
        return tuple(spans)

    def _stop_end(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn, with the token that ends it if the template writes that with the next turn."""
        # E.g. GLM ends an answer with the `<|user|>` that begins the next turn.
        stops = self._settings.stop_texts
        if any(stop in text[start:end] for stop in stops):
            return end
        return end + max((len(stop) for stop in stops if text.startswith(stop, end)), default=0)


def _is_empty_turn(message: JsonObject) -> bool:
    """Return whether a message is a turn of the assistant without text, reasoning and calls."""
    if message["role"] != ASSISTANT:
        return False
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    if isinstance(content, str):
        content = content.strip()
    return not content and not any(message.get(key) for key in (TOOL_CALLS, *REASONING_KEYS))


MESSAGES_KEY = "messages"
TOOLS_KEY = "tools"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the assistant continues."""

    messages: Sequence[JsonObject]  # Its messages
    # JSON schemas of the tools that the assistant may call. None without tools.
    tools: Sequence[JsonObject] | None = None
    place: str = "the conversation"  # File and line, for error messages


Prompt = str | ChatPrompt


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """The token ids of a prompt, and its text: of a conversation, the text that the template renders."""

    ids: list[int]
    text: str


class PromptEncoder:
    """Encodes prompts. The chat template is loaded for the first conversation."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        template_args: Mapping[str, JsonValue] | None = None,
        now: datetime | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        """Keep the tokenizer and its chat template.

        Args:
            tokenizer: The tokenizer. Its folder has the chat template.
            template_args: Variables of the template.
            now: The time for the template.
            template: A template with its variables and its date, in place of that of the tokenizer.
        """
        self.tokenizer = tokenizer
        self._template_args = template_args
        self._now = now
        self._replacement = template

    @cached_property
    def _template(self) -> ChatTemplate:
        if self._replacement is not None:
            return self._replacement
        template = load_chat_template(self.tokenizer.path)
        arguments = json.dumps(self._template_args or {})
        return replace(template, arguments=arguments, date=self._now)

    @cached_property
    def _forms(self) -> MessageForms:
        return load_forms(self._template)

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a prompt.

        The template of a conversation writes all special tokens, and the tokenizer adds none.

        Raises:
            PrepError: The tokenizer fails or has no chat template, or the template rejects the messages.
        """
        if isinstance(prompt, str):
            if not is_utf8(prompt):
                what = "a prompt is not UTF-8 text"
                raise PrepError(what, SURROGATE_CAUSE, "convert it to UTF-8")
            return EncodedPrompt(self.tokenizer.encode_prompt(prompt), prompt)
        conversation = self._forms.conversation(prompt.messages, prompt.tools, prompt.place)
        text, _ = self._forms.renderer.render(conversation, add_generation_prompt=True)
        (ids,) = self.tokenizer.encode([text])
        bos = self._template.bos_text
        bos_id = self.tokenizer.codec.token_id(bos) if bos and text.startswith(bos) else None
        if bos_id is not None and ids[:1].tolist() != [bos_id]:
            raise PrepError(
                f"{self.tokenizer.path} encodes {bos!r} of the chat template as characters",
                "a SentencePiece model alone has no ids for the special tokens in a text",
                "use a tokenizer.json of this model",
            )
        return EncodedPrompt(ids.tolist(), text)


def chat_prompt(value: JsonValue, tools: JsonValue, place: str) -> ChatPrompt:
    """Return the prompt of a conversation with tools, or the JSON text of their schemas.

    Raises:
        PrepError: The messages or the tools are invalid, or there are no messages.
    """
    messages = messages_value(Record({MESSAGES_KEY: value}, place, 1), MESSAGES_KEY)
    if not messages:
        raise PrepError(
            f"{place}: the conversation has no messages",
            "the assistant answers the messages of a conversation",
            '`[{"role": "user", "content": "..."}]`',
        )
    return ChatPrompt(messages, tool_schemas(tools, f"{place}: `{TOOLS_KEY}`"), place)
