"""Checks of a recipe before its data is read, and warnings about a run before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer.data import files, tokenizer
from trainer.distributed.sharding import ShardingContext
from trainer.models.memory_inputs import MemoryInputs
from trainer.nn.model_spec import ModelSpec
from trainer.recipe import Recipe, batch_shape
from trainer.training.loop import Job

MANY_EPOCHS = 1000  # a run of more epochs gets a warning
ITEMSIZES = {"float32": 4, "bfloat16": 2}


def check_inputs(recipe: Recipe, sharding: ShardingContext) -> None:
    """Check the inputs of a recipe that need neither the model nor the content of the data.

    Raises:
        PrepError: The batch does not divide among the devices, or a data file or the tokenizer is missing, unreadable
            or empty.
    """
    assert sharding.mesh is not None
    batch_shape(recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size)
    for paths in (recipe.data.path, recipe.data.eval_path or ()):
        for path in files.find_files(paths, recipe.data.type):
            files.check_readable(path)
    if recipe.data.tokenizer:
        tokenizer.check_tokenizer_exists(Path(recipe.data.tokenizer))


def memory_run(recipe: Recipe, model: ModelSpec, sharding: ShardingContext, *, widens_bfloat16: bool) -> MemoryInputs:
    """Return the inputs of the memory estimate of a training step.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        widens_bfloat16: Whether the devices are CPUs, which compute bfloat16 in float32.
    """
    assert sharding.mesh is not None
    shape = batch_shape(recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size)
    return MemoryInputs(
        arch_config=model.arch_config,
        leaves=model.leaves,
        mesh=sharding.mesh,
        rules=sharding.rules,
        micro_batch_size=shape.micro_batch_size,
        seq_length=recipe.data.seq_length,
        source_length=recipe.data.source_length or 0,
        itemsize=ITEMSIZES["float32" if widens_bfloat16 else recipe.model.dtype],
        remat_policy=recipe.model.remat_policy,
        head_chunk_size=recipe.model.head_chunk_size,
        ffn_chunk_size=recipe.model.ffn_chunk_size,
        attention_tile=_attention_tile(recipe),
        blocks_overlap=widens_bfloat16,
    )


def _attention_tile(recipe: Recipe) -> tuple[int, int] | None:
    """Return the queries and keys of a tile; None if the scores of all exist at the same time."""
    model = recipe.model
    return None if model.attention_kernel == "reference" else (model.q_chunk_size, model.k_chunk_size)


def context_warnings(recipe: Recipe, model: ModelSpec) -> Iterator[str]:
    """Yield a warning if sequences are longer than the model's context."""
    config = model.arch_config
    scaled = (int(rope.original_max_positions * rope.factor) for rope in config.ropes)
    context = max([config.max_positions, *scaled])
    if config.ropes and recipe.data.seq_length > context:
        yield f"`data.seq_length` is {recipe.data.seq_length:,}, and the model was made for {context:,} positions"


def run_warnings(recipe: Recipe, job: Job) -> Iterator[str]:
    """Yield a warning for each length, interval or split that does not fit the amount of data.

    Args:
        recipe: The recipe.
        job: Its job.
    """
    n_rows, batch_size, steps = job.train.n_rows, job.order.batch_size, job.steps
    if n_rows < batch_size:
        yield f"a batch of {batch_size:,} takes sequences more than once: the data has {n_rows:,}"
    if recipe.train.epochs and recipe.train.epochs * n_rows < batch_size:
        epochs_text = f"{recipe.train.epochs:g} of {n_rows:,} sequences"
        yield f"`train.epochs` {epochs_text} is less than one step of {batch_size:,}"
    epochs = steps * batch_size / n_rows
    if epochs > MANY_EPOCHS:
        yield f"{steps:,} steps are {epochs:,.0f} epochs of {n_rows:,} sequences"
    if job.evaluation is not None:
        n_evaluated = min(job.evaluation.n_rows, job.eval_limit or job.evaluation.n_rows)
        if n_evaluated > n_rows:
            yield (
                f"{n_evaluated:,} sequences are evaluated, more than the {n_rows:,} that are trained on; "
                "`eval.limit` takes fewer"
            )
    for key, interval in (("train.eval_every", job.eval_every), ("checkpoint.every", job.save_every)):
        if interval > steps:
            yield f"`{key}` is {interval:,}, but the run has {steps:,} steps: it happens only at the end"
