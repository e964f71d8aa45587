"""Changes of a recipe that make a training step fit into memory, each verified by another estimate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.core.errors import Option, PrepError, override_text
from prepcli.models.chunk_sizes import chunk_length
from prepcli.models.mesh import parse_mesh
from prepcli.models.remat import SAVES_ALL
from prepcli.models.rules import Rules
from trainer.planning.meshes import meshes_of
from trainer.planning.model_shapes import PlannedModel
from trainer.planning.step_inputs import chunk_sizes
from trainer.planning.training_plan import TrainingPlan, plan_training, with_overrides

FFN_CHUNK_SIZES = (2048, 512)
HEAD_CHUNK_SIZES = (512, 128)
TILE_SIZES = (512, 256)
# Most devices of the meshes to try.
MAX_DEVICES = 4096


@dataclass(frozen=True, slots=True)
class MemoryChange:
    """Changes of a recipe, and the peak of the changed step.

    Attributes:
        values: New values of dotted keys.
        plan: The plan with them.
    """

    values: Mapping[str, object]
    plan: TrainingPlan

    @property
    def overrides(self) -> Option:
        """The changes as overrides of a recipe."""
        items = self.values.items()
        return Option("overrides", [f"{key}={override_text(value)}" for key, value in items])


# The plan with changed values. None if it is not valid.
Replan = Callable[[Mapping[str, object]], TrainingPlan | None]


def find_memory_change(
    plan: TrainingPlan,
    model: PlannedModel,
    rules: Rules,
    *,
    limit_nbytes: int,
    max_devices: int = MAX_DEVICES,
) -> MemoryChange | None:
    """Find changes after which a step's estimated peak is within a limit.

    Changes that keep the mesh are tried first: recomputation and division of work, from the
    cheapest on. If they do not suffice, other meshes of as many devices are tried as well, and then
    larger ones. A change that is not needed in the end is removed.

    Args:
        plan: The plan that exceeds the limit.
        model: The model to train.
        rules: Partition rules.
        limit_nbytes: Memory of a device.
        max_devices: Devices of the largest mesh to try.

    Returns:
        The changes, or None if no combination suffices.
    """

    def replan(values: Mapping[str, object]) -> TrainingPlan | None:
        try:
            recipe = with_overrides(plan.recipe, values)
            return plan_training(recipe, model, rules, device=plan.device)
        except PrepError:
            return None

    applied = _apply_until_fit(plan, replan, limit_nbytes)
    if not _plan_fits(applied.plan, limit_nbytes):
        # A generator, so that no mesh after the first that fits is planned.
        meshes = (
            replan({**applied.values, "mesh": mesh})
            for mesh in _other_meshes(plan, rules, max_devices)
        )
        fitting = next(
            (other for other in meshes if other and _plan_fits(other, limit_nbytes)), None
        )
        if fitting is None:
            return None
        applied = MemoryChange({**applied.values, "mesh": str(fitting.mesh)}, fitting)
    return _drop_needless_keys(applied, replan, limit_nbytes)


def _plan_fits(plan: TrainingPlan, limit_nbytes: int) -> bool:
    return plan.memory.peak <= limit_nbytes


def _apply_until_fit(plan: TrainingPlan, replan: Replan, limit_nbytes: int) -> MemoryChange:
    """Apply every change that lowers the peak, until the step fits."""
    applied = MemoryChange({}, plan)
    for values in _candidate_changes(plan):
        changed = replan({**applied.values, **values})
        if changed and changed.memory.peak < applied.plan.memory.peak:
            applied = MemoryChange({**applied.values, **values}, changed)
        if _plan_fits(applied.plan, limit_nbytes):
            break
    return applied


def _drop_needless_keys(change: MemoryChange, replan: Replan, limit_nbytes: int) -> MemoryChange:
    """Remove each change without which the step still fits."""
    # The loop runs over the keys of the first `change`, although `change` is replaced in it. Each
    # key is tried once, without the keys that were removed before.
    for key in change.values:
        values = {name: value for name, value in change.values.items() if name != key}
        fewer = replan(values)
        if fewer and _plan_fits(fewer, limit_nbytes):
            change = replace(change, values=values, plan=fewer)
    return change


def _candidate_changes(plan: TrainingPlan) -> Iterator[Mapping[str, object]]:
    """Yield changes that keep the mesh and the batch size, in the order in which to try them."""
    length = plan.inputs.seq_length
    current = plan.recipe.model
    sizes = chunk_sizes(plan.recipe, plan.device, num_rows=plan.inputs.local_batch_size)
    if current.remat_policy in SAVES_ALL:
        yield {"model.remat_policy": "nothing_saveable"}
    # Dense attention keeps all scores in memory, and a policy that saves scores rejects tiles.
    # Both keys therefore change together.
    if plan.inputs.attention_tile is None:
        yield {"model.attention_kernel": "blockwise", "model.remat_policy": "nothing_saveable"}
    # Try the largest chunk sizes first, because they already save most of the memory. The smaller sizes
    # follow at the end.
    yield from _smaller_chunk_lengths(
        "model.head_chunk_size", sizes.head, HEAD_CHUNK_SIZES[:1], length
    )
    yield from _smaller_chunk_lengths(
        "model.ffn_chunk_size", current.ffn_chunk_size, FFN_CHUNK_SIZES[:1], length
    )
    yield from _more_micro_batches(plan)
    if current.remat_policy != "nothing_saveable":
        yield {"model.remat_policy": "nothing_saveable"}
    for key, value, smaller_sizes in (
        ("model.ffn_chunk_size", current.ffn_chunk_size, FFN_CHUNK_SIZES),
        ("model.head_chunk_size", sizes.head, HEAD_CHUNK_SIZES),
        ("model.q_chunk_size", sizes.queries, TILE_SIZES),
        ("model.k_chunk_size", sizes.keys, TILE_SIZES),
    ):
        yield from _smaller_chunk_lengths(key, value, smaller_sizes, length)


def _smaller_chunk_lengths(
    key: str, current: int, sizes: tuple[int, ...], length: int
) -> Iterator[Mapping[str, object]]:
    """Yield a value of `key` for each of `sizes` below the current chunk length."""
    yield from ({key: size} for size in sizes if size < chunk_length(current, length))


def _more_micro_batches(plan: TrainingPlan) -> Iterator[Mapping[str, object]]:
    """Yield recipe keys for micro-batches of one sequence per replica, with an unchanged batch size."""
    if plan.inputs.local_batch_size == 1:
        return
    # E.g. 2 micro-batches of 4 sequences per replica become 8 of 1.
    batch = plan.recipe.batch
    size = plan.inputs.micro_batch_size * plan.inputs.accumulate
    values: dict[str, object] = {}
    # Without this key the size is derived from the micro-batch, and would shrink with it.
    if not batch.size:
        values["batch.size"] = size
    if batch.per_device:
        yield {**values, "batch.per_device": 1}
    elif batch.per_replica:
        yield {**values, "batch.per_replica": 1}
    else:
        yield {**values, "batch.accumulate": plan.inputs.local_batch_size * plan.inputs.accumulate}


def _other_meshes(plan: TrainingPlan, rules: Rules, max_devices: int) -> Iterator[str]:
    """Yield other meshes, the fewest devices first, then the least mp, and then the most fsdp."""
    number = plan.mesh.n_devices
    while number <= max_devices:
        meshes = {mesh: parse_mesh(mesh) for mesh in meshes_of(number, rules)}
        yield from sorted(
            meshes, key=lambda mesh: (meshes[mesh].size("mp"), -meshes[mesh].size("fsdp"))
        )
        number *= 2
