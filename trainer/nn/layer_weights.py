"""The weights of one layer, as its parts read them. `trainer.nn.layer_stack` takes them from the parameter tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NotRequired, TypedDict

from jax import Array

# Leaves of a projection (`weight`, `bias`, `lora_a`, `lora_b`) or of a norm (`scale`, `bias`).
Leaves = Mapping[str, Array]
# The leaves of a norm without parameters, e.g. of OPT with `layer_norm_elementwise_affine` false.
NO_PARAMETERS: Leaves = {}
# Projections and norms of attention or of an MLP, by name, e.g. `q`, `o` and `q_norm`.
Projections = Mapping[str, Leaves]


class RouterWeights(TypedDict):
    """The weights of a router. A correction shifts the choice of the experts, not their weights."""

    weight: Array
    bias: NotRequired[Array]
    correction: NotRequired[Leaves]
    input_scale: NotRequired[Leaves]
    expert_scale: NotRequired[Leaves]


class MoeWeights(TypedDict):
    """The weights of an MoE layer. The projections are stacked over its experts. Some experts have no `gate`."""

    router: RouterWeights
    gate: Leaves
    up: Leaves
    down: Leaves
    shared: NotRequired[Projections]
    shared_gate: NotRequired[Leaves]
    input_norm: NotRequired[Leaves]


class BlockWeights(TypedDict):
    """The weights of a layer. A norm without parameters is absent.

    A layer with experts beside its MLP has `moe`. A layer with a recurrent mixer has `mixer` in place of `attn` or
    beside it. A layer of the family mamba2 has no `mlp` either. A layer of one sublayer has `norm` and one of
    `attn`, `mixer` and `mlp`. Layers of other block types have `attn` and `mlp`. The residual connections of Doge have
    weights.
    """

    attn: NotRequired[Projections]
    mixer: NotRequired[Projections]
    cross: NotRequired[Projections]
    mlp: NotRequired[Projections | MoeWeights]
    norm: NotRequired[Leaves]
    attn_norm: NotRequired[Leaves]
    attn_residual: NotRequired[Leaves]
    mlp_residual: NotRequired[Leaves]
    attn_post_norm: NotRequired[Leaves]
    cross_norm: NotRequired[Leaves]
    mlp_norm: NotRequired[Leaves]
    mlp_post_norm: NotRequired[Leaves]
    moe: NotRequired[MoeWeights]
    moe_norm: NotRequired[Leaves]
    moe_post_norm: NotRequired[Leaves]
    mlp_branch_norm: NotRequired[Leaves]
    layer_input_gate: NotRequired[Projections]
    output: NotRequired[Leaves]
