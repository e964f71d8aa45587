"""Documents out of files, in bounded memory: what is not text is an error that says where, and nothing is skipped."""

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

TEXT_CHUNK_NBYTES = 1 << 18  # of text that is encoded at once; part of what a store's tokens depend on
BYTE_ORDER_MARK = "\ufeff"  # some editors begin a UTF-8 file with it; it is no text
WIDE_SPACES = rb"\xe1\x9a\x80|\xe2\x80[\x80-\x8a\xa8\xa9\xaf]|\xe2\x81\x9f|\xe3\x80\x80"  # Unicode's, of three bytes
AFTER_VISIBLE = rb"(?<!\s)(?<!\xc2[\x85\xa0])(?<!" + WIDE_SPACES + rb")"
VISIBLE = rb"(?!\s|\xc2[\x85\xa0]|" + WIDE_SPACES + rb")...."  # all bytes of a character, to be sure what it is
CUT_PATTERNS = (  # where a text may be cut, from the best place to the worst
    re.compile(AFTER_VISIBLE + rb"\n(?=" + VISIBLE + rb")|\n(?= " + VISIBLE + rb")", re.DOTALL),
    re.compile(rb"\n"),
    re.compile(rb"\S(?= )"),
)


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Text that is encoded by itself: a document, or a part of one. `nbytes`: of the file, for progress."""

    text: str
    nbytes: int
    ends_document: bool


def read_text_chunks(file: DataFile, type: FileType, fields: TextFields, prefix: str = "") -> Iterator[TextChunk]:
    """The text of a file, in order. PrepError if the file is not what it was when it was examined.

    `text`: the file is one document (see `text_pieces` for how a long one is cut).
    `json`: each line is an object whose `fields` are a document, in one piece however long, or two where they have a
    source, which comes first, after `prefix`. Blank lines are none.
    """
    state = xxhash.xxh3_128()
    try:
        with file.path.open("rb") as handle:
            if type == "text":
                yield from split_text(
                    file.path, _hash_while_reading(iter(lambda: handle.read(FILE_READ_NBYTES), b""), state)
                )
            else:
                yield from read_json_lines(file.path, _hash_while_reading(handle, state), fields, prefix)
    except OSError as error:
        raise io_error(file.path, error) from error
    if state.hexdigest() != file.digest:
        why = "its bytes are not those of a moment ago, so that nobody could tell what the tokens are made from"
        raise PrepError(f"{file.path} changed while it was read", why, "run again once it is complete")


def _hash_while_reading(blocks: Iterable[bytes], state: xxhash.xxh3_128) -> Iterator[bytes]:
    for chunk in blocks:
        state.update(chunk)
        yield chunk


def split_text(path: Path, blocks: Iterable[bytes]) -> Iterator[TextChunk]:
    """A text as one piece, or as several of at most PIECE_NBYTES where it is longer.

    A cut comes after a newline that stands between two visible characters, or that one space and a visible character
    follow: the pre-tokenisers of GPT-2 and of Llama 3 part the text there as well, so that the tokens are those of the
    whole text. Where half a piece has no such newline it is cut after another one, else before a space, else anywhere
    between two characters: then the tokens next to the cut may be others, which spell the same text. A tokeniser that
    puts a space before every text (Llama 1 and 2) puts one at the start of each piece, wherever the cut is.
    PrepError with the byte offset for what is not UTF-8.
    """
    held, at = b"", 0
    for chunk in blocks:
        held += chunk
        while len(held) > TEXT_CHUNK_NBYTES:
            cut = _cut_length(held)
            yield TextChunk(_decode(path, held[:cut], at), cut, ends_document=False)
            held, at = held[cut:], at + cut
    yield TextChunk(_decode(path, held, at), len(held), ends_document=True)


def _cut_length(data: bytes) -> int:
    """How much of the text goes into the next piece: more than half a piece."""
    for pattern in CUT_PATTERNS:
        ends = [found.end() for found in pattern.finditer(data, TEXT_CHUNK_NBYTES // 2, TEXT_CHUNK_NBYTES)]
        if ends:
            return ends[-1]
    within = (at for at in range(TEXT_CHUNK_NBYTES, TEXT_CHUNK_NBYTES - 4, -1) if data[at] & 0xC0 != 0x80)
    return next(within, TEXT_CHUNK_NBYTES)  # nowhere: not UTF-8, which decoding tells


def _decode(path: Path, data: bytes, offset: int) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {offset + error.start:,} is 0x{data[error.start]:02x}: {error.reason}"
        raise PrepError(f"{path} is not UTF-8", why, "`iconv -f ENCODING -t UTF-8` converts it") from None
    return text if offset else text.removeprefix(BYTE_ORDER_MARK)


def read_json_lines(path: Path, lines: Iterable[bytes], fields: TextFields, prefix: str = "") -> Iterator[TextChunk]:
    """A piece for each line that is not blank, two where there is a source. PrepError with the line for what is no
    object whose `fields` are texts."""
    at, skipped = 0, 0
    for number, line in enumerate(lines, start=1):
        text = _decode(path, line, at)
        at += len(line)
        if text.strip():
            source, target = _source_and_target(f"{path}:{number}", text.rstrip(), fields)
            if fields.source:
                yield TextChunk(prefix + source, 0, ends_document=True)
            yield TextChunk(target, skipped + len(line), ends_document=True)
            skipped = 0
        else:
            skipped += len(line)


def _source_and_target(place: str, line: str, fields: TextFields) -> tuple[str, str]:
    """What the source and the target of a line are, the first empty where there is none."""
    found = _parse_json(place, line)
    if not isinstance(found, dict):
        what = f"{place}: not an object but {_json_type_name(found)}"
        raise PrepError(what, "type `json` reads one object a line", "`jq -c '.[]'` writes a list so")
    if missing := [column for column in fields.columns if column not in found]:
        columns = ", ".join(f"`{name}`" for name in found) or "none"
        hint = "`--set data.fields='[SOURCE], TARGET'`" if fields.source else "`--set data.fields=COLUMN`"
        raise PrepError(f"{place}: no column `{missing[0]}`", f"its columns: {columns}", hint)
    source, target = (
        " ".join(_column_text(place, found, column) for column in columns) for columns in (fields.source, fields.target)
    )
    return source, target


def _column_text(place: str, record: Mapping[str, Any], column: str) -> str:
    value = record[column]
    if not isinstance(value, str):
        raise PrepError(
            f"{place}: column `{column}` is no text", f"it is {_json_type_name(value)}", "mend or remove the line"
        )
    if not _is_encodable(value):
        why = "it has half of a surrogate pair, which stands for no character"
        raise PrepError(f"{place}: column `{column}` is no text", why, "mend or remove the line")
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
    hint = "an object on a line of its own: `jq -c .` writes one so, `jq -c '.[]'` each of a list"
    raise PrepError(f"{place}: not JSON", why, hint)


def _json_type_name(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
