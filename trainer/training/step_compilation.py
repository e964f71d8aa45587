"""Compilation of the training step, and the compiler's plan of it."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from trainer.distributed.sharding import catch_out_of_memory
from trainer.models.compiled_plan import CompiledPlan, read_collectives
from trainer.training.exact_reduction import compiler_options
from trainer.training.step import StepSetup, state_shapes
from trainer.training.stop import train_step_with_stop


def jit_train_step(setup: StepSetup) -> Any:
    """Return the jitted training step, which donates the state and keeps its shardings."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state_shapes(setup))
    options: dict[str, Any] | None = None
    if setup.reduction_shards:
        options = compiler_options()
    step = partial(train_step_with_stop, setup=setup)
    return jax.jit(
        step, donate_argnums=0, out_shardings=(shardings, None), compiler_options=options
    )


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
        is_upper_bound=setup.sharding.device_mesh.devices.flat[0].platform == "cpu",
        temp_nbytes=memory.temp_size_in_bytes,
        argument_nbytes=memory.argument_size_in_bytes,
        output_nbytes=memory.output_size_in_bytes,
        alias_nbytes=memory.alias_size_in_bytes,
        compile_s=compile_s,
        host_nbytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        collectives=read_collectives(compiled.as_text()),
    )
