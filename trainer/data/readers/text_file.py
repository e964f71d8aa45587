"""Text files: each is one document, cut into chunks if it is long."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.data.files import DataFile
from trainer.data.readers.reader import DEFAULT_OPTIONS, Reader, ReadOptions, TextChunk, decode_utf8, read_stream

READ_NBYTES = 1 << 20
# Maximum bytes of text that are encoded at once. Tokens may depend on it: raise `TOKENS_VERSION` with it.
TEXT_CHUNK_NBYTES = 1 << 18
WIDE_SPACES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"  # UTF-8 spaces of 3 bytes
AFTER_VISIBLE = rb"(?<!\s)(?<!\xc2[\x85\xa0])(?<!" + WIDE_SPACES + rb")"
VISIBLE = rb"(?!\s|\xc2[\x85\xa0]|" + WIDE_SPACES + rb")...."  # 4 bytes hold the whole first character
CUT_PATTERNS = (  # places where a text may be cut, best first
    re.compile(AFTER_VISIBLE + rb"\n(?=" + VISIBLE + rb")|\n(?= " + VISIBLE + rb")", re.DOTALL),
    re.compile(rb"\n"),
    re.compile(rb"\S(?= )"),
)


def _split_blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(READ_NBYTES), b"")


def _read_text(file: DataFile, options: ReadOptions = DEFAULT_OPTIONS, /) -> Iterator[TextChunk]:
    return read_stream(file, lambda stream: split_text(file.path, _split_blocks(stream)))


def split_text(path: Path | str, blocks: Iterable[bytes]) -> Iterator[TextChunk]:
    """Yield a text in chunks of at most TEXT_CHUNK_NBYTES.

    Each cut is in the second half of a chunk, in this order of preference

    1. after a newline between two visible characters, or before one space and a visible character. The pre-tokenizers
       of GPT-2 and Llama 3 also split there, so the tokens equal the tokens of the whole text;
    2. after any newline;
    3. before a space;
    4. between two characters.

    After cuts 2 to 4 the tokens next to the cut may differ from those of the whole text, but decode to the same text.
    A tokenizer that puts a space before every text (Llama 1 and 2) puts one at the start of each chunk.

    Args:
        path: The file, for error messages.
        blocks: Its bytes, in blocks of any length.

    Raises:
        PrepError: The text is not UTF-8; the error names the byte offset.
    """
    buffer, offset = b"", 0
    for block in blocks:
        buffer += block
        while len(buffer) > TEXT_CHUNK_NBYTES:
            cut = _cut_length(buffer)
            text = decode_utf8(path, buffer[:cut], offset)
            yield TextChunk(text, cut, starts_document=not offset, ends_document=False)
            buffer, offset = buffer[cut:], offset + cut
    text = decode_utf8(path, buffer, offset)
    yield TextChunk(text, len(buffer), starts_document=not offset, ends_document=True)


def _cut_length(data: bytes) -> int:
    """Return the bytes of the next chunk, more than half of TEXT_CHUNK_NBYTES."""
    for pattern in CUT_PATTERNS:
        ends = [match.end() for match in pattern.finditer(data, TEXT_CHUNK_NBYTES // 2, TEXT_CHUNK_NBYTES)]
        if ends:
            return ends[-1]
    candidates = range(TEXT_CHUNK_NBYTES, TEXT_CHUNK_NBYTES - 4, -1)
    character_starts = (i for i in candidates if data[i] & 0xC0 != 0x80)
    return next(character_starts, TEXT_CHUNK_NBYTES)  # without one the text is not UTF-8, and decoding fails


TEXT_READER = Reader((".txt",), _read_text, is_compressible=True)
