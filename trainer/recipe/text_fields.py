"""The types and formats of data, the default columns of each, and the grammar of `data.fields`.

    fields = item ("," item)*
    item   = "[" field ("," field)* "]" | field
    field  = "<|bos|>" | "<|eos|>" | "<|ID|>"     a token
           | "{" column "}"                       token ids
           | column ("+" column)*                 texts that are joined, then tokenized together

Fields in brackets are read by the encoder. In a model without an encoder, their tokens do not count
in the loss.
Blanks around names are ignored. A text without any of these signs is the name of one column.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from prepcli.core.errors import Key, text, usage_error

# Types of tables that pyarrow decodes.
TableType = Literal["parquet", "arrow"]
# Types of files with records, whose values have names.
ColumnType = Literal["json", "csv", TableType]
FileType = Literal["text", ColumnType, "ids", "megatron"]
# `auto` takes the type that the suffix of the files names.
DataType = Literal["auto", FileType]
DataFormat = Literal[
    "auto",
    "text",
    "prompt_completion",
    "prompt_response",
    "question_answer",
    "chat",
    "sharegpt",
    "alpaca",
]
# The columns of the first record decide.
AUTO: DataFormat = "auto"
# The format without a template: fields of any columns.
PLAIN: DataFormat = "text"
# The formats of conversations, which a chat template renders.
CHAT_FORMATS: frozenset[DataFormat] = frozenset({"chat", "sharegpt", "alpaca"})
# Dtypes of token ids in files without a header.
IdsDtype = Literal["uint16", "uint32", "int32", "int64"]
DEFAULT_IDS_DTYPE: IdsDtype = "uint16"
DEFAULT_MAX_DOCUMENT_NBYTES = 64 << 20
# Default of `data.fields` of each type that has columns, or may have some.
DEFAULT_FIELDS: Mapping[str, str] = dict.fromkeys(("auto", *get_args(ColumnType)), "text")
Packing = Literal["concatenate", "documents", "none"]
# The packing that gives sequences segment ids and positions.
SEGMENTED: Packing = "documents"
CONCATENATED: Packing = "concatenate"
# Value of `data.chat_template` for the template of the tokenizer, with each turn as the last one.
TRAINING = "training"
Overlong = Literal["split", "truncate", "truncate_prompt", "drop"]
# The rule that keeps all tokens.
WHOLE_TOKENS: Overlong = "split"
Objective = Literal["next_token", "span_corruption"]
# Default of `data.fields` of each format with columns of its own.
FORMAT_FIELDS: Mapping[str, str] = {
    "prompt_completion": "[prompt], completion",
    "prompt_response": "[prompt], response",
    "question_answer": "[question], answer",
    "chat": "messages",
    "sharegpt": "conversations",
    "alpaca": "[instruction+input], output",
}

SIGNS = re.compile(r"[\[\]{},+]|<\||\|>")
# One item, with the comma or the end after it. A bracket within a field, e.g. `a[b]`,
# does not match, and is an error.
ITEM = re.compile(r"\s*(?:\[(?P<bracket>[^\[\]]*)\]|(?P<field>[^\[\],]*))\s*(?P<end>,|$)")
TOKEN = re.compile(r"<\|(.*)\|>")
IDS = re.compile(r"\{([^{}]+)\}")
SPECIAL_HINT = "`<|bos|>`, `<|eos|>` or `<|ID|>` with a token id"


class FieldsError(ValueError):
    """Error for a text that is not in the grammar. Its message says why."""


@dataclass(frozen=True, slots=True)
class TextField:
    """Columns whose texts are joined, then tokenized together."""

    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenIdsField:
    """A column of token ids."""

    column: str


@dataclass(frozen=True, slots=True)
class TokenField:
    """A token: its id, or the name of a special token of the model."""

    token: int | Literal["bos", "eos"]


Field: TypeAlias = TextField | TokenIdsField | TokenField


@dataclass(frozen=True, slots=True)
class FieldList:
    """Fields of an example in order, as pairs (field, is_bracketed)."""

    items: tuple[tuple[Field, bool], ...]

    @property
    def source(self) -> tuple[Field, ...]:
        """The fields in brackets."""
        return tuple(field for field, is_bracketed in self.items if is_bracketed)

    @property
    def target(self) -> tuple[Field, ...]:
        """The fields outside brackets."""
        return tuple(field for field, is_bracketed in self.items if not is_bracketed)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns. Columns in brackets come first."""
        columns: list[str] = []
        for field in (*self.source, *self.target):
            if isinstance(field, TextField):
                columns += field.columns
            elif isinstance(field, TokenIdsField):
                columns.append(field.column)
        return tuple(columns)


def parse_fields(fields: str) -> FieldList:
    """Parse `data.fields`.

    Args:
        fields: A column name, or a list of fields in the grammar.

    Raises:
        UsageError: The text is not in the grammar.
    """
    try:
        return split_fields(fields)
    except FieldsError as error:
        hint = text("{}", Key("data.fields", "[article], summary"))
        raise usage_error(f'`data.fields` is "{fields:.60}"', str(error), hint) from None


def split_fields(text: str) -> FieldList:
    """Parse a list of fields. Raise FieldsError if it is not in the grammar."""
    if not SIGNS.search(text):
        return FieldList(((TextField((text,)), False),))
    items: list[tuple[Field, bool]] = []
    position = 0
    has_next = True
    while has_next:
        match = ITEM.match(text, position)
        if match is None:
            raise FieldsError("brackets must enclose whole fields, and commas must separate them")
        bracket = match["bracket"]
        bodies = [match["field"]]
        if bracket is not None:
            bodies = bracket.split(",")
        items += [(_parse_field(body.strip()), bracket is not None) for body in bodies]
        position = match.end()
        has_next = match["end"] == ","
    fields = FieldList(tuple(items))
    if not fields.target:
        raise FieldsError(
            "all fields are in brackets, so no token would count in the loss: put one field outside brackets"
        )
    return fields


def _parse_field(body: str) -> Field:
    """Parse one field: a token, ids of a column, or columns joined by +."""
    if token := TOKEN.fullmatch(body):
        name = token[1]
        if name == "bos" or name == "eos":
            return TokenField(name)
        # `int` would also take `1_000`, ` 7` and digits of other scripts. 10 digits hold every uint32.
        if not re.fullmatch(r"[0-9]{1,10}", name):
            raise FieldsError(f"<|{name}|> is not {SPECIAL_HINT}")
        return TokenField(int(name))
    if ids := IDS.fullmatch(body):
        return TokenIdsField(ids[1].strip())
    columns = tuple(column.strip() for column in body.split("+"))
    if not all(columns):
        raise FieldsError("a field is empty" if not body else f'"{body}" lacks a column beside +')
    if SIGNS.search("".join(columns)):
        raise FieldsError(f'"{body}" is neither a column, nor `{{COLUMN}}`, nor {SPECIAL_HINT}')
    return TextField(columns)
