"""Parquet and Arrow files, decoded and checked in a child process (`table_batches`).

A row has the values of the same row in JSON Lines. Arrow stores objects as structs. All structs of a column have the
same keys, so `{"city": "Ulm"}` becomes `{"city": "Ulm", "days": null}` if another row has `days`. Null is therefore no
key, at any depth. A list keeps its nulls, and so does a JSON text (the type `Json` of `datasets`), which is stored as
it was written. A value that JSON does not have, such as the time of a message, is a text in an object or a list.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

from prepcli.core.errors import PrepError
from prepcli.core.json_values import load_json
from prepcli.core.sandbox import Limits, Sandbox, SandboxError, SandboxLimitError
from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    SIZE_KEY,
    Reader,
    ReadOptions,
    Record,
    read_seekable,
    too_large_error,
)
from trainer.recipe.text_fields import TableType

if TYPE_CHECKING:
    from pyarrow import Field, RecordBatch, Schema

# Memory of a child without its rows: a page or a record batch, compressed and decompressed, and dictionaries.
DECODING_NBYTES = 1 << 30
# Memory for copies of the largest row: in its page, in its batch and in the message.
ROW_COPIES = 8
# CPU time to decode the next rows. The first ones of a row group need its dictionaries.
DECODING_S = 120
MEMORY_HINT = f"write it again with smaller row groups or batches, or raise `{SIZE_KEY}`"
ROW_HINT = "fix or remove the row, or `data.bad_lines = N` skips up to N of them"
# Canonical extension type of JSON texts. pyarrow before 19 reads it as text, with its name in the field's metadata.
JSON_EXTENSION = "arrow.json"
EXTENSION_KEY = b"ARROW:extension:name"
# Metadata of the schema that `datasets` writes: the types of its columns, as JSON.
DATASETS_KEY = b"huggingface"
JSON_FEATURE = "Json"
# Turns a value of pyarrow's `as_py` into the value of JSON Lines.
ValueDecoder: TypeAlias = Callable[[Any], Any]


def _read_table(table_format: str, file: DataFile, options: ReadOptions) -> Iterator[Record]:
    return read_seekable(file, partial(_parse_table, file, table_format, options))


def _parse_table(
    file: DataFile, table_format: str, options: ReadOptions, stream: BinaryIO
) -> Iterator[Record]:
    """Yield a record per valid row. Report the invalid rows."""
    try:
        from pyarrow import ipc
    except ModuleNotFoundError as error:
        hint = "`pip install 'prepcli[data]'`"
        raise PrepError(f"cannot read {file.path}", "pyarrow is not installed", hint) from error

    # A file states the sizes of its pages and dictionaries, and pyarrow allocates what it states. E.g. rows of 64 MiB
    # give 1 GiB + 8 * 64 MiB = 1.5 GiB.
    limits = Limits(DECODING_NBYTES + ROW_COPIES * options.max_document_nbytes, DECODING_S)
    arguments = (table_format, file.nbytes, options.max_document_nbytes)
    reader = Sandbox("trainer.data.table_batches:TableReader", arguments, limits=limits)
    number = 0
    num_parts = 0
    try:
        while part := reader.call("read_part", num_parts, limits=limits, file=stream):
            num_parts += 1
            if not isinstance(part[-1], bytes):
                number, why, nbytes = part
                place = f"{file.path}, row {number}"
                error = PrepError(f"{place}: invalid", why, ROW_HINT)
                if nbytes:
                    limit = options.max_document_nbytes
                    error = too_large_error(f"{place}: too large", nbytes, limit)
                options.on_error(error)
                continue
            first_row, share, content = part
            batch = ipc.open_stream(content).read_next_batch()
            decoders = _value_decoders(batch.schema)
            for index in range(batch.num_rows):
                number = first_row + index
                place = f"{file.path}, row {number}"
                row = _Row(batch, decoders, index=index, place=place)
                yield Record(row, place, 0 if index else share)
    except SandboxError as error:
        what = f"{file.path} cannot be read as {table_format} after row {number:,}"
        why = str(error).partition("\n")[0] or error.type_name.rpartition(".")[2]
        hint = "get the file again, or set `data.type`"
        if isinstance(error, SandboxLimitError):
            hint = MEMORY_HINT
            if error.is_memory:
                memory = f"{limits.memory_nbytes:,}"
                why = f"a page, dictionary or record batch of it needs more than {memory} bytes of memory"
        raise PrepError(what, why, hint) from error


class _Row(Mapping[str, object]):
    """A row of a record batch. A value is converted to a Python object when it is used."""

    __slots__ = ("_batch", "_decoders", "_index", "_place")

    def __init__(
        self, batch: RecordBatch, decoders: Mapping[str, ValueDecoder], *, index: int, place: str
    ) -> None:
        self._batch = batch
        self._decoders = decoders
        self._index = index
        self._place = place

    def __getitem__(self, column: str) -> object:
        position = self._batch.schema.get_field_index(column)
        if position < 0:
            raise KeyError(column)
        try:
            value = self._batch.column(position)[self._index].as_py()
            if value is not None and column in self._decoders:
                return self._decoders[column](value)
            return value
        except Exception as error:
            # Of malformed JSON, and of dates, times and zones that Python does not have. pyarrow names no types.
            what = f"{self._place}: column `{column}` has no value in Python"
            raise PrepError(what, f"{type(error).__name__}: {error}"[:200], ROW_HINT) from error

    def __contains__(self, column: object) -> bool:
        return column in self._batch.schema.names

    def __iter__(self) -> Iterator[str]:
        return iter(self._batch.schema.names)

    def __len__(self) -> int:
        return len(self._batch.schema.names)


# --- The values of a row


def _value_decoders(schema: Schema) -> dict[str, ValueDecoder]:
    """Return the decoder of each column that needs one: a column with objects, maps or JSON texts."""
    from pyarrow import types

    features = _dataset_features(schema.metadata or {})
    decoders: dict[str, ValueDecoder] = {}
    for field in schema:
        feature = features.get(field.name)
        # A date of its own column stays a date, which is no text of a document.
        if not types.is_nested(field.type) and not _is_json(field, feature):
            continue
        decoder = _decoder_of(field, feature)
        if decoder is not None:
            decoders[field.name] = decoder
    return decoders


def _dataset_features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any]:
    """Return the types of columns that `datasets` has recorded. Empty if there are none, or they are malformed."""
    try:
        features = load_json(metadata.get(DATASETS_KEY, b"{}"))["info"]["features"]
    except (ValueError, KeyError, TypeError):
        return {}
    if isinstance(features, dict):
        return features
    return {}


def _decoder_of(field: Field[Any], feature: Any) -> ValueDecoder | None:
    """Return the decoder of a field's values, or None if they need none. `feature` is its type in `datasets`."""
    from pyarrow import types

    kind = field.type
    if _is_json(field, feature):
        return _decode_json
    if types.is_struct(kind):
        return _struct_decoder(field, feature)
    if types.is_map(kind):
        item_decoder = _decoder_of(kind.item_field, None)
        return lambda pairs: _decode_map(pairs, item_decoder)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        # `[TYPE]`, or `{"_type": "List", "feature": TYPE}`.
        item_feature = None
        if isinstance(feature, dict):
            item_feature = feature.get("feature")
        elif isinstance(feature, list) and feature:
            item_feature = feature[0]
        decoder = _decoder_of(kind.value_field, item_feature)
        if decoder is None:
            return None
        return lambda items: [_decode_or_none(decoder, item) for item in items]
    if _has_json_values(kind):
        return None
    # Templates write a date, a time, a decimal number or bytes as Python does.
    return str


def _has_json_values(kind: Any) -> bool:
    """Return whether the Python values of an Arrow type are values of JSON."""
    from pyarrow import types

    if types.is_dictionary(kind):
        kind = kind.value_type
    kind = getattr(kind, "storage_type", kind)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
    return is_text or is_number or types.is_null(kind) or types.is_nested(kind)


def _is_json(field: Field[Any], feature: Any) -> bool:
    from pyarrow import types

    if getattr(field.type, "extension_name", None) == JSON_EXTENSION:
        return True
    if not (types.is_string(field.type) or types.is_large_string(field.type)):
        return False
    is_extension = (field.metadata or {}).get(EXTENSION_KEY) == JSON_EXTENSION.encode()
    is_feature = isinstance(feature, dict) and feature.get("_type") == JSON_FEATURE
    return is_extension or is_feature


def _struct_decoder(field: Field[Any], feature: Any) -> ValueDecoder:
    """Return the decoder of structs: it leaves out the keys that are null."""
    kind = field.type
    decoders: dict[str, ValueDecoder | None] = {}
    for index in range(kind.num_fields):
        child = kind.field(index)
        child_feature = None
        if isinstance(feature, dict):
            child_feature = feature.get(child.name)
        decoders[child.name] = _decoder_of(child, child_feature)

    def decode(value: Mapping[str, Any]) -> dict[str, Any]:
        items: dict[str, Any] = {}
        for key, item in value.items():
            if item is not None:
                items[key] = _decode_or_none(decoders[key], item)
        return items

    return decode


def _decode_map(
    pairs: list[tuple[Any, Any]], decoder: ValueDecoder | None
) -> dict[str, Any] | list[tuple[Any, Any]]:
    """Return the object of a map with texts as keys. Other maps have no value in JSON, and stay lists of pairs."""
    if not all(isinstance(key, str) for key, _ in pairs):
        return pairs
    return {key: _decode_or_none(decoder, item) for key, item in pairs}


def _decode_json(value: str) -> Any:
    """Return the value of a JSON text. Raise ValueError if it is not JSON."""
    try:
        return load_json(value.encode())
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error.msg}") from error


def _decode_or_none(decoder: ValueDecoder | None, value: Any) -> Any:
    if decoder is None or value is None:
        return value
    return decoder(value)


TABLE_READERS: Mapping[TableType, Reader] = {
    "parquet": Reader((".parquet",), partial(_read_table, "Parquet")),
    "arrow": Reader((".arrow",), partial(_read_table, "Arrow"), other_suffixes=(".feather",)),
}
