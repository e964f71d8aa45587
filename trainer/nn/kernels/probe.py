"""A numeric check of attention kernels: output and gradients of a small random case against the reference kernel.

Axes: B rows of the batch, T tokens, H query heads, K key and value heads, E head width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.attention_kernels import (
    KERNEL_SPECS,
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
)
from prepcli.models.layer_config import RelativePositionBias
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.dropout import AttentionDropout, RandomKey
from trainer.nn.kernels import KERNELS
from trainer.nn.kernels.accelerators import AttentionKernel
from trainer.nn.kernels.reference import reference_attention
from trainer.nn.model_spec import AttentionOptions

NUM_ROWS = 2
NUM_KV_HEADS = 2
GROUP = 2
LENGTH, TILE = 72, (32, 16)  # the last tile of queries is incomplete
ACCELERATOR_LENGTH = 640  # several blocks of every kernel
WINDOW = 20
SOFTCAP = 2.0
LAYER_SCALE = 0.5
DROPOUT_RATE = 0.25
BIAS = RelativePositionBias(num_buckets=8, max_distance=16, bidirectional=True)
UNIT_ROUNDOFFS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# No optimization: it halves the compile time.
CPU_OPTIONS: dict[str, str | bool] = {"xla_backend_optimization_level": "0"}
# From scaled queries to a gradient an element is rounded 8 times to the dtype of the computation.
NUM_ROUNDINGS = 8

Arrays = Mapping[str, Array]


@cache
def find_mismatch(name: str, needs: AttentionNeeds, device: DeviceKind) -> str:
    """Run a kernel on a random case with the features of a run. Return how it differs from the reference kernel.

    Args:
        name: One of `KERNEL_NAMES`.
        needs: Requirements of the run.
        device: Kind of JAX's default device.

    Returns:
        Empty if output and gradients are equal within rounding. Otherwise a phrase with the largest error, or with the
        exception that the kernel raised.
    """
    length = ACCELERATOR_LENGTH if KERNEL_SPECS[name].runs_per_device else LENGTH
    try:
        errors = relative_errors(KERNELS[name], needs, device, length=length)
    except Exception as error:
        # A failure of any kind means that the kernel does not work here.
        return f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
    array, largest = max(errors.items(), key=lambda item: (not np.isfinite(item[1]), item[1]))
    allowed = tolerance(needs, device, length)
    if largest <= allowed:
        return ""
    return f"its {array} differs from the reference by {largest:.2g} of the norm, {allowed:.2g} is allowed"


def tolerance(needs: AttentionNeeds, device: DeviceKind, length: int) -> float:
    """Return the allowed norm of an error, relative to the norm of the exact array.

    Products are summed in float32: a sum of n products has an error of at most n unit roundoffs (Higham 2002, section
    3.1). Accelerators round the factors of float32 products to bfloat16 or tf32 by default.
    """
    dtype = needs.dtype if device.platform == "cpu" else "bfloat16"
    return (
        NUM_ROUNDINGS * UNIT_ROUNDOFFS[dtype]
        + (needs.head_dim + length) * UNIT_ROUNDOFFS["float32"]
    )


def relative_errors(
    kernel: AttentionKernel, needs: AttentionNeeds, device: DeviceKind, *, length: int
) -> dict[str, float]:
    """Return the norm of the error of each array, relative to the norm of the exact one.

    Args:
        kernel: The kernel to check.
        needs: Features of the masks and scores, and dtype and width of the heads.
        device: Kind of JAX's default device.
        length: Tokens of a row.

    Returns:
        The largest errors over the masks of the run, of `output`, and of `gradient of q`, `k`, `v` and, if the run has
        them, `bias` and `sinks`.
    """
    inputs = _random_inputs(needs, length)
    exact_inputs = {name: array.astype(jnp.float32) for name, array in inputs.items()}
    errors: dict[str, float] = {}
    for has_causal_mask, window in _mask_kinds(needs):
        run = partial(_output_and_gradients, needs=needs, is_causal=has_causal_mask, window=window)
        actual = _compile_and_run(partial(run, kernel), inputs, device)
        with jax.default_matmul_precision("highest"):
            exact = _compile_and_run(partial(run, reference_attention), exact_inputs, device)
        for name, expected in jax.device_get(exact).items():
            difference = np.asarray(actual[name], np.float32) - expected
            error = float(np.linalg.norm(difference) / np.linalg.norm(expected))
            # `np.maximum` keeps nan, and `max` drops it or not, by the order of its arguments.
            errors[name] = float(np.maximum(errors.get(name, 0.0), error))
    return errors


def _compile_and_run(
    function: Callable[[Arrays], Arrays], inputs: Arrays, device: DeviceKind
) -> Arrays:
    """Run a function of arrays on JAX's default device."""
    options = CPU_OPTIONS if device.platform == "cpu" else None
    return jax.jit(function).lower(inputs).compile(compiler_options=options)(inputs)


def _random_inputs(needs: AttentionNeeds, length: int) -> dict[str, Array]:
    """Return q, k, v, the gradient of the output, and the table of the bias. Scores are of the order of 1."""
    num_heads = NUM_KV_HEADS * (GROUP if AttentionFeature.GROUPED_HEADS in needs.features else 1)
    value_dim = needs.head_dim
    if AttentionFeature.VALUE_WIDTH in needs.features:
        value_dim = needs.head_dim // 2
    random = np.random.default_rng(0)

    def normal(*shape: int) -> Array:
        return jnp.asarray(random.standard_normal(shape), needs.dtype)

    inputs = {
        "q": normal(NUM_ROWS, length, num_heads, needs.head_dim),
        "k": normal(NUM_ROWS, length, NUM_KV_HEADS, needs.head_dim),
        "v": normal(NUM_ROWS, length, NUM_KV_HEADS, value_dim),
        "output_gradient": normal(NUM_ROWS, length, num_heads, value_dim),
    }
    if AttentionFeature.SCORE_BIAS in needs.features:
        inputs["bias"] = normal(BIAS.num_buckets, num_heads)
    if AttentionFeature.SINKS in needs.features:
        inputs["sinks"] = normal(num_heads)
    return inputs


def _mask_kinds(needs: AttentionNeeds) -> Iterator[tuple[bool, int]]:
    """Yield whether the mask is causal, and its window, for each mask of the run."""
    if (
        needs.features.isdisjoint({AttentionFeature.WINDOW})
        or AttentionFeature.MIXED_WINDOWS in needs.features
    ):
        yield True, FULL_ATTENTION
    if AttentionFeature.WINDOW in needs.features:
        yield True, WINDOW
    if AttentionFeature.BIDIRECTIONAL in needs.features:
        yield False, FULL_ATTENTION


def _output_and_gradients(
    kernel: AttentionKernel, inputs: Arrays, *, needs: AttentionNeeds, is_causal: bool, window: int
) -> dict[str, Array]:
    """Return the output of a kernel, and the gradients of its inputs."""
    arch_config = ArchConfig(
        norm="rms",
        norm_eps=1e-6,
        activation="silu",
        has_gated_mlp=True,
        attn_scale=needs.head_dim**-0.5,
        sliding_windows=(),
        rope=None,
        max_positions=0,
        init_std=1.0,
        attn_logit_softcap=SOFTCAP if AttentionFeature.SOFTCAP in needs.features else NO_SOFTCAP,
    )
    options = AttentionOptions("blockwise", *TILE)

    def attend(arrays: Arrays) -> Array:
        mask = _mask(needs, arrays, is_causal=is_causal, window=window)
        return kernel(arrays["q"], KV(arrays["k"], arrays["v"]), arch_config, mask, options)

    differentiable = {name: array for name, array in inputs.items() if name != "output_gradient"}
    output, pullback = jax.vjp(attend, differentiable)
    (gradients,) = pullback(inputs["output_gradient"].astype(output.dtype))
    return {
        "output": output,
        **{f"gradient of {name}": gradient for name, gradient in gradients.items()},
    }


def _mask(needs: AttentionNeeds, arrays: Arrays, *, is_causal: bool, window: int) -> AttentionMask:
    """Return a mask with the features of the run."""
    num_rows, length = arrays["q"].shape[:2]
    positions = jnp.arange(length)
    # The first token of the second segment or of padding, another one in each row.
    starts = length * jnp.arange(1, num_rows + 1)[:, None] // (num_rows + 2)
    mask = AttentionMask(positions, positions, window=window, is_causal=is_causal)
    changes: dict[str, Any] = {}
    # Chunks of positions reach the kernels as segments.
    segmented = {AttentionFeature.SEGMENTS, AttentionFeature.CHUNKS}
    if segmented & needs.features and is_causal:
        segment_ids = (positions >= starts).astype(jnp.int32)
        changes |= {"q_segment_ids": segment_ids, "kv_segment_ids": segment_ids}
    if AttentionFeature.KEY_PADDING in needs.features and not is_causal:
        changes["kv_valid"] = positions < starts
    if AttentionFeature.SCORE_BIAS in needs.features:
        changes["bias"] = ScoreBias(arrays["bias"], BIAS)
    if AttentionFeature.SINKS in needs.features:
        changes["sinks"] = arrays["sinks"]
    if AttentionFeature.DROPOUT in needs.features:
        row_keys = RandomKey(*jnp.arange(2 * num_rows, dtype=jnp.uint32).reshape(2, num_rows))
        head_ids = jnp.arange(arrays["q"].shape[2], dtype=jnp.uint32)
        changes["dropout"] = AttentionDropout(row_keys, head_ids, DROPOUT_RATE)
    if AttentionFeature.FCM in needs.features and is_causal:
        # A third of the keys is hidden, and never the first one, as in forgetful causal masking.
        changes["kv_valid"] = jnp.broadcast_to(positions % 3 != 1, (num_rows, length))
    if AttentionFeature.LAYER_SCALE in needs.features:
        changes["layer_score_scale"] = jnp.float32(LAYER_SCALE)
    return dataclasses.replace(mask, **changes)
