"""Recurrent mixers: a sublayer in which tokens read earlier tokens, in addition to attention or in its place.

`prepcli.models.layer_config.Mixer` has the equations of the mixers: the gated short convolution of LFM2
(arXiv:2511.23404), the gated delta net (arXiv:2412.06464), Mamba (arXiv:2312.00752) and Mamba-2 (arXiv:2405.21060).

Axes: B rows of the batch, T tokens, L taps of a convolution, C channels, G groups of heads with the same queries and
keys, R heads of a group, N width of queries and keys, P width of values, D model width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax, nn

from prepcli.models.layer_config import Mixer
from trainer.nn.attention import INPUT_NORM
from trainer.nn.cache import STATE, KVCache
from trainer.nn.context import LayerContext
from trainer.nn.mlp import ACTIVATION_FUNCTIONS
from trainer.nn.model_spec import name_activation
from trainer.nn.projections import Leaves, Projections, linear, norm, plain_rms_norm, scale_by
from trainer.nn.scans import Recurrence, SelectiveInputs, chunked_scan, selective_scan
from trainer.nn.token_chunks import TokenFunction, over_token_chunks

# Causal convolution over tokens with one filter per channel, as in Mamba (arXiv:2312.00752, section 3.4).
#
# y_t = sum_d w_d x_(t-d) + b, with d from 0 to L - 1


def causal_conv(
    x: Array, weights: Mapping[str, Array], previous: Array | None, positions: Array | None
) -> tuple[Array, Array]:
    """Convolve each channel of [B, T, channels] with its filter.

    Args:
        x: Input [B, T, channels].
        weights: `weight` [channels, L], whose last tap is for the token itself, and optionally `bias` [channels].
        previous: The inputs of the last L - 1 tokens before `x`, [B, L - 1, channels]. None means zeros.
        positions: int32 [B, T], the position of each token in its document. No tap reads an earlier document.
            None if each row is one document.

    Returns:
        The output [B, T, channels], and the inputs of the last L - 1 tokens.
    """
    taps = weights["weight"]
    num_taps = taps.shape[-1]
    num_tokens = x.shape[1]
    if previous is None:
        previous = jnp.zeros((x.shape[0], num_taps - 1, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([previous, x], axis=1)
    # E.g. 3 taps: the inputs are those of the tokens -2, -1, 0, ..., and tap 2 reads from token 0 on.
    output = x * taps[..., -1]
    for distance in range(1, num_taps):
        start = num_taps - 1 - distance
        shifted = inputs[:, start : start + num_tokens]
        if positions is not None:
            is_same_document = (positions >= distance).reshape(
                *positions.shape, *(1 for _ in x.shape[2:])
            )
            shifted = jnp.where(is_same_document, shifted, 0)
        output = output + shifted * taps[..., start]
    if "bias" in weights:
        output = output + weights["bias"]
    return output, inputs[:, num_tokens:]


# End of the key of a convolution in the weights of a mixer.
CONV = "_conv"


def project(
    x: Array, weights: Projections, names: Sequence[str], context: LayerContext
) -> dict[str, Array]:
    """Normalize hidden states [B, T, D], and project them, in chunks of tokens. `Mixer` has the factors.

    Args:
        x: Hidden states [B, T, D].
        weights: Projections by name, and optionally INPUT_NORM, the norm of `x`.
        names: The projections to compute. A name without weights is skipped.
        context: Architecture and sharding of the layer.

    Returns:
        [B, T, ...] by name.
    """
    sharding = context.sharding
    mixer = context.arch_config.mixer
    assert mixer is not None
    factors = dict(mixer.projection_scales)

    def project_chunk(x: Array, weights: Projections, constants: None) -> dict[str, Array]:
        if INPUT_NORM in weights:
            x = norm(x, weights[INPUT_NORM], context.arch_config)
        x = scale_by(x, mixer.input_scale)
        x = sharding.constrain(x, "batch", "seq", "embed")
        projected: dict[str, Array] = {}
        for name in names:
            if name in weights:
                output = linear(x, weights[name], num_devices=sharding.num_devices)
                projected[name] = scale_by(output, factors.get(name, 1.0))
        return projected

    selected = {name: weights[name] for name in (*names, INPUT_NORM) if name in weights}
    return over_chunks(project_chunk, x.shape[1], context)(x, selected, None)


def project_out(
    hidden: Any, combine: Callable[[Any, Any], Array], weights: Any, context: LayerContext
) -> Array:
    """Combine the results of a mixer, and project them to [B, T, D], in chunks of tokens.

    Args:
        hidden: Tree of arrays [B, T, ...].
        combine: Computes the input [B, T, ...] of the output projection from `hidden` and the weights, each token
            by itself.
        weights: Weights of the mixer, with the output projection `o`.
        context: Architecture and sharding of the layer.
    """

    def project_chunk(hidden: Any, weights: Any, constants: None) -> Array:
        combined = combine(hidden, weights)
        return linear(combined, weights["o"], num_devices=context.sharding.num_devices)

    selected = {name: weights[name] for name in ("o", "norm") if name in weights}
    num_tokens = jax.tree.leaves(hidden)[0].shape[1]
    return over_chunks(project_chunk, num_tokens, context)(hidden, selected, None)


def document_starts(context: LayerContext, shape: tuple[int, ...]) -> Array:
    """Return a bool mask [B, T] of the first tokens of documents."""
    if context.document_positions is None:
        return jnp.zeros(shape, bool)
    return context.document_positions == 0


def over_chunks(function: TokenFunction, num_tokens: int, context: LayerContext) -> TokenFunction:
    """Return a function that applies `function` to chunks of `ffn_chunk_size` tokens."""
    return over_token_chunks(
        function,
        num_tokens,
        context.ffn_chunk_size,
        num_shards=context.sharding.sequence_parallel_size,
    )


def convolve(
    inputs: Mapping[str, Array],
    weights: Projections,
    context: LayerContext,
    states: Mapping[str, Array],
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Convolve each input with the convolution of its name.

    Args:
        inputs: [B, T, channels] by name. For "v" the weights have the convolution "v_conv".
        weights: Weights of the mixer.
        context: Positions of the tokens.
        states: Inputs of earlier tokens, by the name of the convolution. Empty without a cache.

    Returns:
        The outputs by the names of the inputs, and the new states.
    """
    # The backward pass shifts the input again: a copy of it per tap takes more memory than time.
    run_conv = jax.checkpoint(causal_conv, prevent_cse=False)
    outputs: dict[str, Array] = {}
    new_states: dict[str, Array] = {}
    for name, x in inputs.items():
        conv = name + CONV
        outputs[name], new_states[conv] = run_conv(
            x, weights[conv], states.get(conv), context.document_positions
        )
    return outputs, new_states


def short_conv(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute (c * conv(b * v)) W_o of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `b`, `c`, `v` and `o`, the convolution `v_conv`, and optionally the norm of `x`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of the convolution of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    projected = project(x, weights, ("b", "c", "v"), context)
    gated = {"v": projected["b"] * projected["v"]}
    convolved, new_states = convolve(gated, weights, context, states)
    hidden = (projected["c"], convolved["v"])
    return project_out(hidden, _multiply_by_gate, weights, context), new_states


def _multiply_by_gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
    """Multiply the convolution by its gate, both [B, T, C]."""
    gate, convolved = hidden
    return gate * convolved


PROJECTIONS = ("q", "k", "v", "z", "qkvz", "beta", "dt")
# Added to the squared length of queries and keys, as in `l2norm` of transformers.
LENGTH_EPS = 1e-6


def gated_delta(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the gated delta net of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `q`, `k`, `v` and `z`, or all of them as parts of `qkvz`; `beta`, `dt` and `o`; the
            convolutions `q_conv`, `k_conv` and `v_conv`; `a_log` and `dt_bias` [G, R]; and `norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of convolutions and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    projected = project(x, weights, PROJECTIONS, context)
    if "qkvz" in projected:
        projected |= _split_groups(projected["qkvz"], weights)
    inputs = {name: projected[name] for name in ("q", "k", "v")}
    convolved, new_states = convolve(inputs, weights, context, states)
    activate = ACTIVATION_FUNCTIONS[context.arch_config.activation]
    q, k, v = (activate(convolved[name]) for name in ("q", "k", "v"))
    dt = projected["dt"].astype(jnp.float32) + weights["dt_bias"]["bias"]
    recurrence = Recurrence(
        q=_normalize(q) * q.shape[-1] ** -0.5,
        k=_normalize(k),
        v=v,
        log_decay=-jnp.exp(weights["a_log"]["weight"].astype(jnp.float32)) * nn.softplus(dt),
        beta=nn.sigmoid(projected["beta"]),
        is_start=document_starts(context, x.shape[:2]),
    )
    output, new_states[STATE] = chunked_scan(recurrence, states.get(STATE))
    plain_norm = dataclasses.replace(context.arch_config, norm="rms")

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        values, z = hidden
        normed = norm(values, weights["norm"], plain_norm)
        return (normed * nn.silu(z.astype(jnp.float32))).astype(values.dtype)

    hidden = (output.astype(x.dtype), projected["z"])
    return project_out(hidden, gate, weights, context), new_states


def _split_groups(fused: Array, weights: Projections) -> dict[str, Array]:
    """Split [B, T, G, 2 N + 2 R P] into queries and keys [B, T, G, N], and values and gates [B, T, G, R, P]."""
    key_dim = weights["k_conv"]["weight"].shape[1]
    heads, value_dim = weights["v_conv"]["weight"].shape[1:3]
    ends = (key_dim, 2 * key_dim, 2 * key_dim + heads * value_dim)
    q, k, v, z = jnp.split(fused, ends, axis=-1)
    shape = (*fused.shape[:3], heads, value_dim)
    return {"q": q, "k": k, "v": v.reshape(shape), "z": z.reshape(shape)}


def _normalize(x: Array) -> Array:
    """Divide queries or keys [B, T, G, N] by their length, in float32."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + LENGTH_EPS)


# Projections of the output of the convolution. `dt_up` widens the output of `dt_down`.
SELECTIONS = ("q", "k", "dt_down")


def mamba(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the Mamba mixer of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `v`, `z` and `o` of hidden states, and `q`, `k`, `dt_down` and `dt_up` of channels. The
            convolution `v_conv`, `a_log` [C, N], `d` [C], and optionally the norms `q_norm`, `k_norm` and
            `dt_down_norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of the convolution and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    projected = project(x, weights, ("v", "z"), context)
    convolved, new_states = convolve({"v": projected["v"]}, weights, context, states)
    v = ACTIVATION_FUNCTIONS[mixer.activation or context.arch_config.activation](convolved["v"])
    selected = _select(v, weights, context, mixer)
    inputs = SelectiveInputs(
        q=selected["q"],
        k=selected["k"],
        v=v,
        dt=selected["dt"],
        is_start=document_starts(context, x.shape[:2]),
    )
    rates = -jnp.exp(weights["a_log"]["weight"].astype(jnp.float32))
    output, new_states[STATE] = selective_scan(inputs, rates, states.get(STATE))
    output += v * weights["d"]["weight"].astype(jnp.float32)

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        values, z = hidden
        return (values * nn.silu(z.astype(jnp.float32))).astype(x.dtype)

    return project_out((output, projected["z"]), gate, weights, context), new_states


def _select(
    v: Array, weights: Projections, context: LayerContext, mixer: Mixer
) -> dict[str, Array]:
    """Project channels [B, T, C] to queries and keys [B, T, N], and to steps dt, float32 [B, T, C]."""
    num_devices = context.sharding.num_devices

    def select_chunk(v: Array, weights: Projections, constants: None) -> dict[str, Array]:
        selected: dict[str, Array] = {}
        for name in SELECTIONS:
            output = linear(v, weights[name], num_devices=num_devices)
            if f"{name}_norm" in weights:
                output = norm(output, weights[f"{name}_norm"], context.arch_config)
            if mixer.plain_norm_eps is not None:
                output = plain_rms_norm(output, mixer.plain_norm_eps)
            selected[name] = output
        steps = {name: leaf for name, leaf in weights["dt_up"].items() if name != "bias"}
        dt = linear(selected.pop("dt_down"), steps, num_devices=num_devices)
        # In bfloat16 the bias would round most steps to the same number.
        selected["dt"] = nn.softplus(dt.astype(jnp.float32) + weights["dt_up"]["bias"])
        return selected

    names = (*SELECTIONS, "dt_up", *(f"{name}_norm" for name in SELECTIONS))
    chosen = {name: weights[name] for name in names if name in weights}
    return over_chunks(select_chunk, v.shape[1], context)(v, chosen, None)


# Axes of the heads of a group, and of their values.
GROUP_AXES = (-2, -1)


def mamba2(
    x: Array, weights: Projections, context: LayerContext, states: Mapping[str, Array]
) -> tuple[Array, dict[str, Array]]:
    """Compute the Mamba-2 mixer of hidden states [B, T, D].

    Args:
        x: Hidden states [B, T, D].
        weights: Projections `q`, `k`, `v`, `z`, `dt` and `o`; the convolutions `q_conv`, `k_conv` and `v_conv`;
            `a_log`, `d` and `dt_bias` [G, R]; and optionally `norm`.
        context: Architecture, sharding and positions of the layer.
        states: Inputs of convolutions and the state of earlier tokens. Empty without a cache.

    Returns:
        [B, T, D], and the new states.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    projected = project(x, weights, ("q", "k", "v", "z", "dt"), context)
    inputs = {name: projected[name] for name in ("q", "k", "v")}
    convolved, new_states = convolve(inputs, weights, context, states)
    activate = ACTIVATION_FUNCTIONS[mixer.activation or context.arch_config.activation]
    q, k, v = (activate(convolved[name]).astype(jnp.float32) for name in ("q", "k", "v"))
    dt = nn.softplus(projected["dt"].astype(jnp.float32) + weights["dt_bias"]["bias"])
    dt = jnp.clip(dt, *mixer.dt_limits)
    recurrence = Recurrence(
        q=q,
        k=k,
        v=v * dt[..., None],
        log_decay=-jnp.exp(weights["a_log"]["weight"].astype(jnp.float32)) * dt,
        beta=None,
        is_start=document_starts(context, x.shape[:2]),
    )
    output, new_states[STATE] = chunked_scan(recurrence, states.get(STATE))
    output += v * weights["d"]["weight"].astype(jnp.float32)[..., None]

    def gate(hidden: tuple[Array, Array], weights: Projections) -> Array:
        return _gate(*hidden, weights, context, mixer).astype(x.dtype)

    return project_out((output, projected["z"]), gate, weights, context), new_states


def _gate(
    output: Array, z: Array, weights: Projections, context: LayerContext, mixer: Mixer
) -> Array:
    """Multiply the output [B, T, G, R, P] by its gate, and normalize each group before or after that."""
    gate = nn.silu(z.astype(jnp.float32))
    if mixer.norm_place == "none":
        return output * gate
    plain_norm = dataclasses.replace(context.arch_config, norm="rms")
    if mixer.norm_place == "before_gate":
        return norm(output, weights["norm"], plain_norm, GROUP_AXES) * gate
    return norm(output * gate, weights["norm"], plain_norm, GROUP_AXES)


# (hidden states [B, T, D], weights, context, states of the layer) -> output [B, T, D], new states
MixerFunction = Callable[
    [Array, Projections, LayerContext, Mapping[str, Array]],
    tuple[Array, dict[str, Array]],
]
MIXERS: Mapping[str, MixerFunction] = {
    "short_conv": short_conv,
    "gated_delta": gated_delta,
    "mamba2": mamba2,
    "mamba": mamba,
}


def recurrent_mixer(
    x: Array,
    weights: Projections,
    context: LayerContext,
    *,
    input_norm: Leaves | None = None,
) -> tuple[Array, KVCache | None]:
    """Compute the recurrent mixer of a layer.

    Args:
        x: Hidden states [B, T, D].
        weights: Weights of the mixer.
        context: Architecture, sharding and cache of the layer.
        input_norm: Weights of the norm of `x`. None skips the norm.

    Returns:
        The output [B, T, D], and the cache with the new tokens.
    """
    mixer = context.arch_config.mixer
    assert mixer is not None
    if input_norm is not None:
        weights = {**weights, INPUT_NORM: input_norm}
    cache = context.kv_cache
    states: Mapping[str, Array] = {}
    if cache is not None:
        assert cache.recurrent is not None
        states = cache.recurrent.read()
    output, new_states = MIXERS[mixer.kind](x, weights, context, states)
    if cache is not None:
        cache = cache.write_states(new_states, context.sharding)
    return name_activation(scale_by(output, mixer.output_scale), "o"), cache
