"""Tests of attention with sinks, and with values of another width than keys, against dense attention in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import relative_error
from prepcli.models.architecture import FULL_ATTENTION
from tests.helpers.slow_cases import slow_except
from tests.trainer.nn.kernels.test_ring import split_over
from tests.trainer.nn.test_attention import make_arch
from trainer.distributed.sharding import ShardingContext, zigzag_order
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.kernels import attend
from trainer.nn.model_spec import AttentionOptions

ROWS, LENGTH, KV_HEADS, GROUP, KEY_WIDTH, VALUE_WIDTH = 2, 24, 2, 3, 6, 4
Inputs = dict[str, Array]


def random_inputs() -> dict[str, np.ndarray]:
    """Generate queries, keys, values and sinks. The sinks of two heads hide most keys."""
    rng = np.random.default_rng(0)
    shapes = {
        "q": (ROWS, LENGTH, KV_HEADS * GROUP, KEY_WIDTH),
        "k": (ROWS, LENGTH, KV_HEADS, KEY_WIDTH),
        "v": (ROWS, LENGTH, KV_HEADS, VALUE_WIDTH),
        "sinks": (KV_HEADS * GROUP,),
    }
    inputs = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    inputs["sinks"][:2] += 4
    return inputs


def dense_attention(inputs: Inputs, window: int) -> Array:
    """Compute exp(score) / (exp(sink) + sum exp(score)) directly, [B, T, H, V]."""
    keys = jnp.repeat(inputs["k"], GROUP, axis=2)
    values = jnp.repeat(inputs["v"], GROUP, axis=2)
    scores = jnp.einsum("bthe,bshe->bhts", inputs["q"], keys) * make_arch().attn_scale
    distance = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)
    visible = (distance >= 0) & ((distance < window) | (window == FULL_ATTENTION))
    weights = jnp.where(visible, jnp.exp(scores), 0)
    total = weights.sum(-1) + jnp.exp(inputs["sinks"])[:, None]
    return jnp.einsum("bhts,bshv->bthv", weights / total[..., None], values)


def run_kernel(inputs: Inputs, window: int, kernel: str, sharding: ShardingContext) -> Array:
    """Compute the output with a kernel."""
    positions = jnp.asarray(zigzag_order(LENGTH, sharding))
    mask = AttentionMask(positions, positions, sinks=inputs["sinks"], window=window)
    return attend(
        inputs["q"][:, positions],
        KV(inputs["k"][:, positions], inputs["v"][:, positions]),
        arch_config=make_arch(),
        mask=mask,
        options=AttentionOptions(kernel, 5, 7),
        sharding=sharding,
    )[:, jnp.argsort(positions)]


def outputs_and_gradients(function: Any, inputs: dict[str, np.ndarray], dtype: Any) -> list[Array]:
    """Return the output, and the gradients of its product with fixed numbers."""
    arrays = {name: jnp.asarray(array, dtype) for name, array in inputs.items()}

    def loss(arrays: Inputs) -> tuple[Array, Array]:
        output = function(arrays)
        return (output * jnp.cos(jnp.arange(output.size)).reshape(output.shape)).sum(), output

    gradients, output = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return [output, *(gradients[name] for name in sorted(gradients))]


WINDOWS = (FULL_ATTENTION, 5)
KERNELS = (("reference", 1), ("blockwise", 1), ("blockwise", 2))
CASES = [(*kernel, window) for window in WINDOWS for kernel in KERNELS]


# The first kernel is the reference of the others, and two devices need tiles of one.
@pytest.mark.parametrize(
    ("kernel", "num_devices", "window"),
    slow_except(
        CASES, [("reference", 1, 5), ("blockwise", 2, 5), ("blockwise", 1, FULL_ATTENTION)]
    ),
)
def test_sinks_and_other_value_width_are_exact(kernel: str, num_devices: int, window: int):
    inputs = random_inputs()
    sharding = split_over(num_devices) if num_devices > 1 else ShardingContext()
    with jax.enable_x64(True):
        expected = outputs_and_gradients(lambda x: dense_attention(x, window), inputs, jnp.float64)
    actual = outputs_and_gradients(
        lambda x: run_kernel(x, window, kernel, sharding), inputs, jnp.float32
    )
    errors = [relative_error(np.asarray(a), np.asarray(e)) for a, e in zip(actual, expected)]
    assert max(errors) < 2e-6
