"""Sizes, rates and durations: as users write them, and as prep shows them."""

from __future__ import annotations

import re
from fractions import Fraction

from prepcli.errors import PrepError, usage_error

BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
DECIMAL_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS = {"B": 1, **BINARY_UNITS, **DECIMAL_UNITS}

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", re.ASCII)
_BY_LOWER_CASE = {unit.lower(): nbytes for unit, nbytes in UNITS.items()}


def parse_bytes(text: str) -> int:
    """The bytes that a text such as `512MiB`, `5GB`, `1.5 gib` or `1048576` stands for; KiB counts 1024, KB 1000.

    Raises a usage PrepError for anything else, also for a fraction of a byte.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise _invalid_size_error(text)
    number, unit = match.groups()
    scale = _BY_LOWER_CASE.get(unit.lower() or "b")
    if scale is None:
        raise _invalid_size_error(text, f"{number}{unit.upper()}iB" if unit.upper() in ("K", "M", "G", "T") else "")
    nbytes = Fraction(number) * scale
    if nbytes.denominator != 1:
        raise usage_error(f"`{text}` is not a whole number of bytes", f"it is {float(nbytes):.6g} bytes")
    return int(nbytes)


def _invalid_size_error(text: str, guess: str = "") -> PrepError:
    return usage_error(
        f"`{text}` is not a size in bytes",
        "it takes a number and KiB, MiB, GiB, TiB (of 1024), KB, MB, GB, TB (of 1000), or nothing for bytes",
        f"did you mean `{guess}`?" if guess else "for example `512MiB`",
    )


def format_bytes(nbytes: float) -> str:
    """`4.90 GiB`, `56.0 KiB`, `214 MiB`, `17 bytes`: binary units, three digits or so."""
    unit = _fitting_unit(nbytes)
    return f"{_in_unit(nbytes, unit)} {unit}" if unit else _count(round(nbytes), "byte")


def format_bytes_of(done_nbytes: int, total_nbytes: int) -> str:
    """`11.15 of 24.24 GiB`: both in the unit that fits the total."""
    unit = _fitting_unit(total_nbytes)
    if not unit:
        return f"{done_nbytes} of {_count(total_nbytes, 'byte')}"
    digits = len(_in_unit(total_nbytes, unit).partition(".")[2])
    return f"{done_nbytes / BINARY_UNITS[unit]:.{digits}f} of {format_bytes(total_nbytes)}"


def format_rate(bytes_per_s: float) -> str:
    """`870 MiB/s`, `1.2 GiB/s`."""
    unit = _fitting_unit(bytes_per_s)
    if not unit:
        return f"{bytes_per_s:.0f} B/s"
    value = bytes_per_s / BINARY_UNITS[unit]
    return f"{value:.{1 if value < 99.95 else 0}f} {unit}/s"


def format_duration(seconds: float) -> str:
    """How long something took: `4.3 s`, `2 min 13 s`, `3 h 05 min`."""
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_clock(seconds: float) -> str:
    """Elapsed time as a clock shows it: `0:04`, `12:30`, `1:00:07`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_time_left(seconds: float) -> str:
    """How long something will still take, no more exactly than anyone can know: `15 s left`, `2 min left`."""
    if seconds < 99.5:
        return f"{round(seconds)} s left"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min left"
    return f"{minutes // 60} h {minutes % 60:02d} min left"


def _fitting_unit(nbytes: float) -> str:
    """The largest binary unit of which there is at least one, once the digits shown are rounded; `` for bytes."""
    fitting = [unit for unit, scale in BINARY_UNITS.items() if nbytes >= scale - scale / 2048]
    return fitting[-1] if fitting else ""


def _in_unit(nbytes: float, unit: str) -> str:
    value = nbytes / BINARY_UNITS[unit]
    if unit in ("GiB", "TiB"):
        return f"{value:.2f}"
    return f"{value:.{1 if value < 99.95 else 0}f}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
