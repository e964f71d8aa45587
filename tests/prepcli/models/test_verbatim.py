"""Leaves of the verbatim family: runs of numbers, products, unequal tensors, and paths."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import Family, parameter_rows
from prepcli.models.verbatim import (
    CANNOT_TRAIN,
    TensorTypes,
    recorded_family,
    stacked_numbers,
    verbatim_family,
)


def matrices(*names: str, dtype: str = "float32") -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the types of tensors of one shape."""
    return dict.fromkeys(names, (dtype, (4, 4)))


def tensors_by_leaf(family: Family, *, scan: bool = True) -> dict[str, list[str]]:
    """Return the names of the tensors of each leaf, by its path."""
    leaves: dict[str, list[str]] = {}
    for path, row in parameter_rows(family, {}, scan).items():
        bound = bind_row(row, family.sizes({}))
        assert path.format() not in leaves
        leaves[path.format()] = [name for name, _ in bound.tensors()]
    return leaves


def test_numbered_tensors_form_one_leaf():
    family = verbatim_family(matrices("h.0.w", "h.2.w", "h.10.w", "head"))
    assert tensors_by_leaf(family) == {"h.*.w": ["h.0.w", "h.2.w", "h.10.w"], "head": ["head"]}
    assert stacked_numbers(family) == {"h.*.w": [[0, 2, 10]]}
    rows = parameter_rows(family, {})
    assert bind_row(rows["h.*.w"], family.sizes({})).leaf_shape == (3, 4, 4)


def test_experts_stack_below_layers():
    names = [f"l.{layer}.e.{expert}.w" for layer in (1, 2) for expert in range(3)]
    family = verbatim_family(matrices(*names))
    assert tensors_by_leaf(family) == {"l.*.e.*.w": names}
    unstacked = tensors_by_leaf(family, scan=False)
    assert unstacked == {"l.1.e.*.w": names[:3], "l.2.e.*.w": names[3:]}
    assert stacked_numbers(family, scan=False) == {
        "l.1.e.*.w": [[0, 1, 2]],
        "l.2.e.*.w": [[0, 1, 2]],
    }


def test_layers_with_unequal_experts_form_two_leaves():
    experts = {0: 2, 1: 4, 2: 2}
    names = [f"l.{layer}.e.{i}.w" for layer, count in experts.items() for i in range(count)]
    leaves = tensors_by_leaf(verbatim_family(matrices(*names)))
    assert leaves == {
        "l.*.e.*.w": ["l.0.e.0.w", "l.0.e.1.w", "l.2.e.0.w", "l.2.e.1.w"],
        "l.1.e.*.w": ["l.1.e.0.w", "l.1.e.1.w", "l.1.e.2.w", "l.1.e.3.w"],
    }


def test_other_dtypes_and_shapes_form_other_leaves():
    tensors = matrices("h.0.w", "h.1.w") | matrices("h.2.w", "h.3.w", dtype="int8")
    tensors |= {"h.4.w": ("int8", (4,))}
    leaves = tensors_by_leaf(verbatim_family(tensors))
    assert leaves == {
        "h.*.w": ["h.0.w", "h.1.w"],
        "h.*.w~2": ["h.2.w", "h.3.w"],
        "h.4.w": ["h.4.w"],
    }


def test_third_number_stays_in_the_path():
    names = [f"a.{i}.b.{j}.c.{k}" for i in range(2) for j in range(2) for k in range(2)]
    leaves = tensors_by_leaf(verbatim_family(matrices(*names)))
    assert sorted(leaves) == ["a.*.b.*.c.0", "a.*.b.*.c.1"]


def test_tensor_named_like_a_stack_keeps_its_name():
    family = verbatim_family(matrices("a.*.b", "a.0.b", "a.1.b"))
    assert tensors_by_leaf(family) == {"a.*.b": ["a.*.b"], "a.*.b~2": ["a.0.b", "a.1.b"]}
    assert tensors_by_leaf(family, scan=False) == {
        name: [name] for name in ("a.*.b", "a.0.b", "a.1.b")
    }


@pytest.mark.parametrize("scan", [True, False])
def test_name_that_ends_with_a_slash_has_another_path(scan: bool):
    family = verbatim_family(matrices("a", "a/", "a/~2", "/"))
    assert tensors_by_leaf(family, scan=scan) == {
        "a": ["a"],
        "a/~3": ["a/"],
        "a/~2": ["a/~2"],
        "/~2": ["/"],
    }


def test_stack_of_names_that_end_with_a_slash_has_another_path():
    family = verbatim_family(matrices("h.0.w/", "h.1.w/"))
    assert tensors_by_leaf(family) == {"h.*.w/~2": ["h.0.w/", "h.1.w/"]}
    assert tensors_by_leaf(family, scan=False) == {
        "h.0.w/~2": ["h.0.w/"],
        "h.1.w/~2": ["h.1.w/"],
    }


def test_numbers_with_leading_zeros_do_not_stack():
    names = ("h.00.w", "h.01.w", "h.1234567890.w", "h.w2.x", "h.w3.x")
    assert tensors_by_leaf(verbatim_family(matrices(*names))) == {name: [name] for name in names}


def test_empty_tensor_has_no_leaf():
    family = verbatim_family({"a": ("float32", (0, 4)), "b": ("float32", ())})
    assert tensors_by_leaf(family) == {"b": ["b"]}


NAME_PARTS = st.sampled_from(
    ["", "0", "1", "2", "11", "007", "w", "*", "{}", "{layers}", "a b", "x:y", "~2", "w/", "w/~2"]
)
TYPES = st.sampled_from([("float32", (2, 2)), ("int8", (2, 2)), ("float32", ()), ("int8", (0,))])
TENSORS = st.dictionaries(st.lists(NAME_PARTS, min_size=1, max_size=4).map(".".join), TYPES)


@given(
    tensors=TENSORS, seed=st.integers(0, 9), scan=st.booleans(), scan_axis=st.sampled_from([0, 1])
)
def test_every_tensor_is_in_exactly_one_leaf(
    tensors: TensorTypes, seed: int, scan: bool, scan_axis: int
):
    family = verbatim_family(tensors)
    used: dict[str, tuple[int, ...]] = {}
    paths: set[str] = set()
    for path, row in parameter_rows(family, {}, scan, scan_axis).items():
        bound = bind_row(row, family.sizes({}))
        assert path.format() not in paths
        assert not path.endswith("/")
        paths.add(path.format())
        dtypes: set[str] = set()
        for name, _ in bound.tensors():
            assert name not in used
            used[name] = bound.source_shape
            dtypes.add(tensors[name][0])
        assert len(dtypes) == 1
    assert used == {name: shape for name, (_, shape) in tensors.items() if 0 not in shape}
    shuffled = list(tensors.items())
    random.Random(seed).shuffle(shuffled)
    assert tensors_by_leaf(verbatim_family(dict(shuffled))) == tensors_by_leaf(family)


@pytest.mark.parametrize("config", [{}, {"model_type": "unheard_of"}])
def test_verbatim_family_has_no_architecture(config: dict[str, str]):
    with pytest.raises(PrepError, match=CANNOT_TRAIN):
        verbatim_family({}).arch_config(config)


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"dtype": "int8"},
        {"dtype": 1, "shape": []},
        {"dtype": "int8", "shape": "2"},
        {"dtype": "int8", "shape": [-1]},
    ],
)
def test_manifest_without_types_is_rejected(record: dict[str, object]):
    with pytest.raises(PrepError, match="has no dtype and shape"):
        recorded_family({"tensors": {"a.b": record}})
