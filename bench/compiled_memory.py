"""Measure the planned memory of a compiled LLaMA training step for a context length, without allocating it.

    python -m bench.compiled_memory
    python -m bench.compiled_memory --size 7b --tokens 2048 --mesh 1,64,4 --remat nothing_saveable
    python -m bench.compiled_memory --tokens 131072 --mesh sp:8 --kernel blockwise --remat nothing_saveable

The step computes the mean loss and its gradients. `temp` is the compiler's plan for one device without arguments and
results. `estimated` is the estimate of `trainer.planning.memory_estimate`. A mesh of N devices is compiled for N
simulated CPU devices, which widen bfloat16 to float32. `--topology` compiles for one chip of a TPU. It needs the
package libtpu, but no TPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.model_configs import MODEL_SIZES
from prepcli.models import mesh as meshes
from prepcli.models.activation_memory import ACTIVATION_NAMES, RematPolicy

if TYPE_CHECKING:
    from jax.stages import Lowered

    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ForwardConfig, ModelSpec


@dataclass(frozen=True, slots=True)
class CompiledMemory:
    """The compiler's memory plan for one device in bytes, and the compile time."""

    temp_nbytes: int
    argument_nbytes: int
    compile_s: float


def compile_step(
    model: ModelSpec, forward_config: ForwardConfig, batch_size: int, seq_length: int
) -> CompiledMemory:
    """Compile loss and gradients for `batch_size` sequences of `seq_length` tokens."""
    start_s = time.perf_counter()
    memory: Any = (
        lower_step(model, forward_config, batch_size, seq_length).compile().memory_analysis()
    )
    return CompiledMemory(
        memory.temp_size_in_bytes, memory.argument_size_in_bytes, time.perf_counter() - start_s
    )


def lower_step(
    model: ModelSpec, forward_config: ForwardConfig, batch_size: int, seq_length: int
) -> Lowered:
    """Lower loss and gradients for `batch_size` sequences of `seq_length` tokens."""
    import jax
    import jax.numpy as jnp

    from prepcli.models.param_tree import Tree, unflatten_tree
    from trainer.nn.transformer import loss_sums

    def mean(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        sums = loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    def shape(extents: tuple[int, ...], dtype: Any, leaf_sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype, sharding=leaf_sharding)

    leaves = {
        path: (leaf.shape, forward_config.sharding.param_sharding(leaf))
        for path, leaf in model.leaves.items()
    }
    params = unflatten_tree(
        {
            path: shape(extents, jnp.float32, leaf_sharding)
            for path, (extents, leaf_sharding) in leaves.items()
        }
    )
    batch_sharding = forward_config.sharding.activation_sharding(
        (batch_size, seq_length), "batch", "seq"
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {
        name: shape((batch_size, seq_length), dtype, batch_sharding)
        for name, dtype in dtypes.items()
    }
    grad_shardings = unflatten_tree(
        {path: leaf_sharding for path, (_, leaf_sharding) in leaves.items()}
    )
    step = jax.jit(
        jax.value_and_grad(mean),
        out_shardings=(forward_config.sharding.replicated_sharding(), grad_shardings),
    )
    return step.lower(params, batch)


def topology_sharding(topology: str) -> ShardingContext:
    """Return a sharding context on one device of a TPU topology, for compilation only."""
    import jax
    from jax.experimental import topologies

    from prepcli.models.mesh import parse_mesh
    from trainer.distributed.sharding import ShardingContext

    mesh = parse_mesh("1,1,1")
    device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
    axis_types = (jax.sharding.AxisType.Auto,) * len(mesh.names)
    return ShardingContext(
        mesh, device_mesh=jax.make_mesh(mesh.sizes, mesh.names, axis_types, devices=[device])
    )


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compiled_memory", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--size", choices=MODEL_SIZES, default="small")
    parser.add_argument(
        "--tokens",
        default="8192,32768",
        help="context lengths, comma-separated (default: %(default)s)",
    )
    parser.add_argument(
        "--remat",
        default="none,nothing_saveable",
        help="remat policies, comma-separated, or names of activations: q+k+v (default: %(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, help="batch size (default: one sequence per data-parallel shard)"
    )
    parser.add_argument(
        "--dtype", default="float32", help="dtype of the computation (default: %(default)s)"
    )
    parser.add_argument(
        "--kernel", default="reference", help="attention kernel (default: %(default)s)"
    )
    parser.add_argument(
        "--q-chunk", type=int, default=512, help="queries of a tile (default: %(default)s)"
    )
    parser.add_argument(
        "--k-chunk", type=int, default=512, help="keys of a tile (default: %(default)s)"
    )
    parser.add_argument(
        "--ffn-chunk", type=int, default=-1, help="tokens of an MLP chunk (default: all)"
    )
    parser.add_argument(
        "--head-chunk", type=int, default=512, help="tokens of a head chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--mesh", default="1,1,1", help="dp,fsdp,mp, or names such as sp:8 (default: one device)"
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        help="one TPU chip of a topology, as v5e:2x2, instead of the mesh",
    )
    return parser


def parse_policy(text: str) -> RematPolicy:
    """Return the policy of a name, or of names of activations joined by `+`."""
    names = tuple(text.split("+"))
    return names if {*names} <= {*ACTIVATION_NAMES} else text


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line per context length and remat policy."""
    options = make_parser().parse_args(arguments)
    mesh = meshes.parse_mesh(options.mesh)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(mesh.n_devices)
    from prepcli.models.registry import FAMILIES
    from trainer.distributed.sharding import ShardingContext, make_sharding_context
    from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model
    from trainer.planning.memory_estimate import estimate_memory
    from trainer.planning.memory_inputs import FLOAT32, MemoryInputs

    sharding = make_sharding_context(mesh) if mesh.n_devices > 1 else ShardingContext()
    if options.topology:
        sharding = topology_sharding(options.topology)
    rows = options.rows or sharding.data_parallel_size
    model = build_model(FAMILIES["llama"], MODEL_SIZES[options.size], is_tied=False)
    devices = options.topology or f"mesh {mesh}"
    print(f"{options.size}, {options.dtype}, {devices}, {rows} sequences a step; of one device:")
    columns = f"{'temp MiB':>10}{'estimated':>11}{'parameters and batch MiB':>26}{'compile s':>11}"
    print(f"{'tokens':>8}  {'remat':<32}{columns}")
    for seq_length in map(int, options.tokens.split(",")):
        for remat in map(parse_policy, options.remat.split(",")):
            forward_config = ForwardConfig(
                dtype=options.dtype,
                remat_policy=remat,
                sharding=sharding,
                attention_options=AttentionOptions(
                    options.kernel, options.q_chunk, options.k_chunk
                ),
                ffn_chunk_size=options.ffn_chunk,
                head_chunk_size=options.head_chunk,
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
                itemsize=2 if options.topology and options.dtype == "bfloat16" else FLOAT32,
                ffn_chunk_size=options.ffn_chunk,
                head_chunk_size=options.head_chunk,
                plans_for_cpu=not options.topology,
                attention_tile=None
                if options.kernel == "reference"
                else (options.q_chunk, options.k_chunk),
            )
            expected = estimate_memory(run).activations
            sizes = f"{compiled.temp_nbytes >> 20:>10,}{expected >> 20:>11,}{compiled.argument_nbytes >> 20:>26,}"
            policy_text = remat if isinstance(remat, str) else "+".join(remat)
            print(
                f"{seq_length:>8}  {policy_text:<32}{sizes}{compiled.compile_s:>11.1f}", flush=True
            )


if __name__ == "__main__":
    main()
