"""The tree of parameters: paths, shapes, roles; stacked or apart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.tiny_configs import GPT_NEO, LLAMA
from trainer.models.param_tree import flatten_tree, param_leaves, unflatten_tree
from trainer.models.registry import FAMILIES

PATHS = st.lists(st.text("abc", min_size=1, max_size=2), min_size=1, max_size=4).map(".".join)
CONFIGS = {"gpt_neo": GPT_NEO, "llama": LLAMA, "biases": LLAMA | {"attention_bias": True, "mlp_bias": True}}


@given(st.dictionaries(PATHS, st.integers(), max_size=6))
def test_dotted_paths_and_nested_dicts_are_one(named: dict[str, int]):
    inner = {path for path in named if any(other.startswith(f"{path}.") for other in named)}
    whole = {path: value for path, value in named.items() if path not in inner}
    assert flatten_tree(unflatten_tree(whole)) == whole


def shapes(config: dict[str, Any], tied: bool, scan: bool = True, axis: int = 0) -> dict[str, tuple[int, ...]]:
    found = param_leaves(FAMILIES[config["model_type"]], config, tied, scan, axis)
    assert [*found] == [leaf.path for leaf in found.values()]
    assert all(len(leaf.dims) == len(leaf.shape) for leaf in found.values())
    return {path: leaf.shape for path, leaf in found.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_stacked_leaves_are_those_of_each_layer(name: str):
    config = CONFIGS[name]
    stacked, apart = shapes(config, False), shapes(config, False, scan=False)
    count = FAMILIES[config["model_type"]].sizes(config)["layers"]
    wanted: dict[str, tuple[int, ...]] = {}
    for path, shape in stacked.items():
        if path.startswith("layers."):
            assert shape[0] == count
            wanted |= {path.replace("layers.", f"layers.{i}."): shape[1:] for i in range(count)}
        else:
            wanted[path] = shape
    assert apart == wanted


@pytest.mark.parametrize("name", CONFIGS)
def test_the_axis_of_layers_can_be_the_second(name: str):
    first, second = shapes(CONFIGS[name], False), shapes(CONFIGS[name], False, axis=1)
    for path, shape in first.items():
        moved = (shape[1], shape[0], *shape[2:]) if path.startswith("layers.") else shape
        assert second[path] == moved
    found = param_leaves(FAMILIES[CONFIGS[name]["model_type"]], CONFIGS[name], False, True, 1)
    axes = {leaf.stack_axis for path, leaf in found.items() if path.startswith("layers.")}
    assert axes == {1}
    assert found["embed.tokens"].stack_axis is None


def test_a_head_that_is_the_embedding_is_no_leaf():
    assert shapes(GPT_NEO, False).keys() - shapes(GPT_NEO, True).keys() == {"head.weight"}


@pytest.mark.parametrize("scan", [True, False])
def test_roles(scan: bool):
    found = param_leaves(FAMILIES["gpt_neo"], GPT_NEO, False, scan)
    roles = {path.rpartition("layers.")[2].lstrip("012."): leaf.role for path, leaf in found.items()}
    assert {path for path, role in roles.items() if role == "embedding"} == {"embed.tokens", "embed.positions"}
    scales = {"attn_norm.scale", "mlp_norm.scale", "final_norm.scale"}
    assert {path for path, role in roles.items() if role == "scale"} == scales
    assert {path for path, role in roles.items() if role == "bias"} == {p for p in roles if p.endswith(".bias")}
    matrices = {p for p in roles if p.endswith(".weight")}
    assert {path for path, role in roles.items() if role == "matrix"} == matrices


def test_leaves_know_their_layer():
    found = param_leaves(FAMILIES["llama"], LLAMA, False, False)
    leaf = found["layers.1.attn.q.weight"]
    assert (leaf.layer_index, leaf.path_pattern, leaf.shape) == (1, "layers.{layers}.attn.q.weight", (2, 16, 16))
    assert leaf.dims == (("heads",), ("head_dim",), ("embed",))
    assert found["head.weight"].layer_index is None
