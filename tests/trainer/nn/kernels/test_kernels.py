"""Kernels of accelerators: which calls they support, their probe, and their results."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from jax._src.cudnn import fused_attention_stablehlo

from prepcli.core.errors import UsageError
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP, ArchConfig
from prepcli.models.attention_kernels import AttentionFeature, AttentionNeeds, DeviceKind
from prepcli.models.layer_config import RelativePositionBias
from prepcli.models.mesh import parse_mesh
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias
from trainer.nn.kernels import KERNELS, AttentionKernel, attend, probe
from trainer.nn.kernels.accelerators import attend_per_device, splash_attention
from trainer.nn.kernels.blockwise import blockwise_attention
from trainer.nn.kernels.probe import LENGTH, find_mismatch, relative_errors, tolerance
from trainer.nn.kernels.reference import reference_attention
from trainer.nn.kernels.splash_kernel import BlockMask, make_row_kernel
from trainer.nn.model_spec import AttentionOptions

# The numeric check of kernels: it accepts right kernels and finds each kind of wrong one.

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
        [("gemma2", "float32")],
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

# Mistakes in other parts of the mask and of the scores than these are found in the same way.
SHOWN = ("no window", "no dropout", "other groups", "no gradient of keys")


@pytest.mark.parametrize("name", slow_except(WRONG, SHOWN))
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


# Lowering of cuDNN attention for GPUs; without a GPU the calls of cuDNN are read, not run.

ROWS, CUDNN_LENGTH, HEADS, KV_HEADS, HEAD_DIM = 4, 64, 4, 2, 16


@pytest.fixture
def _cudnn_is_installed(monkeypatch: pytest.MonkeyPatch):
    """Let JAX find a version of cuDNN; lowering asks for it."""
    monkeypatch.setattr(
        fused_attention_stablehlo,
        "cuda_versions",
        SimpleNamespace(cudnn_get_version=lambda: 91000),
        raising=False,
    )


def lower(window: int, sharding: ShardingContext) -> str:
    """Lower the gradients of attention for CUDA."""
    mask = AttentionMask(jnp.arange(CUDNN_LENGTH), jnp.arange(CUDNN_LENGTH), window=window)

    def loss(q: Array, k: Array, v: Array) -> Array:
        options = AttentionOptions("cudnn")
        output = attend(
            q, KV(k, v), arch_config=make_arch(), mask=mask, options=options, sharding=sharding
        )
        return output.astype(jnp.float32).sum()

    q = jax.ShapeDtypeStruct((ROWS, CUDNN_LENGTH, HEADS, HEAD_DIM), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((ROWS, CUDNN_LENGTH, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return (
        jax.jit(jax.grad(loss, (0, 1, 2)))
        .trace(q, kv, kv)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )


def calls(text: str) -> dict[str, str]:
    """Return the first tensor type of each cuDNN call, by name of its target."""
    lines = [line for line in text.splitlines() if "__cudnn$" in line]
    return {
        re.findall(r"@__cudnn\$(\w+)", line)[0]: re.findall(r"tensor<([0-9x]+)xbf16>", line)[0]
        for line in lines
    }


@pytest.mark.usefixtures("_cudnn_is_installed")
@pytest.mark.parametrize("window", [FULL_ATTENTION, 5])
def test_cudnn_is_called_with_causal_mask_window_and_scale(window: int):
    text = lower(window, ShardingContext())
    shape = f"{ROWS}x{CUDNN_LENGTH}x{HEADS}x{HEAD_DIM}"
    assert calls(text) == {"fmhaSoftmax": shape, "fmhaSoftmaxBackward": shape}
    settings = {
        key: {*re.findall(rf"{key}\\22: (?:\\22)?([\w.]+)", text)}
        for key in ("mask_type", "fmha_scale")
    }
    assert settings == {"mask_type": {"CAUSAL"}, "fmha_scale": {str(make_arch().attn_scale)}}
    assert {*re.findall(r"sliding_window_length\\22: (\d+)", text)} == {str(window)}, (
        "the token itself included"
    )


@pytest.mark.usefixtures("_cudnn_is_installed")
def test_each_device_calls_cudnn_for_its_rows_and_heads():
    text = lower(FULL_ATTENTION, make_sharding_context(parse_mesh("2,2,2")))
    shape = f"{ROWS // 4}x{CUDNN_LENGTH}x{HEADS // 2}x{HEAD_DIM}"
    assert calls(text) == {"fmhaSoftmax": shape, "fmhaSoftmaxBackward": shape}


# Splash attention against the reference kernel, interpreted on CPU devices, and its lowering for TPUs.

SPLASH_HEADS, SPLASH_KV_HEADS, SPLASH_HEAD_DIM, SPLASH_ROWS = 4, 2, 8, 2

ARCH = dataclasses.replace(make_arch(), attn_scale=0.3)

SPLASH = partial(splash_attention, interpret=True)

Heads = tuple[Array, Array, Array]


def random_heads(length: int, rows: int = SPLASH_ROWS) -> Heads:
    """Return random queries, keys and values."""
    random = np.random.default_rng(0)
    shapes = [
        (rows, length, heads, SPLASH_HEAD_DIM)
        for heads in (SPLASH_HEADS, SPLASH_KV_HEADS, SPLASH_KV_HEADS)
    ]
    q, k, v = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes)
    return q, k, v


def run(
    kernel: AttentionKernel, heads: Heads, mask: dict[str, Any], softcap: float = NO_SOFTCAP
) -> tuple[Any, ...]:
    """Return output and gradients of a kernel; the gradient of the output is the output of the reference kernel."""
    positions = jnp.arange(heads[0].shape[1])
    attention_mask = AttentionMask(positions, positions, **mask)
    arch_config = dataclasses.replace(ARCH, attn_logit_softcap=softcap)

    def attend(kernel: AttentionKernel, q: Array, k: Array, v: Array) -> Array:
        return kernel(q, KV(k, v), arch_config, attention_mask, AttentionOptions())

    @jax.jit
    def compute(*heads: Array) -> tuple[Any, ...]:
        output, pullback = jax.vjp(partial(attend, kernel), *heads)
        return output, *pullback(attend(reference_attention, *heads))

    return compute(*heads)


def check(length: int, mask: dict[str, Any], softcap: float = NO_SOFTCAP) -> None:
    """Compare output and gradients with the reference kernel; a sum of n products has an error of n roundings.

    The gradients of a query with one key are differences of equal terms: their error is that of the terms, which have
    about the norm of the output.
    """
    heads = random_heads(length)
    results, references = (
        run(SPLASH, heads, mask, softcap),
        run(reference_attention, heads, mask, softcap),
    )
    for actual, expected in zip(results, references):
        norm = jnp.linalg.norm(expected if expected.any() else references[0])
        assert jnp.linalg.norm(actual - expected) <= (length + SPLASH_HEAD_DIM) * 2.0**-24 * norm


SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (SPLASH_ROWS, 640)), axis=1)

CASES: dict[str, tuple[int, dict[str, Any], float]] = {
    "padded": (100, {}, NO_SOFTCAP),
    "window and softcap": (200, {"window": 5}, 2.0),
    "several blocks": (
        640,
        {"window": 200, "q_segment_ids": SEGMENTS, "kv_segment_ids": SEGMENTS},
        NO_SOFTCAP,
    ),
    "layer scale": (128, {"layer_score_scale": jnp.float32(0.5)}, NO_SOFTCAP),
    "window of one": (128, {"window": 1}, NO_SOFTCAP),
    "wide window": (300, {"window": 300}, 2.0),
}


@pytest.mark.parametrize("name", slow_except(CASES, ["window and softcap"]))
def test_splash_matches_reference(name: str):
    check(*CASES[name])


@pytest.mark.parametrize(
    "window", [FULL_ATTENTION, 1, 2, 100, 128, 129, 255, 256, 257, 383, 384, 500, 640]
)
def test_block_mask_equals_dense_mask(window: int):
    length, size = 640, 128
    distance = np.arange(length)[:, None] - np.arange(length)
    expected = (distance >= 0) & ((distance < window) | (window == FULL_ATTENTION))
    mask = BlockMask(length, window)
    for q_start, k_start in np.ndindex(length // size, length // size):
        block = (
            slice(q_start * size, (q_start + 1) * size),
            slice(k_start * size, (k_start + 1) * size),
        )
        actual = mask[block]
        assert (actual == expected[block]).all(), "as broadcast"
        assert actual.shape in ((1, 1), (size, size))


def test_equal_block_masks_have_equal_hashes():
    assert BlockMask(256, 5) == BlockMask(256, 5)
    assert hash(BlockMask(256, 5)) == hash(BlockMask(256, 5))
    assert BlockMask(256, 5) != BlockMask(256, 6)


def test_devices_compute_their_rows_and_heads():
    """On mesh 2,2,2 each device has one of four rows and two of four query heads."""
    sharding, length = make_sharding_context(parse_mesh("2,2,2")), 32
    q, k, v = random_heads(length, rows=4)
    positions = jnp.arange(length)
    ids = jnp.sort(jnp.asarray(np.random.default_rng(1).integers(0, 3, (4, length))), axis=1)
    mask = AttentionMask(
        positions,
        positions,
        q_segment_ids=ids,
        kv_segment_ids=ids,
        layer_score_scale=jnp.float32(0.5),
        window=7,
    )

    def kernel(q: Array, kv: KV, *arguments: Any) -> Array:
        assert (q.shape[0], q.shape[2], kv.keys.shape[2]) == (1, 2, 1)
        return SPLASH(q, kv, *arguments)

    options: dict[str, Any] = {
        "arch_config": ARCH,
        "mask": mask,
        "options": AttentionOptions(),
        "sharding": sharding,
    }
    actual = jax.jit(lambda q, k, v: attend_per_device(kernel, q, KV(k, v), **options))(q, k, v)
    expected = reference_attention(q, KV(k, v), ARCH, mask, AttentionOptions())
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_mask_field_not_passed_to_devices_is_rejected():
    @dataclasses.dataclass(frozen=True)
    class OtherMask(AttentionMask):
        rate: float = 0.0

    q, k, v = random_heads(8)
    options: dict[str, Any] = {
        "arch_config": ARCH,
        "options": AttentionOptions(),
        "sharding": ShardingContext(),
    }
    with pytest.raises(ValueError, match="`rate` of the mask is not passed"):
        attend_per_device(SPLASH, q, KV(k, v), mask=OtherMask(rate=0.5), **options)


@pytest.mark.parametrize("mesh", slow_except(["", "2,2,2"], ["2,2,2"]))
def test_splash_is_lowered_for_tpus(mesh: str):
    sharding = make_sharding_context(parse_mesh(mesh)) if mesh else ShardingContext()
    positions = jnp.arange(256)
    mask = AttentionMask(positions, positions)

    def loss(q: Array, k: Array, v: Array) -> Array:
        options = AttentionOptions("pallas-splash")
        return attend(
            q, KV(k, v), arch_config=ARCH, mask=mask, options=options, sharding=sharding
        ).sum()

    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*random_heads(256, rows=4))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("@tpu_custom_call") == 3, (
        "forward, gradient of queries, gradient of keys and values"
    )


def test_blocks_divide_the_length():
    heads = jnp.zeros((SPLASH_HEADS, 384, SPLASH_HEAD_DIM))
    kernel = make_row_kernel(
        384, num_heads=SPLASH_HEADS, window=FULL_ATTENTION, softcap=NO_SOFTCAP, interpret=True
    )
    assert kernel(heads, heads, heads, None).shape == heads.shape


# Calls that a kernel does not support are refused when they are traced: no kernel ignores a part of a mask.

CALL_LENGTH = 4

POSITIONS, IDS = jnp.arange(CALL_LENGTH), jnp.zeros((1, CALL_LENGTH), jnp.int32)

CALL_CAUSAL: dict[str, Any] = {"q_positions": POSITIONS, "kv_positions": POSITIONS}

BIAS = ScoreBias(jnp.zeros((8, 2)), RelativePositionBias(8, 16, bidirectional=False))

UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "encoder": (CALL_CAUSAL | {"is_causal": False}, "attention without a causal mask"),
    "no positions": ({}, "attention without a causal mask"),
    "padding": (CALL_CAUSAL | {"kv_valid": IDS == 0}, "padding of keys that differs between rows"),
    "bias": (CALL_CAUSAL | {"bias": BIAS}, "relative position bias"),
    "sinks": (CALL_CAUSAL | {"sinks": jnp.zeros(2)}, "attention sinks"),
    "positions of rows": (
        dict.fromkeys(CALL_CAUSAL, POSITIONS[None]),
        "positions other than 0 to T - 1",
    ),
    "fewer queries": (
        CALL_CAUSAL | {"q_positions": POSITIONS[3:]},
        "positions other than 0 to T - 1",
    ),
}


def trace_attention(kernel: str, mask: AttentionMask, softcap: float = 0.0) -> tuple[int, ...]:
    """Trace attention with two heads of 8 elements. Return the shape of the output."""
    heads = jax.ShapeDtypeStruct((1, CALL_LENGTH, 2, 8), jnp.bfloat16)
    options: dict[str, Any] = {
        "arch_config": dataclasses.replace(make_arch(), attn_logit_softcap=softcap),
        "mask": mask,
        "options": AttentionOptions(kernel),
        "sharding": ShardingContext(),
    }
    return jax.eval_shape(lambda q, k, v: attend(q, KV(k, v), **options), heads, heads, heads).shape


@pytest.mark.parametrize("name", UNSUPPORTED)
@pytest.mark.parametrize("kernel", ["cudnn", "pallas-splash"])
def test_unsupported_mask_is_refused(kernel: str, name: str):
    mask, feature = UNSUPPORTED[name]
    with pytest.raises(UsageError) as caught:
        trace_attention(kernel, AttentionMask(**mask))
    assert caught.value.why == f"it does not support {feature}"


def test_cudnn_refuses_segments_and_softcaps():
    with pytest.raises(UsageError, match="softcap of scores"):
        trace_attention("cudnn", AttentionMask(**CALL_CAUSAL), softcap=2.0)
    with pytest.raises(UsageError, match="segment ids"):
        trace_attention(
            "cudnn", AttentionMask(**CALL_CAUSAL, q_segment_ids=IDS, kv_segment_ids=IDS)
        )


def test_general_kernels_accept_every_mask():
    for mask, _ in UNSUPPORTED.values():
        shape = trace_attention("reference", AttentionMask(**mask), softcap=2.0)
        assert shape == (1, CALL_LENGTH, 2, 8)
