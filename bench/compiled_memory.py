"""Measure the planned memory of a compiled LLaMA training step for a context length, without allocating it.

    python -m bench.compiled_memory
    python -m bench.compiled_memory --size 7b --tokens 2048 --mesh 1,64,4 --remat nothing_saveable
    python -m bench.compiled_memory --tokens 131072 --mesh sp:8 --kernel blockwise --remat nothing_saveable

The step computes the mean loss and its gradients. `temp` is the compiler's plan for one device without arguments and
results; `estimated` is the estimate of `trainer.models.memory_estimate`. A mesh of N devices is compiled for N
simulated CPU devices.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.models import mesh as meshes

if TYPE_CHECKING:
    from trainer.nn.model_spec import ForwardConfig, ModelSpec

MODEL_SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 1376,
        "vocab_size": 32000,
    },
    "7b": {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000,
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """The compiler's memory plan for one device in bytes, and the compile time."""

    temp_nbytes: int
    argument_nbytes: int
    compile_s: float


def compile_step(model: ModelSpec, forward_config: ForwardConfig, batch_size: int, seq_length: int) -> CompiledMemory:
    """Compile loss and gradients for `batch_size` sequences of `seq_length` tokens."""
    import jax
    import jax.numpy as jnp

    from trainer.models.param_tree import Tree, unflatten_tree
    from trainer.nn.transformer import loss_sums

    def mean(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        sums = loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    def shape(extents: tuple[int, ...], dtype: Any, leaf_sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype, sharding=leaf_sharding)

    leaves = {path: (leaf.shape, forward_config.sharding.param_sharding(leaf)) for path, leaf in model.leaves.items()}
    params = unflatten_tree(
        {path: shape(extents, jnp.float32, leaf_sharding) for path, (extents, leaf_sharding) in leaves.items()}
    )
    batch_sharding = forward_config.sharding.activation_sharding((batch_size, seq_length), "batch", "seq")
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: shape((batch_size, seq_length), dtype, batch_sharding) for name, dtype in dtypes.items()}
    grad_shardings = unflatten_tree({path: leaf_sharding for path, (_, leaf_sharding) in leaves.items()})
    start_s = time.perf_counter()
    step = jax.jit(
        jax.value_and_grad(mean), out_shardings=(forward_config.sharding.replicated_sharding(), grad_shardings)
    )
    memory: Any = step.lower(params, batch).compile().memory_analysis()
    return CompiledMemory(memory.temp_size_in_bytes, memory.argument_size_in_bytes, time.perf_counter() - start_s)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(prog="python -m bench.compiled_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", choices=MODEL_SIZES, default="small")
    parser.add_argument(
        "--tokens", default="8192,32768", help="context lengths, comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--remat", default="none,nothing_saveable", help="remat policies, comma-separated (default: %(default)s)"
    )
    parser.add_argument("--rows", type=int, help="batch size (default: one sequence per data-parallel shard)")
    parser.add_argument("--dtype", default="float32", help="dtype of the computation (default: %(default)s)")
    parser.add_argument("--kernel", default="reference", help="attention kernel (default: %(default)s)")
    parser.add_argument("--q-chunk", type=int, default=512, help="queries of a tile (default: %(default)s)")
    parser.add_argument("--k-chunk", type=int, default=512, help="keys of a tile (default: %(default)s)")
    parser.add_argument("--ffn-chunk", type=int, default=-1, help="tokens of an MLP chunk (default: all)")
    parser.add_argument("--mesh", default="1,1,1", help="dp,fsdp,mp, or names such as sp:8 (default: one device)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per context length and remat policy."""
    options = make_parser().parse_args(arguments)
    mesh = meshes.parse_mesh(options.mesh)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(mesh.n_devices)
    from trainer.distributed.sharding import ShardingContext, make_sharding_context
    from trainer.models.memory_estimate import estimate_memory
    from trainer.models.memory_inputs import MemoryInputs
    from trainer.models.registry import FAMILIES
    from trainer.nn.kernels.options import AttentionOptions
    from trainer.nn.model_spec import ForwardConfig, build_model

    sharding = make_sharding_context(mesh) if mesh.n_devices > 1 else ShardingContext()
    rows = options.rows or sharding.data_parallel_size
    model = build_model(FAMILIES["llama"], MODEL_SIZES[options.size], is_tied=False)
    print(f"{options.size}, {options.dtype}, mesh {mesh}, {rows} sequences a step; of one device:")
    columns = f"{'temp MiB':>10}{'estimated':>11}{'parameters and batch MiB':>26}{'compile s':>11}"
    print(f"{'tokens':>8}  {'remat':<32}{columns}")
    for seq_length in map(int, options.tokens.split(",")):
        for remat in options.remat.split(","):
            forward_config = ForwardConfig(
                dtype=options.dtype,
                remat_policy=remat,
                sharding=sharding,
                attention_options=AttentionOptions(options.kernel, options.q_chunk, options.k_chunk),
                ffn_chunk_size=options.ffn_chunk,
            )
            compiled = compile_step(model, forward_config, rows, seq_length)
            run = MemoryInputs(
                model.arch_config,
                model.leaves,
                sharding.mesh,
                sharding.rules,
                rows,
                seq_length,
                remat_policy=remat,
                ffn_chunk_size=options.ffn_chunk,
                attention_tile=None if options.kernel == "reference" else (options.q_chunk, options.k_chunk),
            )
            expected = estimate_memory(run).activations
            sizes = f"{compiled.temp_nbytes >> 20:>10,}{expected >> 20:>11,}{compiled.argument_nbytes >> 20:>26,}"
            print(f"{seq_length:>8}  {remat:<32}{sizes}{compiled.compile_s:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
