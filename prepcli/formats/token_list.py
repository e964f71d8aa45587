"""The user's list of tokens to add: one token per line, or a JSON list."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict, cast

from prepcli.core.errors import Option, UsageError, text, usage_error
from prepcli.core.formatting import join_names
from prepcli.core.json_values import JsonObject, JsonValue, load_json
from prepcli.stores.paths import AnyPath
from prepcli.stores.reading import read_file_or_pipe, unreadable_error

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
    if path.suffix == ".json":
        tokens = _json_tokens(path, data)
    else:
        tokens = [make_token(line) for line in _lines(path, data)]
    if not tokens:
        raise _list_error(path, "it has no token")
    _check_texts(path, [token["content"] for token in tokens])
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


def _lines(path: AnyPath, data: bytes) -> list[str]:
    try:
        # Some editors write a byte order mark.
        lines = data.removeprefix(codecs.BOM_UTF8).decode().split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _list_error(path, f"line {line} is not UTF-8") from None
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def _json_tokens(path: AnyPath, data: bytes) -> list[AddedToken]:
    try:
        document = load_json(data)
    except ValueError as error:
        raise _list_error(path, f"it is not JSON: {error}") from None
    if not isinstance(document, list):
        raise _list_error(path, "it is not a JSON list")
    items: list[JsonValue] = document
    return [_json_token(path, number, item) for number, item in enumerate(items, 1)]


def _json_token(path: AnyPath, number: int, item: JsonValue) -> AddedToken:
    if isinstance(item, str):
        return make_token(item)
    if not isinstance(item, dict) or not isinstance(item.get("content"), str):
        raise _list_error(path, f"item {number} is neither a string nor an object with `content`")
    flags: JsonObject = {key: value for key, value in item.items() if key != "content"}
    for key, value in flags.items():
        if key not in FLAGS:
            why = f"item {number} has the unknown key {key!r:.60}"
            raise _list_error(path, why, f"supported keys: content, {', '.join(FLAGS)}")
        if not isinstance(value, bool):
            raise _list_error(path, f"`{key}` of item {number} is {value!r:.60}, not true or false")
    return make_token(cast(str, item["content"]), flags)


def _check_texts(path: AnyPath, contents: list[str]) -> None:
    """Raise UsageError for empty, doubled and overlapping tokens."""
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


def _list_error(path: AnyPath, why: str, hint: str = LIST_HINT) -> UsageError:
    return usage_error(text("{} is invalid", Option("tokens", str(path))), why, hint)
