"""The parameter tree: paths, shapes and roles, with stacked or separate layers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.models.param_tree import flatten_tree, param_leaves, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_configs import GPT_NEO, LLAMA

PATHS = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=4).map(".".join)
CONFIGS = {
    "gpt_neo": GPT_NEO,
    "llama": LLAMA,
    "biases": LLAMA | {"attention_bias": True, "mlp_bias": True},
}


@given(st.dictionaries(PATHS, st.integers(), max_size=6))
def test_flatten_tree_inverts_unflatten_tree(values: dict[str, int]):
    branches = {path for path in values if any(longer.startswith(f"{path}.") for longer in values)}
    leaves = {path: value for path, value in values.items() if path not in branches}
    assert flatten_tree(unflatten_tree(leaves)) == leaves


def shapes(
    config: dict[str, Any], tied: bool, scan: bool = True, axis: int = 0
) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of a model."""
    leaves = param_leaves(FAMILIES[config["model_type"]], config, tied, scan=scan, scan_axis=axis)
    assert [*leaves] == [leaf.path for leaf in leaves.values()]
    assert all(len(leaf.dims) == len(leaf.shape) for leaf in leaves.values())
    return {path: leaf.shape for path, leaf in leaves.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_param_leaves_stack_equals_each_layer(name: str):
    config = CONFIGS[name]
    stacked, separate = shapes(config, False), shapes(config, False, scan=False)
    count = FAMILIES[config["model_type"]].sizes(config)["layers"]
    expected: dict[str, tuple[int, ...]] = {}
    for path, shape in stacked.items():
        if path.startswith("layers."):
            assert shape[0] == count
            expected |= {path.replace("layers.", f"layers.{i}."): shape[1:] for i in range(count)}
        else:
            expected[path] = shape
    assert separate == expected


@pytest.mark.parametrize("name", CONFIGS)
def test_param_leaves_stack_on_second_axis(name: str):
    first, second = shapes(CONFIGS[name], False), shapes(CONFIGS[name], False, axis=1)
    for path, shape in first.items():
        moved = (shape[1], shape[0], *shape[2:]) if path.startswith("layers.") else shape
        assert second[path] == moved
    leaves = param_leaves(
        FAMILIES[CONFIGS[name]["model_type"]], CONFIGS[name], False, scan=True, scan_axis=1
    )
    axes = {leaf.stack_axis for path, leaf in leaves.items() if path.startswith("layers.")}
    assert axes == {1}
    assert leaves["embed.tokens"].stack_axis is None


def test_tied_head_has_no_leaf():
    assert shapes(GPT_NEO, False).keys() - shapes(GPT_NEO, True).keys() == {"head.weight"}


@pytest.mark.parametrize("scan", [True, False])
def test_param_leaf_role_follows_its_path(scan: bool):
    leaves = param_leaves(FAMILIES["gpt_neo"], GPT_NEO, False, scan=scan)
    roles = {
        path.rpartition("layers.")[2].lstrip("012."): leaf.role for path, leaf in leaves.items()
    }
    assert {path for path, role in roles.items() if role == "embedding"} == {
        "embed.tokens",
        "embed.positions",
    }
    scales = {"attn_norm.scale", "mlp_norm.scale", "final_norm.scale"}
    assert {path for path, role in roles.items() if role == "scale"} == scales
    assert {path for path, role in roles.items() if role == "bias"} == {
        p for p in roles if p.endswith(".bias")
    }
    matrices = {p for p in roles if p.endswith(".weight")}
    assert {path for path, role in roles.items() if role == "matrix"} == matrices


def test_separate_leaf_has_layer_index():
    leaves = param_leaves(FAMILIES["llama"], LLAMA, False, scan=False)
    leaf = leaves["layers.1.attn.q.weight"]
    assert (leaf.layer_index, leaf.path_pattern, leaf.shape) == (
        1,
        "layers.{layers}.attn.q.weight",
        (2, 16, 16),
    )
    assert leaf.dims == (("heads",), ("head_dim",), ("embed",))
    assert leaves["head.weight"].layer_index is None
