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
from prepcli.core.json_values import JsonObject, JsonValue, json_type_name
from trainer.data.chat_template import HIDDEN_HINT, ChatRenderer, ChatTemplate, Conversation
from trainer.data.columns import SURROGATE_CAUSE, is_encodable, json_list, parse_json
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
        # Role, and the form of its content -> whether the template shows its texts. None if it fails.
        self._shown_contents: dict[tuple[str, int], bool | None] = {}

    def conversation(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonValue] | None, place: str
    ) -> Conversation:
        """Return a conversation as the template takes it.

        Args:
            messages: Its messages.
            tools: Schemas of its tools. None without any.
            place: File and line, for error messages.

        Raises:
            PrepError: The calls of tools are invalid, a content is no text, or a text has characters that are none.
        """
        adapted = [
            self._adapt(message, place, number) for number, message in enumerate(messages, start=1)
        ]
        text = json.dumps([adapted, tools], ensure_ascii=False)
        if not is_encodable(text):
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
        adapted = _with_reasoning_keys(message)
        content = message.get("content")
        if content is not None:
            adapted["content"] = self._adapt_content(role, content, message_place)
            if adapted["content"] and role not in (USER, ASSISTANT):
                self._check_role(role, message_place)
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
        if role == TOOL and not _has_typed_parts(content):
            # The result of a tool may be any value.
            return content
        if not isinstance(content, list):
            what = f"{place}: the content is not a text"
            raise PrepError(what, f"it is {json_type_name(content)}", CONTENT_HINT)
        parts = [_adapt_part(part, place) for part in content]
        if _has_thinking(content) or self._shows_content(role, PARTS_FORM):
            return [*parts]
        return self._adapt_content(role, "".join(str(part["text"]) for part in parts), place)

    def _check_role(self, role: str, place: str) -> None:
        """Raise PrepError if the template leaves out all messages of a role."""
        forms = (TEXT_FORM, PART_FORM, PARTS_FORM)
        is_shown = any(self._shows_content(role, form) for form in forms)
        # A template that fails for a text fails for the message, too.
        if not is_shown and self._shows_content(role, TEXT_FORM) is False:
            what = f"{place}: the role is `{role:.40}`"
            why = f"{self.renderer.file} does not show messages of this role"
            hint = HIDDEN_HINT
            if role not in ROLES:
                hint = f"the roles are {', '.join(ROLES)}"
            raise PrepError(what, why, hint)

    def _shows_content(self, role: str, form: int) -> bool | None:
        """Return whether the template shows the texts of a role that have a form.

        None if it cannot render a short conversation with this role.
        """
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
        rendered = [(form, text) for form in forms if (text := self._render_call(form)) is not None]
        shown = [form for form, text in rendered if _shows_call(text)]
        return (shown or [form for form, _ in rendered] or forms)[0]

    def _render_call(self, form: _CallForm) -> str | None:
        """Return a conversation with a call as the template renders it, or None if it rejects the form."""
        result: JsonObject = {
            "role": TOOL, "tool_call_id": PROBE_ID, "name": PROBE_NAME, "content": "b",
        }  # fmt: skip
        return self.renderer.probe([self._probe_question(), _probe_call(form), result])


def _shows_call(rendered: str) -> bool:
    """Return whether a text shows the call of `_render_call`."""
    has_all = all(word in rendered for word in PROBE_WORDS)
    return has_all and not any(trace in rendered for trace in BAD_TRACES)


def _probe_call(form: _CallForm) -> JsonObject:
    """Return a turn of the assistant that calls a tool."""
    function: JsonObject = {"name": PROBE_NAME, "arguments": PROBE_ARGUMENTS}
    call: JsonObject = {"id": PROBE_ID, "type": "function", "function": function}
    return {"role": ASSISTANT, **form.no_content, TOOL_CALLS: [_adapt_call(call, form, "")]}


def _has_typed_parts(content: JsonValue) -> bool:
    """Return whether a content is a list of parts with a type."""
    return isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in content
    )


def _text_part(text: str) -> JsonObject:
    """Return a part of a content that has a text."""
    return {"type": TEXT_TYPE, "text": text}


def _has_thinking(content: JsonValue) -> bool:
    """Return whether a content has parts with reasoning."""
    return isinstance(content, list) and any(_is_thinking(part) for part in content)


def _is_thinking(part: JsonValue) -> bool:
    return isinstance(part, dict) and part.get("type") == THINKING_TYPE


def _with_thinking_key(message: JsonObject, place: str) -> JsonObject:
    """Return a message with the reasoning of its content in a key of its own.

    Raises:
        PrepError: The message has another reasoning in a key.
    """
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
    """Return a part of a content as templates take it.

    Raises:
        PrepError: The part is no text, e.g. an image.
    """
    if isinstance(part, str):
        return _text_part(part)
    if not isinstance(part, dict):
        what = f"{place}: a part of the content is not a text"
        raise PrepError(what, f"it is {json_type_name(part)}", CONTENT_HINT)
    part_type = part.get("type")
    if part_type == THINKING_TYPE:
        return {**part, THINKING_TYPE: _thinking_text(part, place)}
    if part_type not in TEXT_TYPES or not isinstance(part.get("text"), str):
        what = f"{place}: a part of the content is not a text"
        why = f"it has the type `{part_type!s:.40}`, and the model reads texts only"
        raise PrepError(what, why, CONTENT_HINT)
    return {**part, "type": TEXT_TYPE}


def _thinking_text(part: JsonObject, place: str) -> str:
    """Return the reasoning of a part: a text, or a list of parts with texts, as in the format of Mistral."""
    value = part.get(THINKING_TYPE)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not _has_thinking(value):
        return "".join(str(_adapt_part(item, place)["text"]) for item in value)
    what = f"{place}: a part of the content is not a text"
    why = f"its `{THINKING_TYPE}` is {json_type_name(value)}"
    raise PrepError(what, why, THINKING_HINT)


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


def load_forms(template: ChatTemplate) -> MessageForms:
    """Return the forms of messages that a template takes, with its renderer.

    Raises:
        PrepError: jinja2 is not installed, or the template is not valid.
    """
    if importlib.util.find_spec("jinja2") is None:
        what = "cannot render chat templates"
        raise PrepError(what, "jinja2 is not installed", "`pip install 'prepcli[chat]'`")
    return MessageForms(ChatRenderer(template))
