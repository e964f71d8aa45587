"""The interface of readers and their common helpers: streams, also of compressed files, and lines.

Files are decompressed by suffix: `.gz` and `.zst`, also with several members or frames.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from prepcli.core.errors import Key, PrepError, text
from trainer.data.files import FILE_READ_NBYTES, DataFile, HashingStream, stream_blocks
from trainer.recipe.text_fields import DEFAULT_IDS_DTYPE, DEFAULT_MAX_DOCUMENT_NBYTES


class RecordLimitError(PrepError):
    """A record took too much memory or time, e.g. because its chat template has endless loops.

    It is never skipped: the tokens of a dataset must not depend on the machine.
    """


COMPRESSED_READ_NBYTES = 64 << 10
# 16 selects the gzip format, MAX_WBITS its largest window (see `zlib.decompressobj`).
GZIP_FORMAT = 16 + zlib.MAX_WBITS
# Limit of the zstd program without `--long`. A frame may ask for a much larger window.
MAX_ZSTD_WINDOW_NBYTES = 128 << 20
# Compressed bytes that are decompressed at once, so that at most 8 MiB come out. A byte of gzip
# stands for up to 1,032 bytes. A block of zstd has at least 4 bytes and stands for up to 128 KiB.
FEED_NBYTES = {".gz": 4 << 10, ".zst": 256}


def _new_zstd_decompressor() -> Any:
    import zstandard

    return zstandard.ZstdDecompressor(max_window_size=MAX_ZSTD_WINDOW_NBYTES).decompressobj()


# Suffix -> the decompressor of one member of a file: a `zlib.decompressobj`, or one of the same methods.
DECOMPRESSORS: Mapping[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(GZIP_FORMAT),
    ".zst": _new_zstd_decompressor,
}

# Bytes that may follow a member. gzip skips zeros there, e.g. those of a tape or of a disk image.
PADDING = {".gz": b"\0", ".zst": b""}


def split_compression(name: str) -> tuple[str, str]:
    """Split a file name at the suffix of its compression.

    E.g. `a.csv.gz` -> (`a.csv`, `.gz`) and `a.csv` -> (`a.csv`, an empty text).
    """
    suffix = PurePath(name).suffix
    if suffix not in DECOMPRESSORS:
        return name, ""
    return name.removesuffix(suffix), suffix


def open_decompressed(stream: BinaryIO, name: str, suffix: str) -> BinaryIO:
    """Return a buffered stream of the decompressed bytes of a stream. The name is for error messages."""
    return stream_blocks(_decompressed_blocks(stream, name, suffix))


def _decompressed_blocks(stream: BinaryIO, name: str, suffix: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of all members of a file."""
    # Plans and help read this module, and compressed files are rare.
    import zstandard

    what = f"{name} cannot be decompressed"
    decompressor = None
    # Before the first member there is none: a file of zeros is no gzip file.
    padding = b""
    try:
        while read := stream.read(COMPRESSED_READ_NBYTES):
            for start in range(0, len(read), FEED_NBYTES[suffix]):
                data = read[start : start + FEED_NBYTES[suffix]]
                if decompressor is None:
                    data = data.lstrip(padding)
                while data:
                    decompressor = decompressor or DECOMPRESSORS[suffix]()
                    yield decompressor.decompress(data)
                    # A file may have several members or frames one after the other, e.g. of `cat a.gz
                    # b.gz`. The bytes after the end of a member belong to the next member.
                    data = b""
                    if decompressor.eof:
                        padding = PADDING[suffix]
                        data = decompressor.unused_data.lstrip(padding)
                        decompressor = None
    except (zlib.error, zstandard.ZstdError) as error:
        raise PrepError(what, str(error), "get the file again") from error
    if decompressor is not None:
        raise PrepError(what, "its end is missing", "get the file again")


BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a data file with columns, such as a line of JSON."""

    values: Mapping[str, object]  # Value of each column, not checked
    place: str  # File and line, for error messages: `train.jsonl:7`
    nbytes: int  # Its bytes in the file. Progress reports add them up.


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A separately tokenized text: a document of a file without columns, or a part of one."""

    text: str  # The text
    nbytes: int  # Its bytes in the file. Progress reports add them up.
    starts_document: bool  # Whether it is the start of its document
    ends_document: bool  # Whether it is the end of its document


@dataclass(frozen=True, slots=True, eq=False)
class IdsChunk:
    """Token ids of a previously tokenized data file."""

    ids: npt.NDArray[np.integer[Any]]  # Ids of a part of the file, any integer dtype
    file: str  # Name of the file, for error messages
    first: int  # Position of the first id in the file
    nbytes: int  # Its bytes in the file. Progress reports add them up.
    ends_document: bool  # Whether a document ends with it
    ends_at_eos: bool = True  # Whether a document also ends after each end-of-sequence token in it


DataPiece: TypeAlias = Record | TextChunk
ErrorHandler: TypeAlias = Callable[[PrepError], None]


def raise_error(error: PrepError) -> None:
    """Raise an error. As `ReadOptions.on_error`, this stops the read at the first invalid record."""
    raise error


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Settings of a reader."""

    # Called with the error of an invalid record. If it returns, the record is skipped.
    on_error: ErrorHandler = raise_error
    ids_dtype: str = DEFAULT_IDS_DTYPE  # Dtype of ids in files without a recorded dtype
    # Maximum bytes of a line, a row or a value
    max_document_nbytes: int = DEFAULT_MAX_DOCUMENT_NBYTES
    # Byte of the file. What ends before it is not needed, and a reader may skip it unparsed.
    start: int = 0


DEFAULT_OPTIONS = ReadOptions()
Pieces: TypeAlias = Iterator[Record] | Iterator[TextChunk] | Iterator[IdsChunk]
ReadFunction: TypeAlias = Callable[[DataFile, ReadOptions], Pieces]


@dataclass(frozen=True, slots=True)
class Reader:
    """Function to read data files of one type, and their suffixes."""

    suffixes: tuple[str, ...]  # Suffixes of the files to read from folders
    read_file: ReadFunction  # Reads a file, see `read`
    # More suffixes for files named in the recipe, outside of folders
    other_suffixes: tuple[str, ...] = ()
    is_compressible: bool = False  # Whether files may be compressed as a whole, with a suffix more
    # Whether the bytes of its results do not depend on settings, so that a file can be divided
    is_divisible: bool = False
    has_ids: bool = False  # Whether files have token ids instead of texts
    # Suffix of a second file with the rest of the content, in the same folder
    companion_suffix: str = ""

    def read(self, file: DataFile, options: ReadOptions = DEFAULT_OPTIONS) -> Pieces:
        """Yield the records, the text or the ids of a file, in order and in bounded memory.

        Raises:
            PrepError: The file is invalid, or changed since it was hashed. The error names the
                line, the row or the byte offset.
        """
        return self.read_file(file, options)

    def divides(self, file: DataFile) -> bool:
        """Return whether a file can be divided into shards. A compressed one cannot."""
        return self.is_divisible and not split_compression(str(file.path))[1]

    def matches(self, name: str, *, is_named: bool = False) -> bool:
        """Return whether a file of a folder, or one named in the recipe, belongs to this reader by its suffix."""
        suffixes = self.suffixes
        if is_named:
            suffixes += self.other_suffixes
        compression = ""
        if self.is_compressible:
            _, compression = split_compression(name)
        return name.endswith(tuple(suffix + compression for suffix in suffixes))


PieceT = TypeVar("PieceT", Record, TextChunk, IdsChunk)


def read_stream(file: DataFile, parse: Callable[[BinaryIO], Iterator[PieceT]]) -> Iterator[PieceT]:
    """Parse a decompressed file from start to end, then check its digest.

    Args:
        file: The file. Its suffix selects the compression.
        parse: Yields the records, text chunks or id chunks of the content. Their `nbytes` counts
            decompressed bytes.

    Yields:
        The results of `parse`. Their `nbytes` counts bytes of the file.

    Raises:
        PrepError: The file cannot be read or decompressed, or changed since it was hashed.
    """
    _, compression = split_compression(str(file.path))
    with file.open() as raw:
        hashing = HashingStream(raw)
        stream = cast(BinaryIO, hashing)
        if compression:
            # The parser counts decompressed bytes. For progress reports each record or chunk gets
            # the compressed bytes read since the one before it, so that `nbytes` adds up to the
            # size of the file.
            content = open_decompressed(stream, str(file.path), compression)
            done_nbytes = 0
            for piece in parse(content):
                yield replace(piece, nbytes=hashing.position - done_nbytes)
                done_nbytes = hashing.position
        else:
            yield from parse(cast(BinaryIO, io.BufferedReader(hashing, FILE_READ_NBYTES)))
        file.check_digest(hashing.digest())


def read_seekable(
    file: DataFile, parse: Callable[[BinaryIO], Iterator[PieceT]]
) -> Iterator[PieceT]:
    """Parse a file in any order, then check its digest.

    Raises:
        PrepError: The file cannot be read, or changed since it was hashed.
    """
    with file.open() as raw:
        yield from parse(raw)
        if file.open_remote is None:
            # A remote file is read at one version.
            raw.seek(0)
            file.check_digest(HashingStream(raw).digest())


def decode_utf8(path: Path | str, data: bytes, offset: int) -> str:
    """Decode a part of a file at an offset, without the byte order mark at its start.

    Raises:
        PrepError: The bytes are not UTF-8. The error names the byte offset.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {offset + error.start:,} is 0x{data[error.start]:02x}: {error.reason}"
        raise PrepError(
            f"{path} is not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it"
        ) from None
    if offset:
        return text
    return text.removeprefix(BYTE_ORDER_MARK)


# Recipe key of the limit on the bytes of a document, a line, a row and a cell.
SIZE_KEY = "data.max_document_bytes"
# Bytes read at once of a line above the limit, which is skipped without being held in memory.
SKIP_NBYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """The text of a record: a line of a file, or an element of a list."""

    content: bytes  # Its bytes. A line has its line feed. Empty if it is too long.
    start: int  # Offset of the content in the file
    nbytes: int  # Bytes of the file that count for it
    is_too_long: bool = False  # Whether it is longer than the limit


def read_lines(stream: BinaryIO, max_nbytes: int) -> Iterator[Line]:
    """Yield the lines of a stream in bounded memory. Longer ones than `max_nbytes` have no content."""
    start = 0
    while content := stream.readline(max_nbytes + 1):
        nbytes = len(content)
        is_too_long = nbytes > max_nbytes and not content.endswith(b"\n")
        if is_too_long:
            while not content.endswith(b"\n") and (rest := stream.readline(SKIP_NBYTES)):
                nbytes += len(rest)
                content = rest
            content = b""
        yield Line(content, start, nbytes, is_too_long)
        start += nbytes


def too_large_error(what: str, nbytes: int, max_nbytes: int) -> PrepError:
    """Return the error for a line or row above the limit. `nbytes` is its size, or a lower bound of it."""
    why = text("it has {:,} bytes or more, {} is {:,}", nbytes, Key(SIZE_KEY), max_nbytes)
    hint = text(
        "{} allows more, `{} = N` skips up to N of them",
        Key(SIZE_KEY, "N", is_override=True),
        "data.bad_lines",
    )
    return PrepError(what, why, hint)
