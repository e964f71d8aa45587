"""Memory that a compiled training step of a LLaMA needs for a given context; nothing is allocated, only compiled.

    python -m bench.compiled_memory
    python -m bench.compiled_memory --size 7b --tokens 2048 --mesh 1,64,4 --remat nothing_saveable

The step is the mean loss and its gradients. `temp` is what the compiler plans for one device beside arguments and
results; `estimated` is the estimate of
`trainer.models.memory_estimate`. A mesh of N devices is compiled for N CPU devices, whatever the machine has.
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
    from trainer.nn.transformer import ForwardConfig, ModelSpec

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
    """What the compiler plans for one device, in bytes, and how long it took."""

    temp_nbytes: int
    argument_nbytes: int
    compile_s: float


def compile_step(model: ModelSpec, forward_config: ForwardConfig, batch_size: int, seq_length: int) -> CompiledMemory:
    """Compile loss and gradients for `rows` sequences of `length` tokens."""
    import jax
    import jax.numpy as jnp

    from trainer.models.param_tree import Tree, unflatten_tree
    from trainer.nn.transformer import loss_sums

    def mean(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        sums = loss_sums(params, batch, model, forward_config)
        return sums.loss / sums.weight

    def shape(extents: tuple[int, ...], kind: Any, where: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, kind, sharding=where)

    leaves = {path: (leaf.shape, forward_config.sharding.param_sharding(leaf)) for path, leaf in model.leaves.items()}
    params = unflatten_tree({path: shape(extents, jnp.float32, where) for path, (extents, where) in leaves.items()})
    dealt = forward_config.sharding.activation_sharding((batch_size, seq_length), "batch", "seq")
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {name: shape((batch_size, seq_length), kind, dealt) for name, kind in kinds.items()}
    out = unflatten_tree({path: where for path, (_, where) in leaves.items()})
    began_s = time.perf_counter()
    run = jax.jit(jax.value_and_grad(mean), out_shardings=(forward_config.sharding.replicated_sharding(), out))
    memory: Any = run.lower(params, batch).compile().memory_analysis()
    return CompiledMemory(memory.temp_size_in_bytes, memory.argument_size_in_bytes, time.perf_counter() - began_s)


def make_parser() -> argparse.ArgumentParser:
    """Flags of this command."""
    made = argparse.ArgumentParser(prog="python -m bench.compiled_memory", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--size", choices=MODEL_SIZES, default="small")
    made.add_argument("--tokens", default="8192,32768", help="of a sequence, with commas (default: %(default)s)")
    made.add_argument("--remat", default="none,nothing_saveable", help="policies, with commas (default: %(default)s)")
    made.add_argument("--rows", type=int, help="sequences of a batch (default: one for each part of the mesh)")
    made.add_argument("--dtype", default="float32", help="of the computation (default: %(default)s)")
    made.add_argument("--mesh", default="1,1,1", help="dp,fsdp,mp (default: one device)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each length and policy."""
    given = make_parser().parse_args(arguments)
    mesh = meshes.parse_mesh(given.mesh)
    os.environ["JAX_NUM_CPU_DEVICES"] = str(mesh.n_devices)
    from trainer.distributed.sharding import ShardingContext, make_sharding_context
    from trainer.models.memory_estimate import MemoryInputs, estimate_memory
    from trainer.models.registry import FAMILIES
    from trainer.nn.transformer import ForwardConfig, build_model

    on = make_sharding_context(mesh) if mesh.n_devices > 1 else ShardingContext()
    rows = given.rows or on.data_parallel_size
    model = build_model(FAMILIES["llama"], MODEL_SIZES[given.size], is_tied=False)
    print(f"{given.size}, {given.dtype}, mesh {mesh}, {rows} sequences a step; of one device:")
    columns = f"{'temp MiB':>10}{'estimated':>11}{'parameters and batch MiB':>26}{'compile s':>11}"
    print(f"{'tokens':>8}  {'remat':<32}{columns}")
    for length in map(int, given.tokens.split(",")):
        for remat in given.remat.split(","):
            found = compile_step(model, ForwardConfig(dtype=given.dtype, remat_policy=remat, sharding=on), rows, length)
            run = MemoryInputs(model.arch_config, model.leaves, on.mesh, on.rules, rows, length, remat_policy=remat)
            expected = estimate_memory(run).activations
            sizes = f"{found.temp_nbytes >> 20:>10,}{expected >> 20:>11,}{found.argument_nbytes >> 20:>26,}"
            print(f"{length:>8}  {remat:<32}{sizes}{found.compile_s:>11.1f}", flush=True)


if __name__ == "__main__":
    main()
