"""Guards for untrusted tokenizer files: errors of their libraries, and memory for normalized text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.formats.charsmap import charsmap_growth

# Module of the exception that a panic of Rust code raises. It is no `Exception`.
PANIC_MODULE = "pyo3_runtime"
MAX_CHARS = 300


@contextmanager
def library_errors(what: str, hint: str) -> Iterator[None]:
    """Turn every error of a library in the block into a PrepError.

    A panic of Rust is a BaseException, so `except Exception` does not catch it. The cause of
    a panic is an error in the tokenizer file that the library does not check.

    Args:
        what: The failed operation, for the message.
        hint: How to correct it.

    Raises:
        PrepError: The block raised an error.
    """
    try:
        yield
    except PrepError:
        raise
    except Exception as error:
        # The libraries have no exception type of their own.
        first_line = str(error).partition("\n")[0]
        raise PrepError(what, first_line[:MAX_CHARS], hint) from error
    except BaseException as error:
        if type(error).__module__ != PANIC_MODULE:
            raise
        raise PrepError(what, f"its library stopped with: {error!s:.{MAX_CHARS}}", hint) from error


# The `tokenizers` library allocates the normalized text without a limit, and aborts the process if
# the allocation fails. A tokenizer of some kilobytes can request any amount: each of k nested
# replacements multiplies the text. The growth is therefore computed before a text is encoded.
# Ordinary normalizers replace a space by the three bytes of U+2581, which is far below this factor.
MAX_GROWTH = 16
# Maximum normalized bytes of a text if the normalizer grows texts more than that.
MAX_GROWN_NBYTES = 1 << 28
# Each map reads the whole text. Tokenizers have one map, of the SentencePiece model that they were made from.
MAX_MAPS = 16


def normalizer_growth(tokenizer_json: bytes) -> float:
    """Return an upper bound of the normalized bytes per byte of text, for a valid tokenizer.json.

    Changes by the Unicode tables of the library are not counted: they are small, and no file can change them. A
    `Precompiled` normalizer has its own table, which is counted.

    Raises:
        ValueError: A map is malformed, or there are too many.
    """
    growth = 1.0
    num_maps = 0
    for step in _iter_steps(json.loads(tokenizer_json).get("normalizer")):
        if step.get("type") == "Precompiled":
            num_maps += 1
        if num_maps > MAX_MAPS:
            raise ValueError(f"it has more than {MAX_MAPS} precompiled maps in its normalizer")
        growth *= _max_growth(step)
    return growth


def check_normalizer_growth(growth: float, num_chars: int, file: str, hint: str) -> None:
    """Raise PrepError if a normalizer may turn a text of `num_chars` characters into a huge one.

    Called before encoding: the library aborts the process if an allocation fails.

    Args:
        growth: Result of `normalizer_growth`.
        num_chars: Length of the text.
        file: Name of the tokenizer.
        hint: How to correct it.
    """
    if growth <= MAX_GROWTH or growth * num_chars <= MAX_GROWN_NBYTES:
        return
    why = f"it may turn each byte into {growth:.3g} bytes, and a text has {num_chars:,} characters"
    raise PrepError(f"the normalizer of {file} enlarges texts too much", why, hint)


def _iter_steps(normalizer: JsonValue) -> Iterator[JsonObject]:
    """Yield the normalizers of nested sequences in order, or a single normalizer."""
    if not isinstance(normalizer, dict):
        return
    if normalizer.get("type") != "Sequence":
        yield normalizer
        return
    steps = normalizer.get("normalizers")
    if isinstance(steps, list):
        for step in steps:
            yield from _iter_steps(step)


def _max_growth(normalizer: JsonObject) -> float:
    """Return how many bytes a normalizer makes of one byte at most."""
    if normalizer.get("type") == "Precompiled":
        encoded = normalizer.get("precompiled_charsmap")
        if not isinstance(encoded, str):
            return 1.0
        return charsmap_growth(encoded)
    if normalizer.get("type") == "Prepend":
        return 1.0 + _text_nbytes(normalizer.get("prepend"))
    if normalizer.get("type") == "Replace":
        return max(1.0, _replacement_growth(normalizer))
    return 1.0


def _replacement_growth(normalizer: JsonObject) -> float:
    """Return the bytes of a replacement for each byte of its pattern.

    A regular expression may match the empty text between any two bytes. Its replacement is then
    added to each byte.
    """
    content = _text_nbytes(normalizer.get("content"))
    pattern = normalizer.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return content / max(1, _text_nbytes(pattern["String"]))
    return 1.0 + content


def _text_nbytes(value: JsonValue) -> int:
    """Return the number of UTF-8 bytes of a text, 0 for another value."""
    if not isinstance(value, str):
        return 0
    return len(value.encode("utf-8", "surrogatepass"))
