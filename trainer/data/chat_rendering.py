"""Render conversations with Jinja templates in a sandbox, as transformers does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

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
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_error
        self._file, self._special_tokens = template.file, dict(template.special_tokens)
        self._has_markers = GENERATION.search(template.text) is not None
        try:
            self._template = environment.from_string(template.text)
        except TemplateError as error:
            raise PrepError(f"{template.file} is not a valid chat template", str(error)) from None

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
        if any(mark in json.dumps(messages, ensure_ascii=False) for mark in (START_MARK, END_MARK)):
            raise PrepError(f"{place}: a message is not text", "it has U+FDD0 or U+FDD1, which are no characters")
        try:
            text = self._template.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )  # fmt: skip
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise PrepError(f"{place}: {self._file} cannot render the messages", str(error), "fix them") from None
        return _split_marks(text) if self._has_markers else (text, None)


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


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, unlike Jinja's filter without escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_error(message: str) -> NoReturn:
    raise TemplateError(message)
