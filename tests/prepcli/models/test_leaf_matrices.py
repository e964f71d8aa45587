"""Parameters as matrices, layer by layer."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.models.param_tree import (
    LAYER_PARTS,
    FactoredAxes,
    MatrixAxes,
    ParamLeaf,
    factored_axes,
    is_layer_matrix,
    matrix_axes,
    param_leaves,
    reduce_leaf,
    reduced_axes,
)
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_checkpoints import ALL_CONFIGS


def leaf(path: str, dims: str, *shape: int) -> ParamLeaf:
    """Return a leaf with a dim per word."""
    return ParamLeaf(path, path, shape, tuple((name,) for name in dims.split()))


QUERY = leaf("layers.attn.q.weight", "layers heads head_dim embed", 3, 4, 8, 16)


@pytest.mark.parametrize(
    ("dims", "axes"),
    [
        ("vocab embed", MatrixAxes((), (0,), (1,))),
        ("layers heads head_dim embed", MatrixAxes((0,), (1, 2), (3,))),
        ("embed layers kv_heads head_dim", MatrixAxes((1,), (0,), (2, 3))),
        ("layers experts mlp embed", MatrixAxes((0, 1), (2,), (3,))),
        ("layers experts embed", MatrixAxes((0,), (1,), (2,))),
        ("layers heads head_dim", None),
        ("layers embed", None),
        ("embed", None),
    ],
)
def test_matrix_axes_group_attention_heads(dims: str, axes: MatrixAxes | None):
    assert matrix_axes(leaf("a.weight", dims, *range(2, 2 + len(dims.split())))) == axes


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=lambda config: config["model_type"])
def test_every_matrix_of_a_layer_has_two_dims(config: dict[str, Any]):
    leaves = param_leaves(FAMILIES[config["model_type"]], config, False)
    in_layers = [
        leaf
        for leaf in leaves.values()
        if leaf.role == "matrix"
        and not LAYER_PARTS.isdisjoint(leaf.path.split("."))
        # The gate of shared experts is a vector per layer.
        and not leaf.path.endswith("shared_gate.weight")
    ]
    assert in_layers
    assert all(map(is_layer_matrix, in_layers))
    assert not any(is_layer_matrix(leaf) for leaf in leaves.values() if leaf not in in_layers)


def test_factored_axes_name_the_larger_dim_first():
    assert factored_axes(QUERY, 16) == FactoredAxes((1, 2), (3,))
    assert factored_axes(QUERY, 17) is None
    assert factored_axes(leaf("a.weight", "mlp embed", 8, 8), 1) == FactoredAxes((1,), (0,))


def test_reduced_axes_reverse_reduce_leaf():
    reduced = reduce_leaf(QUERY, (1, 2))
    assert (reduced.shape, reduced.dims) == ((3, 1, 1, 16), (("layers",), (), (), ("embed",)))
    assert reduced_axes(reduced.shape, QUERY.shape) == (1, 2)
    assert reduced_axes(QUERY.shape, QUERY.shape) == ()
    assert reduced_axes((3, 4, 8), QUERY.shape) is None
    assert reduced_axes((3, 4, 8, 2), QUERY.shape) is None


def test_decay_rates_of_mamba_are_no_matrix():
    rates = leaf("layers.mixer.a_log.weight", "layers mixer_channels mixer_state", 2, 8, 4)
    assert not is_layer_matrix(rates)
