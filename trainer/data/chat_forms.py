"""The forms of messages that chat templates take: reasoning, tool calls and their arguments.

Data sets write the same call in several ways, and a template reads one of them. A short conversation shows which.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.chat_marks import ASSISTANT, NONCHARACTER, REASONING_KEYS, TOOL_CALLS
from trainer.data.chat_rendering import ChatRenderer, Conversation
from trainer.data.column_values import json_list, parse_json
from trainer.files.json_values import json_type_name
from trainer.models.errors import PrepError
from trainer.models.json_types import JsonObject, JsonValue

ARGUMENTS_HINT = '`"arguments": {"city": "Ulm"}`, or the same as a JSON text'
# A template may check the length of an id: those of Mistral take 9 characters.
PROBE_ID = "abcdefghi"
PROBE_NAME = "probe_name"
PROBE_ARGUMENTS: JsonObject = {"probe_key": "probe_value"}
PROBE_WORDS = (PROBE_NAME, "probe_key", "probe_value")
# Traces of arguments that a template writes as Python values, or as JSON of a JSON text.
BAD_TRACES = ("'probe_key'", '\\"probe_key')

# What stands for the content of a message that has tool calls and no text: no key, null or an empty text.
NO_CONTENTS: tuple[JsonObject, ...] = ({}, {"content": None}, {"content": ""})


@dataclass(frozen=True, slots=True)
class _CallForm:
    """How a template takes tool calls.

    Attributes:
        has_json_text: Whether arguments are a JSON text. Otherwise they are an object.
        no_content: The content of a message without a text, one of `NO_CONTENTS`.
    """

    has_json_text: bool
    no_content: JsonObject


class MessageForms:
    """Turns the messages of data sets into those that one template takes.

    Attributes:
        renderer: The renderer of the template.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer

    def conversation(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue] | None, place: str
    ) -> Conversation:
        """Return a conversation as the template takes it.

        Args:
            messages: Its messages.
            tools: Schemas of its tools. None without any.
            place: File and line, for error messages.

        Raises:
            PrepError: The calls of tools are invalid, or a text has characters that are none.
        """
        adapted = [self._adapt(message, place) for message in messages]
        if NONCHARACTER.search(json.dumps([adapted, tools], ensure_ascii=False)):
            what = f"{place}: a message is not text"
            why = "it has one of U+FDD0 to U+FDEF, which are not characters"
            raise PrepError(what, why, "remove them")
        return Conversation(adapted, place, tools)

    def _adapt(self, message: JsonObject, place: str) -> JsonObject:
        adapted = _with_reasoning_keys(message)
        calls = json_list(message.get(TOOL_CALLS), f"{place}: `{TOOL_CALLS}`", ARGUMENTS_HINT)
        if not calls:
            # Templates ask whether the key is defined.
            adapted.pop(TOOL_CALLS, None)
            return adapted
        form = self._call_form
        if message.get("content") is None:
            adapted |= form.no_content
        adapted[TOOL_CALLS] = [_adapt_call(call, form, place) for call in calls]
        return adapted

    @functools.cached_property
    def _call_form(self) -> _CallForm:
        """The first form of which the template shows the name and the arguments, else the first one that it renders."""
        forms = [
            _CallForm(has_json_text, content)
            for has_json_text, content in itertools.product((False, True), NO_CONTENTS)
        ]
        rendered = [(form, text) for form in forms if (text := self._render_call(form)) is not None]
        shown = [form for form, text in rendered if _shows_call(text)]
        return (shown or [form for form, _ in rendered] or forms)[0]

    def _render_call(self, form: _CallForm) -> str | None:
        """Return a conversation with a call as the template renders it, or None if it rejects the form."""
        function: JsonObject = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
        call: JsonObject = {"id": PROBE_ID, "type": "function", "function": function}
        calls: list[JsonValue] = [_adapt_call(call, form, "")]
        asked: JsonObject = {"role": "user", "content": "a"}
        answer: JsonObject = {"role": ASSISTANT, **form.no_content, TOOL_CALLS: calls}
        result: JsonObject = {
            "role": "tool", "tool_call_id": PROBE_ID, "name": PROBE_NAME, "content": "b",
        }  # fmt: skip
        try:
            rendered, _ = self.renderer.render(Conversation([asked, answer, result], ""))
        except PrepError:
            return None
        return rendered


def _shows_call(rendered: str) -> bool:
    """Return whether a text shows the call of `_render_call`."""
    has_all = all(word in rendered for word in PROBE_WORDS)
    return has_all and not any(trace in rendered for trace in BAD_TRACES)


def _with_reasoning_keys(message: JsonObject) -> JsonObject:
    """Return a message with its reasoning in all keys that templates read, as transformers gives it to them."""
    reasoning = next((message[key] for key in REASONING_KEYS if message.get(key) is not None), None)
    if reasoning is None:
        return dict(message)
    standard, gpt_oss, _ = REASONING_KEYS
    return {gpt_oss: reasoning, **message, standard: reasoning}


def _adapt_call(call: JsonValue, form: _CallForm, place: str) -> JsonValue:
    """Return a tool call with its arguments in the form of the template.

    Raises:
        PrepError: The arguments are not an object, nor a JSON text of one.
    """
    if not isinstance(call, dict):
        what = f"{place}: a tool call is not an object"
        raise PrepError(what, f"it is {json_type_name(call)}", ARGUMENTS_HINT)
    function = call.get("function")
    if isinstance(function, dict):
        return {**call, "function": _adapt_arguments(function, form, place)}
    return _adapt_arguments(call, form, place)


def _adapt_arguments(function: JsonObject, form: _CallForm, place: str) -> JsonObject:
    arguments = function.get("arguments")
    if arguments is None:
        return function
    parsed = arguments
    if isinstance(arguments, str):
        parsed = {}
        if arguments.strip():
            parsed = parse_json(arguments, f"{place}: the arguments of a tool call", ARGUMENTS_HINT)
    if not isinstance(parsed, dict):
        what = f"{place}: the arguments of a tool call are not an object"
        raise PrepError(what, f"they are {json_type_name(parsed)}", ARGUMENTS_HINT)
    if not form.has_json_text:
        return {**function, "arguments": parsed}
    if isinstance(arguments, str):
        # As the model wrote it.
        return function
    return {**function, "arguments": json.dumps(parsed, ensure_ascii=False)}
