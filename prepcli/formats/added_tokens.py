"""The record of added tokens, with which `prep remove-tokens` restores the files and sizes from before.

{"format": 1, "additions": [{
  "tokens": [{"id": 50257, "content": "<tool>"}], "init": "mean", "true_vocab_size": 50257, "padded_vocab_size": 50257,
  "files": {"tokenizer.json": {"inserted": [[312, 440]], "before": "5f...", "after": "9a..."}}
}]}
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, TypedDict, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from prepcli.algebra.boxes import Range
from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, UsageError, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.json_values import JsonObject, JsonValue, load_json
from prepcli.planning.manifest_fields import MAX_ROWS
from prepcli.stores.files import read_file_or_pipe, unreadable_error
from prepcli.stores.paths import AnyPath

# Next to the tokenizer, so that later commands copy it with the files of the model.
RECORD_FILE = "prep-added-tokens.json"

Xxh3 = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]

STRICT = ConfigDict(frozen=True, extra="forbid")


class RecordedToken(BaseModel):
    """A token and its id."""

    model_config = STRICT

    id: NonNegativeInt
    content: str


class FileEdit(BaseModel):
    """Insertions into a file.

    Attributes:
        inserted: Byte range of each insertion in the file after it, in the order of the insertions.
        before: XXH3-128 of the file before the first insertion.
        after: XXH3-128 of the file after the last insertion.
    """

    model_config = STRICT

    inserted: tuple[tuple[NonNegativeInt, NonNegativeInt], ...]
    before: Xxh3
    after: Xxh3


class Addition(BaseModel):
    """One run of `prep add-tokens`.

    Attributes:
        tokens: The added tokens. Their ids follow each other.
        init: Values of the new rows: `mean`, `zeros` or `normal`.
        true_vocab_size: Number of tokens before the addition.
        padded_vocab_size: Rows of the vocabulary before the addition, with padding.
        files: Changed files, by name.
    """

    model_config = STRICT

    tokens: Annotated[tuple[RecordedToken, ...], Field(min_length=1)]
    init: str
    true_vocab_size: PositiveInt
    padded_vocab_size: PositiveInt
    files: Mapping[str, FileEdit]

    @property
    def new_vocab_size(self) -> int:
        """Number of tokens after the addition."""
        return self.true_vocab_size + len(self.tokens)

    @model_validator(mode="after")
    def _check_sizes_and_ids(self) -> Self:
        """Raise ValueError unless the sizes are ordered and the tokens follow the old vocabulary."""
        if not self.true_vocab_size <= self.padded_vocab_size <= MAX_ROWS:
            raise ValueError(
                f"{self.true_vocab_size} tokens do not fit {self.padded_vocab_size} rows"
            )
        for token_id, token in enumerate(self.tokens, self.true_vocab_size):
            if token.id != token_id:
                raise ValueError(
                    f"the token {token.content!r:.60} has id {token.id}, not {token_id}"
                )
        return self


class AddedTokens(BaseModel):
    """Content of a record: each run of `prep add-tokens`, the last one at the end."""

    model_config = STRICT

    format: Literal[1] = 1
    additions: Annotated[tuple[Addition, ...], Field(min_length=1)]


def encode_record(additions: tuple[Addition, ...]) -> bytes:
    """Return the bytes of a record."""
    return AddedTokens(additions=additions).model_dump_json(indent=2).encode() + b"\n"


def parse_record(path: AnyPath, data: bytes) -> tuple[Addition, ...]:
    """Return the additions in the record `data` of the file `path`.

    Raises:
        DamagedError: It is no record, or has another format.
    """
    try:
        return AddedTokens.model_validate_json(data).additions
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        why = f"`{place}`: {first['msg']}" if place else first["msg"]
        raise DamagedError(f"{path} is not a record of this prep", why, GET_AGAIN_HINT) from error


FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
LIST_HINT = "write one token per line, or a JSON list of strings and objects in a file named *.json"


class AddedToken(TypedDict):
    """A token in the form of `added_tokens` of tokenizer.json, without its id."""

    content: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


def read_token_list(path: Path) -> tuple[AddedToken, ...]:
    """Read the tokens of a file or a pipe: a JSON list in `*.json`, else one token per line.

    Raises:
        UsageError: The file is invalid, or a token is empty, doubled or part of another one.
        PrepError: The file cannot be read.
    """
    try:
        data = read_file_or_pipe(path)
    except OSError as error:
        raise unreadable_error(path, error) from error
    tokens: list[AddedToken] = []
    if path.suffix == ".json":
        try:
            document = load_json(data)
        except ValueError as error:
            raise _list_error(path, f"it is not JSON: {error}") from None
        if not isinstance(document, list):
            raise _list_error(path, "it is not a JSON list")
        items: list[JsonValue] = document
        for number, item in enumerate(items, 1):
            if isinstance(item, str):
                tokens.append(make_token(item))
                continue
            if not isinstance(item, dict) or not isinstance(item.get("content"), str):
                why = f"item {number} is neither a string nor an object with `content`"
                raise _list_error(path, why)
            flags: JsonObject = {key: value for key, value in item.items() if key != "content"}
            for key, value in flags.items():
                if key not in FLAGS:
                    why = f"item {number} has the unknown key {key!r:.60}"
                    raise _list_error(path, why, f"supported keys: content, {', '.join(FLAGS)}")
                if not isinstance(value, bool):
                    why = f"`{key}` of item {number} is {value!r:.60}, not true or false"
                    raise _list_error(path, why)
            tokens.append(make_token(cast(str, item["content"]), flags))
    else:
        try:
            # Some editors write a byte order mark.
            lines = data.removeprefix(codecs.BOM_UTF8).decode().split("\n")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise _list_error(path, f"line {line} is not UTF-8") from None
        if lines[-1] == "":
            lines.pop()
        lines = [line.removesuffix("\r") for line in lines]
        tokens = [make_token(line) for line in lines]
    if not tokens:
        raise _list_error(path, "it has no token")
    contents = [token["content"] for token in tokens]
    empty = [str(number) for number, content in enumerate(contents, 1) if not content]
    if empty:
        raise _list_error(path, f"empty tokens: number {join_names(empty)} of the list")
    counts = Counter(contents)
    doubled = [repr(content) for content, count in counts.items() if count > 1]
    if doubled:
        raise _list_error(path, f"it has tokens twice: {join_names(doubled)}")
    if overlaps := overlapping_texts(contents, contents):
        why = f"tokens overlap: {join_names(overlaps)}, so a text with the longer one has two tokenizations"
        raise _list_error(path, why, "remove one token of each pair")
    return tuple(tokens)


def make_token(content: str, flags: Mapping[str, JsonValue] | None = None) -> AddedToken:
    """Return a token. Without flags it has the defaults of the tokenizers library.

    >>> make_token("<tool>", {"special": True})["normalized"]
    False
    """
    flags = flags or {}
    is_special = flags.get("special") is True
    values: dict[str, object] = {"content": content}
    for name in FLAGS:
        # The text of a special token is not normalized before it is searched.
        default = name == "normalized" and not is_special
        values[name] = flags.get(name, default)
    return cast(AddedToken, values)


def overlapping_texts(new: Collection[str], others: Collection[str]) -> list[str]:
    """Return a description of each pair of a new and another text, one of them within the other.

    >>> overlapping_texts(["<a>b"], ["<a>", "c"])
    ["'<a>b' contains '<a>'"]
    """
    pairs = dict.fromkeys([*_contained_pairs(new, others), *_contained_pairs(others, new)])
    return [f"{whole!r} contains {part!r}" for whole, part in pairs]


def _contained_pairs(texts: Iterable[str], parts: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield each text with each of its shorter parts."""
    # Each part of a text with a fitting length is looked up. The time is linear in the number of texts, so that lists
    # of 100,000 tokens take seconds.
    known = set(parts)
    lengths = sorted({len(part) for part in parts})
    for content in texts:
        for length in lengths:
            if length >= len(content):
                break
            for start in range(len(content) - length + 1):
                part = content[start : start + length]
                if part in known:
                    yield content, part


def _list_error(path: AnyPath, why: str, hint: str = LIST_HINT) -> UsageError:
    return usage_error(text("{} is invalid", Option("tokens", str(path))), why, hint)


_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"


def insert_members(
    data: bytes, keys: Sequence[str], members: JsonObject | list[JsonValue]
) -> tuple[bytes, Range]:
    """Insert members at the end of an object or a list.

    The members have the indentation of a text with one member per line. Other texts get them without spaces.

    Args:
        data: A valid JSON text.
        keys: Keys from the root to the object or list, e.g. `("model", "vocab")`. Empty for the root.
        members: An object to add to an object, or a list to add to a list, not empty.

    Returns:
        The new text, and the byte range of the insertion in it.

    Raises:
        ValueError: There is no such object or list, or the object has one of the members.

    >>> insert_members(b'{"a": [1], "b": 2}', ("a",), [3, 4])
    (b'{"a": [1,3,4], "b": 2}', (8, 12))
    """
    text = data.decode()
    start, stop = find_value(text, keys)
    brackets = text[start] + text[stop - 1]
    if brackets != ("{}" if isinstance(members, dict) else "[]"):
        raise ValueError(
            f"{'.'.join(keys)} is not {'an object' if isinstance(members, dict) else 'a list'}"
        )
    if isinstance(members, dict):
        # Readers of JSON disagree about doubled keys.
        old: JsonObject = json.loads(text[start:stop])
        doubled = [key for key in members if key in old]
        if doubled:
            name = ".".join(keys) or "the object"
            raise ValueError(f"{name} has {doubled[0]!r:.60} already")
    body = text[start + 1 : stop - 1]
    last_stop = start + 1 + len(body.rstrip(_SPACE))
    is_empty = last_stop == start + 1
    # The space between the last member and the closing bracket, e.g. "\n  "
    closing_space = text[last_stop : stop - 1]
    separator = ""
    if "\n" in closing_space:
        separator = "\n" + closing_space.rpartition("\n")[2] + "  "
    if not isinstance(members, dict):
        texts = [_value_text(value, separator) for value in members]
    else:
        colon = ": " if separator else ":"
        texts: list[str] = []
        for key, value in members.items():
            texts.append(_value_text(key, separator) + colon + _value_text(value, separator))
    inserted = ("," + separator).join(texts)
    inserted = ("" if is_empty else ",") + separator + inserted
    offset = len(text[:last_stop].encode())
    insertion = inserted.encode()
    new_data = data[:offset] + insertion + data[offset:]
    return new_data, (offset, offset + len(insertion))


def remove_insertion(data: bytes, insertion: Range) -> bytes:
    """Return a text without an insertion.

    >>> remove_insertion(b'{"a": [1,3,4], "b": 2}', (8, 12))
    b'{"a": [1], "b": 2}'
    """
    return data[: insertion[0]] + data[insertion[1] :]


def find_value(text: str, keys: Sequence[str]) -> Range:
    """Return where the value of some keys begins and ends in a valid JSON text.

    Raises:
        ValueError: A key is missing.

    >>> find_value('{"a": {"b": [1]}}', ("a", "b"))
    (12, 15)
    """
    start = _skip_space(text, 0)
    for key in keys:
        start = _find_member(text, start, key)
    _, stop = _DECODER.raw_decode(text, start)
    return start, stop


def _find_member(text: str, start: int, key: str) -> int:
    """Return where the value of a key begins, in the object from `start` on."""
    position = start
    while text[position] in "{,":
        position = _skip_space(text, position + 1)
        if text[position] == "}":
            break
        name, position = _DECODER.raw_decode(text, position)
        # A colon follows each name.
        position = _skip_space(text, _skip_space(text, position) + 1)
        if name == key:
            return position
        _, position = _DECODER.raw_decode(text, position)
        position = _skip_space(text, position)
    raise ValueError(f"there is no {key}")


def _skip_space(text: str, position: int) -> int:
    while text[position] in _SPACE:
        position += 1
    return position


def _value_text(value: JsonValue, separator: str) -> str:
    if not separator:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return json.dumps(value, ensure_ascii=False, indent=2).replace("\n", separator)
