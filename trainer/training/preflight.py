"""Checks of a recipe against its devices, and warnings about a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from prepcli.models.lora import Adapters, num_features, rank_axis
from prepcli.models.remat import OFFLOAD_NONE
from trainer.distributed.sharding import ShardingContext
from trainer.planning.exact_reduction import reduction_shards
from trainer.planning.step_inputs import check_token_split
from trainer.recipe import Recipe, batch_shape
from trainer.training.loop_config import LoopConfig

MANY_EPOCHS = 1000  # a run of more epochs gets a warning


def check_batch(recipe: Recipe, sharding: ShardingContext) -> None:
    """Raise UsageError if the batch of a recipe, its logical shards, or its tokens do not divide among the devices."""
    assert sharding.mesh is not None
    mesh = sharding.mesh
    n_replicas = sharding.data_parallel_size
    shape = batch_shape(recipe.batch, n_devices=mesh.n_devices, n_replicas=n_replicas)
    reduction_shards(recipe, shape, mesh=mesh, rules=sharding.rules)
    check_token_split(recipe, sharding.sequence_parallel_size)


def check_devices(recipe: Recipe, sharding: ShardingContext) -> None:
    """Raise UsageError if `model.offload` is set and the devices have no host memory to move arrays to."""
    if recipe.model.offload != OFFLOAD_NONE:
        sharding.check_host_memory()


def run_warnings(recipe: Recipe, config: LoopConfig, *, last_step: int = 0) -> Iterator[str]:
    """Yield a warning for each setting in conflict with the data or the number of steps.

    Args:
        recipe: The recipe.
        config: Configuration of its loop.
        last_step: The step to resume from. 0 without one.
    """
    n_rows = config.train.n_rows
    batch_size = config.order.batch_size
    steps = config.steps
    if n_rows < batch_size:
        yield f"a batch of {batch_size:,} takes sequences more than once: the data has {n_rows:,}"
    if recipe.train.epochs and recipe.train.epochs * n_rows < batch_size:
        epochs_text = f"{recipe.train.epochs:g} of {n_rows:,} sequences"
        yield f"`train.epochs` {epochs_text} is less than one step of {batch_size:,}"
    epochs = steps * batch_size / n_rows
    if epochs > MANY_EPOCHS:
        yield f"{steps:,} steps are {epochs:,.0f} epochs of {n_rows:,} sequences"
    if config.evaluation is not None:
        n_evaluated = min(
            config.evaluation.n_rows, config.recipe.eval.limit or config.evaluation.n_rows
        )
        if n_evaluated > n_rows:
            yield (
                f"{n_evaluated:,} sequences are evaluated, more than the {n_rows:,} that are trained on; "
                "`eval.limit` takes fewer"
            )
    for key, interval in (
        ("train.eval_every", config.eval_every),
        ("checkpoint.every", config.save_every),
    ):
        if interval > steps:
            every = f"{float(interval):,g} steps"
            if isinstance(interval, int):
                every = f"{interval:,}"
            yield f"`{key}` is {every}, but the run has {steps:,} steps: it happens only at the end"
    if recipe.train.profile is not None:
        what = f"`train.profile` starts at step {recipe.train.profile['start']:,}"
        if recipe.train.profile["start"] > steps:
            yield f"{what}, but the run has {steps:,} steps: nothing is recorded"
        elif recipe.train.profile["start"] <= last_step:
            yield f"{what}, but the run resumes after step {last_step:,}: nothing is recorded"
    if config.setup.model.adapters is not None:
        yield from _rank_warnings(config.setup.model.adapters)


def _rank_warnings(adapters: Adapters) -> Iterator[str]:
    """Yield a warning if the rank of adapters is larger than the smallest dimension of a projection."""
    sizes: list[tuple[int, int, str]] = []
    for leaf in adapters.matrices.values():
        size = num_features(leaf)
        sizes.append((size - leaf.shape[rank_axis(leaf)], size, leaf.path))
    spare, size, path = min(sizes)
    if spare < 0:
        target = path.rpartition(".")[0]
        what = f"`lora.rank` is {size - spare:,}, but `{target}` has a dimension of {size:,}"
        yield f"{what}: a higher rank learns nothing more"
