"""Checks of a recipe before its data are read, and doubts about a run once they are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.data import files, tokenizer
from trainer.distributed.sharding import Shards
from trainer.models.memory_estimate import Run
from trainer.nn.transformer import Model
from trainer.recipe import Recipe, batch_shape
from trainer.training.loop import Job

MANY_EPOCHS = 1000
ITEMSIZES = {"float32": 4, "bfloat16": 2}


def check_inputs(recipe: Recipe, on: Shards) -> None:
    """Check what needs neither the model nor the content of the data.

    Raises:
        PrepError: The batch does not divide among the devices, or a data file or the tokenizer that the recipe names
            is missing, unreadable or empty.
    """
    assert on.mesh is not None
    batch_shape(recipe.batch, on.mesh.n_devices, on.replicas)
    for paths in (recipe.data.path, recipe.data.eval_path or ()):
        for path in files.find(paths, recipe.data.type):
            files.check_readable(path)
    if recipe.data.tokenizer:
        tokenizer.check_present(Path(recipe.data.tokenizer))


def memory_run(recipe: Recipe, model: Model, on: Shards, widens: bool) -> Run:
    """Return what the memory of a step depends on; `widens`: the devices compute bfloat16 in float32, as CPUs do."""
    assert on.mesh is not None
    shape = batch_shape(recipe.batch, on.mesh.n_devices, on.replicas)
    return Run(
        traits=model.traits,
        leaves=model.leaves,
        mesh=on.mesh,
        rules=on.rules,
        sequences=shape.micro,
        length=recipe.data.seq_length,
        source_length=recipe.data.source_length or 0,
        itemsize=ITEMSIZES["float32" if widens else recipe.model.dtype],
        remat=recipe.model.remat_policy,
        head_chunk=recipe.model.head_chunk_size,
    )


def context_doubts(recipe: Recipe, model: Model) -> Iterator[str]:
    """Yield a warning if sequences are longer than the context that the model was made for."""
    known = max([model.traits.positions, *(int(rope.positions * rope.factor) for rope in model.traits.ropes)])
    if model.traits.ropes and recipe.data.seq_length > known:
        yield f"`data.seq_length` is {recipe.data.seq_length:,}, and the model was made for {known:,} positions"


def run_doubts(recipe: Recipe, job: Job) -> Iterator[str]:
    """Yield a warning for each length, interval or split that does not go with the data."""
    n, size, steps = job.train.n, job.order.size, job.steps
    if n < size:
        yield f"a batch of {size:,} takes sequences more than once: the data has {n:,}"
    if recipe.train.epochs and recipe.train.epochs * n < size:
        yield f"`train.epochs` {recipe.train.epochs:g} of {n:,} sequences is less than one step of {size:,}"
    epochs = steps * size / n
    if epochs > MANY_EPOCHS:
        yield f"{steps:,} steps are {epochs:,.0f} epochs of {n:,} sequences"
    if job.evaluation is not None and (held := min(job.evaluation.n, job.eval_limit or job.evaluation.n)) > n:
        yield f"{held:,} sequences are evaluated, more than the {n:,} that are trained on; `eval.limit` takes fewer"
    for key, every in (("train.eval_every", job.eval_every), ("checkpoint.every", job.save_every)):
        if every > steps:
            yield f"`{key}` is {every:,}, and the run has {steps:,} steps: it happens only at the end"
