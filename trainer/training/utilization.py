"""Model FLOPs utilization (MFU) of a run: the share of the devices' peak that its model operations take."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.distributed.sharding import ShardingContext
from trainer.models.param_tree import ParamLeaf
from trainer.nn.model_spec import ModelSpec
from trainer.planning.accelerators import accelerator_of
from trainer.planning.step_flops import count_step_flops
from trainer.planning.step_inputs import ModelShapes, step_inputs, with_adapters
from trainer.recipe import Recipe


def peak_step_s(recipe: Recipe, model: ModelSpec, sharding: ShardingContext) -> float | None:
    """Return the seconds that the model operations of a step take at the devices' dense bfloat16 peak.

    Masked pairs of attention count, as in published figures and in `prep plan`: with packed
    documents also the pairs between documents, and the padding of sequences. Frozen parameters count
    without their gradients.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: Mesh and rules of the run.

    Returns:
        The seconds. None if the peak of the devices is unknown.
    """
    if sharding.mesh is None or sharding.device_mesh is None:
        return None
    kind = accelerator_of(sharding.device_mesh.devices.flat[0].device_kind)
    if kind is None:
        return None
    adapters: Mapping[str, ParamLeaf] = {}
    if model.adapters is not None:
        adapters = model.adapters.leaves
    base_leaves = {path: leaf for path, leaf in model.leaves.items() if path not in adapters}
    base = ModelShapes(model.arch_config, base_leaves)
    inputs = step_inputs(recipe, base, mesh=sharding.mesh, rules=sharding.rules)
    if model.adapters is not None:
        inputs = with_adapters(inputs, recipe, adapters)
    return count_step_flops(inputs).model_full / (sharding.mesh.n_devices * kind.peak_flops)
