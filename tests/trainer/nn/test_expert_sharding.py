"""Tests of the mesh axes of MoE layers and of the collectives that the compiler plans, on 8 CPU devices."""

from __future__ import annotations

import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from prepcli.models.mesh import MeshAxes, parse_mesh
from prepcli.models.param_tree import unflatten_tree
from prepcli.models.rule_text import merge_rules
from tests.trainer.nn.test_moe import make_moe_arch
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.experts import EXPERT_DIMS, ExpertSharding, expert_sharding
from trainer.nn.moe import moe_mlp
from trainer.nn.projections import MoeWeights

ROWS, LENGTH, D, F, EXPERTS = 8, 16, 32, 48, 4
SIZES = {"experts": EXPERTS, "mlp": F, "embed": D}
# The leaves of experts without adapters.
STACKED = {path: dims for path, dims in EXPERT_DIMS.items() if SIZES.keys() >= {*dims}}
DIMS = {**STACKED, "router.weight": ("experts", "embed")}
TOKENS = (ROWS, LENGTH, D)


def array_shapes(sharding: ShardingContext) -> tuple[Any, dict[str, Any]]:
    """Return tokens and weights without values, placed on the mesh."""
    assert sharding.device_mesh is not None
    weights = {}
    for name, dims in DIMS.items():
        shape = tuple(map(SIZES.__getitem__, dims))
        placed = NamedSharding(
            sharding.device_mesh, PartitionSpec(*sharding.weight_axes(shape, *dims))
        )
        weights[name] = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed)
    placed = sharding.activation_sharding(TOKENS, "batch", "seq", "embed")
    return jax.ShapeDtypeStruct(TOKENS, jnp.float32, sharding=placed), weights


def sharding_with_rules(mesh: str, *rules: str) -> ExpertSharding:
    """Return the sharding of the experts on a mesh."""
    sharding = make_sharding_context(parse_mesh(mesh), merge_rules(rules))
    x, weights = array_shapes(sharding)
    return expert_sharding(x, {name: weights[name] for name in STACKED}, sharding)


@pytest.mark.parametrize(
    ("rules", "up_axes", "gathers"),
    [
        ((), ((), ("mp",), ("fsdp",)), True),
        (("embed=none",), ((), ("mp",), ()), False),
        (("experts=mp",), (("mp",), (), ("fsdp",)), True),
        (("experts=mp", "embed=none"), (("mp",), (), ()), False),
        (("experts=fsdp",), ((), ("mp",), ()), False),
        (("mlp=fsdp+mp",), ((), ("fsdp", "mp"), ()), True),
        (("mlp=none", "embed=fsdp+mp"), ((), (), ("fsdp",)), True),
    ],
)
def test_expert_sharding_splits_matrices_by_the_rules(
    rules: tuple[str, ...], up_axes: tuple[MeshAxes, ...], gathers: bool
):
    """A stack of experts that is split like the tokens is gathered before the layer."""
    shards = sharding_with_rules("1,2,4", *rules)
    assert shards.token_axes == ("fsdp",)
    assert shards.weight_axes["up.weight"] == up_axes
    assert shards.weight_axes["down.weight"] == (up_axes[0], up_axes[2], up_axes[1])
    assert shards.gathers_experts == gathers


def test_experts_on_one_device_are_not_split():
    shards = ExpertSharding()
    assert (shards.token_axes, shards.num_expert_shards, shards.gathers_experts) == ((), 1, False)


def test_num_expert_shards_is_the_size_of_the_mesh_axis():
    assert sharding_with_rules("1,2,4", "experts=mp").num_expert_shards == 4


def test_compiler_gathers_one_expert_and_no_tokens():
    sharding, arch_config = make_sharding_context(parse_mesh("1,2,4")), make_moe_arch(2)

    def loss(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        tree = cast(MoeWeights, unflatten_tree(weights))
        return jnp.square(moe_mlp(x, tree, arch_config, sharding)).sum()

    text = jax.jit(jax.grad(loss, (0, 1))).lower(*array_shapes(sharding)).compile().as_text() or ""
    gathered = {*re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)}
    assert gathered == {f"{F // 4},{D}", f"{D},{F // 4}", f"{EXPERTS},{D}"}, (
        "gate and up, down, router"
    )
