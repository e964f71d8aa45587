"""The format and the columns of data whose recipe names neither: those of the first record."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from prepcli.core.errors import PrepError, text, usage_error
from prepcli.core.json_values import is_json_list
from prepcli.core.process_group import ProcessGroup, SingleProcess
from prepcli.stores.files import open_regular_file
from trainer.data.columns import (
    CONVERSATIONS,
    TEXT_COLUMN,
    Shape,
    check_columns,
    find_shapes,
    list_value,
    shapes_hint,
)
from trainer.data.files import DataFile, Note
from trainer.data.find_files import NO_REMOTE_FILES, RemoteFiles, find_data_files, resolve_type
from trainer.data.readers import READERS
from trainer.data.readers.reader import Reader, ReadOptions, Record
from trainer.recipe.conflicts import chat_problems
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import DEFAULT_FIELDS, PLAIN
from trainer.training.source_datasets import train_selection

ONE_PROCESS = SingleProcess()


def find_data_shape(
    data: Data,
    *,
    remote: RemoteFiles = NO_REMOTE_FILES,
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


def _read_shape(data: Data, remote: RemoteFiles, note: Note) -> Data:
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
        note(f"found by the columns: {shape.keys()}{lists}")
    return data.model_copy(update={"format": shape.format, "fields": shape.fields or None})


def _first_shape(
    data: Data, files: Sequence[Path | DataFile], reader: Reader
) -> tuple[Shape, bool] | None:
    """Return the shape of the first record, and whether its lists are JSON texts. None without a shape.

    Invalid records, and records in no shape, are skipped if the recipe allows some.

    Raises:
        UsageError: The columns fit several shapes.
        PrepError: The record is invalid.
    """
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
        if not data.bad_lines:
            _check_record(record)
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
