"""Tensor names as a tree."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from prepcli.inspection.contents import TreeNode, build_tree, tree_fields, tree_rows
from prepcli.planning.arrays import whole_array
from prepcli.sources.source import SourceTensor, stored_tensor


def entry(name: str, *shape: int, dtype: str = "float32") -> SourceTensor:
    return stored_tensor(whole_array(name, dtype, shape, (0, 0)))


def lines(*entries: SourceTensor) -> list[str]:
    return [" | ".join(part for part in row if part) for row in tree_rows(build_tree(entries))]


def test_tree_sums_sizes_and_joins_single_children() -> None:
    rows = lines(
        entry("model.embed.weight", 3, 4), entry("model.norm.weight", 4), entry("head.weight", 3, 4)
    )
    assert rows == [
        "model | 64 bytes",
        "  embed.weight | [3, 4] | float32 | 48 bytes",
        "  norm.weight | [4] | float32 | 16 bytes",
        "head.weight | [3, 4] | float32 | 48 bytes",
    ]


def test_tree_merges_equal_layers_in_any_order() -> None:
    layers = [entry(f"h.{i}.{name}.weight", 2, 2) for i in range(12) for name in ("q", "k")]
    layers[2], layers[3] = layers[3], layers[2]
    assert lines(*layers) == [
        "h.{0..11} | 384 bytes",
        *(f"  {n}.weight | 12 x [2, 2] | float32 | 192 bytes" for n in "qk"),
    ]


def test_tree_separates_layers_of_another_shape_or_dtype() -> None:
    rows = lines(
        entry("h.0.w", 2), entry("h.1.w", 2), entry("h.2.w", 3), entry("h.3.w", 2, dtype="int32")
    )
    assert rows == [
        "h | 36 bytes",
        "  {0,1}.w | 2 x [2] | float32 | 16 bytes".replace("0,1", "0..1"),
        "  2.w | [3] | float32 | 12 bytes",
        "  3.w | [2] | int32 | 8 bytes",
    ]


def test_tree_merges_alternating_layers_into_two_groups() -> None:
    rows = lines(*(entry(f"h.{i}.w", 2 + i % 2) for i in range(20)))
    assert rows == [
        "h | 200 bytes",
        "  {0,2,4,…,18}.w | 10 x [2] | float32 | 80 bytes",
        "  {1,3,5,…,19}.w | 10 x [3] | float32 | 120 bytes",
    ]


def test_tree_multiplies_experts_within_layers() -> None:
    rows = lines(*(entry(f"h.{i}.experts.{j}.w", 2) for i in range(3) for j in range(4)))
    assert rows == ["h.{0..2}.experts.{0..3}.w | 12 x [2] | float32 | 96 bytes"]


def test_tree_shows_a_tensor_whose_name_is_a_prefix() -> None:
    assert lines(entry("a", 1), entry("a.b", 2)) == [
        "a | 12 bytes",
        "  (itself) | [1] | float32 | 4 bytes",
        "  b | [2] | float32 | 8 bytes",
    ]


def test_tree_does_not_merge_noncanonical_numbers() -> None:
    assert [line.split()[0] for line in lines(entry("h.00", 1), entry("h.²", 1), entry(f"h.{'9' * 5000}", 1))] == [
        "h", "00", "²", "9" * 5000,
    ]  # fmt: skip


def test_tree_fields_nest_leaves_in_branches() -> None:
    (node,) = build_tree([entry("h.0.w", 2), entry("h.1.w", 2), entry("h.b", 3)])
    assert tree_fields(node) == {
        "name": "h",
        "tensors": 3,
        "bytes": 28,
        "children": [
            {"name": "{0..1}.w", "tensors": 2, "bytes": 16, "shape": (2,), "dtype": "float32"},
            {"name": "b", "tensors": 1, "bytes": 12, "shape": (3,), "dtype": "float32"},
        ],
    }


NAMES = st.lists(st.sampled_from(["a", "b", "0", "1", "2", "3", ""]), min_size=1, max_size=4).map(
    ".".join
)


@given(st.dictionaries(NAMES, st.integers(0, 3), max_size=12))
def test_tree_contains_all_tensors(sizes: dict[str, int]) -> None:
    entries = [entry(name, size) for name, size in sizes.items()]
    nodes = build_tree(entries)
    assert sum(node.tensors for node in nodes) == len(entries)
    assert sum(node.nbytes for node in nodes) == sum(item.nbytes for item in entries)
    assert sorted(name for node in nodes for name in expand_names(node, "")) == sorted(sizes)


def expand_names(node: TreeNode, before: str) -> list[str]:
    """Return the names of a node's tensors. Number lists are short enough here to be complete."""
    names = [f"{before}{label}" for label in expand_label(node.name)]
    if node.name == "(itself)":
        names = [before[:-1]]
    return (
        names
        if node.dtype
        else [
            full
            for name in names
            for child in node.children
            for full in expand_names(child, f"{name}.")
        ]
    )


def expand_label(name: str) -> list[str]:
    head, braces, rest = name.partition("{")
    if not braces:
        return [name]
    runs, _, tail = rest.partition("}")
    numbers = [
        n
        for run in runs.split(",")
        for n in range(int(run.split("..")[0]), int(re.split(r"\.\.", run)[-1]) + 1)
    ]
    return [f"{head}{n}{end}" for n in numbers for end in expand_label(tail)]
