"""Hypothesis strategies for axis maps, and the slow obvious evaluator that they are judged by."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from trainer.models.axis_map import AxisMap, Factor, bind_row, parse_row


@st.composite
def axis_maps(draw, padding: bool = True) -> AxisMap:
    """Random rows: merged, held, stacked and unequal parts, in any order, over small extents."""
    free = [f"a{i}" for i in range(draw(st.integers(0, 4)))]
    stacked = [f"s{i}" for i in range(draw(st.integers(0, 2)))]
    held = [f"h{i}" for i in range(draw(st.integers(0, 2)))]
    sizes = {a: draw(st.integers(1, 4)) for a in [*free, *stacked, *held]} | {"b": 2, "c": 3}
    words = draw(st.permutations([*free, *(f"{h}={draw(st.integers(0, sizes[h] - 1))}" for h in held)]))
    source = " ".join(draw(_dim_text(group)) for group in draw(_groups(words)))
    leaf = " ".join(_merged(group) for group in draw(_groups(draw(st.permutations([*free, *stacked])))))
    name = ".".join(["t", *(f"{{{s}}}" for s in draw(st.permutations(stacked)))])
    padded = (
        {a: sizes[a] + draw(st.integers(0, 2)) for a in [*free, *stacked]} if padding and draw(st.booleans()) else {}
    )
    return bind_row(parse_row(f"{leaf} <- {name}: {source}"), sizes, padded)


def complete_tables() -> st.SearchStrategy[tuple[AxisMap, ...]]:
    """Rows that leave nothing of their tensors over, as a family's table does: one that takes all, or several parts."""
    return st.one_of(axis_maps(padding=False).filter(_uses_whole_tensors).map(lambda row: (row,)), fused_rows())


def _uses_whole_tensors(row: AxisMap) -> bool:
    held = any(f.fixed is not None and f.extent > 1 for d in row.source_dims for f in d.factors)
    return not held and all(d.extent == d.selected_extent for d in row.source_dims)


def _groups(words: list[str]) -> st.SearchStrategy[list[list[str]]]:
    return st.lists(st.booleans(), min_size=len(words), max_size=len(words)).map(lambda cuts: _cut(words, cuts))


def _cut(words: list[str], cuts: list[bool]) -> list[list[str]]:
    groups: list[list[str]] = []
    for word, apart in zip(words, cuts):
        if apart or not groups:
            groups.append([])
        groups[-1].append(word)
    return groups


def _merged(group: list[str]) -> str:
    return group[0] if len(group) == 1 else f"({' '.join(group)})"


@st.composite
def _dim_text(draw, group: list[str]) -> str:
    if draw(st.integers(0, 4)):
        return _merged(group)
    parts = [" ".join(group), "b", "c b"]
    order = draw(st.permutations(parts))
    return "(" + " | ".join(">" + p if p == parts[0] else p for p in order) + ")"


@st.composite
def fused_rows(draw) -> tuple[AxisMap, ...]:
    """Rows that take tensors apart, in equal or unequal parts of one dim: every element is in exactly one of them."""
    free = [f"a{i}" for i in range(draw(st.integers(1, 3)))]
    stacked = draw(st.sampled_from([[], ["s0"]]))
    sizes = {a: draw(st.integers(1, 4)) for a in [*free, *stacked]} | {"b": 2, "c": 3, "h": draw(st.integers(2, 3))}
    dims = draw(_groups(free))
    cut = draw(st.integers(0, len(dims) - 1))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(dims[cut])))
        parts = [([*dims[cut][:at], f"h={i}", *dims[cut][at:]], dims[cut]) for i in range(sizes["h"])]
        texts = [_merged(words) for words, _ in parts]
    else:
        parts = [(words, words) for words in draw(st.permutations([dims[cut], ["b"], ["c", "b"]]))]
        joined = [" ".join(words) for words, _ in parts]
        texts = ["(" + " | ".join(">" * (i == n) + p for i, p in enumerate(joined)) + ")" for n in range(len(parts))]
    rows = []
    for (_, atoms), text in zip(parts, texts):
        source = " ".join([*map(_merged, dims[:cut]), text, *map(_merged, dims[cut + 1 :])])
        inside = [a for n, dim in enumerate(dims) if n != cut for a in dim] + atoms
        leaf = " ".join(_merged(group) for group in draw(_groups(draw(st.permutations([*inside, *stacked])))))
        name = ".".join(["t", *(f"{{{s}}}" for s in stacked)])
        rows.append(bind_row(parse_row(f"{leaf} <- {name}: {source}"), sizes))
    return tuple(rows)


@st.composite
def boxes(draw, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """A random box of a shape; it may be empty in a dim."""
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return tuple((low, high) for low, high in ends)


def random_tensors(row: AxisMap, seed: int = 0) -> dict[str, np.ndarray]:
    """Every source tensor of a row; no two elements of them are equal, none is 0."""
    names = [name for name, _ in row.tensors()]
    size = math.prod(row.source_shape)
    values = np.random.default_rng(seed).permutation(len(names) * size).astype(np.int32) + 1
    return {name: values[i * size : (i + 1) * size].reshape(row.source_shape) for i, name in enumerate(names)}


def leaf_by_numpy(row: AxisMap, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """The leaf by whole-array NumPy: take the part, reshape to atoms, choose the held ones, transpose, pad, merge."""
    atoms = [f for dim in row.leaf_dims for f in dim]
    out = np.zeros([f.extent for f in atoms], np.int32)
    for name, at in row.tensors():
        values, names = split_into_atoms(row, tensors[name])
        order = [f.atom for f in atoms if f.atom not in at]
        place = tuple(at[f.atom] if f.atom in at else slice(0, values.shape[names.index(f.atom)]) for f in atoms)
        out[place] = values.transpose([names.index(a) for a in order])
    return out.reshape(row.leaf_shape)


def split_into_atoms(row: AxisMap, tensor: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """What a row has of a tensor, a dim for each atom, as a view; and the atoms."""
    part = tensor[tuple(slice(d.start, d.start + d.selected_extent) for d in row.source_dims)]
    factors: list[Factor] = [f for dim in row.source_dims for f in dim.factors]
    values = part.reshape([f.extent for f in factors])
    values = values[tuple(slice(None) if f.fixed is None else f.fixed for f in factors)]
    return values, [f.atom for f in factors if f.fixed is None]
