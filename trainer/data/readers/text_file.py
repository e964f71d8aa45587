"""Text files: each is one document, cut into chunks if it is long."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from trainer.data.files import DataFile
from trainer.data.readers.reader import (
    Reader,
    ReadOptions,
    TextChunk,
    decode_utf8,
    read_stream,
)

READ_NBYTES = 1 << 20
# Maximum bytes of text that are encoded at once. Tokens may depend on it: raise `TOKENS_VERSION`
# with it.
TEXT_CHUNK_NBYTES = 1 << 18
# Spaces of 3 bytes in UTF-8: U+1680, U+2000 to U+200A, U+2028, U+2029, U+202F, U+205F and U+3000.
# `\s` of a bytes pattern matches only ASCII. U+0085 and U+00A0 have 2 bytes.
WIDE_SPACES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"
AFTER_VISIBLE = rb"(?<!\s)(?<!\xc2[\x85\xa0])(?<!" + WIDE_SPACES + rb")"
# Matches before a visible character. The four dots make sure that all of its bytes are in the
# buffer.
VISIBLE = rb"(?!\s|\xc2[\x85\xa0]|" + WIDE_SPACES + rb")...."
# Places where a text may be cut, best first.
CUT_PATTERNS = (
    re.compile(AFTER_VISIBLE + rb"\n(?=" + VISIBLE + rb")|\n(?= " + VISIBLE + rb")", re.DOTALL),
    re.compile(rb"\n"),
    re.compile(rb"\S(?= )"),
)


def _split_blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(READ_NBYTES), b"")


def _read_text(file: DataFile, options: ReadOptions) -> Iterator[TextChunk]:
    return read_stream(file, lambda stream: split_text(file.path, _split_blocks(stream)))


def split_text(path: Path | str, blocks: Iterable[bytes]) -> Iterator[TextChunk]:
    """Yield a text in chunks of at most TEXT_CHUNK_NBYTES.

    Each cut is in the second half of a chunk, in this order of preference:

    1. After a newline between two visible characters, or before one space and a visible character.
       The pre-tokenizers of GPT-2 and Llama 3 also split there, so the tokens equal the tokens of
       the whole text.
    2. After any newline.
    3. Before a space.
    4. Between two characters.

    After cuts 2 to 4 the tokens next to the cut may differ from the tokens of the whole text, but
    decode to the same text. A tokenizer that puts a space before every text (Llama 1 and 2) puts
    one at the start of each chunk.

    Args:
        path: The file, for error messages.
        blocks: Its bytes, in blocks of any length.

    Raises:
        PrepError: The text is not UTF-8. The error names the byte offset.
    """
    buffer = b""
    offset = 0
    for block in blocks:
        buffer += block
        while len(buffer) > TEXT_CHUNK_NBYTES:
            cut = _cut_length(buffer)
            text = decode_utf8(path, buffer[:cut], offset)
            yield TextChunk(text, cut, starts_document=not offset, ends_document=False)
            buffer = buffer[cut:]
            offset = offset + cut
    text = decode_utf8(path, buffer, offset)
    yield TextChunk(text, len(buffer), starts_document=not offset, ends_document=True)


def _cut_length(data: bytes) -> int:
    """Return the bytes of the next chunk, more than half of TEXT_CHUNK_NBYTES."""
    for pattern in CUT_PATTERNS:
        ends = [
            match.end()
            for match in pattern.finditer(data, TEXT_CHUNK_NBYTES // 2, TEXT_CHUNK_NBYTES)
        ]
        if ends:
            return ends[-1]
    candidates = range(TEXT_CHUNK_NBYTES, TEXT_CHUNK_NBYTES - 4, -1)
    # 0b10xxxxxx is a continuation byte, and a character has at most 4 bytes.
    character_starts = (i for i in candidates if data[i] & 0xC0 != 0x80)
    # Without one the text is not UTF-8, and decoding fails.
    return next(character_starts, TEXT_CHUNK_NBYTES)


TEXT_READER = Reader((".txt",), _read_text, is_compressible=True, is_divisible=True)
