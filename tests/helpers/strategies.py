"""Hypothesis strategies for axis maps, and a reference evaluation with whole NumPy arrays."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.rows import parse_row
from prepcli.commands.testing.tiny_model import split_into_atoms


@st.composite
def axis_maps(draw, padding: bool = True) -> AxisMap:
    """Draw an axis map: merged, fixed and stacked atoms and unequal parts, in any order, over small extents."""
    free = [f"a{number}" for number in range(draw(st.integers(0, 4)))]
    stacked = [f"s{number}" for number in range(draw(st.integers(0, 2)))]
    fixed = [f"h{number}" for number in range(draw(st.integers(0, 2)))]
    sizes = {atom: draw(st.integers(1, 4)) for atom in [*free, *stacked, *fixed]} | {"b": 2, "c": 3}
    words = draw(
        st.permutations(
            [
                *free,
                *(
                    f"{fixed_atom}={draw(st.integers(0, sizes[fixed_atom] - 1))}"
                    for fixed_atom in fixed
                ),
            ]
        )
    )
    source = " ".join(draw(_dim_text(group)) for group in draw(_groups(words)))
    leaf = " ".join(
        _merged(group) for group in draw(_groups(draw(st.permutations([*free, *stacked]))))
    )
    name = ".".join(
        ["t", *(f"{{{stacked_atom}}}" for stacked_atom in draw(st.permutations(stacked)))]
    )
    padded = (
        {atom: sizes[atom] + draw(st.integers(0, 2)) for atom in [*free, *stacked]}
        if padding and draw(st.booleans())
        else {}
    )
    return bind_row(parse_row(f"{leaf} <- {name}: {source}"), sizes, padded)


def complete_tables() -> st.SearchStrategy[tuple[AxisMap, ...]]:
    """Draw axis maps that together take every element of their tensors: one for all, or several for parts."""
    return st.one_of(
        axis_maps(padding=False).filter(_uses_whole_tensors).map(lambda row: (row,)), fused_rows()
    )


def _uses_whole_tensors(row: AxisMap) -> bool:
    """Return whether the leaf of a row uses its tensors without gaps."""
    has_fixed = any(
        factor.fixed is not None and factor.extent > 1
        for dim in row.source_dims
        for factor in dim.factors
    )
    return not has_fixed and all(dim.extent == dim.selected_extent for dim in row.source_dims)


def _groups(words: list[str]) -> st.SearchStrategy[list[list[str]]]:
    """Cut words into groups at random places."""
    return st.lists(st.booleans(), min_size=len(words), max_size=len(words)).map(
        lambda cuts: _cut(words, cuts)
    )


def _cut(words: list[str], cuts: list[bool]) -> list[list[str]]:
    """Cut words before each marked word."""
    groups: list[list[str]] = []
    for word, starts_group in zip(words, cuts):
        if starts_group or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _merged(group: list[str]) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


@st.composite
def _dim_text(draw, group: list[str]) -> str:
    """Return a group as a dim, sometimes as one of several parts."""
    if draw(st.integers(0, 4)):
        return _merged(group)
    parts = [" ".join(group), "b", "c b"]
    order = draw(st.permutations(parts))
    return "(" + " | ".join(">" + p if p == parts[0] else p for p in order) + ")"


@st.composite
def fused_rows(draw) -> tuple[AxisMap, ...]:
    """Draw axis maps that split tensors into equal or unequal parts of one dim; each element is in exactly one part."""
    free = [f"a{index}" for index in range(draw(st.integers(1, 3)))]
    stacked = draw(st.sampled_from([[], ["s0"]]))
    sizes = {atom: draw(st.integers(1, 4)) for atom in [*free, *stacked]} | {
        "b": 2,
        "c": 3,
        "h": draw(st.integers(2, 3)),
    }
    dims = draw(_groups(free))
    split_dim = draw(st.integers(0, len(dims) - 1))
    if draw(st.booleans()):
        position = draw(st.integers(0, len(dims[split_dim])))
        parts = [
            (
                [*dims[split_dim][:position], f"h={index}", *dims[split_dim][position:]],
                dims[split_dim],
            )
            for index in range(sizes["h"])
        ]
        texts = [_merged(words) for words, _ in parts]
    else:
        parts = [
            (words, words) for words in draw(st.permutations([dims[split_dim], ["b"], ["c", "b"]]))
        ]
        part_words = [" ".join(words) for words, _ in parts]
        texts = [
            "("
            + " | ".join(">" * (index == number) + p for index, p in enumerate(part_words))
            + ")"
            for number in range(len(parts))
        ]
    rows = []
    for (_, atoms), text in zip(parts, texts):
        source = " ".join(
            [*map(_merged, dims[:split_dim]), text, *map(_merged, dims[split_dim + 1 :])]
        )
        leaf_atoms = [
            atom for number, dim in enumerate(dims) if number != split_dim for atom in dim
        ] + atoms
        leaf = " ".join(
            _merged(group)
            for group in draw(_groups(draw(st.permutations([*leaf_atoms, *stacked]))))
        )
        name = ".".join(["t", *(f"{{{stacked_atom}}}" for stacked_atom in stacked)])
        rows.append(bind_row(parse_row(f"{leaf} <- {name}: {source}"), sizes))
    return tuple(rows)


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Draw a box of a shape. It may be empty along a dim."""
    ranges = [
        sorted((draw(st.integers(0, extent)), draw(st.integers(0, extent)))) for extent in shape
    ]
    return tuple((start, stop) for start, stop in ranges)


def random_tensors(row: AxisMap, seed: int = 0) -> dict[str, np.ndarray]:
    """Return every source tensor of an axis map, with distinct nonzero elements."""
    names = [name for name, _ in row.tensors()]
    size = math.prod(row.source_shape)
    values = np.random.default_rng(seed).permutation(len(names) * size).astype(np.int32) + 1
    return {
        name: values[i * size : (i + 1) * size].reshape(row.source_shape)
        for i, name in enumerate(names)
    }


def leaf_by_numpy(row: AxisMap, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Compute a leaf with whole arrays: slice, reshape to atoms, index the fixed ones, transpose, pad, merge."""
    atoms = [factor for dim in row.leaf_dims for factor in dim]
    out = np.zeros([factor.extent for factor in atoms], np.int32)
    for name, stacked in row.tensors():
        values, names = split_into_atoms(row, tensors[name])
        order = [factor.atom for factor in atoms if factor.atom not in stacked]
        leaf_index = tuple(
            stacked[factor.atom]
            if factor.atom in stacked
            else slice(0, values.shape[names.index(factor.atom)])
            for factor in atoms
        )
        out[leaf_index] = values.transpose([names.index(atom) for atom in order])
    return out.reshape(row.leaf_shape)
