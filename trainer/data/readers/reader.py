"""The interface of readers, and their common helpers."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from trainer.data.compression import open_decompressed, split_compression
from trainer.data.files import FILE_READ_NBYTES, DataFile, HashingStream
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import DEFAULT_IDS_DTYPE, DEFAULT_MAX_DOCUMENT_NBYTES

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


@dataclass(frozen=True, slots=True, eq=False)
class IdsChunk:
    """Token ids of a data file that was tokenized before.

    Attributes:
        ids: Ids of a part of the file, any integer dtype.
        file: Name of the file, for error messages.
        first: Position of the first id in the file.
        nbytes: Its share of the file's bytes, for the progress.
        ends_document: Whether a document ends with it.
    """

    ids: npt.NDArray[np.integer[Any]]
    file: str
    first: int
    nbytes: int
    ends_document: bool


DataPiece: TypeAlias = Record | TextChunk
ErrorHandler: TypeAlias = Callable[[PrepError], None]


def raise_error(error: PrepError) -> None:
    """Raise an error: the handler that tolerates no invalid line."""
    raise error


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Settings of a reader.

    Attributes:
        on_error: Called with the error of an invalid record. If it returns, the record is skipped.
        ids_dtype: Dtype of ids in files that do not record it.
        max_document_nbytes: Maximum bytes of a line, a row or a value.
    """

    on_error: ErrorHandler = raise_error
    ids_dtype: str = DEFAULT_IDS_DTYPE
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES


DEFAULT_OPTIONS = ReadOptions()


class ReadFunction(Protocol):
    """Function that reads a data file of one type."""

    def __call__(
        self, file: DataFile, options: ReadOptions = DEFAULT_OPTIONS, /
    ) -> Iterator[Record] | Iterator[TextChunk] | Iterator[IdsChunk]:
        """Yield the records, the text or the ids of a file, in order and in bounded memory.

        Raises:
            PrepError: The file is invalid, with the line, the row or the byte offset; or it changed since it was
                hashed.
        """
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """The function that reads data files of one type, and their suffixes.

    Attributes:
        suffixes: Suffixes of the files to read from folders.
        read: Reads a file.
        other_suffixes: Suffixes that tell the type of a file which is named itself.
        is_compressible: Whether files may be compressed as a whole, with a suffix more.
        has_ids: Whether files have token ids instead of texts.
    """

    suffixes: tuple[str, ...]
    read: ReadFunction
    other_suffixes: tuple[str, ...] = ()
    is_compressible: bool = False
    has_ids: bool = False

    def reads_from_folder(self, name: str) -> bool:
        """Return whether a file in a folder belongs to this reader, by its suffix."""
        return name.endswith(self._with_compression(name, self.suffixes))

    def reads_named(self, name: str) -> bool:
        """Return whether a file that is named itself belongs to this reader, by its suffix."""
        return name.endswith(self._with_compression(name, self.suffixes + self.other_suffixes))

    def _with_compression(self, name: str, suffixes: tuple[str, ...]) -> tuple[str, ...]:
        compression = split_compression(name)[1] if self.is_compressible else ""
        return tuple(suffix + compression for suffix in suffixes)


PieceT = TypeVar("PieceT", Record, TextChunk, IdsChunk)


def read_stream(file: DataFile, parse: Callable[[BinaryIO], Iterator[PieceT]]) -> Iterator[PieceT]:
    """Parse a file from its start to its end, decompressed, and check at the end that it has not changed.

    Args:
        file: The file; its suffix tells its compression.
        parse: Yields the pieces of the content. Its progress counts the bytes of the content.

    Yields:
        The pieces. Their progress counts the bytes of the file.

    Raises:
        PrepError: The file cannot be read or decompressed, or changed since it was hashed.
    """
    _, compression = split_compression(str(file.path))
    with file.open() as raw:
        hashing = HashingStream(raw)
        stream = cast(BinaryIO, hashing)
        if compression:
            content, done_nbytes = open_decompressed(stream, str(file.path), compression), 0
            for piece in parse(content):
                yield replace(piece, nbytes=hashing.position - done_nbytes)
                done_nbytes = hashing.position
        else:
            yield from parse(cast(BinaryIO, io.BufferedReader(hashing, FILE_READ_NBYTES)))
        file.check_digest(hashing.digest())


def read_seekable(file: DataFile, parse: Callable[[BinaryIO], Iterator[PieceT]]) -> Iterator[PieceT]:
    """Parse a file in any order, and check at the end that it has not changed.

    Args:
        file: The file.
        parse: Yields the pieces of a seekable stream.

    Raises:
        PrepError: The file cannot be read, or changed since it was hashed.
    """
    with file.open() as raw:
        yield from parse(raw)
        if file.open_remote is None:  # a remote file is read at one version
            raw.seek(0)
            file.check_digest(HashingStream(raw).digest())


def decode_utf8(path: Path | str, data: bytes, offset: int) -> str:
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
