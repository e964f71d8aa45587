"""A stack of layers: the weights of each layer, the scan over layers, and the final norm.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.models.architecture import ArchConfig, LayerKind, layer_period
from trainer.models.axis_map import LAYERS
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn.block import BLOCKS
from trainer.nn.context import LAYER_DROPOUT_KEYS, LAYER_SCORE_SCALE, StackContext
from trainer.nn.dropout import Dropout
from trainer.nn.kv_cache import KVCache
from trainer.nn.model_spec import ForwardConfig, ModelSpec, unscannable_error
from trainer.nn.norms import norm
from trainer.nn.remat import with_remat

# stacked on axis 0, or one tree per layer
LayerWeights = Tree | list[Tree]
# the residual stream [B, T, D] between layers, and the KV cache
LayerCarry = tuple[Array, KVCache | None]
LayerFunction = Callable[[LayerCarry, Tree], LayerCarry]


def run_stack(
    x: Array, params: Tree, context: StackContext, kv_cache: KVCache | None = None
) -> LayerCarry:
    """Run all layers of the encoder or decoder in order, and the final norm.

    Stacked layers are scanned in whole periods of the pattern of kinds, so that each window and
    rotary embedding is static. The layers of an incomplete period at the end run one at a time, e.g.
    7 layers with the windows (8, 8, full, 8, 8, full, 8) are 2 scanned periods of 3 layers and one
    more layer.

    Args:
        x: Residual stream [B, T, D] before the first layer.
        params: Parameters of the model in the dtype of the computation.
        context: Inputs of all layers.
        kv_cache: Keys and values of earlier tokens. None to attend to `x` alone.

    Returns:
        The output [B, T, D], and the cache with the keys and values of all layers appended.
    """
    stack = params[context.name] if context.name else params
    arch_config = context.arch_config
    forward_config = context.forward_config
    kinds = arch_config.layer_kinds
    weights = layer_weights(stack[LAYERS], context.name, len(kinds), context.model, forward_config)
    weights = _with_layer_inputs(weights, arch_config, context.dropout)
    carry: LayerCarry = (x, kv_cache)
    num_scanned = 0
    if not isinstance(weights, list):
        period = layer_period(kinds)
        num_periods = len(kinds) // period
        if num_periods > 1:
            carry = _scan_layers(carry, weights, context, num_periods)
            num_scanned = num_periods * period
        weights = [_take_layer(weights, index) for index in range(num_scanned, len(kinds))]
    # One function per kind, not per layer: JAX traces each function once.
    run_by_kind: dict[LayerKind, LayerFunction] = {
        kind: with_remat(partial(run_layer, context, kind), forward_config) for kind in set(kinds)
    }
    for kind, layer in zip(kinds[num_scanned:], weights):
        carry = run_by_kind[kind](carry, layer)
    x, kv_cache = carry
    if arch_config.has_final_norm:
        x = norm(x, stack.get("final_norm", {}), arch_config)
    return x, kv_cache


def run_layer(
    context: StackContext, kind: LayerKind, carry: LayerCarry, weights: Tree
) -> LayerCarry:
    """Run one layer with its window, rotary embedding, score scale and random masks."""
    x, kv_cache = carry
    block = BLOCKS[context.arch_config.block_type]
    return block(x, weights, context.for_layer(kind, weights, kv_cache))


def _scan_layers(
    carry: LayerCarry, stacked: Tree, context: StackContext, num_periods: int
) -> LayerCarry:
    """Scan whole periods of the pattern of kinds."""
    kinds = context.arch_config.layer_kinds
    period = layer_period(kinds)
    layer_fns: list[LayerFunction] = [
        with_remat(partial(run_layer, context, kind), context.forward_config, in_loop=True)
        for kind in kinds[:period]
    ]

    # With a KV cache there is no backward pass, so each step indexes the full stack. Slicing the
    # scanned part off first would copy the weights.
    indexes_stack = carry[1] is not None

    def run_period(carry: LayerCarry, step: Any) -> tuple[LayerCarry, None]:
        if indexes_stack:
            weights = stacked
            first = step
        else:
            weights = step
            first = 0
        for index, layer_fn in enumerate(layer_fns):
            carry = layer_fn(carry, _take_layer(weights, first + index))
        return carry, None

    if indexes_stack:
        return lax.scan(run_period, carry, period * jnp.arange(num_periods))[0]
    num_scanned = num_periods * period

    def split_periods(leaf: Array) -> Array:
        return leaf[:num_scanned].reshape(num_periods, period, *leaf.shape[1:])

    return lax.scan(run_period, carry, jax.tree.map(split_periods, stacked))[0]


def layer_weights(
    weights: Tree, stack_name: str, num_layers: int, model: ModelSpec, forward_config: ForwardConfig
) -> LayerWeights:
    """Return the weights stacked on axis 0 for a scan, or one tree per layer.

    Raises:
        UsageError: `scan_layers` is set and the model stores one leaf per layer.
    """
    if not model.has_stacked_layers:
        if forward_config.scan_layers:
            raise unscannable_error()
        return [weights[str(index)] for index in range(num_layers)]
    axes = {path: leaf.stack_axis for path, leaf in model.leaves.items()}
    if model.adapters is not None:
        for path, owner in model.adapters.shared.items():
            axes[path] = axes[owner]
    prefix = f"{stack_name}.{LAYERS}." if stack_name else f"{LAYERS}."
    leaves: dict[str, Array] = {}
    for path, leaf in flatten_tree(weights).items():
        leaves[path] = jnp.moveaxis(leaf, axes[prefix + path] or 0, 0)
    stacked = unflatten_tree(leaves)
    if forward_config.scan_layers:
        return stacked
    return [_take_layer(stacked, index) for index in range(num_layers)]


def _with_layer_inputs(
    layers: LayerWeights, arch_config: ArchConfig, dropout: Dropout | None
) -> LayerWeights:
    """Add the inputs that differ between layers to their weights: score scales and dropout keys."""
    num_layers = len(arch_config.sliding_windows)
    inputs: Tree = {}
    if arch_config.scale_attn_by_inverse_layer_idx:
        scales = [1 / number for number in range(1, num_layers + 1)]
        inputs[LAYER_SCORE_SCALE] = jnp.asarray(scales, jnp.float32)
    if dropout is not None and (keys := dropout.layer_keys(num_layers)) is not None:
        inputs[LAYER_DROPOUT_KEYS] = keys
    if isinstance(layers, list):
        return [{**weights, **_take_layer(inputs, index)} for index, weights in enumerate(layers)]
    return {**layers, **inputs}


def _take_layer(stacked: Tree, index: int | Array) -> Tree:
    """Return the weights of one layer from a stack on axis 0."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)
