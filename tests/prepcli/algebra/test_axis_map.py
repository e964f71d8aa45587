"""Rows of maps: every form is parsed and bound, invalid rows have an error, and rows cover each element once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from prepcli.algebra import rows as row_checks
from prepcli.algebra.axis_map import SizedAxis, TensorDim, TensorIndex, bind_row
from prepcli.algebra.rows import dims_are_disjoint, parse_row
from prepcli.core.errors import PrepError
from prepcli.sources.maps import MAX_PAIRS, MapCoverage, bind_map, parse_map
from prepcli.sources.tensor_match import TensorInfo

SIZES = {
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "embed": 8,
    "qkv": 3,
    "blocks": 2,
    "slot": 2,
}

FORMS = {  # row -> (shape of the leaf, shape of a tensor, names of the tensors)
    "embed <- norm: embed": ((8,), (8,), ["norm"]),
    "<- scale:": ((), (), ["scale"]),
    "1 embed 1 <- n: embed": ((1, 8, 1), (8,), ["n"]),
    "embed <- n: 1 embed": ((8,), (1, 8), ["n"]),
    "(1 embed) <- n: (embed 1)": ((8,), (8,), ["n"]),
    "heads head_dim embed <- q: (heads head_dim) embed": ((4, 6, 8), (24, 8), ["q"]),
    "(heads head_dim) embed <- q: embed heads head_dim": ((24, 8), (8, 4, 6), ["q"]),
    "layers embed <- h.{layers}.n: embed": ((3, 8), (8,), ["h.0.n", "h.1.n", "h.2.n"]),
    "embed layers <- h.{layers}.n: embed": ((8, 3), (8,), ["h.0.n", "h.1.n", "h.2.n"]),
    "embed <- h.{layers}.n: embed": ((8,), (8,), ["h.0.n", "h.1.n", "h.2.n"]),
    "layers <- h.{layers}.s:": ((3,), (), ["h.0.s", "h.1.s", "h.2.s"]),
    "blocks embed <- h.{blocks slot=1}.n: embed": ((2, 8), (8,), ["h.1.n", "h.3.n"]),
    "blocks slot embed <- h.{blocks slot}.n: embed": (
        (2, 2, 8),
        (8,),
        ["h.0.n", "h.1.n", "h.2.n", "h.3.n"],
    ),
    "layers embed <- h.{layers@local}.n: embed": ((2, 8), (8,), ["h.1.n", "h.4.n"]),
    "layers embed <- h.{ layers @ local }.n: embed": ((2, 8), (8,), ["h.1.n", "h.4.n"]),
    "kv layers embed <- h.{layers}.{kv of key value}: embed": (
        (2, 3, 8),
        (8,),
        ["h.0.key", "h.0.value", "h.1.key", "h.1.value", "h.2.key", "h.2.value"],
    ),
    "layers blocks <- h.{layers}.e.{blocks}:": (
        (3, 2),
        (),
        ["h.0.e.0", "h.0.e.1", "h.1.e.0", "h.1.e.1", "h.2.e.0", "h.2.e.1"],
    ),
    "heads embed <- c: embed (qkv=1 heads)": ((4, 8), (8, 12), ["c"]),
    "heads embed <- c: embed (heads qkv=2)": ((4, 8), (8, 12), ["c"]),
    "embed <- c: embed qkv=2": ((8,), (8, 3), ["c"]),
    "heads <- c: (>heads head_dim=5 | kv_heads | 1)": ((4,), (27,), ["c"]),
    "heads <- c: ( kv_heads | > heads)": ((4,), (6,), ["c"]),
}


@pytest.mark.parametrize("text", FORMS)
def test_bound_axis_map_has_shapes_and_tensor_names(text: str):
    leaf, source, names = FORMS[text]
    row = bind_row(parse_row(text), SIZES | {"local": [1, 4]})
    assert (row.leaf_shape, row.source_shape) == (leaf, source)
    assert [name for name, _ in row.tensors()] == names
    assert all(row.tensor_name(indices) == name for name, indices in row.tensors())


@pytest.mark.parametrize(
    ("parts", "start", "length"),
    [
        (">heads head_dim|kv_heads head_dim|1", 0, 24),
        ("heads head_dim|>kv_heads head_dim|1", 24, 12),
    ],
)
def test_unequal_parts_are_consecutive_in_dim(parts: str, start: int, length: int):
    marked = parts.split(">")[1].split("|")[0]
    (dim,) = bind_row(parse_row(f"{marked} <- c: ({parts})"), SIZES).source_dims
    assert (dim.extent, dim.start, dim.selected_extent) == (24 + 12 + 1, start, length)


def test_fixed_atom_selects_one_of_equal_parts():
    (_, dim) = bind_row(
        parse_row("heads head_dim embed <- c: embed (qkv=2 heads head_dim)"), SIZES
    ).source_dims
    assert dim.factors == (SizedAxis("qkv", 3, 2), SizedAxis("heads", 4), SizedAxis("head_dim", 6))
    assert (dim.extent, dim.start, dim.selected_extent) == (72, 0, 72)


def test_bind_row_pads_leaf_only():
    row = bind_row(
        parse_row("vocab embed <- wte: vocab embed"), SIZES | {"vocab": 11}, {"vocab": 16}
    )
    assert (row.leaf_shape, row.source_shape) == ((16, 8), (11, 8))


def test_atom_only_in_braces_is_unscanned():
    row = bind_row(parse_row("embed <- h.{layers}.e.{blocks slot=0}.n: embed"), SIZES)
    assert (
        [f.atom for f in row.stacked_factors]
        == ["layers", "blocks"]
        == [f.atom for f in row.unscanned_factors]
    )
    assert bind_row(parse_row("layers embed <- h.{layers}.n: embed"), SIZES).unscanned_factors == ()


def test_tensor_index_counts_last_atom_fastest():
    tensor_index = TensorIndex((SizedAxis("blocks", 2), SizedAxis("slot", 3, 1)))
    assert [tensor_index.resolve({"blocks": i}) for i in range(2)] == [1, 4]


INVALID_ROWS = {  # row -> part of the reason
    "embed embed": "not of the form",
    "embed <- a <- b: embed": "not of the form",
    "embed <- norm embed": "not of the form",
    "embed: a <- norm": "not of the form",
    "a-b <- t: a": "`a-b` is not a valid atom name",
    "a=1 <- t: a": "`a=1` is not a valid atom name",
    "(>a | b) <- t: a b": "is not a valid atom name",
    "(a b <- t: a b": "parentheses do not match",
    "a b <- t: a b)": "parentheses do not match",
    "a b <- t: ((a) b)": "parentheses do not match",
    "a <- t: (a | b)": "exactly one of several parts",
    "a <- t: (>a | >b)": "exactly one of several parts",
    "a <- t: >a": "exactly one of several parts",
    "a <- t: (>a | )": "a part of a dim is empty",
    "a <- t: a=": "`a=` is neither an atom (an axis name such as `heads`) nor",
    "a <- t: a b=-1": "`b=-1` is neither an atom (an axis name such as `heads`) nor",
    "a <- t: a b=c": "`b=c` is neither an atom (an axis name such as `heads`) nor",
    "a <- t: a.b": "`a.b` is neither an atom (an axis name such as `heads`) nor",
    "a <- : a": "name is empty",
    "a <- t u: a": "has a space",
    "a <- t\tu: a": "has a space",
    "a <- t.{a: a": "braces that do not match",
    "a <- t.a}: a": "braces that do not match",
    "a <- t.{a{b}}: a": "braces that do not match",
    "a <- t.{}: a": "has no atom",
    "a <- t.{@local}: a": "has no atom",
    "a b <- t.{a b@local}:": "`@` and `of` follow one atom without an index",
    "a <- t.{a=1@local}: a": "`@` and `of` follow one atom without an index",
    "a b <- t.{a b of k v}:": "`@` and `of` follow one atom without an index",
    "a <- t: a / b": "its scale `/ b` is not of the form `/ sqrt(atom)`",
    "a <- t: a / sqrt(b) c": "its scale `/ sqrt(b) c` is not of the form `/ sqrt(atom)`",
    "a <- t: a * sqrt(a)": "its scale `* sqrt(a)` is not of the form",
    "a <- t: a + b": "its scale `+ b` is not of the form",
    "a a <- t: a": "`a` appears twice",
    "a <- t: a a": "`a` appears twice",
    "a <- t.{a}: a": "`a` appears twice",
    "a b <- t: a": "`b` appears on one side only",
    "a <- t: a b": "`b` appears on one side only",
    "a b <- t: a b=1": "`b` appears on one side only",
    "a b <- t: (>a | b)": "`b` appears on one side only",
}


@pytest.mark.parametrize("text", INVALID_ROWS)
def test_parse_row_rejects_invalid_row(text: str):
    with pytest.raises(PrepError) as caught:
        parse_row(text)
    assert caught.value.what == f"invalid row `{text.strip()}`"
    assert INVALID_ROWS[text] in caught.value.why


INVALID_SIZES = {  # row -> (sizes, padded, part of the reason)
    "vocab <- t: vocab": ({}, {}, "the atom `vocab` has no size"),
    "embed <- t: (>embed | rest)": ({}, {}, "the atom `rest` has no size"),
    "embed <- t.{vocab}: embed": ({}, {}, "the atom `vocab` has no size"),
    "embed local <- t: embed local": ({"local": [1, 4]}, {}, "the atom `local` has no size"),
    "layers <- t.{layers@local}:": ({}, {}, "no index list `local`"),
    "layers <- t.{layers@embed}:": ({}, {}, "no index list `embed`"),
    "heads <- t: (qkv=3 heads)": ({}, {}, "`qkv=3` is out of range: the size is 3"),
    "heads <- t.{slot=2}: heads": ({}, {}, "`slot=2` is out of range: the size is 2"),
    "heads <- t: (>heads | slot=2)": ({}, {}, "`slot=2` is out of range: the size is 2"),
    "embed heads <- t: embed heads": (
        {},
        {"heads": 3},
        "`heads` has size 4 and cannot be padded to 3, which is smaller",
    ),
}


@pytest.mark.parametrize("text", INVALID_SIZES)
def test_bind_row_rejects_invalid_sizes(text: str):
    sizes, padded, reason = INVALID_SIZES[text]
    with pytest.raises(PrepError) as caught:
        bind_row(parse_row(text), SIZES | sizes, padded)
    assert caught.value.what == f"invalid row `{text}`"
    assert reason in caught.value.why


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
