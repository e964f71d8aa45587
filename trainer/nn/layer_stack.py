"""Stacks of layers: their weights, and the scan over layers.

Axes: B rows of the batch, T tokens, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer.models.architecture import ArchConfig, window_period
from trainer.models.axis_map import LAYERS
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn.dropout import Dropout
from trainer.nn.kv_cache import KVCache
from trainer.nn.model_spec import ForwardConfig, ModelSpec, unscannable_error
from trainer.nn.remat import with_remat

# entries in a layer's weights that are not parameters
LAYER_SCORE_SCALE, LAYER_DROPOUT_KEYS = "layer_score_scale", "layer_dropout_keys"

LayerWeights = Tree | list[Tree]  # stacked on axis 0, or one tree per layer
LayerCarry = tuple[Array, KVCache | None]  # residual stream [B, T, D] between layers, and the KV cache


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
        axes |= {path: axes[owner] for path, owner in model.adapters.shared.items()}
    prefix = f"{stack_name}.{LAYERS}." if stack_name else f"{LAYERS}."
    leaves = flatten_tree(weights).items()
    stacked = unflatten_tree({path: jnp.moveaxis(leaf, axes[prefix + path] or 0, 0) for path, leaf in leaves})
    return stacked if forward_config.scan_layers else [_take_layer(stacked, index) for index in range(num_layers)]


def with_layer_inputs(layers: LayerWeights, arch_config: ArchConfig, dropout: Dropout | None) -> LayerWeights:
    """Add the inputs that differ between layers to their weights: score scales and keys of dropout."""
    num_layers = len(arch_config.sliding_windows)
    inputs: Tree = {}
    if arch_config.scale_attn_by_inverse_layer_idx:
        inputs[LAYER_SCORE_SCALE] = jnp.asarray([1 / number for number in range(1, num_layers + 1)], jnp.float32)
    if dropout is not None and (keys := dropout.layer_keys(num_layers)) is not None:
        inputs[LAYER_DROPOUT_KEYS] = keys
    if isinstance(layers, list):
        return [{**weights, **_take_layer(inputs, index)} for index, weights in enumerate(layers)]
    return {**layers, **inputs}


def _take_layer(stacked: Tree, index: int | Array) -> Tree:
    """Return the weights of one layer from a stack on axis 0."""
    return jax.tree.map(lambda leaf: leaf[index], stacked)


def run_layers(
    carry: LayerCarry,
    weights: LayerWeights,
    run_layer: Callable[[int, LayerCarry, Tree], LayerCarry],
    forward_config: ForwardConfig,
    arch_config: ArchConfig,
) -> LayerCarry:
    """Run all layers in order.

    Stacked layers are scanned in whole periods of the sliding window pattern, so that each window is static. The rest
    of an incomplete period runs one layer at a time.
    """
    windows = arch_config.sliding_windows
    period, num_scanned = window_period(windows), 0
    if not isinstance(weights, list):
        layer_fns = [
            with_remat(partial(run_layer, window), forward_config, in_loop=True) for window in windows[:period]
        ]
        if (num_periods := len(windows) // period) > 1:
            carry, num_scanned = _scan_layers(carry, weights, layer_fns, num_periods), num_periods * period
        weights = [_take_layer(weights, index) for index in range(num_scanned, len(windows))]
    layer_fn_by_window = {window: with_remat(partial(run_layer, window), forward_config) for window in {*windows}}
    for window, layer in zip(windows[num_scanned:], weights):
        carry = layer_fn_by_window[window](carry, layer)
    return carry


def _scan_layers(
    carry: LayerCarry, stacked: Tree, layer_fns: list[Callable[[LayerCarry, Tree], LayerCarry]], num_periods: int
) -> LayerCarry:
    """Scan whole periods of layers.

    With a KV cache there is no backward pass, so each step indexes the full stack: slicing the scanned part off first
    would copy the weights.
    """
    period = len(layer_fns)

    def run_period(carry: LayerCarry, weights: Tree, first: int | Array) -> tuple[LayerCarry, None]:
        for index, layer_fn in enumerate(layer_fns):
            carry = layer_fn(carry, _take_layer(weights, first + index))
        return carry, None

    if carry[1] is not None:
        firsts = period * jnp.arange(num_periods)
        return lax.scan(lambda carry, first: run_period(carry, stacked, first), carry, firsts)[0]
    scanned = num_periods * period
    periods = jax.tree.map(lambda leaf: leaf[:scanned].reshape(num_periods, period, *leaf.shape[1:]), stacked)
    return lax.scan(lambda carry, weights: run_period(carry, weights, 0), carry, periods)[0]
