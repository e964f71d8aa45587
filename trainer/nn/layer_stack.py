"""A stack of layers: the weights of each layer, the scan over layers, and the final norm.

Weights that all layers have are one group. In a model with both dense and MoE layers, the MLPs of each kind are another
group (`prepcli.models.layer_config`). The weights of a group are stacked over its own layers.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from prepcli.algebra.axis_map import LAYERS
from prepcli.models.architecture import ArchConfig, LayerKind
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn.attention import initial_lambdas
from trainer.nn.block import BLOCKS
from trainer.nn.cache import KVCache
from trainer.nn.context import (
    LAYER_DROPOUT_KEYS,
    LAYER_INITIAL_LAMBDA,
    LAYER_INPUT,
    LAYER_SCORE_SCALE,
    StackContext,
    with_adapter_dropout,
)
from trainer.nn.model_spec import ForwardConfig, ModelSpec, unscannable_error, with_remat
from trainer.nn.projections import BlockWeights, norm

# Group of layers -> its weights, stacked on axis 0. Or one tree per layer.
LayerWeights = dict[str, Tree] | list[Tree]
# the residual stream [B, T, D] between layers, and the KV cache
LayerCarry = tuple[Array, KVCache | None]
LayerFunction = Callable[[LayerCarry, Tree], LayerCarry]


def run_stack(
    x: Array, params: Tree, context: StackContext, kv_cache: KVCache | None = None
) -> LayerCarry:
    """Run all layers of the encoder or decoder in order, and the final norm.

    Stacked layers are scanned in whole periods of the pattern of kinds and groups, so that each window
    and rotary embedding is static. Other layers run one at a time, e.g. 7 layers with the windows (8,
    8, full, 8, 8, full, 8) are 2 scanned periods of 3 layers and one more layer.

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
    weights = layer_weights(stack, context.name, arch_config, context.model, forward_config)
    weights = _with_layer_inputs(weights, context)
    # One function per kind, not per layer: JAX traces each function once.
    run_by_kind: dict[LayerKind, LayerFunction] = {
        kind: with_remat(partial(run_layer, context, kind), forward_config) for kind in set(kinds)
    }

    if kv_cache is None and arch_config.reusing_layers:
        kv_cache = KVCache({}, jnp.int32(0), num_slots=0)
    carry: LayerCarry = (x, kv_cache)
    schedule = arch_config.layer_schedule
    scanned = range(0)
    if not isinstance(weights, list) and schedule.num_periods > 1:
        scanned = range(schedule.num_first, schedule.stop)
    for layer, kind in enumerate(kinds):
        if isinstance(weights, list):
            layer_tree = weights[layer]
        elif layer not in scanned:
            layer_tree = _take_layer(weights, arch_config.group_indices[layer])
        else:
            # The scan runs all of its layers at the first one.
            if layer == scanned.start:
                carry = _scan_layers(carry, weights, context)
            continue
        carry = run_by_kind[kind](carry, layer_tree)
    x, kv_cache = carry
    return _final_norm(x, stack, arch_config), kv_cache


def layer_outputs(x: Array, params: Tree, context: StackContext) -> Iterator[Array]:
    """Run all layers one at a time.

    Each kind of layer is compiled once. The device holds one residual stream and the weights of one layer in addition
    to the parameters.

    Args:
        x: Residual stream [B, T, D] before the first layer.
        params: Parameters of the model in the dtype of the computation.
        context: Inputs of all layers.

    Yields:
        The residual stream [B, T, D] after each layer. The last one is after the final norm.
    """
    stack = params[context.name] if context.name else params
    arch_config = context.arch_config
    model = context.model
    # A list of all layers would copy a stack. Its layers are sliced one by one.
    forward_config = replace(context.forward_config, scan_layers=model.has_stacked_layers)
    weights = layer_weights(stack, context.name, arch_config, model, forward_config)
    weights = _with_layer_inputs(weights, context)
    kinds = arch_config.layer_kinds
    run_by_kind = {kind: jax.jit(partial(run_layer, context, kind)) for kind in set(kinds)}
    carry: LayerCarry = (x, None)
    if arch_config.reusing_layers:
        carry = (x, KVCache({}, jnp.int32(0), num_slots=0))
    for layer, kind in enumerate(kinds):
        if isinstance(weights, list):
            layer_tree = weights[layer]
        else:
            layer_tree = _take_layer(weights, arch_config.group_indices[layer])
        carry = run_by_kind[kind](carry, layer_tree)
        if layer < len(kinds) - 1:
            yield carry[0]
    yield _final_norm(carry[0], stack, arch_config)


def _final_norm(x: Array, stack: Tree, arch_config: ArchConfig) -> Array:
    if arch_config.has_final_norm:
        return norm(x, stack.get("final_norm", {}), arch_config)
    return x


def run_layer(
    context: StackContext, kind: LayerKind, carry: LayerCarry, weights: Tree
) -> LayerCarry:
    """Run one layer with its window, rotary embedding, score scale and random masks."""
    x, kv_cache = carry
    block = BLOCKS[context.arch_config.block_type]
    layer_context = context.for_layer(kind, weights, kv_cache)
    if context.model.adapters is not None:
        sites = context.model.adapters.dropout_sites
        weights = with_adapter_dropout(weights, layer_context, sites)
    return block(x, cast(BlockWeights, weights), layer_context)


def _scan_layers(
    carry: LayerCarry, groups: Mapping[str, Tree], context: StackContext
) -> LayerCarry:
    """Scan whole periods of the pattern of kinds and groups."""
    arch_config = context.arch_config
    schedule = arch_config.layer_schedule
    period = range(schedule.num_first, schedule.num_first + schedule.period)
    layer_fns: list[LayerFunction] = []
    for layer in period:
        run = partial(run_layer, context, arch_config.layer_kinds[layer])
        layer_fns.append(with_remat(run, context.forward_config, in_loop=True))
    # Indices of the layers of the first period, e.g. dense layer 0 and MoE layer 0 of each period of 2
    # have the index 1 in `layers` if 1 layer comes first. Later periods add the count of each group.
    first_indices = [arch_config.group_indices[layer] for layer in period]
    counts = Counter(group for indices in first_indices for group in indices)
    starts: dict[str, int] = {}
    for indices in reversed(first_indices):
        starts |= indices

    # With a KV cache there is no backward pass, so each step indexes the full stack. Slicing the
    # scanned part off first would copy the weights.
    kv_cache = carry[1]
    indexes_stack = kv_cache is not None and kv_cache.num_slots > 0

    def run_period(carry: LayerCarry, step: Any) -> tuple[LayerCarry, None]:
        for layer_fn, indices in zip(layer_fns, first_indices):
            if indexes_stack:
                shifted = {name: index + step * counts[name] for name, index in indices.items()}
                weights = _take_layer(groups, shifted)
            else:
                shifted = {name: index - starts[name] for name, index in indices.items()}
                weights = _take_layer(step, shifted)
            carry = layer_fn(carry, weights)
        return carry, None

    if indexes_stack:
        return lax.scan(run_period, carry, jnp.arange(schedule.num_periods))[0]
    steps = {
        name: _split_periods(groups[name], starts[name], schedule.num_periods, count)
        for name, count in counts.items()
    }
    return lax.scan(run_period, carry, steps)[0]


def _split_periods(group: Tree, start: int, num_periods: int, count: int) -> Tree:
    """Return the weights of a group [layers, ...] as [periods, layers of a period, ...], from layer `start` on."""

    def split(leaf: Array) -> Array:
        scanned = leaf[start : start + num_periods * count]
        return scanned.reshape(num_periods, count, *leaf.shape[1:])

    return jax.tree.map(split, group)


def layer_weights(
    stack: Tree,
    stack_name: str,
    arch_config: ArchConfig,
    model: ModelSpec,
    forward_config: ForwardConfig,
) -> LayerWeights:
    """Return the weights of each group stacked on axis 0 for a scan, or one tree per layer.

    Args:
        stack: Parameters of the stack.
        stack_name: Its key in the parameters, or "".
        arch_config: The choices of its layers.
        model: The model.
        forward_config: Execution options.

    Raises:
        UsageError: `scan_layers` is set and the model stores one leaf per layer.
    """
    names = list(dict.fromkeys(name for indices in arch_config.group_indices for name in indices))
    groups = {name: stack[name] for name in names}
    if not model.has_stacked_layers:
        if forward_config.scan_layers:
            raise unscannable_error()
        return [_numbered_layer(groups, indices) for indices in arch_config.group_indices]
    axes = {path: leaf.stack_axis for path, leaf in model.leaves.items()}
    if model.adapters is not None:
        for path, owner in model.adapters.shared.items():
            axes[path] = axes[owner]
    prefix = f"{stack_name}." if stack_name else ""
    leaves: dict[str, Array] = {}
    for path, leaf in flatten_tree(groups).items():
        leaves[path] = jnp.moveaxis(leaf, axes[prefix + path] or 0, 0)
    stacked = unflatten_tree(leaves)
    if forward_config.scan_layers:
        return stacked
    return [_take_layer(stacked, indices) for indices in arch_config.group_indices]


def _numbered_layer(groups: Mapping[str, Tree], indices: Mapping[str, int]) -> Tree:
    """Return the weights of one layer from groups with one tree per layer."""
    weights: Tree = {}
    for name, index in indices.items():
        weights |= groups[name][str(index)]
    return weights


def _with_layer_inputs(layers: LayerWeights, context: StackContext) -> LayerWeights:
    """Return the weights of layers together with their constants and inputs, one entry per layer, for a scan."""
    num_layers = len(context.arch_config.sliding_windows)
    inputs: Tree = {}
    if context.arch_config.scale_attn_by_inverse_layer_idx:
        scales = [1 / number for number in range(1, num_layers + 1)]
        inputs[LAYER_SCORE_SCALE] = jnp.asarray(scales, jnp.float32)
    if context.arch_config.has_differential_attention:
        inputs[LAYER_INITIAL_LAMBDA] = jnp.asarray(initial_lambdas(num_layers), jnp.float32)
    if context.dropout is not None:
        keys = context.dropout.layer_keys(num_layers)
        if keys is not None:
            inputs[LAYER_DROPOUT_KEYS] = keys
    if context.layer_inputs is not None:
        inputs[LAYER_INPUT] = context.layer_inputs
    if isinstance(layers, list):
        return [{**weights, **_slice_tree(inputs, index)} for index, weights in enumerate(layers)]
    return {**layers, LAYERS: {**layers[LAYERS], **inputs}}


def _take_layer(groups: Mapping[str, Tree], indices: Mapping[str, int | Array]) -> Tree:
    """Return the weights of one layer from stacked groups, by its index in each group."""
    weights: Tree = {}
    for name, index in indices.items():
        weights |= _slice_tree(groups[name], index)
    return weights


def _slice_tree(stacked: Tree, index: int | Array) -> Tree:
    """Return one layer of a tree that is stacked on axis 0."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)
