"""Bound the growth of a text by the normalizer of a tokenizer.

The library allocates the normalized text without a limit, and aborts the process if the allocation fails. A tokenizer
of some kilobytes can request any amount. The growth is therefore computed before a text is encoded.
"""

from __future__ import annotations

import json
from typing import Any

from trainer.models.errors import PrepError

MAX_GROWTH = 16  # of ordinary normalizers, which replace a space by three bytes
MAX_GROWN_NBYTES = 1 << 28  # of a text that grows more


def normalizer_growth(tokenizer_json: bytes) -> float:
    """Return an upper bound of the normalized bytes per byte of text, for a valid tokenizer.json.

    Changes by Unicode tables are not counted: they are small, and no file can change them.
    """
    return _growth(json.loads(tokenizer_json).get("normalizer"))


def check_growth(growth: float, num_chars: int, file: str) -> None:
    """Raise PrepError if a normalizer with this growth may make a huge text of one with a number of characters."""
    if growth <= MAX_GROWTH or growth * num_chars <= MAX_GROWN_NBYTES:
        return
    why = f"its normalizer may make {growth:.3g} bytes of each character, and a text has {num_chars:,} characters"
    raise PrepError(f"{file} grows texts too much", why, "`--set data.tokenizer=PATH` with another tokenizer")


def _growth(normalizer: Any) -> float:
    if not isinstance(normalizer, dict):
        return 1.0
    if normalizer.get("type") == "Sequence":
        growth = 1.0
        for step in normalizer.get("normalizers", []):
            growth *= _growth(step)
        return growth
    if normalizer.get("type") == "Prepend":
        return 1.0 + _nbytes(normalizer.get("prepend"))
    if normalizer.get("type") == "Replace":
        return max(1.0, _replacement_growth(normalizer))
    return 1.0


def _replacement_growth(normalizer: dict[str, Any]) -> float:
    """Return the bytes of a replacement for each byte of its pattern. A regular expression may match no byte."""
    content, pattern = _nbytes(normalizer.get("content")), normalizer.get("pattern")
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return content / max(1, _nbytes(pattern["String"]))
    return 1.0 + content


def _nbytes(value: Any) -> int:
    return len(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else 0
