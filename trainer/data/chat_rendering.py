"""Render conversations with Jinja templates in a sandbox, as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from trainer.data.chat_environment import ChatEnvironment
from trainer.data.chat_template import ChatTemplate
from trainer.models.errors import PrepError

# Unicode noncharacters, which no text contains, around the parts of a rendered text that the assistant generates.
START_MARK, END_MARK = "\ufdd0", "\ufdd1"
GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")

Spans = tuple[tuple[int, int], ...]


class ChatRenderer:
    """A compiled chat template.

    The time of day is not available to it: the ids of a conversation do not depend on the day.
    """

    def __init__(self, template: ChatTemplate) -> None:
        """Compile a template.

        Raises:
            PrepError: The template is not valid Jinja.
        """
        self._environment = ChatEnvironment([_GenerationBlocks, loopcontrols])
        self._file, self._special_tokens = template.file, dict(template.special_tokens)
        self._has_markers = GENERATION.search(template.text) is not None
        try:
            self._template = self._environment.compile_template(template.text)
        except Exception as error:  # Jinja and Python's compiler raise errors of many types
            raise PrepError(f"{template.file} is not a valid chat template", _error_text(error)) from None

    def render(
        self, messages: Sequence[dict[str, Any]], place: str, *, add_generation_prompt: bool = False
    ) -> tuple[str, Spans | None]:
        """Render messages.

        Args:
            messages: The messages, in order.
            place: File and line, for error messages.
            add_generation_prompt: End with the text that starts a turn of the assistant.

        Returns:
            The text, and the start and end of each part that the template marks as generated; None for a template
            without markers.

        Raises:
            PrepError: The template fails or rejects the messages.
        """
        messages_text = json.dumps(messages, ensure_ascii=False)
        if any(mark in messages_text for mark in (START_MARK, END_MARK)):
            raise PrepError(f"{place}: a message is not text", "it has U+FDD0 or U+FDD1, which are no characters")
        self._environment.limits.start(len(messages_text))
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )  # fmt: skip
        except Exception as error:  # a template is a program, which may raise any error
            what = f"{place}: {self._file} cannot render the messages"
            raise PrepError(what, _error_text(error), "correct the messages or the template") from None
        return _split_marks(text) if self._has_markers else (text, None)


def _error_text(error: Exception) -> str:
    """Return the cause of an error of Jinja or of Python, for people who wrote neither."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply, or its macros call each other without end"
    if isinstance(error, MemoryError):
        return "it is nested too deeply, or needs too much memory"
    return f"{str(error) or type(error).__name__:.300}"


def _split_marks(text: str) -> tuple[str, Spans]:
    """Return a text without its marks, and the parts between them."""
    parts, spans, length = [], [], 0
    for index, part in enumerate(re.split(f"[{START_MARK}{END_MARK}]", text)):
        if index % 2:
            spans.append((length, length + len(part)))
        parts.append(part)
        length += len(part)
    return "".join(parts), tuple(spans)


class _GenerationBlocks(Extension):
    """The tag `{% generation %}`: its body is rendered between marks."""

    tags = {"generation"}  # noqa: RUF012 - the interface of Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag and its body up to `{% endgeneration %}`."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line_number)

    def _mark(self, caller: Macro) -> str:
        return f"{START_MARK}{caller()}{END_MARK}"
