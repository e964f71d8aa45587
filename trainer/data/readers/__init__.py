"""Readers of data files by `data.type`. Invalid input raises an error with the file and line."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.data.readers.json_lines import JSON_READER
from trainer.data.readers.reader import Reader
from trainer.data.readers.text_file import TEXT_READER
from trainer.recipe.text_fields import DataType

READERS: Mapping[DataType, Reader] = {"text": TEXT_READER, "json": JSON_READER}
