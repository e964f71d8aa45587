"""The forms of messages that chat templates take: contents, reasoning, tool calls and their arguments.

Data sets write the same message in several ways, and a template reads one of them. A short conversation shows which.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, JsonValue, is_utf8, json_type_name
from trainer.data.chat_template import HIDDEN_HINT, ChatRenderer, ChatTemplate, Conversation
from trainer.data.columns import SURROGATE_CAUSE, json_list, parse_json
from trainer.data.conversations import (
    ASSISTANT,
    REASONING_KEYS,
    TOOL_CALLS,
)

NONCHARACTER = re.compile("[\ufdd0-\ufdef]")
ARGUMENTS_HINT = '`"arguments": {"city": "Ulm"}`, or the same as a JSON text'
# A template may check the length of an id: those of Mistral take 9 characters.
PROBE_ID = "abcdefghi"
PROBE_NAME = "probe_name"
PROBE_ARGUMENTS: JsonObject = {"probe_key": "probe_value"}
PROBE_WORDS = (PROBE_NAME, "probe_key", "probe_value")
# Traces of arguments that a template writes as Python values, or as JSON of a JSON text.
BAD_TRACES = ("'probe_key'", '\\"probe_key')
# Texts of the parts of a content. Some templates read the first part only.
PROBE_TEXTS = ("probe_first", "probe_second")
# Trace of parts that a template writes as a Python value or as JSON. The result of a tool may be JSON.
BAD_PARTS_TRACE = re.compile(r"""['"](text|thinking)['"]: *['"]probe_""")
BAD_RESULT_TRACE = re.compile(r"'text': *'probe_")
# Forms of a content, the preferred ones first: a text, its only part, or one of several parts.
TEXT_FORM, PART_FORM, PARTS_FORM = range(3)
TEXT_TYPE = "text"
# Types of parts with a text, in the formats of several publishers. Templates know the first one.
TEXT_TYPES = (TEXT_TYPE, "input_text", "output_text", None)
# The type of parts with the reasoning of a message.
THINKING_TYPE = "thinking"
THINKING_HINT = '`{"type": "thinking", "thinking": "..."}`'
CONTENT_HINT = '`"content": "..."`, or a list of `{"type": "text", "text": "..."}`'
USER = "user"
TOOL = "tool"
# Roles before the first turn of a user.
SYSTEM_ROLES = ("system", "developer")
ROLES = (*SYSTEM_ROLES, USER, ASSISTANT, TOOL)
# Further ones have the form of a user's messages.
MAX_ROLES = 64
# What stands for the content of a message that has tool calls and no text: no key, null or an empty text.
NO_CONTENTS: tuple[JsonObject, ...] = ({}, {"content": None}, {"content": ""})


@dataclass(frozen=True, slots=True)
class _CallForm:
    """How a template takes tool calls: arguments as JSON text or an object, and one of `NO_CONTENTS` for no text."""

    has_json_text: bool
    no_content: JsonObject


class MessageForms:
    """Turns the messages of data sets into those that one template takes.

    Attributes:
        renderer: The renderer of the template.
    """

    def __init__(self, renderer: ChatRenderer) -> None:
        self.renderer = renderer
        # Role, and the form of its content -> whether the template shows its texts. None if it fails.
        self._shown_contents: dict[tuple[str, int], bool | None] = {}

    def conversation(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue] | None, place: str
    ) -> Conversation:
        """Return a conversation as the template takes it.

        Raises:
            PrepError: The calls of tools are invalid, a content is no text, or a text has characters that are none.
        """
        adapted = [
            self._adapt(message, place, number) for number, message in enumerate(messages, start=1)
        ]
        text = json.dumps([adapted, tools], ensure_ascii=False)
        if not is_utf8(text):
            what = f"{place}: a message is not UTF-8 text"
            raise PrepError(what, SURROGATE_CAUSE, "convert it to UTF-8")
        if NONCHARACTER.search(text):
            what = f"{place}: a message is not text"
            why = "it has one of U+FDD0 to U+FDEF, which are not characters"
            raise PrepError(what, why, "remove them")
        return Conversation(adapted, place, tools)

    def _adapt(self, message: JsonObject, place: str, number: int) -> JsonObject:
        role = str(message["role"])
        message_place = f"{place}: message {number}"
        if _has_thinking(message.get("content")) and not self._shows_thinking:
            message = _with_thinking_key(message, message_place)
        adapted: JsonObject = dict(message)
        reasoning = next(
            (message[key] for key in REASONING_KEYS if message.get(key) is not None), None
        )
        if reasoning is not None:
            # In all keys that templates read, as transformers gives it to them.
            standard, gpt_oss, _ = REASONING_KEYS
            adapted = {gpt_oss: reasoning, **message, standard: reasoning}
        content = message.get("content")
        if content is not None:
            adapted["content"] = self._adapt_content(role, content, message_place)
            forms = (TEXT_FORM, PART_FORM, PARTS_FORM)
            if adapted["content"] and role not in (USER, ASSISTANT):
                is_shown = any(self._shows_content(role, form) for form in forms)
                # A template that fails for a text fails for the message, too.
                if not is_shown and self._shows_content(role, TEXT_FORM) is False:
                    what = f"{message_place}: the role is `{role:.40}`"
                    why = f"{self.renderer.file} does not show messages of this role"
                    hint = HIDDEN_HINT if role in ROLES else f"the roles are {', '.join(ROLES)}"
                    raise PrepError(what, why, hint)
        calls = json_list(message.get(TOOL_CALLS), f"{place}: `{TOOL_CALLS}`", ARGUMENTS_HINT)
        if not calls:
            # Templates ask whether the key is defined.
            adapted.pop(TOOL_CALLS, None)
            return adapted
        form = self._call_form
        if content is None:
            adapted |= form.no_content
        adapted[TOOL_CALLS] = [_adapt_call(call, form, place) for call in calls]
        return adapted

    def _adapt_content(self, role: str, content: JsonValue, place: str) -> JsonValue:
        """Return a content as the template takes it from a role: a text, or a list of parts."""
        if isinstance(content, str):
            if not content.strip() or self._shows_content(role, TEXT_FORM):
                return content
            if self._shows_content(role, PART_FORM):
                return [_text_part(content)]
            return content
        has_typed_parts = isinstance(content, list) and all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
        )
        if role == TOOL and not has_typed_parts:
            # The result of a tool may be any value.
            return content
        if not isinstance(content, list):
            what = f"{place}: the content is not a text"
            raise PrepError(what, f"it is {json_type_name(content)}", CONTENT_HINT)
        parts = [_adapt_part(part, place) for part in content]
        if _has_thinking(content) or self._shows_content(role, PARTS_FORM):
            return [*parts]
        return self._adapt_content(role, "".join(str(part["text"]) for part in parts), place)

    def _shows_content(self, role: str, form: int) -> bool | None:
        """Return whether the template shows texts of a role in a form. None if it cannot render a short one."""
        key = (role, form)
        if key not in self._shown_contents:
            if len(self._shown_contents) >= MAX_ROLES:
                key = (USER, form)
            self._shown_contents[key] = self._probe_content(*key)
        return self._shown_contents[key]

    def _probe_content(self, role: str, form: int) -> bool | None:
        texts = PROBE_TEXTS[: max(form, 1)]
        content: JsonValue = texts[0]
        if form != TEXT_FORM:
            content = [_text_part(text) for text in texts]
        message: JsonObject = {"role": role, "content": content}
        messages = [message]
        if role in SYSTEM_ROLES:
            messages.append(self._probe_question())
        elif role == TOOL:
            result: JsonObject = {**message, "tool_call_id": PROBE_ID, "name": PROBE_NAME}
            messages = [self._probe_question(), _probe_call(self._call_form), result]
        elif role != USER:
            messages.insert(0, self._probe_question())
        rendered = self.renderer.probe(messages)
        if rendered is None:
            return None
        trace = BAD_RESULT_TRACE if role == TOOL else BAD_PARTS_TRACE
        return all(text in rendered for text in texts) and not trace.search(rendered)

    @functools.cached_property
    def _shows_thinking(self) -> bool:
        """Whether the template shows reasoning that is a part of a content."""
        thinking, answer = PROBE_TEXTS
        part: JsonObject = {"type": THINKING_TYPE, THINKING_TYPE: thinking}
        message: JsonObject = {"role": ASSISTANT, "content": [part, _text_part(answer)]}
        rendered = self.renderer.probe([self._probe_question(), message])
        if rendered is None:
            return False
        return thinking in rendered and not BAD_PARTS_TRACE.search(rendered)

    def _probe_question(self) -> JsonObject:
        """Return a short turn of a user."""
        return {"role": USER, "content": self._adapt_content(USER, "a", "")}

    @functools.cached_property
    def _call_form(self) -> _CallForm:
        """The first form of which the template shows the name and the arguments, else the first one that it renders."""
        forms = [
            _CallForm(has_json_text, content)
            for has_json_text, content in itertools.product((False, True), NO_CONTENTS)
        ]
        result: JsonObject = {
            "role": TOOL, "tool_call_id": PROBE_ID, "name": PROBE_NAME, "content": "b",
        }  # fmt: skip
        rendered: list[tuple[_CallForm, str]] = []
        for form in forms:
            text = self.renderer.probe([self._probe_question(), _probe_call(form), result])
            if text is not None:
                rendered.append((form, text))
        shown = [
            form
            for form, text in rendered
            if all(word in text for word in PROBE_WORDS)
            and not any(trace in text for trace in BAD_TRACES)
        ]
        return (shown or [form for form, _ in rendered] or forms)[0]


def _probe_call(form: _CallForm) -> JsonObject:
    """Return a turn of the assistant that calls a tool."""
    function: JsonObject = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
    call: JsonObject = {"id": PROBE_ID, "type": "function", "function": function}
    return {"role": ASSISTANT, **form.no_content, TOOL_CALLS: [_adapt_call(call, form, "")]}


def _text_part(text: str) -> JsonObject:
    """Return a part of a content that has a text."""
    return {"type": TEXT_TYPE, "text": text}


def _has_thinking(content: JsonValue) -> bool:
    return isinstance(content, list) and any(map(_is_thinking, content))


def _is_thinking(part: JsonValue) -> bool:
    return isinstance(part, dict) and part.get("type") == THINKING_TYPE


def _with_thinking_key(message: JsonObject, place: str) -> JsonObject:
    """Return a message with the reasoning of its content in a key. Raise PrepError if a key has another one."""
    parts = cast(list[JsonValue], message["content"])
    texts = [_adapt_part(part, place)[THINKING_TYPE] for part in parts if _is_thinking(part)]
    reasoning = "".join(map(str, texts))
    if any(message.get(key) not in (None, "", reasoning) for key in REASONING_KEYS):
        what = f"{place}: it has two kinds of reasoning"
        why = f"a part of its content has the type `{THINKING_TYPE}`"
        raise PrepError(what, why, "remove one of them")
    others = [part for part in parts if not _is_thinking(part)]
    return {**message, "content": others or "", REASONING_KEYS[0]: reasoning}


def _adapt_part(part: JsonValue, place: str) -> JsonObject:
    """Return a part of a content as templates take it. Raise PrepError if it is no text, e.g. an image."""
    if isinstance(part, str):
        return _text_part(part)
    if not isinstance(part, dict):
        what = f"{place}: a part of the content is not a text"
        raise PrepError(what, f"it is {json_type_name(part)}", CONTENT_HINT)
    part_type = part.get("type")
    if part_type == THINKING_TYPE:
        # A text, or a list of parts with texts, as in the format of Mistral.
        value = part.get(THINKING_TYPE)
        if isinstance(value, list) and not _has_thinking(value):
            value = "".join(str(_adapt_part(item, place)["text"]) for item in value)
        if not isinstance(value, str):
            what = f"{place}: a part of the content is not a text"
            why = f"its `{THINKING_TYPE}` is {json_type_name(value)}"
            raise PrepError(what, why, THINKING_HINT)
        return {**part, THINKING_TYPE: value}
    if part_type not in TEXT_TYPES or not isinstance(part.get("text"), str):
        what = f"{place}: a part of the content is not a text"
        why = f"it has the type `{part_type!s:.40}`, and the model reads texts only"
        raise PrepError(what, why, CONTENT_HINT)
    return {**part, "type": TEXT_TYPE}


def _adapt_call(call: JsonValue, form: _CallForm, place: str) -> JsonValue:
    """Return a tool call with its arguments, an object or a JSON text of one, in the form of the template."""
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


def load_forms(template: ChatTemplate) -> MessageForms:
    """Return the forms of messages that a template takes, with its renderer.

    Raises:
        PrepError: jinja2 is not installed, or the template is not valid.
    """
    if importlib.util.find_spec("jinja2") is None:
        what = "cannot render chat templates"
        raise PrepError(what, "jinja2 is not installed", "`pip install 'prepcli[chat]'`")
    return MessageForms(ChatRenderer(template))
