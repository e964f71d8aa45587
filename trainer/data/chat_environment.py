"""Render chat templates in a child process, as transformers does.

A template is a program of any origin. Jinja's sandbox keeps it from Python's internals, and the child process
(`prepcli.core.sandbox`) limits its memory and its time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateRenderer:
    """Compiled templates with the same variables."""

    def __init__(
        self,
        texts: Sequence[str],
        variables: Mapping[str, Any],
        marks: tuple[str, str],
        time: str | None,
    ) -> None:
        """Compile the templates.

        Args:
            texts: The templates.
            variables: Variables of all renderings.
            marks: Texts around a part that the template marks as generated.
            time: Time that `strftime_now` writes, in ISO format. None makes that an error.

        Raises:
            Exception: A text is not a template. Jinja and Python raise errors of many types.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
        )
        environment.extend(generation_marks=marks)
        # Equal messages have equal texts.
        environment.filters["random"] = _refuse_random
        del environment.globals["lipsum"]
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_error
        if time is not None:
            environment.globals["strftime_now"] = datetime.datetime.fromisoformat(time).strftime
        self._templates = [environment.from_string(text) for text in texts]
        self._variables = variables

    def render(
        self, index: int, conversation: bytes, add_generation_prompt: bool, max_chars: int
    ) -> str:
        """Render a conversation as JSON with one of the templates, to at most `max_chars` characters.

        Raises:
            Exception: The template fails. It may raise any error.
        """
        messages, tools = json.loads(conversation)
        variables = {
            **self._variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._templates[index].render(variables)
        if len(text) > max_chars:
            raise TemplateError(
                f"it makes a text of {len(text):.3g} characters, the limit is {max_chars:,}"
            )
        return text


class _GenerationBlocks(Extension):
    """The tag `{% generation %}`: its body is rendered between marks."""

    tags = {"generation"}  # noqa: RUF012 - the interface of Jinja

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag and its body up to `{% endgeneration %}`."""
        line_number = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line_number)

    def _mark(self, caller: Macro) -> str:
        # Jinja's class does not declare the attributes that `extend` sets.
        start, end = vars(self.environment)["generation_marks"]
        return f"{start}{caller()}{end}"


def _refuse_random(*args: Any, **named: Any) -> NoReturn:
    raise SecurityError("the filter 'random' is not available in chat templates")


def _raise_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON, unlike Jinja's filter without escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
