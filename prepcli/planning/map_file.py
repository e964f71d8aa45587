"""The text of a tensor map: the rows of a user, from the tensors of a checkpoint to the tensors of a model.

    # Comments are allowed on lines of their own, and after a space.
    family llama
    size half = 2
    size ffn = intermediate_size
    drop *.inv_freq
    model.embed_tokens.weight: vocab embed <- tok.w: vocab embed
    model.layers.{layers}.mlp.up_proj.weight: ffn embed <- h.{layers}.fused: (half=1 ffn) embed

A row has the target on its left and the tensor of the checkpoint on its right. Both are written as the right side of
a family's row (`prepcli.algebra.axis_map`): each may be stacked, transposed, merged or a part of a fused tensor.

- `family` names the family of the targets. They then have the names of its Hugging Face tensors, and its atoms have
  sizes. Without it, the targets are the tensors of a verbatim output.
- `size` gives an atom its size: a number, a key of config.json, or numbers and keys with `*` and `/` between them.
  Numbers with commas are an index list for `{atom@list}`.
- `drop` ignores the tensors of the checkpoint with names that match a pattern.

No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from prepcli.algebra.axis_map import row_error
from prepcli.algebra.row_text import ParsedTensor, parse_tensor
from prepcli.core.errors import Command, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.models.parameters import MAX_AXIS_SIZE

MAX_NBYTES = 4 << 20
MAX_LINES = 20_000
# Each pattern is compared with the names of all tensors.
MAX_DROPS = 1_000
# Longer lines are no rows of a model, and their patterns would take long to parse.
MAX_LINE_CHARS = 2_000
# A message lists at most this many problems.
MAX_PROBLEMS = 20
ARROW = "<-"


@dataclass(frozen=True, slots=True)
class ParsedMapRow:
    """A row of a map, before its atoms have sizes.

    Attributes:
        line: Number of its line, from 1.
        text: The row as written.
        target: The tensor of the model.
        source: The tensor of the checkpoint.
    """

    line: int
    text: str
    target: ParsedTensor
    source: ParsedTensor


@dataclass(frozen=True, slots=True)
class MapLine:
    """The value of a `size` or `drop` line."""

    line: int
    value: str


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A parsed map.

    Attributes:
        name: Name of the file in messages.
        content: Text of the file.
        family: Name of the family, or "".
        sizes: Text of the size of each atom.
        drops: Patterns of tensors to ignore.
        rows: The rows.
    """

    name: str
    content: str
    family: str = ""
    sizes: Mapping[str, MapLine] = field(default_factory=dict)
    drops: tuple[MapLine, ...] = ()
    rows: tuple[ParsedMapRow, ...] = ()


def parse_map(name: str, content: str) -> TensorMap:
    """Parse the text of a map.

    Args:
        name: Name of the file, for messages.
        content: Text of the file.

    Raises:
        PrepError: Lines are malformed. The error lists them with their numbers.
    """
    lines = content.splitlines()
    if len(content) > MAX_NBYTES or len(lines) > MAX_LINES:
        why = f"a map has at most {MAX_LINES:,} lines and {MAX_NBYTES >> 20} MiB"
        raise map_error(name, [why])
    parser = _MapParser(name, content)
    for number, line in enumerate(lines, start=1):
        statement = re.sub(r"(^|\s)#.*", "", line).strip()
        if statement:
            parser.read(number, statement)
    if not parser.rows and not parser.problems:
        parser.problems.append(f"it has no row `target: dims {ARROW} tensor: dims`")
    if parser.problems:
        raise map_error(name, parser.problems)
    return TensorMap(
        name, content, parser.family, parser.sizes, tuple(parser.drops), tuple(parser.rows)
    )


def map_error(name: str, problems: list[str]) -> PrepError:
    """Return one error with all problems of a map."""
    shown = problems[:MAX_PROBLEMS]
    if len(problems) > len(shown):
        shown.append(f"{len(problems) - len(shown):,} more")
    hint = text("{} explains the lines of a map", Command("docs", "map"))
    return PrepError(f"the map {name} is not valid", "; ".join(shown), hint)


class _MapParser:
    """The lines of a map that were read so far, and their problems."""

    def __init__(self, name: str, content: str) -> None:
        self.name = name
        self.content = content
        self.family = ""
        self.sizes: dict[str, MapLine] = {}
        self.drops: list[MapLine] = []
        self.rows: list[ParsedMapRow] = []
        self.problems: list[str] = []

    def read(self, line: int, statement: str) -> None:
        """Read a line without its comment."""
        try:
            self._read_statement(line, statement)
        except PrepError as error:
            self.problems.append(f"line {line}: {error.why}")

    def _read_statement(self, line: int, statement: str) -> None:
        if len(statement) > MAX_LINE_CHARS:
            raise row_error("", f"it has more than {MAX_LINE_CHARS:,} characters")
        keyword, _, value = statement.partition(" ")
        if ARROW in statement:
            self.rows.append(_parse_map_row(line, statement))
        elif keyword == "family" and value:
            if self.family:
                raise row_error(statement, "the family is named twice")
            self.family = value.strip()
        elif keyword == "size" and "=" in value:
            self._read_size(line, value)
        elif keyword == "drop" and value:
            if len(self.drops) == MAX_DROPS:
                raise row_error(statement, f"a map has at most {MAX_DROPS:,} `drop` lines")
            self.drops.append(MapLine(line, value.strip()))
        else:
            why = f"`{statement:.60}` is no row, and no `family`, `size` or `drop` line"
            raise row_error(statement, why)

    def _read_size(self, line: int, value: str) -> None:
        atom, _, size = value.partition("=")
        atom = atom.strip()
        if not atom.isidentifier():
            raise row_error(value, f"`{atom:.60}` is not a valid atom name")
        if atom in self.sizes:
            first = self.sizes[atom].line
            raise row_error(
                value, f"the atom `{atom}` has two sizes, the first one in line {first}"
            )
        self.sizes[atom] = MapLine(line, size.strip())


def _parse_map_row(line: int, statement: str) -> ParsedMapRow:
    """Parse `target: dims <- tensor: dims`."""
    if statement.count(ARROW) != 1:
        raise row_error(statement, f"it has several `{ARROW}`")
    left, right = statement.split(ARROW)
    row = ParsedMapRow(
        line, statement, parse_tensor(statement, left), parse_tensor(statement, right)
    )
    for tensor in (row.target, row.source):
        atoms = tensor.free_atoms
        repeated = {atom for atom in atoms if atoms.count(atom) > 1}
        if repeated:
            raise row_error(statement, f"`{min(repeated)}` appears twice on one side")
    unmatched = {*row.target.free_atoms} ^ {*row.source.free_atoms}
    if unmatched:
        raise row_error(statement, f"`{min(unmatched)}` appears on one side only")
    return row


def compute_size(value: str, config: HFConfig) -> int | tuple[int, ...]:
    """Return the size that a `size` line gives, or an index list.

    >>> compute_size("hidden_size / heads", {"hidden_size": 64, "heads": 4}), compute_size("3,5", {})
    (16, (3, 5))

    Raises:
        ValueError: It is no size, with the reason.
    """
    if "," in value:
        numbers = [number.strip() for number in value.split(",")]
        if not all(number.isdecimal() and len(number) < 10 for number in numbers):
            raise ValueError(f"`{value:.60}` is not a list of numbers")
        return tuple(map(int, numbers))
    words = re.split(r"\s*([*/])\s*", value)
    size = _term_size(words[0], config)
    for operator, word in zip(words[1::2], words[2::2]):
        factor = _term_size(word, config)
        if operator == "*":
            size *= factor
        elif size % factor:
            raise ValueError(f"{size} is not divisible by {factor}")
        else:
            size //= factor
        _check_size(size, value)
    return size


def _term_size(word: str, config: HFConfig) -> int:
    """Return a number, or the number at a dotted key of the config."""
    if word.isdecimal() and len(word) < 20:
        return _check_size(int(word), word)
    value: object = config
    for key in word.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        raise ValueError(f"config.json has no `{word:.60}`")
    return _check_size(value, word)


def _check_size(value: object, word: str) -> int:
    if type(value) is not int or not 1 <= value <= MAX_AXIS_SIZE:
        raise ValueError(f"`{word:.60}` is {value!r:.40}, not a number from 1 to {MAX_AXIS_SIZE:,}")
    return value
