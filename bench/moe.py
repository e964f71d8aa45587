"""Compare the sparse dispatch of MoE layers with a dense dispatch, in which every expert computes every token.

    python -m bench.moe
    python -m bench.moe --shapes mixtral --tokens 1,8,4096 --dtype bfloat16 --repeats 5

Both run alternately in one process. `rows` are the rows that all experts compute, with those that fill the last block
of each expert. The floating-point operations of a pass are proportional to them. Times are medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, nn

from prepcli.models.activation_memory import expert_block_length
from prepcli.models.architecture import ArchConfig
from prepcli.models.registry import FAMILIES
from trainer.distributed.sharding import ShardingContext
from trainer.nn.experts import ExpertSharding, Routing
from trainer.nn.mlp import mlp_hidden
from trainer.nn.moe import moe_mlp, route
from trainer.nn.projections import linear

WIDTH = 512  # width of the residual stream. The published models have 4096 and 2048.
SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {
        "model_type": "mixtral", "hidden_size": WIDTH, "intermediate_size": 1792, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe", "hidden_size": WIDTH, "moe_intermediate_size": 192, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
COLUMNS = (
    "shape",
    "tokens",
    "pass",
    "dense rows",
    "sparse rows",
    "ratio",
    "dense ms",
    "sparse ms",
    "speedup",
)
WIDTHS = (10, 7, 9, 11, 12, 6, 10, 10, 8)

MlpFunction = Callable[[Array, Mapping[str, Any]], Array]


def dense_moe_mlp(
    x: Array, weights: Mapping[str, Any], arch_config: ArchConfig, sharding: ShardingContext
) -> Array:
    """Compute the weighted sum of each token's experts. Every expert computes every token, one expert at a time."""
    routing = route(x, weights["router"], arch_config, ExpertSharding())
    num_experts = len(weights["router"]["weight"])
    selected = nn.one_hot(routing.experts, num_experts, axis=0)  # [experts, B, T, K]
    experts = {name: projection for name, projection in weights.items() if name != "router"}

    @jax.checkpoint
    def weighted_expert(expert: Mapping[str, Any], token_weights: Array) -> Array:
        output = linear(mlp_hidden(x, expert, arch_config), expert["down"])
        return (output * token_weights[..., None]).astype(x.dtype)

    def add_expert(total: Array, expert: tuple[Mapping[str, Any], Array]) -> tuple[Array, None]:
        return total + weighted_expert(*expert), None

    return lax.scan(add_expert, jnp.zeros_like(x), (experts, (routing.weights * selected).sum(-1)))[
        0
    ]


def random_weights(sizes: Mapping[str, int], dtype: Any, seed: int = 0) -> dict[str, Any]:
    """Generate the router and the experts."""
    num_experts, width, mlp_width = sizes["experts"], sizes["embed"], sizes["mlp"]
    up_shape = (num_experts, mlp_width, width)
    shapes = {
        "router": (num_experts, width), "gate": up_shape, "up": up_shape, "down": (num_experts, width, mlp_width),
    }  # fmt: skip
    rng = np.random.default_rng(seed)
    return {
        name: {"weight": jnp.asarray(0.02 * rng.standard_normal(shape, np.float32), dtype)}
        for name, shape in shapes.items()
    }


def num_sparse_rows(routing: Routing, num_experts: int) -> int:
    """Return the rows of all blocks of all experts."""
    length = expert_block_length(
        routing.experts.size // routing.experts.shape[-1], routing.experts.shape[-1], num_experts
    )
    counts = np.bincount(np.asarray(routing.experts).ravel(), minlength=num_experts)
    return int((-(-counts // length) * length).sum())


def median_times_ms(functions: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Run the functions alternately, and return the median time of each."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):  # the first compiles
        for function, function_times in zip(functions, times):
            start_s = time.perf_counter()
            jax.block_until_ready(function())
            if repeat:
                function_times.append(1e3 * (time.perf_counter() - start_s))
    return list(map(statistics.median, times))


def with_gradients(function: MlpFunction) -> Callable[..., Any]:
    """Return the function that computes the gradients of tokens and weights."""
    return jax.grad(
        lambda x, weights: jnp.square(function(x, weights).astype(jnp.float32)).sum(), (0, 1)
    )


def print_row(*cells: Any) -> None:
    """Print the cells of a row, aligned to the right."""
    print("".join(f"{cell:>{width + 2}}" for cell, width in zip(cells, WIDTHS)), flush=True)


def measure(shape: str, num_tokens: int, dtype: str, repeats: int) -> None:
    """Print the rows and times of one layer: forward, and with gradients for more tokens than a decode step has."""
    family, config = FAMILIES[shape], SHAPES[shape]
    arch_config, sizes = family.arch_config(config), family.sizes(config)
    weights = random_weights(sizes, dtype)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, num_tokens, WIDTH)), dtype)
    options = {"arch_config": arch_config, "sharding": ShardingContext()}
    dense, sparse = partial(dense_moe_mlp, **options), partial(moe_mlp, **options)
    rows = num_sparse_rows(
        route(x, weights["router"], arch_config, ExpertSharding()), sizes["experts"]
    )
    dense_rows = num_tokens * sizes["experts"]
    passes: dict[str, tuple[Callable[..., Any], ...]] = {"forward": (dense, sparse)}
    if num_tokens > 8:
        passes["gradients"] = with_gradients(dense), with_gradients(sparse)
    for name, functions in passes.items():
        runs = [partial(jax.jit(function), x, weights) for function in functions]
        dense_ms, sparse_ms = median_times_ms(runs, repeats)
        ratios = (
            f"{dense_rows / rows:.2f}",
            f"{dense_ms:.2f}",
            f"{sparse_ms:.2f}",
            f"{dense_ms / sparse_ms:.2f}",
        )
        print_row(shape, num_tokens, name, dense_rows, rows, *ratios)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per shape, number of tokens and pass."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.moe", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", default="1,8,2048", help="tokens of a call (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the computation (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"jax {jax.__version__} on {jax.default_backend()}, {options.dtype}, {os.cpu_count()} cores, load {load}"
    )
    print_row(*COLUMNS)
    for shape in options.shapes.split(","):
        for num_tokens in map(int, options.tokens.split(",")):
            measure(shape, num_tokens, options.dtype, options.repeats)


if __name__ == "__main__":
    main()
