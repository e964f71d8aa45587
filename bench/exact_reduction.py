"""Compare training steps with `train.reduction` fast and exact on the same mesh of simulated CPU devices.

    python -m bench.exact_reduction
    python -m bench.exact_reduction --mesh 1,8,1 --rows 16 --tokens 256 --repeats 9

Both steps start from equal states and run alternately in one process. Memory is XLA's plan for one device. The devices
share the cores of this machine, so the times compare work and not the speed of a network.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

LLAMA = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}
MIB = 1 << 20


def build_setups(mesh: str, accumulate: int, num_shards: int) -> dict[str, Any]:
    """Return the setups of fast and exact steps."""
    import jax

    from prepcli.models.mesh import parse_mesh
    from prepcli.models.registry import FAMILIES
    from trainer.distributed.sharding import make_sharding_context
    from trainer.nn.model_spec import ForwardConfig, build_model
    from trainer.recipe.optimizer_tables import AdamWTable
    from trainer.training.optimizers import build_optimizer
    from trainer.training.step import StepSetup

    parsed = parse_mesh(mesh)
    sharding = make_sharding_context(parsed, devices=jax.devices()[: parsed.n_devices])
    model = build_model(FAMILIES["llama"], LLAMA, is_tied=False)
    optimizer = build_optimizer(AdamWTable.model_validate({"lr": 1e-3}), 1000)
    setup = StepSetup(
        model, ForwardConfig(sharding=sharding, head_chunk_size=64), optimizer, accumulate
    )
    return {"fast": setup, "exact": replace(setup, reduction_shards=num_shards)}


def compile_step(setup: Any, rows: int, tokens: int) -> tuple[Callable[[], float], int]:
    """Compile a step. Return a function that takes a step and returns its seconds, and the planned device bytes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from trainer.nn.initialization import init_params
    from trainer.training.step import init_train_state, jit_train_step, state_shapes

    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup))
    state = jax.jit(
        lambda: init_train_state(init_params(setup.model, 0), setup), out_shardings=shardings
    )()
    ids = np.random.default_rng(0).integers(0, LLAMA["vocab_size"], (rows, tokens)).astype("i4")
    columns = {
        "tokens": ids,
        "targets": np.roll(ids, -1, axis=1),
        "weights": np.ones(ids.shape, "f4"),
    }
    rows_sharding = setup.sharding.activation_sharding(ids.shape, "batch", "seq")
    batch = {
        name: jax.device_put(jnp.asarray(column), rows_sharding) for name, column in columns.items()
    }
    compiled = jit_train_step(setup).lower(state, batch).compile()
    memory: Any = compiled.memory_analysis()
    states = [state]

    def take_step() -> float:
        start_s = time.perf_counter()
        new_state, metrics = compiled(states.pop(), batch)
        jax.block_until_ready((new_state, metrics))
        states.append(new_state)
        return time.perf_counter() - start_s

    return take_step, memory.temp_size_in_bytes + memory.argument_size_in_bytes


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.exact_reduction", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--mesh",
        default="1,1,1;2,1,1;8,1,1;1,8,1",
        help="meshes, separated by ; (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, default=16, help="sequences of a batch (default: %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=128, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        help="micro-batches of a fast step (default: %(default)s)",
    )
    parser.add_argument(
        "--shards",
        type=int,
        default=8,
        help="logical shards of an exact step (default: %(default)s)",
    )
    parser.add_argument(
        "--repeats", type=int, default=7, help="steps to measure (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per mesh: median seconds and planned memory of both steps, and the median of paired ratios."""
    options = make_parser().parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    print(
        f"{options.rows} x {options.tokens} tokens, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'mesh':>8}{'fast s':>10}{'exact s':>10}{'ratio':>8}{'fast MiB':>10}{'exact MiB':>11}")
    for mesh in options.mesh.split(";"):
        setups = build_setups(mesh, options.accumulate, options.shards)
        steps = {
            name: compile_step(setup, options.rows, options.tokens)
            for name, setup in setups.items()
        }
        (take_fast, fast_nbytes), (take_exact, exact_nbytes) = steps["fast"], steps["exact"]
        pairs = [(take_fast(), take_exact()) for _ in range(options.repeats + 1)][1:]
        fast_s, exact_s = (statistics.median(column) for column in zip(*pairs))
        ratio = statistics.median(exact / fast for fast, exact in pairs)
        sizes = f"{fast_nbytes / MIB:>10.1f}{exact_nbytes / MIB:>11.1f}"
        print(f"{mesh:>8}{fast_s:>10.3f}{exact_s:>10.3f}{ratio:>8.2f}{sizes}", flush=True)


if __name__ == "__main__":
    main()
