"""Parsing of sizes as users write them, and formatting of sizes, rates and durations."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from prepcli.core.errors import Option, PrepError, text, usage_error

BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"B": 1, **BINARY_UNITS, **DECIMAL_UNITS}

# Digits of a size in any unit. Python refuses to convert more than 4,300.
MAX_DIGITS = 40
MAX_NBYTES = (1 << 63) - 1

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}


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
    # Fractions are exact: 1.005 KB are 1,005 bytes, and as a float 1004.9999999999999.
    nbytes = Fraction(MAX_NBYTES + 1)
    if len(number) <= MAX_DIGITS:
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
