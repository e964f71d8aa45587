"""Read documents from data files in bounded memory. Invalid input is an error with its location, never skipped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from trainer.data.files import FILE_READ_NBYTES, DataFile, FileType, io_error
from trainer.models.errors import PrepError
from trainer.recipe.text_fields import TextFields

# Maximum bytes of text that are encoded at once. Tokens may depend on it: raise `TOKENS_VERSION` with it.
TEXT_CHUNK_NBYTES = 1 << 18
BYTE_ORDER_MARK = "\ufeff"
WIDE_SPACES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"  # UTF-8 spaces of 3 bytes
AFTER_VISIBLE = rb"(?<!\s)(?<!\xc2[\x85\xa0])(?<!" + WIDE_SPACES + rb")"
VISIBLE = rb"(?!\s|\xc2[\x85\xa0]|" + WIDE_SPACES + rb")...."  # 4 bytes hold the whole first character
CUT_PATTERNS = (  # places where a text may be cut, best first
    re.compile(AFTER_VISIBLE + rb"\n(?=" + VISIBLE + rb")|\n(?= " + VISIBLE + rb")", re.DOTALL),
    re.compile(rb"\n"),
    re.compile(rb"\S(?= )"),
)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A separately encoded text: a document, or a part of one.

    Attributes:
        text: The text.
        nbytes: Its share of the file's bytes, for the progress.
        ends_document: Whether it is the end of its document.
    """

    text: str
    nbytes: int
    ends_document: bool


def read_text_chunks(file: DataFile, file_type: FileType, fields: TextFields, prefix: str = "") -> Iterator[TextChunk]:
    """Yield the text of a data file, in order.

    Args:
        file: The file, with its digest.
        file_type: `text`: the file is one document, cut by `split_text` if it is long. `json`: each
            non-blank line is an object with one document, never cut, or with a source and a target, two documents.
        fields: Columns of the object that form the text.
        prefix: Text that is put before each source.

    Raises:
        PrepError: The file is invalid, cannot be read, or changed since it was hashed.
    """
    state = xxhash.xxh3_128()
    try:
        with file.path.open("rb") as handle:
            if file_type == "text":
                blocks = iter(lambda: handle.read(FILE_READ_NBYTES), b"")
                yield from split_text(file.path, _hash_while_reading(blocks, state))
            else:
                yield from read_json_lines(file.path, _hash_while_reading(handle, state), fields, prefix)
    except OSError as error:
        raise io_error(file.path, error) from error
    if state.hexdigest() != file.digest:
        why = "its digest differs from the one taken before, so its tokens could not be identified"
        raise PrepError(f"{file.path} changed while it was read", why, "run again once it is complete")


def _hash_while_reading(blocks: Iterable[bytes], state: xxhash.xxh3_128) -> Iterator[bytes]:
    for block in blocks:
        state.update(block)
        yield block


def split_text(path: Path, blocks: Iterable[bytes]) -> Iterator[TextChunk]:
    """Yield a text in chunks of at most TEXT_CHUNK_NBYTES.

    The text is cut, in order of preference, in the second half of a chunk

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
            yield TextChunk(_decode(path, buffer[:cut], offset), cut, ends_document=False)
            buffer, offset = buffer[cut:], offset + cut
    yield TextChunk(_decode(path, buffer, offset), len(buffer), ends_document=True)


def _cut_length(data: bytes) -> int:
    """Return the bytes of the next chunk, more than half of TEXT_CHUNK_NBYTES."""
    for pattern in CUT_PATTERNS:
        ends = [match.end() for match in pattern.finditer(data, TEXT_CHUNK_NBYTES // 2, TEXT_CHUNK_NBYTES)]
        if ends:
            return ends[-1]
    candidates = range(TEXT_CHUNK_NBYTES, TEXT_CHUNK_NBYTES - 4, -1)
    character_starts = (i for i in candidates if data[i] & 0xC0 != 0x80)
    return next(character_starts, TEXT_CHUNK_NBYTES)  # without one the text is not UTF-8, and decoding fails


def _decode(path: Path, data: bytes, offset: int) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {offset + error.start:,} is 0x{data[error.start]:02x}: {error.reason}"
        raise PrepError(f"{path} is not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it") from None
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)


def read_json_lines(path: Path, lines: Iterable[bytes], fields: TextFields, prefix: str = "") -> Iterator[TextChunk]:
    """Yield one document per non-blank line, or two (source, target) if `fields` has a source.

    Args:
        path: The file, for error messages.
        lines: Its lines.
        fields: Columns of the object that form the text.
        prefix: Text that is put before each source.

    Raises:
        PrepError: A line is not an object, or a column is missing or not text; the error names the line.
    """
    offset, blank_nbytes = 0, 0
    for number, line in enumerate(lines, start=1):
        text = _decode(path, line, offset)
        offset += len(line)
        if text.strip():
            source, target = _source_and_target(f"{path}:{number}", text.rstrip(), fields)
            if fields.source:
                yield TextChunk(prefix + source, 0, ends_document=True)
            yield TextChunk(target, blank_nbytes + len(line), ends_document=True)
            blank_nbytes = 0
        else:
            blank_nbytes += len(line)


def _source_and_target(place: str, line: str, fields: TextFields) -> tuple[str, str]:
    """Return the source and the target of a line; the source is empty if `fields` has none."""
    record = _parse_json(place, line)
    if not isinstance(record, dict):
        what = f"{place}: not an object but {_json_type_name(record)}"
        raise PrepError(what, "type `json` needs one object per line", "`jq -c '.[]'` splits a list into lines")
    if missing := [column for column in fields.columns if column not in record]:
        columns = ", ".join(f"`{name}`" for name in record) or "none"
        hint = "`--set data.fields='[SOURCE], TARGET'`" if fields.source else "`--set data.fields=COLUMN`"
        raise PrepError(f"{place}: no column `{missing[0]}`", f"its columns: {columns}", hint)
    source = " ".join(_column_text(place, record, column) for column in fields.source)
    target = " ".join(_column_text(place, record, column) for column in fields.target)
    return source, target


def _column_text(place: str, record: Mapping[str, Any], column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        why = f"it is {_json_type_name(value)}"
        raise PrepError(f"{place}: column `{column}` is not text", why, "fix or remove the line")
    if not _is_encodable(value):
        why = "it has an unpaired surrogate, which is not a character"
        raise PrepError(f"{place}: column `{column}` is not text", why, "fix or remove the line")
    return value


def _parse_json(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        why = f"{error.msg} at character {error.pos + 1}"
    except RecursionError:
        why = "it is nested too deep"
    except ValueError as error:  # a number of thousands of digits
        why = str(error)
    hint = "one object per line: `jq -c .` writes an object on one line, `jq -c '.[]'` splits a list into lines"
    raise PrepError(f"{place}: not JSON", why, hint)


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
