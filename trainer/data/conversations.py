"""The messages of a record with their tools and loss weights, from the columns of public data sets.

The layouts are lists of messages, ShareGPT and Alpaca, as in TRL (https://huggingface.co/docs/trl/dataset_formats) and
LLaMA-Factory (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from prepcli.core.errors import Key, PrepError, Text
from prepcli.core.json_values import JsonObject, JsonValue, json_type_name
from trainer.data.columns import (
    LINE_HINT,
    check_columns,
    columns_hint,
    is_sharegpt,
    json_list,
    list_value,
    parse_json,
    text_value,
)
from trainer.data.readers.reader import Record
from trainer.recipe.text_fields import DataFormat, FieldList, TextField, parse_fields

ASSISTANT = "assistant"
TOOL_CALLS = "tool_calls"
# Keys of a message for the reasoning before its content, in the formats of several publishers.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
MESSAGE_HINT = '`{"role": "user", "content": "..."}`'
TOOLS_HINT = '`[{"type": "function", "function": {"name": "..."}}]`'
TOOLS_COLUMN = "tools"
SYSTEM = "system"
HISTORY = "history"
FUNCTION_CALL = "function_call"
# Roles of messages by those of ShareGPT.
SHAREGPT_ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "gpt": ASSISTANT,
    ASSISTANT: ASSISTANT,
    SYSTEM: SYSTEM,
    FUNCTION_CALL: ASSISTANT,
    "observation": "tool",
    "tool": "tool",
}
SHAREGPT_HINT = f"known: {', '.join(SHAREGPT_ROLES)}"
PAIR_HINT = Text(Key("data.fields", "[prompt], completion", is_override=True))
MessageReader = Callable[[Record], list[JsonObject]]
# The choices of turns that are not roles: the last turn of the assistant, and all text.
LAST = ("last",)
ALL = ("all",)
# Keys of a message with its loss weight, a number, or with whether it has loss, in the formats of several trainers.
WEIGHT_KEYS = ("loss_weight", "weight")
TRAIN_KEYS = ("loss", "train", "training")
WEIGHT_HINT = "a number from 0 to 1, or true or false"


@dataclass(frozen=True, slots=True)
class LossRule:
    """The parts of conversations with loss."""

    turns: tuple[str, ...] = (ASSISTANT,)  # Roles of the turns, or `LAST` or `ALL`
    has_reasoning: bool = True  # Whether the reasoning of a turn has loss

    @property
    def is_default(self) -> bool:
        """Whether all text that the assistant writes has loss, and nothing else."""
        return self.turns == (ASSISTANT,) and self.has_reasoning

    @property
    def roles(self) -> tuple[str, ...] | None:
        """Roles whose turns may have loss. None for all text."""
        if self.turns == ALL:
            return None
        if self.turns == LAST:
            return (ASSISTANT,)
        return self.turns

    def select(self, messages: Sequence[JsonObject]) -> list[int]:
        """Return the indices of the messages whose turns have loss, if their weight is not 0."""
        roles = self.roles
        indices = [
            index
            for index, message in enumerate(messages)
            if roles is None or message["role"] in roles
        ]
        if self.turns == LAST:
            return indices[-1:]
        return indices

    def identity_inputs(self) -> list[JsonValue] | None:
        """Return the inputs of a store's identity. None for the default."""
        if self.is_default:
            return None
        return [[*self.turns], self.has_reasoning]


DEFAULT_LOSS = LossRule()


def message_weight(message: Mapping[str, JsonValue], place: str) -> float:
    """Return the loss weight of a message: 1 without a key for it, and the least one of several keys.

    >>> message_weight({"role": "assistant", "train": False}, "a.jsonl:1")
    0.0

    Raises:
        PrepError: A value is not a weight. The error begins with `place`, the file and line.
    """
    weight = 1.0
    for key in (*WEIGHT_KEYS, *TRAIN_KEYS):
        value = message.get(key)
        if value is None:
            continue
        # A boolean is a number, and a NaN fails the comparison.
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            shown = value if isinstance(value, int | float) else json_type_name(value)
            raise PrepError(f"{place}: `{key}` of a message is {shown}", WEIGHT_HINT, LINE_HINT)
        weight = min(weight, float(value))
    return weight


def messages_value(record: Record, column: str) -> list[JsonObject]:
    """Return the messages of a column, without keys of value null.

    Raises:
        PrepError: The value is not a list of objects with a `role`, nor its JSON text.
    """
    value = list_value(record, column, "messages")
    place = f"{record.place}: column `{column}`"
    messages: list[JsonObject] = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            why = f"message {number} is {json_type_name(message)}, or has no `role`"
            hint = Text(MESSAGE_HINT)
            if is_sharegpt(value):
                hint = columns_hint({column: value}, hint)
            raise PrepError(f"{place} is not a list of messages", why, hint)
        # Arrow tables have every key in every message, with null for the absent ones. Templates ask
        # whether a key is defined, so null keys are left out.
        messages.append({key: item for key, item in message.items() if item is not None})
    return messages


def tool_schemas(value: object, place: str) -> list[JsonObject] | None:
    """Return JSON schemas of tools from a list, or from its JSON text. None without tools.

    Raises:
        PrepError: The value is not a list of objects. The error begins with `place`.
    """
    tools = json_list(value, place, TOOLS_HINT)
    if not all(isinstance(tool, dict) for tool in tools):
        raise PrepError(f"{place} is not a list of JSON schemas", "it has other values", TOOLS_HINT)
    schemas: list[JsonObject] = []
    for tool in cast(list[JsonObject], tools):
        # It may be the function alone, as LLaMA-Factory writes it.
        if "name" in tool and "function" not in tool and "type" not in tool:
            tool = {"type": "function", "function": tool}
        schemas.append(tool)
    return schemas or None


def message_reader(data_format: DataFormat, fields: str) -> MessageReader:
    """Return the function from a record to the messages of its conversation, for `data.format` and `data.fields`.

    Raises:
        UsageError: The fields are not columns of conversations.
    """
    if data_format == "sharegpt":
        return lambda record: _sharegpt_messages(record, fields)
    if data_format == "alpaca":
        columns = parse_fields(fields)
        _check_text_fields(columns, fields)
        return lambda record: _alpaca_messages(record, columns)
    if not fields.startswith("["):

        def column_messages(record: Record) -> list[JsonObject]:
            check_columns(record, [fields])
            return messages_value(record, fields)

        return column_messages
    columns = parse_fields(fields)
    _check_text_fields(columns, fields)
    return lambda record: _joined_messages(record, columns)


def tools_value(record: Record) -> list[JsonObject] | None:
    """Return the schemas of the tools of a record, or None."""
    value = record.values.get(TOOLS_COLUMN)
    return tool_schemas(value, f"{record.place}: column `{TOOLS_COLUMN}`")


def _check_text_fields(columns: FieldList, fields: str) -> None:
    """Raise UsageError unless a list of fields is columns, with some in brackets and some after them."""
    is_text = all(isinstance(field, TextField) for field, _ in columns.items)
    if not (is_text and columns.source and columns.target):
        what = f'`data.fields` is "{fields:.60}"'
        why = "a conversation has the columns of its prompt in brackets, and those of its answer"
        raise PrepError(what, why, PAIR_HINT)


def _joined_messages(record: Record, columns: FieldList) -> list[JsonObject]:
    """Return the messages of several columns. Those in brackets have no loss."""
    check_columns(record, columns.columns)
    messages: list[JsonObject] = []
    for field, is_bracketed in columns.items:
        for column in cast(TextField, field).columns:
            for message in messages_value(record, column):
                if is_bracketed:
                    message = {**message, WEIGHT_KEYS[0]: 0}
                messages.append(message)
    return messages


def _sharegpt_messages(record: Record, column: str) -> list[JsonObject]:
    check_columns(record, [column])
    turns = list_value(record, column, "turns")
    place = f"{record.place}: column `{column}`"
    messages = [
        _sharegpt_message(turn, f"{place}: turn {number}")
        for number, turn in enumerate(turns, start=1)
    ]
    if messages and messages[0]["role"] == SYSTEM:
        return messages
    return [*_system_messages(record), *messages]


def _sharegpt_message(turn: JsonValue, place: str) -> JsonObject:
    """Return the message of a turn. Its other keys stay, e.g. `weight`."""
    if not isinstance(turn, dict):
        raise PrepError(f"{place} is no object", f"it is {json_type_name(turn)}", LINE_HINT)
    author = turn.get("from")
    value = turn.get("value")
    if not isinstance(author, str) or not isinstance(value, str):
        why = "`from` and `value` must be texts"
        raise PrepError(f"{place} is no turn", why, '`{"from": "human", "value": "..."}`')
    role = SHAREGPT_ROLES.get(author)
    if role is None:
        raise PrepError(f"{place} is from `{author:.40}`", "this role is unknown", SHAREGPT_HINT)
    others = {
        key: item for key, item in turn.items() if key not in ("from", "value") and item is not None
    }
    if author == FUNCTION_CALL:
        return {**others, "role": role, TOOL_CALLS: _function_calls(value, place)}
    return {**others, "role": role, "content": value}


def _function_calls(value: str, place: str) -> list[JsonValue]:
    """Return the calls in the text of a turn: JSON of one call or of a list."""
    parsed = parse_json(value, place, LINE_HINT)
    calls = parsed if isinstance(parsed, list) else [parsed]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            hint = '`{"name": "weather", "arguments": {"city": "Ulm"}}`'
            raise PrepError(f"{place} is no call", "it has no `name`", hint)
    return [{"type": "function", "function": call} for call in calls]


def _alpaca_messages(record: Record, columns: FieldList) -> list[JsonObject]:
    """Return the messages of an instruction with its context, and of the output."""
    prompts, answers = (
        [column for field in fields for column in cast(TextField, field).columns]
        for fields in (columns.source, columns.target)
    )
    check_columns(record, [prompts[0], *answers])
    # Columns after the first one are optional, and empty texts are left out.
    texts = [
        text_value(record, column)
        for column in prompts
        if column == prompts[0] or record.values.get(column) is not None
    ]
    prompt = "\n".join(text for text in texts if text)
    answer = "\n".join(text_value(record, column) for column in answers)
    return [
        *_system_messages(record),
        *_history_messages(record),
        {"role": "user", "content": prompt},
        {"role": ASSISTANT, "content": answer},
    ]


def _system_messages(record: Record) -> list[JsonObject]:
    """Return the message of the column `system`, if it has a text."""
    if record.values.get(SYSTEM) is None:
        return []
    content = text_value(record, SYSTEM)
    return [{"role": SYSTEM, "content": content}] if content else []


def _history_messages(record: Record) -> list[JsonObject]:
    """Return the earlier turns in the column `history`: a list of pairs of an instruction and its output."""
    if record.values.get(HISTORY) in (None, ""):
        return []
    messages: list[JsonObject] = []
    for pair in list_value(record, HISTORY, "pairs of texts"):
        texts = pair if isinstance(pair, list) else []
        if len(texts) != 2 or not all(isinstance(item, str) for item in texts):
            what = f"{record.place}: column `{HISTORY}` is not a list of pairs of texts"
            raise PrepError(what, f"an item is {json_type_name(pair)}", LINE_HINT)
        messages += [
            {"role": "user", "content": texts[0]},
            {"role": ASSISTANT, "content": texts[1]},
        ]
    return messages
