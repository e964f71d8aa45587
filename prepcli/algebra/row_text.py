"""The text of axis maps. `axis_map` explains the notation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from prepcli.algebra.axis_map import (
    AtomDims,
    NamePattern,
    ParsedAxisMap,
    RowScale,
    SourceDim,
    Term,
    row_error,
)


# A command parses the rows of its family several times. The cache is bounded, because other rows are made for the
# tensors of one checkpoint.
@lru_cache(maxsize=4096)
def parse_row(text: str) -> ParsedAxisMap:
    """Parse `leaf dims <- name: tensor dims`.

    Args:
        text: An axis map in the notation of `axis_map`.

    Returns:
        The axis map without sizes.

    Raises:
        PrepError: The text is malformed. The error quotes it and the reason.
    """
    if text.count("<-") != 1 or ":" not in text.partition("<-")[2]:
        raise row_error(text, "it is not of the form `leaf dims <- name: tensor dims`")
    left, right = text.split("<-")
    right, scale = _split_scale(right)
    tensor = parse_tensor(text, right)
    row = ParsedAxisMap(
        text=text,
        leaf_dims=_parse_leaf_dims(text, left),
        name_parts=tensor.name_parts,
        source_dims=tensor.dims,
        scale=_parse_scale(text, scale),
    )
    _check_atoms(row)
    return row


@dataclass(frozen=True, slots=True)
class ParsedTensor:
    """The text `name: dims` of a tensor, parsed.

    Attributes:
        name_parts: Pieces of the name, and the patterns in braces between them.
        dims: Dims of the tensor.
    """

    name_parts: tuple[str | NamePattern, ...]
    dims: tuple[SourceDim, ...]

    @property
    def free_atoms(self) -> tuple[str, ...]:
        """Atoms without a fixed index, in the name and in the selected part of each dim."""
        atoms: list[str] = []
        for part in self.name_parts:
            if isinstance(part, NamePattern):
                atoms += _unfixed_atoms(part.terms)
        for dim in self.dims:
            atoms += _unfixed_atoms(dim.parts[dim.selected])
        return tuple(atoms)


def parse_tensor(row: str, tensor: str) -> ParsedTensor:
    """Parse `name: dims`, the right side of a row.

    Args:
        row: The whole row, for messages.
        tensor: The text of the tensor.

    Raises:
        PrepError: The text is malformed.
    """
    if ":" not in tensor:
        raise row_error(row, f"`{tensor.strip()}` is not of the form `name: dims`")
    name, dims = tensor.rsplit(":", 1)
    return ParsedTensor(
        _parse_name(row, name.strip()),
        tuple(_parse_source_dim(row, dim) for dim in _split_dims(row, dims)),
    )


def _split_scale(right: str) -> tuple[str, str]:
    """Split the right side of a row into its tensor and its scale.

    >>> _split_scale("w: heads head_dim / sqrt(head_dim)")
    ('w: heads head_dim', '/ sqrt(head_dim)')
    """
    match = re.search(r" [/*+] .*$", right)
    if match is None:
        return right, ""
    return right[: match.start()], match[0].strip()


def _parse_scale(text: str, scale: str) -> RowScale | None:
    """Parse the scale of a row. None without a scale."""
    if not scale:
        return None
    if match := re.fullmatch(r"/ sqrt\((\w+)\)", scale):
        return RowScale(match[1])
    if match := re.fullmatch(r"\* (float32|bfloat16)\(sqrt\((\w+)\)\)", scale):
        return RowScale(match[2], power=-1, root_dtype=match[1])
    if match := re.fullmatch(r"\+ (\d+)", scale):
        return RowScale(offset=int(match[1]))
    forms = "`/ sqrt(atom)`, `* float32(sqrt(atom))` or `+ 1`"
    raise row_error(text, f"its scale `{scale}` is not of the form {forms}")


def _parse_leaf_dims(text: str, dims: str) -> AtomDims:
    """Parse the dims of the leaf, e.g. `embed (heads head_dim)`."""
    leaf_dims: list[tuple[str, ...]] = []
    for item in _split_dims(text, dims):
        # A dim written as `1` has no atoms. Its extent is the empty product, 1.
        atoms = tuple(word for word in item.strip("()").split() if word != "1")
        leaf_dims.append(atoms)
    for atom in itertools.chain.from_iterable(leaf_dims):
        if not atom.isidentifier():
            raise row_error(text, f"`{atom}` is not a valid atom name")
    return tuple(leaf_dims)


def _split_dims(text: str, dims: str) -> list[str]:
    """Split dims at spaces outside of parentheses."""
    # E.g. `heads (a b) 1` -> "heads", "(a b)" and "1". The pattern skips a lone parenthesis, so the items
    # then lack a character of the text.
    items = re.findall(r"\([^()]*\)|[^\s()]+", dims)
    if re.sub(r"\s", "", "".join(items)) != re.sub(r"\s", "", dims):
        raise row_error(text, "its parentheses do not match")
    return items


def _parse_source_dim(text: str, item: str) -> SourceDim:
    """Parse one dim of the tensor."""
    # E.g. `(>a b | c b)` has the parts `>a b` and `c b`. The first one is marked.
    parts = [part.strip() for part in item.strip("()").split("|")]
    marked = [i for i, part in enumerate(parts) if part.startswith(">")]
    # One part needs no mark, several need exactly one.
    if len(marked) != (len(parts) > 1):
        raise row_error(text, "exactly one of several parts of a dim must be marked with `>`")
    if len(parts) > 1 and not all(part.strip("> ") for part in parts):
        raise row_error(text, "a part of a dim is empty")
    terms = tuple(_parse_terms(text, part.lstrip(">")) for part in parts)
    return SourceDim(terms, selected=marked[0] if marked else 0)


def _parse_terms(text: str, words: str) -> tuple[Term, ...]:
    """Parse atoms, each with its index if it has one, e.g. `heads gate=0`."""
    terms = []
    for word in words.split():
        atom, equals, index = word.partition("=")
        if word == "1":
            continue
        if not atom.isidentifier() or (equals and not index.isdecimal()):
            raise row_error(
                text, f"`{word}` is neither an atom (an axis name such as `heads`) nor `atom=index`"
            )
        terms.append(Term(atom, int(index) if equals else None))
    return tuple(terms)


def _parse_name(text: str, name: str) -> tuple[str | NamePattern, ...]:
    """Parse the tensor name into plain text and patterns in braces."""
    # Plain text is at even positions, the content of braces at odd ones.
    pieces = re.split(r"{([^{}]*)}", name)
    if any(re.search(r"[{}\s]", piece) for piece in pieces[::2]) or not name:
        raise row_error(text, "its tensor name is empty, has a space, or braces that do not match")
    parts: list[str | NamePattern] = []
    for position, piece in enumerate(pieces):
        if position % 2:
            parts.append(_parse_name_pattern(text, piece))
        elif piece:
            parts.append(piece)
    return tuple(parts)


def _parse_name_pattern(text: str, content: str) -> NamePattern:
    """Parse the content of one pair of braces, e.g. `layers` or `layers@moe_layers`."""
    atoms, _, names = content.partition(" of ")
    atoms, _, index_list = atoms.partition("@")
    pattern = NamePattern(_parse_terms(text, atoms), index_list.strip(), words=tuple(names.split()))
    is_one_free_atom = len(pattern.terms) == 1 and pattern.terms[0].fixed is None
    if not pattern.terms:
        raise row_error(text, f"`{{{content}}}` has no atom")
    if pattern.has_own_size and not is_one_free_atom:
        raise row_error(text, f"`{{{content}}}`: `@` and `of` follow one atom without an index")
    return pattern


def _check_atoms(row: ParsedAxisMap) -> None:
    """Raise PrepError unless each atom appears once on each side.

    Terms with a fixed index (`gate=0`) do not count. An atom in braces (`{layers}`) may be missing in the leaf.
    """
    leaf_atoms = [*itertools.chain.from_iterable(row.leaf_dims)]
    name_atoms: list[str] = []
    for part in row.name_parts:
        if isinstance(part, NamePattern):
            name_atoms += _unfixed_atoms(part.terms)
    dim_atoms: list[str] = []
    for dim in row.source_dims:
        dim_atoms += _unfixed_atoms(dim.parts[dim.selected])
    source_atoms = name_atoms + dim_atoms
    for atoms in (leaf_atoms, source_atoms):
        if repeated := {a for a in atoms if atoms.count(a) > 1}:
            raise row_error(row.text, f"`{min(repeated)}` appears twice on one side")
    if unmatched := set(leaf_atoms) ^ set(source_atoms) - (set(name_atoms) - set(leaf_atoms)):
        raise row_error(row.text, f"`{min(unmatched)}` appears on one side only")


def _unfixed_atoms(terms: Iterable[Term]) -> list[str]:
    return [term.atom for term in terms if term.fixed is None]
