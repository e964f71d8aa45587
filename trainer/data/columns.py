"""Columns of records: their checked values, and the shapes of data sets that their names tell.

Errors name the file, the line and the column.
"""

from __future__ import annotations

import base64
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from prepcli.core.errors import Key, PrepError, Text, join_texts, text, usage_error
from prepcli.core.formatting import count_text
from prepcli.core.json_values import JsonValue, is_json_list, is_utf8, json_type_name, load_json
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.stores.files import open_regular_file
from trainer.data.dataset_layout import train_selection
from trainer.data.files import DataFile, Note
from trainer.data.find_files import DataFinder, find_data_files, resolve_type
from trainer.data.readers import READERS
from trainer.data.readers.reader import Reader, ReadOptions, Record
from trainer.data.tokenizer import TokenIds
from trainer.recipe.conflicts import chat_problems
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import (
    DEFAULT_FIELDS,
    FORMAT_FIELDS,
    PLAIN,
    DataFormat,
    parse_fields,
)

ONE_PROCESS = SingleProcess()
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
# The columns whose names tell a shape. Others are not read: a table may have values there that Python does not have.
SHAPE_COLUMNS = frozenset({*CONVERSATIONS, *itertools.chain(*PAIRS), *CONTEXTS, TEXT_COLUMN})
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
    """How the columns of a data set become tokens."""

    format: DataFormat  # Value of `data.format`
    fields: str  # Value of `data.fields`

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
    """Return the shapes that the columns of a record fit. Null is no value. More than one shape is an ambiguity.

    >>> find_shapes({"question": "1+1?", "answer": "2"})
    [Shape(format='question_answer', fields='[question], answer')]
    """
    # Reading a value of another column may fail.
    known = {name: values[name] for name in values if name in SHAPE_COLUMNS}
    return _find_shapes({name: value for name, value in known.items() if value is not None})


def find_shapes_by_names(values: Mapping[str, object]) -> list[Shape]:
    """Return the shapes that the columns of a record fit if null is a value: the record is then an invalid line.

    >>> find_shapes_by_names({"question": "1+1?", "answer": None})
    [Shape(format='question_answer', fields='[question], answer')]
    """
    return _find_shapes({name: values[name] for name in values if name in SHAPE_COLUMNS})


def _find_shapes(columns: Mapping[str, object]) -> list[Shape]:
    shapes: list[Shape] = []
    for name in CONVERSATIONS:
        if is_sharegpt(columns.get(name)):
            shapes.append(Shape("sharegpt", name))
        elif _has_messages(columns.get(name)) or columns.get(name, "") is None:
            shapes.append(Shape("chat", name))
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
    """
    shapes = find_shapes(values)
    prompt = _first(OTHER_PROMPTS, values)
    answer = _first(OTHER_ANSWERS, values)
    # Without a chat template, an instruction and its output are plain texts.
    is_plain = not shapes or any(shape.format == "alpaca" for shape in shapes)
    if prompt and answer and is_plain:
        if context := _first(OTHER_CONTEXTS.get(prompt, ()), values):
            prompt = f"{prompt}+{context}"
        shapes.append(Shape(PLAIN, f"[{prompt}], {answer}"))
    if shapes:
        return join_texts(", or ", [shape.replacement() for shape in shapes])
    if name := _first(OTHER_TEXTS, values):
        return Shape(PLAIN, name).replacement()
    return default


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


LINE_HINT = "fix or remove the line"
JSON_HINT = "write the list as JSON, e.g. with `json.dumps`, or remove the line"
COLUMN_HINT = Text(Key("data.fields", "COLUMN", is_override=True))
# Python reads a byte that is not UTF-8 as a surrogate from the command line, and in some locales from stdin.
SURROGATE_CAUSE = "it has an unpaired surrogate, which is not a character"
IDS_HINT = "pass a list of token ids, or base64 of little-endian int32 values"


def check_columns(
    record: Record,
    columns: Sequence[str],
    *,
    hint: Text | None = None,
    default_hint: Text = COLUMN_HINT,
) -> None:
    """Raise PrepError if a record lacks a column. Without a hint, the names of its columns decide which to select."""
    if missing := [column for column in columns if column not in record.values]:
        names = ", ".join(f"`{name}`" for name in record.values) or "none"
        raise PrepError(
            f"{record.place}: no column `{missing[0]}`",
            f"its columns: {names}",
            hint or columns_hint(record.values, default_hint),
        )


def text_value(record: Record, column: str) -> str:
    """Return the text of a column. Raise PrepError if it is not text."""
    value = record.values[column]
    what = f"{record.place}: column `{column}` is not text"
    if not isinstance(value, str):
        raise PrepError(what, f"it is {json_type_name(value)}", LINE_HINT)
    if not is_utf8(value):
        raise PrepError(what, SURROGATE_CAUSE, LINE_HINT)
    return value


def ids_value(record: Record, column: str, vocab: int) -> TokenIds:
    """Return the token ids of a column, below `vocab`: a list, or base64 of little-endian int32 values.

    Raises:
        PrepError: The value is not a list of ids, or one is out of range.
    """
    value = record.values[column]
    place = f"{record.place}: column `{column}`"
    try:
        if isinstance(value, str):
            data = base64.b64decode(value, validate=True)
            if len(data) % 4:
                size = count_text(len(data), "byte")
                raise ValueError(f"its base64 decodes to {size}, which is not a multiple of 4")
            ids = np.frombuffer(data, "<i4")
        else:
            ids = np.asarray(value)
    except ValueError as error:
        # The text is not base64, or the list has lists of several lengths.
        raise PrepError(f"{place} has no token ids", str(error), IDS_HINT) from None
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        kind = "a list of other values" if isinstance(value, list) else json_type_name(value)
        raise PrepError(f"{place} has no token ids", f"it is {kind}", IDS_HINT)
    if ids.size:
        smallest = int(ids.min())
        largest = int(ids.max())
        if smallest < 0 or largest >= vocab:
            bad = smallest if smallest < 0 else largest
            what = f"{place}: token id {bad:,} is out of range"
            why = f"the vocabulary without padding has {vocab:,} tokens"
            raise PrepError(what, why, LINE_HINT)
    return ids.astype(np.uint32)


def list_value(record: Record, column: str, items: str) -> list[JsonValue]:
    """Return the list of a column that is stored as it is or as a JSON text. Raise PrepError for another value."""
    value = record.values[column]
    place = f"{record.place}: column `{column}`"
    if isinstance(value, str) and is_json_list(value):
        value = parse_json(value, place, JSON_HINT)
    if not isinstance(value, list):
        what = f"{place} is not a list of {items}"
        raise PrepError(what, f"it is {json_type_name(value)}", LINE_HINT)
    return cast(list[JsonValue], value)


def json_list(value: object, place: str, hint: str) -> list[JsonValue]:
    """Return a list that is stored as it is or as a JSON text. Empty for null, and for an empty text.

    Raises:
        PrepError: It is neither. The error begins with `place`.
    """
    if isinstance(value, str) and value.strip():
        value = parse_json(value, place, hint)
    if not value:
        return []
    if not isinstance(value, list):
        raise PrepError(f"{place} is not a list", f"it is {json_type_name(value)}", hint)
    return cast(list[JsonValue], value)


def parse_json(text: str, place: str, hint: str) -> JsonValue:
    """Return the value of a JSON text. Raise PrepError if it is none."""
    try:
        return load_json(text.encode())
    except ValueError as error:
        raise PrepError(f"{place}: not JSON", str(error)[:200], hint) from None


# The format and the columns of data whose recipe names neither: those of the first record.


def find_data_shape(
    data: Data,
    *,
    remote: DataFinder | None = None,
    group: ProcessGroup = ONE_PROCESS,
    is_only: bool = True,
    note: Note,
) -> Data:
    """Return data with a format and its fields: those of the recipe, or those that its columns name.

    All processes call it together. Process 0 reads the first record, as only its host may have the files.

    Args:
        data: Data of one source.
        remote: Finds the files of URLs.
        group: The processes of the job.
        is_only: Whether it is the only source of the run.
        note: Called with a message about the shape.

    Raises:
        UsageError: The columns fit several shapes, or keys of the recipe do not fit the shape.
        PrepError: The first record is invalid.
    """
    if not data.has_auto_shape:
        return data
    resolved = data
    if group.index == 0:
        resolved = _read_shape(data, remote, note)
    answer = group.broadcast("shape of the data", f"{resolved.format} {resolved.fields or ''}")
    data_format, _, fields = answer.partition(" ")
    resolved = data.model_copy(update={"format": data_format, "fields": fields or None})
    for problem in chat_problems(resolved, is_only=is_only):
        raise usage_error(problem.what, problem.why, problem.hint)
    return resolved


def _read_shape(data: Data, remote: DataFinder | None, note: Note) -> Data:
    """Return data with the shape of its first record. Files without columns have the format `text`."""
    files = find_data_files(data.path or (), data.type, train_selection(data), remote=remote)
    file_type = resolve_type(files, data.type)
    shape = Shape(PLAIN, DEFAULT_FIELDS.get(file_type, ""))
    found = None
    if file_type in DEFAULT_FIELDS:
        found = _first_shape(data, files, READERS[file_type])
    if found is not None:
        shape, has_json = found
        lists = ""
        if has_json:
            lists = ", with lists as JSON texts"
        note(f"the columns of the data mean {shape.keys()}{lists}")
    return data.model_copy(update={"format": shape.format, "fields": shape.fields or None})


def _first_shape(
    data: Data, files: Sequence[Path | DataFile], reader: Reader
) -> tuple[Shape, bool] | None:
    """Return the shape of the first record, and whether its lists are JSON texts. None without a shape."""
    by_names: list[list[Shape]] = []
    # Invalid records, and records in no shape, are skipped if the recipe allows some.
    for record in itertools.islice(_read_records(data, files, reader), data.bad_lines + 1):
        shapes = find_shapes(record.values)
        if len(shapes) > 1:
            names = ", ".join(f"`{name}`" for name in record.values)
            why = f"its columns fit several shapes: {names}"
            what = f"{record.place}: the shape of the data is not clear"
            raise usage_error(what, why, text("choose {}", shapes_hint(shapes)))
        if shapes:
            has_json = any(is_json_list(record.values.get(name)) for name in shapes[0].list_columns)
            return shapes[0], has_json
        by_names.append(find_shapes_by_names(record.values))
        if not data.bad_lines and len(by_names[0]) != 1:
            _check_record(record)
    # No record has the values of a shape. The first one is then an invalid line of the shape that its names tell.
    if by_names and len(by_names[0]) == 1:
        return by_names[0][0], False
    return None


def _check_record(record: Record) -> None:
    """Raise PrepError if a record in no shape has conversations that are not a JSON list, or no text."""
    for name in CONVERSATIONS:
        if is_json_list(record.values.get(name)):
            list_value(record, name, "messages")
    check_columns(record, [TEXT_COLUMN])


def _read_records(data: Data, files: Sequence[Path | DataFile], reader: Reader) -> Iterator[Record]:
    """Yield the records of files. Invalid ones are skipped if the recipe allows any."""

    def on_error(error: PrepError) -> None:
        if not data.bad_lines:
            raise error

    options = ReadOptions(on_error, max_document_nbytes=data.max_document_bytes)
    for file in files:
        if isinstance(file, Path):
            if not file.stat().st_size:
                continue
            # The file is not read to its end, so it has no digest to compare.
            file = DataFile(file, file.stat().st_size, "", partial(open_regular_file, file))
        for piece in reader.read(file, options):
            assert isinstance(piece, Record)
            yield piece
