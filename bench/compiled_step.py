"""Compile a whole training step for a TPU topology, without a TPU, and print its memory and collectives.

    python -m bench.compiled_step --size 7b --topology v5p:8x8x4 --mesh 1,64,4

The step is that of `prep train`: gradients, optimizer, donated state. libtpu compiles it (`pip install
'prepcli[tpu]'`); without `--topology` it is compiled for simulated CPU devices, where bfloat16 takes more memory.
`estimated` is the estimate of `trainer.planning.memory_estimate`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.compiled_memory import parse_policy
from bench.model_configs import MODEL_CONFIGS
from prepcli.models.mesh import Mesh, parse_mesh
from prepcli.models.registry import family_of
from trainer.planning.memory_estimate import estimate_memory
from trainer.planning.training_plan import CompiledPlan
from trainer.recipe import Recipe


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of this command."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compiled_step", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--size", choices=MODEL_CONFIGS, default="small", help="model (default: %(default)s)"
    )
    parser.add_argument(
        "--topology", help="TPU topology such as v5p:8x8x4 (default: simulated CPU devices)"
    )
    parser.add_argument("--mesh", default="1,1,1", help="dp,fsdp,mp (default: one device)")
    parser.add_argument(
        "--rows", type=int, help="sequences of a step (default: one per data-parallel shard)"
    )
    parser.add_argument(
        "--tokens", type=int, default=32768, help="tokens of a sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of the computation (default: %(default)s)"
    )
    parser.add_argument(
        "--remat",
        default="nothing_saveable",
        help="remat policy, or names of activations: q+k+v (default: %(default)s)",
    )
    parser.add_argument(
        "--kernel", default="blockwise", help="attention kernel (default: %(default)s)"
    )
    parser.add_argument(
        "--q-chunk", type=int, default=512, help="queries of a tile (default: %(default)s)"
    )
    parser.add_argument(
        "--k-chunk", type=int, default=512, help="keys of a tile (default: %(default)s)"
    )
    parser.add_argument(
        "--ffn-chunk", type=int, default=2048, help="tokens of an MLP chunk (default: %(default)s)"
    )
    parser.add_argument(
        "--head-chunk", type=int, default=512, help="tokens of a head chunk (default: %(default)s)"
    )
    return parser


def make_recipe(options: argparse.Namespace, mesh: Mesh) -> Recipe:
    """Return the recipe of a step. Neither its checkpoint nor its data exist. Sources are as long as targets."""
    data: dict[str, Any] = {"type": "text", "path": ("data.txt",), "seq_length": options.tokens}
    if family_of(MODEL_CONFIGS[options.size]).arch_config(MODEL_CONFIGS[options.size]).encoder:
        data |= {"type": "json", "fields": "[source], target", "source_length": options.tokens}
    return Recipe.model_validate(
        {
            "name": options.size,
            "mesh": str(mesh),
            "model": {
                "path": options.size,
                "dtype": options.dtype,
                "remat_policy": parse_policy(options.remat),
                "attention_kernel": options.kernel,
                "q_chunk_size": options.q_chunk,
                "k_chunk_size": options.k_chunk,
                "ffn_chunk_size": options.ffn_chunk,
                "head_chunk_size": options.head_chunk,
            },
            "data": data,
            "batch": {"size": options.rows or mesh.size("dp") * mesh.size("fsdp")},
            "optimizer": {"lr": 1e-3},
            "train": {"steps": 1000},
        }
    )


def make_manifest(size: str) -> dict[str, Any]:
    """Return the manifest entries of a checkpoint of the model named `size`."""
    config = MODEL_CONFIGS[size]
    is_tied = family_of(config).is_tied(config)
    return {"config": config, "tied": is_tied, "scan": True, "scan_axis": 0, "rules": []}


def report_lines(plan: CompiledPlan, estimated_nbytes: int) -> list[str]:
    """Return the lines that show a plan, with sizes in MiB."""
    outputs = plan.output_nbytes - plan.alias_nbytes
    sizes = {
        "temporary": plan.temp_nbytes,
        "state and batch": plan.argument_nbytes,
        "outputs not in place": outputs,
        "in all": plan.peak_nbytes,
        "estimated": estimated_nbytes,
    }
    lines = [f"{name:<22}{nbytes / 2**20:>10,.0f} MiB" for name, nbytes in sizes.items()]
    for collective in plan.collectives:
        size = f"{collective.nbytes / 2**20:>10,.0f} MiB"
        lines.append(
            f"{collective.kind:<22}{size} in {collective.count} operations, each counted once"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the plan of one step."""
    from prepcli.models.rules import DEFAULT_RULES
    from trainer.nn.model_spec import model_from_manifest
    from trainer.planning.step_inputs import step_inputs
    from trainer.training.compiled_plan import compiled_plan

    options = make_parser().parse_args(arguments)
    mesh = parse_mesh(options.mesh)
    recipe, manifest = make_recipe(options, mesh), make_manifest(options.size)
    plan = compiled_plan(recipe, manifest, mesh, options.topology)
    run = step_inputs(
        recipe,
        model_from_manifest(manifest),
        mesh=mesh,
        rules=DEFAULT_RULES,
        widens_bfloat16=not options.topology,
    )
    print(
        f"{options.size}, {options.dtype}, {recipe.batch.size} x {options.tokens:,} tokens, mesh {mesh}; of one device:"
    )
    print(*report_lines(plan, estimate_memory(run).peak), sep="\n")
    print(
        f"compiled for {plan.target} in {plan.compile_s:.0f} s with {plan.host_nbytes >> 20:,} MiB of host memory"
    )


if __name__ == "__main__":
    main()
