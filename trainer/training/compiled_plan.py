"""Compile a recipe's training step for devices that need not exist, in a separate process.

JAX starts with one set of devices and keeps it. The process therefore has simulated CPU devices only, whatever devices
this machine has, and no training state is ever allocated in it.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from prepcli.core.errors import USAGE, Key, Option, PrepError, UsageError, text, usage_error
from prepcli.models.attention_kernels import ANY_ACCELERATOR
from prepcli.models.mesh import Mesh, num_slices, parse_mesh, parse_slice_counts
from trainer.data.packing import document_columns
from trainer.data.seq2seq import seq2seq_columns
from trainer.distributed.compilation import (
    UNWATCHED,
    CompileWatch,
    read_request,
    report_phase,
    run_compile_process,
)
from trainer.distributed.devices import libtpu_version, tpu_devices
from trainer.distributed.sharding import catch_out_of_memory, device_kind, make_sharding_context
from trainer.nn.model_spec import model_from_manifest
from trainer.planning.step_inputs import has_segments, run_dropout, run_kernels, split_batch
from trainer.planning.training_plan import CompiledPlan, read_collectives, with_overrides
from trainer.recipe import Recipe
from trainer.recipe.key_types import MAX_INT32
from trainer.training.feed import column_shapes
from trainer.training.setup import (
    build_step_setup,
    check_model_layout,
    partition_rules,
)
from trainer.training.step import StepSetup, jit_train_step, state_shapes

MANIFEST_KEYS = ("config", "tied", "scan", "scan_axis", "rules")


def compiled_plan(
    recipe: Recipe,
    manifest: Mapping[str, Any],
    mesh: Mesh,
    topology: str | None = None,
    *,
    watch: CompileWatch = UNWATCHED,
) -> CompiledPlan:
    """Compile a recipe's training step and return the compiler's plan.

    Args:
        recipe: The recipe. Its data need not exist.
        manifest: Entries of a checkpoint's manifest: `config` with the recipe's rotary embedding,
            `tied`, `scan`, `scan_axis` and `rules`.
        mesh: The mesh without axes of size -1.
        topology: TPU topology of each slice to compile for, such as `v5p:8x8x4`. None to compile
            for simulated CPU devices. Their plan is an upper bound.
        watch: Reports and time limit.

    Raises:
        PrepError: libtpu is missing, the step does not fit the devices' memory, the compiler
            failed, or it reached the time limit.
        UsageError: The topology is unknown, or recipe, model, mesh and topology do not fit
            together.
    """
    request = {
        "recipe": recipe.model_dump(mode="json"),
        "manifest": {key: manifest[key] for key in MANIFEST_KEYS},
        "mesh": str(mesh),
        "topology": topology,
    }
    # With a topology, libtpu describes the devices of the mesh, and JAX itself needs one CPU device
    # only.
    num_cpu_devices = mesh.n_devices
    if topology:
        num_cpu_devices = 1
    answer = json.loads(run_compile_process(__name__, json.dumps(request), num_cpu_devices, watch))
    if error := answer.get("error"):
        if error["code"] == USAGE:
            raise UsageError(**error)
        raise PrepError(**error)
    return CompiledPlan.from_json(answer)


def _compile_recipe(
    recipe: Recipe, manifest: Mapping[str, Any], mesh: Mesh, topology: str | None
) -> CompiledPlan:
    """Compile the step in this process."""
    slices = parse_slice_counts(recipe.cluster.dcn_mesh)
    devices = None
    if topology:
        report_phase("libtpu describes the devices")
        devices = tpu_devices(topology, num_slices(slices))
    else:
        report_phase("JAX starts")
    sharding = make_sharding_context(
        mesh, partition_rules(recipe, manifest), devices=devices, slices=slices
    )
    # Simulated devices stand for accelerators.
    device = ANY_ACCELERATOR
    if topology:
        device = device_kind(sharding)
    if recipe.lora.path is not None:
        why = "the rank is in the adapter's files, which are not read"
        hint = "`lora.rank` instead of `lora.path`"
        what = text("{} is not supported for {}", Key("lora.path"), Option("compile", True))
        raise usage_error(what, why, hint)
    lora = recipe.lora.new_adapters
    if lora is not None:
        manifest = {**manifest, "lora": lora.manifest_entry()}
    model = model_from_manifest(manifest)
    check_model_layout(recipe, model, sharding)
    dropout = run_dropout(recipe, manifest["config"])
    _, choices = run_kernels(
        recipe, model, sharding.mesh, sharding.rules, device=device, dropout=dropout
    )
    steps = recipe.train.steps
    if not steps:
        # The number of steps follows from the data, which is not read here. The largest supported number stands for
        # it. Other schedules may not fit it, and differ from `constant` in a few scalars of the step only.
        steps = MAX_INT32
        recipe = with_overrides(recipe, {"optimizer.schedule": "constant"})
    setup = build_step_setup(
        recipe,
        model,
        sharding=sharding,
        kernel=choices[0].name,
        steps=steps,
        dropout=dropout,
        device=device,
    )
    batch_size = split_batch(recipe, mesh, sharding.rules).shape.size
    if recipe.data.source_length:
        column_specs = seq2seq_columns(recipe.data.source_length, recipe.data.seq_length)
    else:
        column_specs = document_columns(recipe.data.seq_length, has_segments=has_segments(recipe))
    batch = column_shapes(column_specs, batch_size, sharding)
    return compile_plan(setup, batch, topology or f"{mesh.n_devices} CPU devices", report_phase)


def compile_plan(
    setup: StepSetup,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    target: str,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> CompiledPlan:
    """Compile the training step for the devices of its mesh, and return the compiler's plan.

    Args:
        setup: The static parts of the step.
        batch: Shape, dtype and sharding of each array of a batch.
        target: Name of the devices.
        on_phase: Receives the name of each phase when it begins.

    Raises:
        PrepError: The step does not fit the memory of the devices.
    """
    assert setup.sharding.device_mesh is not None
    platform = setup.sharding.device_mesh.devices.flat[0].platform
    start_s = time.perf_counter()
    with catch_out_of_memory():
        on_phase("JAX traces the step")
        lowered = jit_train_step(setup).lower(state_shapes(setup), batch)
        on_phase("XLA compiles it")
        compiled = lowered.compile()
    compile_s = time.perf_counter() - start_s
    on_phase("the program is read")
    memory: Any = compiled.memory_analysis()
    return CompiledPlan(
        target=target,
        kernel=setup.forward_config.attention_options.kernel,
        is_upper_bound=platform == "cpu",
        temp_nbytes=memory.temp_size_in_bytes,
        argument_nbytes=memory.argument_size_in_bytes,
        output_nbytes=memory.output_size_in_bytes,
        alias_nbytes=memory.alias_size_in_bytes,
        compile_s=compile_s,
        host_nbytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        collectives=read_collectives(compiled.as_text()),
        jax_version=jax.__version__,
        libtpu_version=libtpu_version() if platform == "tpu" else "",
    )


def main() -> None:
    """Compile the request on stdin, and write the plan or the error to stdout as a line of JSON."""
    request = read_request()
    recipe = Recipe.model_validate_json(json.dumps(request["recipe"]))
    mesh = parse_mesh(request["mesh"])
    try:
        answer = _compile_recipe(recipe, request["manifest"], mesh, request["topology"]).to_json()
    except PrepError as error:
        answer = {"error": error.fields()}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
