"""Readers of data files by `data.type`. Invalid input raises an error with the file and line."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.data.readers.ids_files import IDS_READER, MEGATRON_READER
from trainer.data.readers.reader import Reader
from trainer.data.readers.table_files import TABLE_READERS
from trainer.data.readers.text_files import CSV_READER, JSON_READER, TEXT_READER
from trainer.recipe.text_fields import FileType

READERS: Mapping[FileType, Reader] = {
    "text": TEXT_READER,
    "json": JSON_READER,
    "csv": CSV_READER,
    **TABLE_READERS,
    "ids": IDS_READER,
    "megatron": MEGATRON_READER,
}
