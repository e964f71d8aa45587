"""Cut long texts where the tokens of the parts, joined, are exactly the tokens of the whole text.

The `tokenizers` library needs about 100 bytes for each byte of a text that it encodes at once. A
row or a line of 60 MiB would take 6 GB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

# Characters of a part at least. Texts up to this length are not cut.
PART_CHARS = 1 << 18
# A newline between two visible characters: ASCII, letters, digits, and punctuation of Chinese and
# Japanese. Every Unicode version and every library agrees that none of them is a space.
VISIBLE = r"[!-~\w\u3001-\u303f\uff01-\uff60]"
CUT = re.compile(rf"(?<={VISIBLE})\n(?={VISIBLE})")
# Pre-tokenizers split a text before a model sees it, so a cut between two of their pieces changes no
# token. A match of these expressions that has a newline before a visible character ends at the
# newline: no alternative takes a visible character after it, and none looks back. E.g. "a!\nb" has
# the pieces "a", "!", "\n", "b" or "a", "!\n", "b", and so has "a!\n" followed by "b". The
# expression of GPT-4o is not one of them: its `[\r\n/]*` takes the newline and the slash of "!\n/".
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# A normalizer of NFC composes no character with a newline before it.
SAFE_NORMALIZERS = (None, "NFC")


def allows_cuts(tokenizer_json: bytes) -> bool:
    """Return whether `cut_text` keeps the tokens of a tokenizer, for a valid tokenizer.json."""
    tokenizer = json.loads(tokenizer_json)
    normalizer = tokenizer.get("normalizer") or {}
    return (
        normalizer.get("type") in SAFE_NORMALIZERS
        and _splits_at_newlines(tokenizer.get("pre_tokenizer") or {})
        and not any(map(_may_reach_over, tokenizer.get("added_tokens") or ()))
    )


def _splits_at_newlines(pre_tokenizer: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer splits texts at each newline before a visible character."""
    steps = [pre_tokenizer]
    if pre_tokenizer.get("type") == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    # The step without an expression maps bytes to characters. A space before each part would change
    # its first token.
    *splits, byte_level = steps
    if byte_level.get("type") != "ByteLevel" or byte_level.get("add_prefix_space"):
        return False
    if not splits:
        # Missing in files of old versions, which always split by the expression of GPT-2.
        return byte_level.get("use_regex", True)
    return (
        len(splits) == 1
        and not byte_level.get("use_regex", True)
        and _is_supported_split(splits[0])
    )


def _is_supported_split(split: dict[str, Any]) -> bool:
    """Return whether a step splits by the expression of Llama 3 or Qwen 2."""
    return (
        split.get("type") == "Split"
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
        and split.get("pattern") in ({"Regex": LLAMA_3}, {"Regex": QWEN_2})
    )


def _may_reach_over(token: dict[str, Any]) -> bool:
    """Return whether an added token depends on characters on both sides of a newline."""
    takes_spaces = token.get("lstrip") or token.get("rstrip") or token.get("single_word")
    return bool(takes_spaces) or "\n" in token["content"]


def cut_text(text: str) -> Iterator[str]:
    """Yield a text in parts of PART_CHARS characters or a little more.

    A text without a newline between visible characters stays whole.
    """
    start = 0
    while cut := CUT.search(text, start + PART_CHARS):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]
