"""The interface of readers, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trainer.data.files import DataFile
from trainer.models.errors import PrepError

BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a data file with columns, such as a line of JSON.

    Attributes:
        values: Value of each column, not checked.
        place: File and line, for error messages: `train.jsonl:7`.
        nbytes: Its share of the file's bytes, for the progress.
    """

    values: Mapping[str, Any]
    place: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A document of a data file without columns, or a part of a long one, which is tokenized by itself.

    Attributes:
        text: The text.
        nbytes: Its share of the file's bytes, for the progress.
        starts_document: Whether it is the start of its document.
        ends_document: Whether it is the end of its document.
    """

    text: str
    nbytes: int
    starts_document: bool
    ends_document: bool


DataPiece: TypeAlias = Record | TextChunk


@dataclass(frozen=True, slots=True)
class Reader:
    """The functions that read data files of one type.

    Attributes:
        suffix: Suffix of the files that are read from folders.
        read: Yields the records or the text of a file, in order and in bounded memory. It raises PrepError if the file
            is invalid, with the line or the byte offset, and if the file changed since it was hashed.
    """

    suffix: str
    read: Callable[[DataFile], Iterator[DataPiece]]


def decode_utf8(path: Path, data: bytes, offset: int) -> str:
    """Decode a part of a file, without the byte order mark at its start.

    Args:
        path: The file, for error messages.
        data: Bytes of the file.
        offset: Offset of `data` in the file.

    Raises:
        PrepError: The bytes are not UTF-8; the error names the byte offset.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {offset + error.start:,} is 0x{data[error.start]:02x}: {error.reason}"
        raise PrepError(f"{path} is not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it") from None
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)
