"""Prompts of generation as token ids: texts, and conversations that a chat template renders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, JsonValue
from trainer.data.chat import load_forms
from trainer.data.chat_forms import MessageForms
from trainer.data.chat_template import ChatTemplate, load_chat_template
from trainer.data.column_values import SURROGATE_CAUSE, is_encodable, messages_value, tool_schemas
from trainer.data.readers.reader import Record
from trainer.data.tokenizer import TextTokenizer

MESSAGES_KEY = "messages"
TOOLS_KEY = "tools"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation that the assistant continues.

    Attributes:
        messages: Its messages.
        tools: JSON schemas of the tools that the assistant may call. None without tools.
        place: File and line, for error messages.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    place: str = "the conversation"


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
    ) -> None:
        """Keep the tokenizer.

        Args:
            tokenizer: The tokenizer, whose folder has the chat template.
            template_args: Further variables of the template.
            now: The time that `strftime_now` of the template writes. None makes that an error.
        """
        self.tokenizer = tokenizer
        self._template_args = template_args
        self._now = now

    @cached_property
    def _template(self) -> ChatTemplate:
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
            if not is_encodable(prompt):
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
    """Return the prompt of a conversation.

    Args:
        value: The messages.
        tools: Schemas of tools, or their JSON text. None without tools.
        place: File and line, for error messages.

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
