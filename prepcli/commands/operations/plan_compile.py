"""The compilation of a planned training step, for a TPU slice or for simulated CPU devices."""

from __future__ import annotations

from dataclasses import replace

from prepcli.commands.operations.plan_target import PlanTarget
from prepcli.commands.pages.plan_page import CompiledStep
from prepcli.core.formatting import format_duration
from prepcli.core.observer import Observer
from prepcli.launch.tpu_topologies import TPU_GENERATIONS, find_topology
from prepcli.models.memory_estimate import estimate_memory
from prepcli.models.memory_inputs import FLOAT32
from prepcli.models.slices import num_slices
from trainer.distributed.compile_process import CompileWatch
from trainer.planning.accelerators import Accelerator
from trainer.planning.training_plan import TrainingPlan
from trainer.training.compiled_plan import compiled_plan


def compile_step(
    target: PlanTarget,
    training_plan: TrainingPlan,
    kind: Accelerator | None,
    *,
    limit_s: float | None,
    observer: Observer,
) -> CompiledStep:
    """Compile the training step of a plan.

    Args:
        target: Model and rules of the plan.
        training_plan: The plan.
        kind: Kind of the devices. For TPUs the step is compiled for a slice with the mesh's number of chips, otherwise
            for simulated CPU devices.
        limit_s: Time limit of the compilation in seconds. None means no limit.
        observer: Receives notes about the phases.

    Raises:
        PrepError: libtpu is missing, no slice has the number of chips, or the step does not compile within the limit.
    """
    mesh = training_plan.mesh
    recipe = training_plan.recipe
    count = num_slices(training_plan.slices)
    topology = None
    hardware = f"{mesh.n_devices:,} simulated CPU devices"
    if kind is not None and kind.name in TPU_GENERATIONS:
        # The compiler needs the topology of each slice: 64 chips of v4 in 2 slices are two times `2x4x4`.
        topology = find_topology(kind.name, mesh.n_devices // count)
        hardware = topology if count == 1 else f"{count} x {topology}"
    observer.note(f"compiling for {hardware}")
    manifest = {**target.model.manifest(mesh, target.rules), "rules": list(target.rule_texts)}

    def note_phase(phase: str, elapsed_s: float) -> None:
        observer.note(f"{phase}, {format_duration(elapsed_s)} since the start")

    plan = compiled_plan(recipe, manifest, mesh, topology, watch=CompileWatch(note_phase, limit_s))
    inputs = training_plan.inputs
    if plan.is_upper_bound:
        # CPUs compute in float32, and keep several layers at once.
        inputs = replace(inputs, itemsize=FLOAT32, plans_for_cpu=True)
    return CompiledStep(plan, estimate_memory(inputs).peak)
