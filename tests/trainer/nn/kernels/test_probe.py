"""The numeric check of kernels: it accepts right kernels and finds each kind of wrong one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.attention_kernels import AttentionFeature, AttentionNeeds, DeviceKind
from tests.helpers.slow_cases import slow_except
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels import KERNELS, AttentionKernel, probe
from trainer.nn.kernels.blockwise import blockwise_attention
from trainer.nn.kernels.probe import LENGTH, find_mismatch, relative_errors, tolerance
from trainer.nn.kernels.reference import reference_attention
from trainer.nn.model_spec import AttentionOptions

CPU = DeviceKind("cpu")
CAUSAL = frozenset({AttentionFeature.CAUSAL})
MODELS = {
    "llama": CAUSAL | {AttentionFeature.GROUPED_HEADS},
    "gemma2": CAUSAL
    | {
        AttentionFeature.GROUPED_HEADS,
        AttentionFeature.WINDOW,
        AttentionFeature.MIXED_WINDOWS,
        AttentionFeature.SOFTCAP,
    },
    "t5": CAUSAL
    | {
        AttentionFeature.BIDIRECTIONAL,
        AttentionFeature.CROSS,
        AttentionFeature.KEY_PADDING,
        AttentionFeature.SCORE_BIAS,
    },
    "gpt_oss": CAUSAL | {AttentionFeature.WINDOW, AttentionFeature.SINKS},
    "deepseek_v3": CAUSAL | {AttentionFeature.VALUE_WIDTH},
    "gpt2, packed": CAUSAL | {AttentionFeature.LAYER_SCALE, AttentionFeature.SEGMENTS},
    "llama, random masks": CAUSAL | {AttentionFeature.DROPOUT, AttentionFeature.FCM},
}
ALL = frozenset().union(*MODELS.values())


@pytest.fixture(autouse=True)
def _without_cache() -> Iterator[None]:
    """Forget results before and after a test: some tests replace kernels."""
    find_mismatch.cache_clear()
    yield
    find_mismatch.cache_clear()


@pytest.mark.parametrize(
    ("model", "dtype"),
    slow_except(
        [(model, dtype) for model in MODELS for dtype in ("float32", "bfloat16")],
        [("gemma2", "float32"), ("llama, random masks", "float32")],
    ),
)
def test_probe_accepts_blockwise_attention(model: str, dtype: str):
    assert find_mismatch("blockwise", AttentionNeeds(MODELS[model], dtype, 16), CPU) == ""


def wrong_mask(**changes: Any) -> AttentionKernel:
    """Return a kernel that ignores fields of the mask, or uses other values."""

    def attend(
        q: Array, kv: KV, arch: ArchConfig, mask: AttentionMask, options: AttentionOptions
    ) -> Array:
        values = {
            name: value(mask) if callable(value) else value for name, value in changes.items()
        }
        return reference_attention(q, kv, arch, dataclasses.replace(mask, **values), options)

    return attend


def wrong_arch(**changes: Any) -> AttentionKernel:
    """Return a kernel with another scale or softcap."""

    def attend(
        q: Array, kv: KV, arch: ArchConfig, mask: AttentionMask, options: AttentionOptions
    ) -> Array:
        return reference_attention(q, kv, dataclasses.replace(arch, **changes), mask, options)

    return attend


def interleave_groups(
    q: Array, kv: KV, arch: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Give query head h the keys and values of head h mod K."""
    group = q.shape[2] // kv.keys.shape[2]
    tiled = KV(*(jnp.tile(array, (1, 1, group, 1)) for array in kv))
    return reference_attention(q, tiled, arch, mask, options)


def stop_gradient(
    q: Array, kv: KV, arch: ArchConfig, mask: AttentionMask, options: AttentionOptions
) -> Array:
    """Compute the output without the gradient of keys."""
    return reference_attention(
        q, KV(jax.lax.stop_gradient(kv.keys), kv.values), arch, mask, options
    )


WRONG: dict[str, tuple[AttentionKernel, AttentionFeature]] = {
    "no causal mask": (wrong_mask(is_causal=False), AttentionFeature.CAUSAL),
    "keys before the query only": (
        wrong_mask(kv_positions=lambda mask: mask.kv_positions + 1),
        AttentionFeature.CAUSAL,
    ),
    "no window": (wrong_mask(window=FULL_ATTENTION), AttentionFeature.WINDOW),
    "window of one more": (
        wrong_mask(window=lambda mask: mask.window + bool(mask.window)),
        AttentionFeature.WINDOW,
    ),
    "no segments": (wrong_mask(q_segment_ids=None), AttentionFeature.SEGMENTS),
    "no key padding": (wrong_mask(kv_valid=None), AttentionFeature.KEY_PADDING),
    "no dropout": (wrong_mask(dropout=None), AttentionFeature.DROPOUT),
    "no forgotten keys": (wrong_mask(kv_valid=None), AttentionFeature.FCM),
    "no bias": (wrong_mask(bias=None), AttentionFeature.SCORE_BIAS),
    "no layer scale": (wrong_mask(layer_score_scale=None), AttentionFeature.LAYER_SCALE),
    "no sinks": (wrong_mask(sinks=None), AttentionFeature.SINKS),
    "no softcap": (wrong_arch(attn_logit_softcap=NO_SOFTCAP), AttentionFeature.SOFTCAP),
    "no scale": (wrong_arch(attn_scale=1.0), AttentionFeature.CAUSAL),
    "other groups": (interleave_groups, AttentionFeature.GROUPED_HEADS),
    "no gradient of keys": (stop_gradient, AttentionFeature.CAUSAL),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_kernel_is_found_in_bfloat16(name: str):
    """The feature alone must show the error: each model needs only some of the features."""
    kernel, feature = WRONG[name]
    bidirectional = (
        {AttentionFeature.BIDIRECTIONAL}
        if feature is AttentionFeature.KEY_PADDING
        else set[AttentionFeature]()
    )
    needs = AttentionNeeds(CAUSAL | {feature} | bidirectional, "bfloat16", 16)
    errors = relative_errors(kernel, needs, CPU, length=LENGTH)
    assert not max(errors.values()) <= tolerance(needs, CPU, LENGTH)


def test_error_of_an_array_names_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(KERNELS, "blockwise", stop_gradient)  # pyright: ignore[reportArgumentType]
    mismatch = find_mismatch("blockwise", AttentionNeeds(CAUSAL, "float32", 8), CPU)
    assert mismatch.startswith("its gradient of k differs from the reference by 1 of the norm, ")


def test_nan_is_a_mismatch(monkeypatch: pytest.MonkeyPatch):
    def attend(q: Array, kv: KV, *arguments: Any) -> Array:
        return blockwise_attention(q, kv, *arguments) * jnp.nan

    monkeypatch.setitem(KERNELS, "blockwise", attend)  # pyright: ignore[reportArgumentType]
    assert "by nan of the norm" in find_mismatch(
        "blockwise", AttentionNeeds(CAUSAL, "float32", 8), CPU
    )


def test_exception_of_a_kernel_is_a_mismatch():
    needs = AttentionNeeds(CAUSAL, "bfloat16", 8)
    assert find_mismatch("cudnn", needs, CPU).startswith("it raises RuntimeError: ")


def test_result_is_computed_once_per_process(monkeypatch: pytest.MonkeyPatch):
    needs = AttentionNeeds(CAUSAL, "float32", 8)
    first = find_mismatch("cudnn", needs, CPU)
    monkeypatch.setattr(probe, "relative_errors", lambda *_, **__: {"output": 0.0})
    assert find_mismatch("cudnn", needs, CPU) == first
    assert find_mismatch("cudnn", dataclasses.replace(needs, head_dim=16), CPU) == ""


def test_tolerance_depends_on_dtype_and_device():
    needs = AttentionNeeds(CAUSAL, "float32", 64)
    assert tolerance(needs, CPU, LENGTH) < 1e-5
    assert tolerance(needs, DeviceKind("tpu"), LENGTH) == tolerance(
        dataclasses.replace(needs, dtype="bfloat16"), CPU, LENGTH
    )
