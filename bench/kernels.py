"""Measure the time and the model FLOPs utilization (MFU) of a transformer layer's gradients with each attention kernel.

    python -m bench.kernels
    python -m bench.kernels --shapes tiny --tokens 128,256 --dtype float32

A layer has the shape of a layer of a LLaMA with that many parameters. The gradients for T tokens count 6 N T operations
for the N elements of the matrices, and for attention 12 H E T^2 (`full`, PaLM, arXiv:2204.02311, appendix B) or half of
it (`causal`). Recomputation is not counted. MFU is unknown if the peak of the device is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prepcli.models.attention_kernels import (
    KERNEL_NAMES,
    KERNEL_SPECS,
    AttentionFeature,
    AttentionNeeds,
    unmet_needs,
)
from prepcli.models.registry import FAMILIES
from trainer.distributed.sharding import kind_of_device
from trainer.nn.attention_mask import AttentionMask
from trainer.nn.block import BLOCKS
from trainer.nn.context import LayerContext
from trainer.nn.model_spec import AttentionOptions
from trainer.nn.projections import BlockWeights

SHAPES: Mapping[str, tuple[int, int, int]] = {  # width, heads, width of the MLP
    "tiny": (64, 4, 128),
    "125m": (768, 12, 2048),
    "1.3b": (2048, 16, 5504),
    "7b": (4096, 32, 11008),
}
PEAK_FLOPS: Mapping[
    str, float
] = {  # dense bfloat16 per second, from data sheets, by part of the device kind
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6": 918e12,
    "TPU v5p": 459e12,
    "TPU v5": 197e12,
    "TPU v4": 275e12,
}
COLUMNS = ("shape", "tokens", "kernel", "ms", "MFU full", "MFU causal", "note")
WIDTHS = (6, 8, 14, 10, 9, 11, 0)


@dataclass(frozen=True, slots=True)
class LayerFlops:
    """Floating-point operations of the gradients of a layer: matrices, and attention without a causal mask."""

    matrices: float
    attention: float

    @property
    def full(self) -> float:
        """Operations if each query attends to all keys."""
        return self.matrices + self.attention

    @property
    def causal(self) -> float:
        """Operations if each query attends to half of the keys on average."""
        return self.matrices + self.attention / 2


def layer_flops(shape: str, num_tokens: int) -> LayerFlops:
    """Return the operations of one layer for one row."""
    width, _, mlp_width = SHAPES[shape]
    return LayerFlops(
        6.0 * (4 * width**2 + 3 * width * mlp_width) * num_tokens, 12.0 * width * num_tokens**2
    )


def random_weights(shape: str, dtype: str) -> dict[str, Any]:
    """Return random weights of one layer."""
    width, num_heads, mlp_width = SHAPES[shape]
    head_dim, random = width // num_heads, np.random.default_rng(0)

    def matrix(*extents: int) -> dict[str, jax.Array]:
        return {"weight": jnp.asarray(0.02 * random.standard_normal(extents), dtype)}

    heads = (num_heads, head_dim)
    return {
        "attn": {**{name: matrix(*heads, width) for name in "qkv"}, "o": matrix(width, *heads)},
        "mlp": {
            "gate": matrix(mlp_width, width),
            "up": matrix(mlp_width, width),
            "down": matrix(width, mlp_width),
        },
        **{name: {"scale": jnp.ones(width, dtype)} for name in ("attn_norm", "mlp_norm")},
    }


def gradient_function(shape: str, kernel: str, num_tokens: int) -> Callable[..., Any]:
    """Return a function of the input [1, T, D] and the weights of a layer that computes the gradients of both."""
    width, num_heads, mlp_width = SHAPES[shape]
    config = {
        "hidden_size": width,
        "num_attention_heads": num_heads,
        "intermediate_size": mlp_width,
    }
    arch_config = FAMILIES["llama"].arch_config(
        {"model_type": "llama", "num_hidden_layers": 1, **config}
    )
    positions = jnp.arange(num_tokens)
    context = LayerContext(
        arch_config, AttentionMask(positions, positions), attention_options=AttentionOptions(kernel)
    )

    block = BLOCKS[arch_config.block_type]

    def loss(x: jax.Array, weights: BlockWeights) -> jax.Array:
        return jnp.square(block(x, weights, context)[0].astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss, (0, 1)))


def median_seconds(function: Callable[[], Any], repeats: int) -> float:
    """Return the median time of a function after a first call, which compiles."""
    times: list[float] = []
    for _ in range(repeats + 1):
        start_s = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])


def measure(
    shape: str, kernel: str, num_tokens: int, *, dtype: str, repeats: int
) -> tuple[str, ...]:
    """Return the cells of a row after the kernel: time, MFU by both conventions, and a note."""
    width, num_heads, _ = SHAPES[shape]
    needs = AttentionNeeds(frozenset({AttentionFeature.CAUSAL}), dtype, width // num_heads)
    if reasons := [*unmet_needs(KERNEL_SPECS[kernel], needs, kind_of_device(jax.devices()[0]))]:
        return "", "", "", reasons[0]
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, num_tokens, width)), dtype)
    function, weights = gradient_function(shape, kernel, num_tokens), random_weights(shape, dtype)
    try:
        seconds = median_seconds(lambda: function(x, weights), repeats)
    except jax.errors.JaxRuntimeError as error:
        return "", "", "", str(error).partition("\n")[0][:60]
    peak, flops = device_peak(jax.devices()[0].device_kind), layer_flops(shape, num_tokens)
    shares = (
        f"{count / seconds / peak:.1%}" if peak else "unknown"
        for count in (flops.full, flops.causal)
    )
    return f"{1e3 * seconds:.2f}", *shares, ""


def device_peak(device_kind: str) -> float | None:
    """Return the peak of a device in operations per second, or None if it is unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_kind), None)


def format_row(cells: Sequence[Any]) -> str:
    """Return the cells of a row, aligned to the right."""
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS)).rstrip()


def table_rows(options: argparse.Namespace) -> Iterator[str]:
    """Yield the rows of the table."""
    yield format_row(COLUMNS)
    for shape in options.shapes.split(","):
        for num_tokens in map(int, options.tokens.split(",")):
            for kernel in options.kernels.split(","):
                cells = measure(
                    shape, kernel, num_tokens, dtype=options.dtype, repeats=options.repeats
                )
                yield format_row((shape, num_tokens, kernel, *cells))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per shape, length and kernel."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--shapes", default="125m,1.3b,7b", help=f"of {', '.join(SHAPES)} (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", default="2048,8192,32768,131072", help="of a row (default: %(default)s)"
    )
    parser.add_argument(
        "--kernels", default=",".join(KERNEL_NAMES), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of the computation (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {options.dtype}, load {load}")
    for row in table_rows(options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
