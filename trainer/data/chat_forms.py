"""The forms of messages that chat templates take: contents, reasoning, tool calls and their arguments.

Data sets write the same message in several ways, and a template reads one of them. A short conversation shows which.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.data.chat_marks import ASSISTANT, NONCHARACTER, REASONING_KEYS, TOOL_CALLS
from trainer.data.chat_rendering import ChatRenderer, Conversation
from trainer.data.column_values import SURROGATE_CAUSE, is_encodable, json_list, parse_json
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

PROBE_TEXT = "probe_text"
# Trace of a list of parts that a template writes as a Python value.
BAD_PARTS_TRACE = "'text'"

TEXT_TYPE = "text"
# Types of parts with a text, in the formats of several publishers. Templates know the first one.
TEXT_TYPES = (TEXT_TYPE, "input_text", "output_text", None)
# The type of parts with the reasoning of a message. The few templates with such parts take them as they are.
THINKING_TYPE = "thinking"
CONTENT_HINT = '`"content": "..."`, or a list of `{"type": "text", "text": "..."}`'
USER = "user"
TOOL = "tool"
# Roles before the first turn of a user.
SYSTEM_ROLES = ("system", "developer")
# Further ones have the form of a user's messages.
MAX_ROLES = 64
HIDDEN_HINT = "remove the message, or put a chat_template.jinja that shows it next to the tokenizer"

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
        # Role, and whether its content is a list of parts -> whether the template shows its text. None if it fails.
        self._shown_contents: dict[tuple[str, bool], bool | None] = {}

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
        adapted = _with_reasoning_keys(message)
        content = message.get("content")
        if content is not None:
            role = str(message["role"])
            message_place = f"{place}: message {number}"
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
            if not content.strip() or self._shows_content(role, has_parts=False):
                return content
            if self._shows_content(role, has_parts=True):
                return [{"type": TEXT_TYPE, "text": content}]
            return content
        if role == TOOL and not _has_typed_parts(content):
            # The result of a tool may be any value.
            return content
        if not isinstance(content, list):
            what = f"{place}: the content is not a text"
            raise PrepError(what, f"it is {json_type_name(content)}", CONTENT_HINT)
        parts = [_adapt_part(part, place) for part in content]
        texts = [part.get("text") for part in parts]
        is_text = all(isinstance(part, str) for part in texts)
        if self._shows_content(role, has_parts=True) or not is_text:
            return [*parts]
        return "".join(map(str, texts))

    def _check_role(self, role: str, place: str) -> None:
        """Raise PrepError if the template leaves out all messages of a role."""
        is_hidden = (
            self._shows_content(role, has_parts=False) is False
            and self._shows_content(role, has_parts=True) is False
        )
        if is_hidden:
            what = f"{place}: the role is `{role:.40}`"
            why = f"{self.renderer.file} does not show messages of this role"
            raise PrepError(what, why, HIDDEN_HINT)

    def _shows_content(self, role: str, *, has_parts: bool) -> bool | None:
        """Return whether the template shows the text of a role that is a text or the only part of a content.

        None if it cannot render a short conversation with this role.
        """
        key = (role, has_parts)
        if key not in self._shown_contents:
            if len(self._shown_contents) >= MAX_ROLES:
                key = (USER, has_parts)
            self._shown_contents[key] = self._probe_content(*key)
        return self._shown_contents[key]

    def _probe_content(self, role: str, has_parts: bool) -> bool | None:
        content: JsonValue = PROBE_TEXT
        if has_parts:
            content = [{"type": TEXT_TYPE, "text": PROBE_TEXT}]
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
        return PROBE_TEXT in rendered and BAD_PARTS_TRACE not in rendered

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


def _adapt_part(part: JsonValue, place: str) -> JsonObject:
    """Return a part of a content as templates take it.

    Raises:
        PrepError: The part is no text, e.g. an image.
    """
    if isinstance(part, str):
        return {"type": TEXT_TYPE, "text": part}
    if not isinstance(part, dict):
        what = f"{place}: a part of the content is not a text"
        raise PrepError(what, f"it is {json_type_name(part)}", CONTENT_HINT)
    part_type = part.get("type")
    if part_type == THINKING_TYPE:
        return part
    if part_type not in TEXT_TYPES or not isinstance(part.get("text"), str):
        what = f"{place}: a part of the content is not a text"
        why = f"it has the type `{part_type!s:.40}`, and the model reads texts only"
        raise PrepError(what, why, CONTENT_HINT)
    return {**part, "type": TEXT_TYPE}


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
