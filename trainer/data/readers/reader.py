"""The interface of readers, and their common helpers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields

BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A text that is tokenized by itself: a document, or a part of one.

    Attributes:
        text: The text.
        nbytes: Its share of the file's bytes, for the progress.
        ends_document: Whether it is the end of its document.
    """

    text: str
    nbytes: int
    ends_document: bool


class ReadBlocks(Protocol):
    """The function of a reader that yields the texts of a file."""

    def __call__(self, path: Path, blocks: Iterable[bytes], *, fields: TextFields, prefix: str) -> Iterator[TextChunk]:
        """Yield the texts of a file, in order and in bounded memory.

        Args:
            path: The file, for error messages.
            blocks: Its bytes, as the reader's `split` yields them.
            fields: Columns that form the text.
            prefix: Text that is put before each source.

        Raises:
            PrepError: The file is invalid; the error names the line or the byte offset.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """The functions that read data files of one type.

    Attributes:
        suffix: Suffix of the files that are read from folders.
        split: Yields the bytes of an open file in blocks, such as lines.
        read: Yields the texts of these blocks.
    """

    suffix: str
    split: Callable[[BinaryIO], Iterable[bytes]]
    read: ReadBlocks


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
