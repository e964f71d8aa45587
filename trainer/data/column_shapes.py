"""The shapes of data sets, found by the columns of a record, and the recipe keys that name them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from prepcli.core.errors import Key, Text, join_texts, text
from prepcli.core.json_values import is_json_list, load_json
from trainer.recipe.text_fields import FORMAT_FIELDS, PLAIN, DataFormat, parse_fields

# Columns of conversations.
CONVERSATIONS = ("messages", "conversations", "conversation")
# Columns of a prompt and its answer. The format says how both become tokens.
PAIRS: Mapping[tuple[str, str], DataFormat] = {
    ("prompt", "completion"): "prompt_completion",
    ("prompt", "response"): "prompt_response",
    ("question", "answer"): "question_answer",
    ("instruction", "output"): "alpaca",
    ("instruction", "response"): "alpaca",
}
PAIR_PROMPTS = ("prompt", "question", "instruction")
# Columns with a context that follows an instruction.
CONTEXTS = ("input", "context")
TEXT_COLUMN = "text"
# Columns of data sets in other shapes, for hints: prompts, answers, contexts and texts, in the order in which they
# are preferred.
OTHER_PROMPTS = (*PAIR_PROMPTS, "query", "input", "article", "document", "source")
OTHER_ANSWERS = (
    *("completion", "response", "output", "answer", "chosen", "target", "summary", "highlights"),
    "label",
)
OTHER_CONTEXTS: Mapping[str, tuple[str, ...]] = {"instruction": CONTEXTS, "question": ("context",)}
OTHER_TEXTS = (TEXT_COLUMN, "content", "body", "code", "document", "article", "markdown")


@dataclass(frozen=True, slots=True)
class Shape:
    """How the columns of a data set become tokens.

    Attributes:
        format: Value of `data.format`.
        fields: Value of `data.fields`.
    """

    format: DataFormat
    fields: str

    def keys(self, *, is_override: bool = False) -> Text:
        """Return the recipe keys that name the shape, without values that are defaults."""
        keys: list[str] = []
        default = FORMAT_FIELDS.get(self.format, TEXT_COLUMN)
        if self.format != PLAIN or self.fields == default:
            keys.append(text("{}", Key("data.format", self.format, is_override=is_override)))
        if self.fields != default:
            keys.append(text("{}", Key("data.fields", self.fields, is_override=is_override)))
        return join_texts(" ", keys)

    @property
    def list_columns(self) -> tuple[str, ...]:
        """The columns that are lists of messages or turns."""
        if self.format == "sharegpt" or self.fields in CONVERSATIONS:
            return (self.fields,)
        if self.format == "chat":
            return parse_fields(self.fields).columns
        return ()

    def replacement(self) -> Text:
        """Return the keys that replace columns that the recipe names, also if they are the default of the format."""
        fields = text("{}", Key("data.fields", self.fields, is_override=True))
        if self.format == PLAIN:
            return fields
        return text("{} {}", Key("data.format", self.format, is_override=True), fields)


def find_shapes(values: Mapping[str, object]) -> list[Shape]:
    """Return the shapes that the columns of a record fit. More than one is an ambiguity.

    >>> find_shapes({"question": "1+1?", "answer": "2"})
    [Shape(format='question_answer', fields='[question], answer')]

    Args:
        values: Columns of the record. Null is no value.
    """
    columns = {name: value for name, value in values.items() if value is not None}
    shapes: list[Shape] = []
    for name in CONVERSATIONS:
        data_format = _conversation_format(columns.get(name))
        if data_format is not None:
            shapes.append(Shape(data_format, name))
    pairs = [pair for pair in PAIRS if {*pair} <= columns.keys()]
    paired = {name for pair in pairs for name in pair}
    for prompt, answer in pairs:
        shapes.append(_pair_shape(prompt, answer, columns))
    if pairs:
        # A second prompt is as likely to be the text before the answer.
        for name in PAIR_PROMPTS:
            if name in columns and name not in paired:
                shapes.append(Shape(PLAIN, f"[{name}], {pairs[0][1]}"))
    if TEXT_COLUMN in columns:
        shapes.append(Shape(PLAIN, TEXT_COLUMN))
    return shapes


def shapes_hint(shapes: Collection[Shape]) -> Text:
    """Return the keys of several shapes. The user chooses one."""
    return join_texts(", or ", [shape.keys(is_override=True) for shape in shapes])


def columns_hint(values: Mapping[str, object], default: Text) -> Text:
    """Return the recipe keys that read the columns of a record, or a default for columns of unknown names.

    >>> columns_hint({"article": "a", "summary": "b"}, Text("?")) == "`--set data.fields='[article], summary'`"
    True

    Args:
        values: Columns of the record.
        default: Hint for other columns.
    """
    shapes = find_shapes(values)
    pair = _plain_pair(values)
    if pair and (not shapes or any(shape.format == "alpaca" for shape in shapes)):
        # Without a chat template, an instruction and its output are plain texts.
        shapes.append(pair)
    if shapes:
        return join_texts(", or ", [shape.replacement() for shape in shapes])
    if name := _first(OTHER_TEXTS, values):
        return Shape(PLAIN, name).replacement()
    return default


def _plain_pair(values: Collection[str]) -> Shape | None:
    """Return the plain fields of a prompt and its answer, or None without such columns."""
    prompt = _first(OTHER_PROMPTS, values)
    answer = _first(OTHER_ANSWERS, values)
    if not (prompt and answer):
        return None
    if context := _first(OTHER_CONTEXTS.get(prompt, ()), values):
        prompt = f"{prompt}+{context}"
    return Shape(PLAIN, f"[{prompt}], {answer}")


def _parsed_list(value: object) -> object:
    """Return the list in a JSON text. Other values stay as they are."""
    if isinstance(value, str) and is_json_list(value):
        with suppress(ValueError):
            return load_json(value.encode())
    return value


def is_sharegpt(turns: object) -> bool:
    """Return whether a value is a list of turns with the keys of ShareGPT."""
    turns = _parsed_list(turns)
    turn = turns[0] if isinstance(turns, list) and turns else None
    return isinstance(turn, dict) and {"from", "value"} <= {*turn}


def _conversation_format(value: object) -> DataFormat | None:
    """Return the format of a conversation, or None for another value."""
    if is_sharegpt(value):
        return "sharegpt"
    if _has_messages(value):
        return "chat"
    return None


def _has_messages(value: object) -> bool:
    messages = _parsed_list(value)
    if not isinstance(messages, list):
        return False
    if not messages:
        # The text of an answer may be "[]".
        return messages is value
    return isinstance(messages[0], dict) and "role" in messages[0]


def _pair_shape(prompt: str, answer: str, columns: Mapping[str, object]) -> Shape:
    """Return the shape of a prompt and its answer: both are texts, or lists of messages."""
    if _has_messages(columns[prompt]) and _has_messages(columns[answer]):
        return Shape("chat", f"[{prompt}], {answer}")
    data_format = PAIRS[prompt, answer]
    if data_format != "alpaca":
        return Shape(data_format, f"[{prompt}], {answer}")
    # The default names an optional column: data with and without it has the same key.
    context = _first(CONTEXTS, columns) or CONTEXTS[0]
    return Shape(data_format, f"[{prompt}+{context}], {answer}")


def _first(names: Collection[str], columns: Collection[str]) -> str:
    """Return the first name that is a column. Empty if none is."""
    return next((name for name in names if name in columns), "")
