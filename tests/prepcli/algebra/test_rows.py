"""Rows of a map that cover each element of a tensor once, twice or not at all, and the bounds of this check."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from prepcli.algebra import rows as row_checks
from prepcli.algebra.axis_map import SizedAxis, TensorDim
from prepcli.algebra.rows import dims_are_disjoint
from prepcli.sources.maps import MAX_PAIRS, MapCoverage, bind_map, parse_map
from prepcli.sources.tensor_match import TensorInfo

LARGE = 1 << 24


def coverage_problems(text: str, **shapes: tuple[int, ...]) -> str:
    """Return the problems of the elements of a map for tensors of these shapes."""
    tensor_map = parse_map("own.map", text)
    sizes = {atom: int(line.value) for atom, line in tensor_map.sizes.items()}
    rows, _ = bind_map(tensor_map, sizes, {})
    tensors = {name: TensorInfo("float32", shape, 4) for name, shape in shapes.items()}
    coverage = MapCoverage(rows, tensors)
    coverage.check_elements()
    return "; ".join(coverage.problems)


def marked(dim: TensorDim) -> np.ndarray:
    """Return which indices of a dim are in a row: a box of its digits, made by NumPy."""
    digits = np.zeros([factor.extent for factor in dim.factors], bool)
    digits[tuple(slice(None) if f.fixed is None else f.fixed for f in dim.factors)] = True
    indices = np.zeros(dim.extent, bool)
    indices[dim.start : dim.start + digits.size] = digits.ravel()
    return indices


def random_dim(randomness: random.Random) -> TensorDim:
    factors: list[SizedAxis] = []
    for extent in randomness.choice([(12,), (2, 6), (6, 2), (3, 4), (4, 3), (2, 2, 3), (2, 3)]):
        fixed = randomness.choice([None, randomness.randrange(extent)])
        factors.append(SizedAxis("a", extent, fixed))
    return TensorDim(24, randomness.choice([0, 0, 0, 6, 12]), tuple(factors))


def test_dims_are_disjoint_agrees_with_marked_indices():
    randomness = random.Random(0)
    decisions = {True: 0, False: 0, None: 0}
    for _ in range(2000):
        a, b = random_dim(randomness), random_dim(randomness)
        decision = dims_are_disjoint(a, b)
        decisions[decision] += 1
        if decision is not None:
            assert decision == (not np.any(marked(a) & marked(b))), (a, b)
    assert min(decisions.values()) > 100


def test_interleaved_rows_of_a_long_dim_cover_it_once():
    text = "size v = 16777216\nsize side = 2\na: v <- x: (v side=0)\nb: v <- x: (v side={})\n"
    assert coverage_problems(text.format(1), x=(2 * LARGE,)) == ""
    assert "x is covered twice" in coverage_problems(text.format(0), x=(2 * LARGE,))


def test_rows_with_different_parts_of_a_dim_are_listed():
    text = """
    size two = 2
    size three = 3
    size four = 4
    a: three <- x: (>three two=0 | two)
    b: two <- x: (two | >two two=0 | two)
    c: two <- x: (three two=1 | >two)
    """
    problem = coverage_problems(text, x=(8,))
    assert "lines 5, 6, 7: x is covered twice" in problem
    swapped = text.replace("(two | >two two=0 | two)", "(two | >two two=1 | two)")
    assert "x is covered in part: 7 of 8 elements" in coverage_problems(swapped, x=(8,))


def test_comparison_of_long_dims_is_bounded():
    """Each row has another part of a long dim. Its index of the second dim makes it disjoint from the others."""
    count = 40
    rows = [f"size a = {LARGE - count}", f"size b = {count}"]
    rows += [f"size p{index} = {index}" for index in range(1, count + 1)]
    for index in range(count):
        before = f"p{index} | " if index else ""
        rows.append(f"t{index}: a <- x: ({before}>a | p{count - index}) b={index}")
    problem = coverage_problems("\n".join(rows), x=(LARGE, count))
    # The second dim decides, without lists.
    assert "x is covered in part" in problem
    twisted = [row.replace(f"b={count - 1}", "b=0") for row in rows]
    problem = coverage_problems("\n".join(twisted), x=(LARGE, count))
    assert "different parts of a long dim, which are not supported" in problem


def test_pairs_of_tensors_are_bounded():
    text = "size a = 2000\nsize b = 2000\nt.{a}: b <- s.{b}: a\n"
    problem = coverage_problems(text)
    assert f"the map has 4,000,000 pairs of tensors, at most {MAX_PAIRS:,}" in problem


def test_layers_with_rows_of_their_own_are_compared_once(monkeypatch: pytest.MonkeyPatch):
    text = "size f = 9\nsize d = 1\n"
    for layer, part in itertools.product(range(3), range(9)):
        text += f"t.{layer}.{part}: d <- s.{layer}: f={part} d\n"
    shapes = {f"s.{layer}": (9, 1) for layer in range(3)}
    # The rows of one layer have 36 pairs.
    monkeypatch.setattr(row_checks, "MAX_ROW_PAIRS", 36)
    assert coverage_problems(text, **shapes) == ""
    monkeypatch.setattr(row_checks, "MAX_ROW_PAIRS", 35)
    assert "is named by 9 rows, which are too many to compare" in coverage_problems(text, **shapes)
