"""Texts of messages: sizes and durations, lists of names, suggestions, and bounds for untrusted values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from unicodedata import category

from prepcli.core.errors import Option, PrepError, text, usage_error

BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"B": 1, **BINARY_UNITS, **DECIMAL_UNITS}

# Digits of a size in any unit. Python refuses to convert more than 4,300.
MAX_DIGITS = 40
MAX_NBYTES = (1 << 63) - 1

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}
MAX_NAMES = 20
# Eight lines of a terminal with 80 columns. With what failed and a hint, a message has about ten lines.
MAX_CHARS = 640
# 19 digits hold every signed 64-bit integer.
_NUMBER = re.compile("[0-9]{1,19}")
# Similarity from 0 to 1 that a suggestion needs.
CUTOFF = 0.6
# Newline, tab, and the zero-width joiners of letters.
UNESCAPED = "\n\t\u200c\u200d"
# Marks around a part of a text. `escape_marks` escapes them in the text itself.
MARK_START = "⟦"
MARK_END = "⟧"
_UNUSUAL = re.compile(r"[^ -~\n\t]")  # only these characters are inspected one by one
# Longer than most paths. A longer word is a value from an option or a file.
MAX_WORD_CHARS = 240
SHORT_WORD_CHARS = 100
MAX_WHAT_CHARS = 400
# The list of the keys of a recipe's table is shorter.
MAX_LINE_CHARS = 800
# The rows of a terminal of the usual size.
MAX_LINES = 24
# A hint may be a command to copy, with the paths of the user.
MAX_HINT_CHARS = 2000
_LONG_WORD = re.compile(rf"\S{{{MAX_WORD_CHARS + 1},}}")


def parse_bytes(size: str, option: str) -> int:
    """Return the bytes of a text such as `512MiB`, `5GB`, `1.5 gib` or `1048576`. KiB is 1024 bytes, KB 1000.

    Args:
        size: The size.
        option: Name of the option for messages, e.g. `memory`.

    Returns:
        A whole number of bytes.

    Raises:
        UsageError: The text has another form, is a fraction of bytes, or is above MAX_NBYTES.
    """
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise _invalid_size_error(size, option)
    number, unit = match.groups()
    scale = _BY_LOWER_CASE.get(unit.lower() or "b")
    if scale is None:
        # `512M` is 512 * 10^6 for some programs and 512 * 2^20 for others, so it is not guessed.
        guess = ""
        if unit.upper() in ("K", "M", "G", "T"):
            guess = f"{number}{unit.upper()}iB"
        raise _invalid_size_error(size, option, guess)
    nbytes = MAX_NBYTES + 1
    if len(number) <= MAX_DIGITS:
        if number.isdecimal():
            nbytes = int(number) * scale
        else:
            # Few sizes have a point, and the import takes 3 ms.
            from fractions import Fraction

            # Fractions are exact: 1.005 KB are 1,005 bytes, and as a float 1004.9999999999999.
            nbytes = Fraction(number) * scale
    if nbytes > MAX_NBYTES:
        raise usage_error(
            text("{} is too large", Option(option, size)),
            f"the limit is {MAX_NBYTES:,} bytes",
            text("for example {}", Option(option, "512MiB")),
        )
    if nbytes.denominator != 1:
        raise usage_error(
            text("{} is not a whole number of bytes", Option(option, size)),
            f"it is {float(nbytes):.6g} bytes",
            text("for example {}", Option(option, round(nbytes))),
        )
    return int(nbytes)


def _invalid_size_error(size: str, option: str, guess: str = "") -> PrepError:
    hint = text("for example {}", Option(option, "512MiB"))
    if guess:
        hint = text("did you mean {}?", Option(option, guess))
    return usage_error(
        text("{} is not a size in bytes", Option(option, size)),
        "it takes a number and KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000), or nothing for bytes",
        hint,
    )


def format_bytes(nbytes: float) -> str:
    """Format as `4.90 GiB`, `56.0 KiB`, `214 MiB` or `17 bytes`: binary units, about three digits."""
    unit = _fitting_unit(nbytes)
    if not unit:
        return _byte_count_text(round(nbytes))
    return f"{_in_unit(nbytes, unit)} {unit}"


def format_bytes_of(done_nbytes: int, total_nbytes: int) -> str:
    """Format as `11.15 of 24.24 GiB`, both in the unit of the total."""
    unit = _fitting_unit(total_nbytes)
    if not unit:
        return f"{done_nbytes} of {_byte_count_text(total_nbytes)}"
    # Both numbers get the digits of the total: 24.24 has two, so 11.1 is shown as 11.10.
    digits = len(_in_unit(total_nbytes, unit).partition(".")[2])
    return f"{done_nbytes / BINARY_UNITS[unit]:.{digits}f} of {format_bytes(total_nbytes)}"


def format_rate(bytes_per_s: float) -> str:
    """Format as `870 MiB/s` or `1.2 GiB/s`."""
    unit = _fitting_unit(bytes_per_s)
    if not unit:
        return f"{bytes_per_s:.0f} B/s"
    return f"{_three_digits(bytes_per_s / BINARY_UNITS[unit])} {unit}/s"


def format_number(value: float | None, digits: int = 4) -> str:
    """Return a number with a fixed number of digits, or `not finite`. None is not finite."""
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.{digits}f}"


def format_token_rate(tokens_per_s: float) -> str:
    """Format as `41.2k tok/s` or `870 tok/s`."""
    if tokens_per_s >= 1000:
        return f"{tokens_per_s / 1000:.1f}k tok/s"
    return f"{tokens_per_s:.0f} tok/s"


def format_duration(seconds: float) -> str:
    """Format as `4.3 s`, `2 min 13 s` or `3 h 05 min`."""
    # The limits are where the rounded number would reach the next form: 99.95 would be 100.0 s, and
    # 3599.5 would be 60 min.
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_clock(seconds: float) -> str:
    """Format elapsed time as `0:04`, `12:30` or `1:00:07`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}"


def format_time_left(seconds: float) -> str:
    """Format remaining time with the precision of an estimate: `15 s left`, `2 min left`."""
    if seconds < 99.5:
        return f"{round(seconds)} s left"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min left"
    return f"{minutes // 60} h {minutes % 60:02d} min left"


def number_runs(numbers: Iterable[int], dash: str) -> list[str]:
    """Return the text of each run of consecutive numbers.

    >>> number_runs([0, 1, 2, 7], "-")
    ['0-2', '7']
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(low) if low == high else f"{low}{dash}{high}" for low, high in runs]


def _fitting_unit(nbytes: float) -> str:
    """Return the largest binary unit that shows as at least 1 after rounding, or an empty text for bytes."""
    # E.g. 1,048,064 bytes are 1023.5 KiB, which rounds to 1024 KiB, and are shown as 1.0 MiB.
    fitting = ""
    for unit, scale in BINARY_UNITS.items():
        if nbytes >= scale - scale / 2048:
            fitting = unit
    return fitting


def _in_unit(nbytes: float, unit: str) -> str:
    value = nbytes / BINARY_UNITS[unit]
    if unit in ("GiB", "TiB"):
        return f"{value:.2f}"
    return _three_digits(value)


def _byte_count_text(number: int) -> str:
    if number == 1:
        return "1 byte"
    return f"{number} bytes"


def _three_digits(value: float) -> str:
    """Format as `9.5`, `56.0` or `214`."""
    if value < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def join_names(
    names: Iterable[str],
    total: int | None = None,
    *,
    max_names: int = MAX_NAMES,
    max_chars: int = MAX_CHARS,
    separator: str = ", ",
) -> str:
    """Join the first names and count the remaining ones.

    Args:
        names: Names. At most `max_names` of them are read if `total` is set.
        total: Number of names, if `names` has no length or is incomplete.
        max_names: Number of names to show.
        max_chars: Number of characters of the shown names. The first name is always shown.
        separator: Separator of the names.

    Returns:
        For example `a, b and 3 more`.
    """
    if total is None:
        if not isinstance(names, list | tuple):
            names = [*names]
        total = len(names)
    shown: list[str] = []
    num_chars = 0
    for name in itertools.islice(names, max_names):
        num_chars += len(name) + len(separator)
        if shown and num_chars > max_chars:
            break
        shown.append(name)
    text = separator.join(shown)
    if total > len(shown):
        return f"{text} and {total - len(shown):,} more"
    return text


def count_text(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in the plural unless it is 1.

    >>> count_text(1, "invalid line"), count_text(1024, "entry", "entries")
    ('1 invalid line', '1,024 entries')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def parse_decimal(text: str) -> int | None:
    """Return the number of a text of at most 19 digits, or None for any other text.

    `int` refuses more than 4,300 digits, and `str.isdecimal` accepts them and digits of other
    scripts.
    """
    if _NUMBER.fullmatch(text):
        return int(text)
    return None


def suggest(text: str, candidates: Collection[str]) -> str | None:
    """Return the most similar candidate to a text, or None if no candidate is similar."""
    return next(iter(get_close_matches(text, candidates, n=1, cutoff=CUTOFF)), None)


def did_you_mean_start(text: str, candidates: Collection[str]) -> str:
    """Return a hint with the candidates that start with a text in any case, else as `did_you_mean` does."""
    longer = [f"`{name}`" for name in candidates if name.lower().startswith(text.lower())]
    if not text or not longer:
        return did_you_mean(text, candidates)
    return f"did you mean {' or '.join(longer)}?"


def did_you_mean(text: str, candidates: Collection[str]) -> str:
    """Return a hint with the most similar candidate, or an empty text if no candidate is similar."""
    # The time of difflib grows with the square of the length.
    suggestion = suggest(text[:60], candidates)
    if suggestion:
        return f"did you mean `{suggestion}`?"
    return ""


def printable(text: str) -> str:
    """Return a text of one or more lines with control characters escaped.

    Spaces and joiners of other scripts are kept.
    """
    return _UNUSUAL.sub(lambda match: _escape_char(match[0]), text)


def printable_line(text: str) -> str:
    """Return a text as one line, with line breaks and tabs escaped, too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def marked(text: str) -> str:
    """Return a text with marks around it."""
    return f"{MARK_START}{text}{MARK_END}"


def escape_marks(text: str) -> str:
    """Return a text with its brackets escaped that look like marks."""
    for mark in (MARK_START, MARK_END):
        text = text.replace(mark, ascii(mark)[1:-1])
    return text


def _escape_char(char: str) -> str:
    # `isprintable` is false for all spaces but U+0020. Those of category Zs, e.g. the no-break space,
    # only move the text, and no control character is among them.
    if char.isprintable() or char in UNESCAPED or category(char) == "Zs":
        return char
    return ascii(char)[1:-1]


def bounded_error(error: PrepError) -> PrepError:
    """Return an error with a short message, for values of any length.

    The middle of long words and lines is replaced by an ellipsis. A hint keeps its words, because it may be a command
    to copy.
    """
    return error.with_texts(
        what=shorten(bounded_line(error.what), MAX_WHAT_CHARS),
        why=bounded_lines(error.why),
        hint=shorten(error.hint, MAX_HINT_CHARS),
    )


def bounded_lines(text: str) -> str:
    """Return a text with at most MAX_LINES lines and the number of omitted ones."""
    lines = text.split("\n")
    shown = [bounded_line(line) for line in lines[:MAX_LINES]]
    if len(lines) > MAX_LINES:
        shown.append(f"and {count_text(len(lines) - MAX_LINES, 'more line')}")
    return "\n".join(shown)


def bounded_line(text: str) -> str:
    """Return a line with the middle of its long words replaced by an ellipsis, and then its own middle."""
    words_shortened = _LONG_WORD.sub(lambda match: shorten(match[0], SHORT_WORD_CHARS), text)
    return shorten(words_shortened, MAX_LINE_CHARS)


def shorten(text: str, width: int) -> str:
    """Shorten a text to `width` with an ellipsis in its middle. The ends identify a name."""
    if len(text) <= width:
        return text
    # Width 9 is 4 + 1 + 4 characters: `abcdefghijkl` becomes `abcd…ijkl`.
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"
