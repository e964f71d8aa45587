"""Readers of data files by `data.type`. Invalid input raises an error with the file and line."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.data.readers.arrow_file import ARROW_READER, PARQUET_READER
from trainer.data.readers.csv_file import CSV_READER
from trainer.data.readers.ids_file import IDS_READER
from trainer.data.readers.json_lines import JSON_READER
from trainer.data.readers.megatron_file import MEGATRON_READER
from trainer.data.readers.reader import Reader
from trainer.data.readers.text_file import TEXT_READER
from trainer.recipe.text_fields import FileType

READERS: Mapping[FileType, Reader] = {
    "text": TEXT_READER,
    "json": JSON_READER,
    "csv": CSV_READER,
    "parquet": PARQUET_READER,
    "arrow": ARROW_READER,
    "ids": IDS_READER,
    "megatron": MEGATRON_READER,
}
