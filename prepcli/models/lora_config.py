"""The settings of low-rank adapters (LoRA, arXiv:2106.09685), their entry in a manifest, and patterns of modules."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from prepcli.core.errors import GET_AGAIN_HINT, PrepError
from prepcli.core.json_values import JsonObject
from prepcli.models.parameters import MAX_AXIS_SIZE

DEFAULT_TARGETS = ("attn.q", "attn.v")
# Far above any setting. Larger numbers overflow float32.
MAX_ALPHA = 1e30


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of adapters."""

    rank: int  # Rows of A and columns of B.
    alpha: float  # Scale of the update before it is divided by the rank.
    # Patterns of projections, such as `attn.q` or `mlp.*`, or `all-linear`.
    targets: tuple[str, ...] = DEFAULT_TARGETS
    use_rslora: bool = False  # Divide by the square root of the rank instead (arXiv:2312.03732).
    dropout: float = 0.0  # Fraction of the input of A to drop in training.
    # Regular expression of modules -> their rank in place of `rank`. The first match counts.
    rank_pattern: Mapping[str, int] = field(default_factory=dict[str, int])
    # Regular expression of modules -> their alpha in place of `alpha`.
    alpha_pattern: Mapping[str, float] = field(default_factory=dict[str, float])
    # Embeddings and head that are trained as a whole, e.g. `embed.tokens` or `head`.
    modules_to_save: tuple[str, ...] = ()
    # Patterns of projections of experts, such as `mlp.gate`.
    target_parameters: tuple[str, ...] = ()

    @property
    def scaling(self) -> float:
        """Factor of B A for modules without a rank or alpha of their own."""
        return self.scaling_of(self.rank, self.alpha)

    def scaling_of(self, rank: int, alpha: float) -> float:
        """Return the factor of B A for a rank and an alpha."""
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def manifest_entry(self) -> JsonObject:
        """Return the settings for a manifest. Settings that adapters rarely have are absent if they are not set."""
        entry: JsonObject = {
            "rank": self.rank,
            "alpha": self.alpha,
            "targets": list(self.targets),
            "use_rslora": self.use_rslora,
        }
        for name in OPTIONAL_SETTINGS:
            value = getattr(self, name)
            if value:
                entry[name] = _json_value(value)
        return entry


# Settings with a default of 0 or of no entries.
OPTIONAL_SETTINGS = tuple(item.name for item in dataclasses.fields(LoraConfig))[4:]


def _json_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return list(value)
    return value


def lora_from_manifest(manifest: Mapping[str, Any]) -> LoraConfig | None:
    """Return the settings of adapters in a manifest, or None if it has none.

    Raises:
        PrepError: They are invalid.
    """
    lora = manifest.get("lora")
    if lora is None:
        return None
    if not _is_lora_config(lora):
        what = "the manifest has invalid settings of adapters"
        raise PrepError(what, f"`lora` is {ascii(lora)[:60]}", GET_AGAIN_HINT)
    alphas = lora.get("alpha_pattern", {})
    return LoraConfig(
        lora["rank"],
        float(lora["alpha"]),
        targets=tuple(lora["targets"]),
        use_rslora=lora["use_rslora"],
        dropout=float(lora.get("dropout", 0.0)),
        rank_pattern=dict(lora.get("rank_pattern", {})),
        alpha_pattern={pattern: float(alpha) for pattern, alpha in alphas.items()},
        modules_to_save=tuple(lora.get("modules_to_save", ())),
        target_parameters=tuple(lora.get("target_parameters", ())),
    )


def _is_lora_config(value: Any) -> bool:
    """Return whether a value of a manifest has the keys of a `LoraConfig`, of its types and in its ranges."""
    if not isinstance(value, Mapping):
        return False
    dropout = value.get("dropout", 0.0)
    is_rate = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    lists = (value.get("targets"), *(value.get(key, ()) for key in _NAME_LISTS))
    patterns = (value.get("rank_pattern", {}), value.get("alpha_pattern", {}))
    return (
        _is_rank(value.get("rank"))
        and _is_alpha(value.get("alpha"))
        and isinstance(value.get("use_rslora"), bool)
        and is_rate
        and 0 <= dropout < 1
        and all(map(_is_name_list, lists))
        and all(isinstance(pattern, Mapping) for pattern in patterns)
        and all(map(_is_rank, patterns[0].values()))
        and all(map(_is_alpha, patterns[1].values()))
    )


_NAME_LISTS = ("modules_to_save", "target_parameters")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_AXIS_SIZE


def _is_alpha(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= MAX_ALPHA


def _is_name_list(value: Any) -> bool:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(name, str) for name in value)


# Regular expressions of module names, as in `rank_pattern` and `alpha_pattern` of PEFT, in bounded time
#
# PEFT takes the first key with a match of `(.*\.)?(KEY)$` at the start of a module's name. An adapter's files are not
# trusted, and Python's `re` may backtrack for years. The parser evaluates a subset of the syntax on all positions of
# the name at once, in at most (length of the name)^2 steps per character of the pattern:
#
#     characters, `.`, escapes such as `\.`, classes such as `[0-9]` and `\d`, groups, `|`,
#     `*`, `+`, `?`, `{2,3}`, `^`, `$`

MAX_PATTERN_LENGTH = 1000
# Loops inside loops take the length of the name to the power of their depth.
MAX_LOOP_DEPTH = 2
MAX_REPEATS = 100
MAX_GROUP_DEPTH = 50
_COUNTS = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")
_SPECIAL = "\\.[]{}()*+?^$|"

# Positions in a text before an expression -> positions after it.
_Matcher = Callable[[str, frozenset[int]], frozenset[int]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of an expression, with the depth of its loops."""

    matcher: _Matcher
    loop_depth: int = 0


def find_pattern(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first pattern that matches one of the names by the rule of PEFT, or None.

    Example:
        >>> find_pattern(["o_proj", "layers.0.*.q_proj"], ["model.layers.0.self_attn.q_proj"])
        'layers.0.*.q_proj'

    Raises:
        PrepError: A pattern is invalid, or has other syntax than the one above.
    """
    names = list(names)
    for pattern in patterns:
        part = _parse_key(pattern)
        if any(part.matcher(name, frozenset((0,))) for name in names):
            return pattern
    return None


@cache
def _parse_key(key: str) -> _Part:
    """Return the expression of a key with the rule of PEFT around it."""
    if len(key) > MAX_PATTERN_LENGTH:
        raise _unsupported_error(key, f"it is longer than {MAX_PATTERN_LENGTH:,} characters")
    return _Parser(key, rf"(.*\.)?({key})$").parse()


def _unsupported_error(key: str, why: str) -> PrepError:
    what = f"the pattern {key!r:.60} of module names is not supported"
    return PrepError(what, why, "use names of modules, `.*`, `[0-9]` and `|`")


class _Parser:
    """A parser of the syntax above, by recursive descent."""

    def __init__(self, key: str, text: str) -> None:
        """Set the key, for errors, and the text to parse."""
        self._key = key
        self._text = text
        self._position = 0
        self._group_depth = 0

    def parse(self) -> _Part:
        """Return the expression of the whole text."""
        part = self._parse_alternatives()
        if self._position < len(self._text):
            raise _unsupported_error(self._key, "it has a `)` without a `(`")
        return part

    def _peek(self) -> str:
        return self._text[self._position : self._position + 1]

    def _take(self, token: str) -> bool:
        """Move behind a token if it is next."""
        is_next = self._text.startswith(token, self._position)
        if is_next:
            self._position += len(token)
        return is_next

    def _is_quantifier(self) -> bool:
        """Return whether a quantifier is next."""
        counts = _COUNTS.match(self._text, self._position)
        return self._peek() in ("*", "+", "?") or (
            counts is not None and bool(counts[1] or counts[3])
        )

    def _parse_alternatives(self) -> _Part:
        branches = [self._parse_sequence()]
        while self._take("|"):
            branches.append(self._parse_sequence())

        def match(text: str, starts: frozenset[int]) -> frozenset[int]:
            return frozenset().union(*(branch.matcher(text, starts) for branch in branches))

        return _Part(match, max(branch.loop_depth for branch in branches))

    def _parse_sequence(self) -> _Part:
        parts: list[_Part] = []
        while self._peek() not in ("", "|", ")"):
            parts.append(self._parse_repeat(self._parse_item()))

        def match(text: str, starts: frozenset[int]) -> frozenset[int]:
            positions = starts
            for part in parts:
                positions = part.matcher(text, positions)
            return positions

        return _Part(match, max((part.loop_depth for part in parts), default=0))

    def _parse_repeat(self, part: _Part) -> _Part:
        """Return a part with the quantifier that follows it, if there is one."""
        low, high = 1, 1
        counts = _COUNTS.match(self._text, self._position)
        if self._take("*"):
            low, high = 0, None
        elif self._take("+"):
            low, high = 1, None
        elif self._take("?"):
            low, high = 0, 1
        elif counts is not None and (counts[1] or counts[3]):
            self._position = counts.end()
            low = int(counts[1] or 0)
            high = low
            if counts[2]:
                high = int(counts[3]) if counts[3] else None
        else:
            return part
        # A lazy quantifier matches the same names.
        self._take("?")
        if self._is_quantifier() or max(low, high or 0) > MAX_REPEATS:
            raise _unsupported_error(self._key, "it has a quantifier of another kind")
        depth = part.loop_depth + (high != 1)
        if depth > MAX_LOOP_DEPTH:
            raise _unsupported_error(self._key, "it has loops inside loops inside loops")
        return _Part(_repeat(part.matcher, low, high), depth)

    def _parse_item(self) -> _Part:
        if self._take("("):
            return self._parse_group()
        part: _Part | None = None
        if self._take("^"):
            part = _Part(lambda text, starts: starts & {0})
        elif self._take("$"):
            part = _Part(lambda text, starts: starts & {len(text)})
        if self._is_quantifier():
            raise _unsupported_error(self._key, "it has a quantifier without an expression")
        if part is not None:
            return part
        if self._take("["):
            return _one_character(self._parse_class())
        character = self._peek()
        self._position += 1
        if character == "\\":
            return _one_character(self._parse_escape())
        if character == ".":
            return _one_character(lambda value: value != "\n")
        return _one_character(lambda value: value == character)

    def _parse_group(self) -> _Part:
        self._group_depth += 1
        if self._group_depth > MAX_GROUP_DEPTH:
            raise _unsupported_error(self._key, f"it has more than {MAX_GROUP_DEPTH} nested groups")
        if self._take("?") and not self._take(":"):
            raise _unsupported_error(self._key, "it has a group with `(?`")
        part = self._parse_alternatives()
        if not self._take(")"):
            raise _unsupported_error(self._key, "it has a `(` without a `)`")
        self._group_depth -= 1
        return part

    def _parse_escape(self) -> Callable[[str], bool]:
        """Return whether a character matches the escape after a backslash."""
        escape = self._peek()
        self._position += 1
        if escape and escape in "dwsDWS":
            compiled = re.compile(f"\\{escape}")
            return lambda value: compiled.match(value) is not None
        if not escape or escape.isalnum():
            raise _unsupported_error(self._key, f"it has the escape `\\{escape}`")
        return lambda value: value == escape

    def _parse_class(self) -> Callable[[str], bool]:
        """Return whether a character is in the class after a `[`."""
        is_negated = self._take("^")
        tests: list[Callable[[str], bool]] = []
        while not self._take("]") or not tests:
            first = self._peek()
            if not first or first == "[":
                raise _unsupported_error(self._key, "it has a `[` without a `]`, or inside of one")
            self._position += 1
            if first == "\\":
                tests.append(self._parse_escape())
            elif self._peek() == "-" and self._text[self._position + 1 : self._position + 2] != "]":
                last = self._text[self._position + 1 : self._position + 2]
                if last < first or last in _SPECIAL:
                    raise _unsupported_error(self._key, "it has an invalid range of characters")
                self._position += 2
                tests.append(lambda value, first=first, last=last: first <= value <= last)
            else:
                tests.append(lambda value, first=first: value == first)
        return lambda value: any(test(value) for test in tests) != is_negated


def _one_character(test: Callable[[str], bool]) -> _Part:
    """Return the part of one character that passes a test."""

    def match(text: str, starts: frozenset[int]) -> frozenset[int]:
        return frozenset(start + 1 for start in starts if start < len(text) and test(text[start]))

    return _Part(match)


def _repeat(matcher: _Matcher, low: int, high: int | None) -> _Matcher:
    """Return a matcher of `low` to `high` repetitions, or of any number if `high` is None."""

    def match(text: str, starts: frozenset[int]) -> frozenset[int]:
        positions = starts
        for _ in range(low):
            positions = matcher(text, positions)
        # Only positions that are new can lead to further new ones.
        new = positions
        count = low
        while new and (high is None or count < high):
            new = matcher(text, new) - positions
            positions |= new
            count += 1
        return positions

    return match
