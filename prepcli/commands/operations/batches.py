"""`prep.batches`: the batches of a recipe for a training loop of the user."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Unpack

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.operations.data_options import DataOptions
from prepcli.commands.operations.operation import public, rendered_for_python
from prepcli.commands.operations.recipe_files import find_training_recipe
from prepcli.core.observer import Observer, Progress
from prepcli.core.option_spec import NonNegativeInt, PathLike, PositiveInt, as_tuple
from prepcli.execution.output_urls import check_local_path
from trainer.data.batches import BatchDigest, Batches, check_share
from trainer.recipe import Recipe, load_recipe
from trainer.run.recipe_data import open_datasets, run_batch_size

__all__ = ["BatchDigest", "Batches", "batches"]


@public
def batches(
    recipe: PathLike,
    *,
    process: NonNegativeInt = 0,
    of: PositiveInt = 1,
    start: NonNegativeInt = 0,
    out: PathLike | None = None,
    verify: bool | None = None,
    progress: Progress | Observer | None = None,
    **options: Unpack[DataOptions],
) -> Batches:
    """Iterate over the batches of `prep train RECIPE`, in a training loop of your own.

    Each batch is a dict of NumPy arrays with one row per sequence, `[rows, seq_length]`:

    - `tokens`, int32: input tokens.
    - `targets`, int32: the token to predict at each position, the next one. 0 without a target.
    - `weights`, float32: loss weight of each target. 0 for padding, prompts and positions without a target.
    - `segment_ids` and `positions`, int32, with `data.packing = "documents"`: number of the document in its sequence
      from 1, and position in the document. 0 in padding. Attention stays within a segment.
    - `source`, int32, and `present`, bool, with an encoder: `[rows, source_length]` tokens of the source, and whether
      a position has one.

    `process` gets its share of the sequences of each batch, as consecutive rows. The shares of all processes are the
    batch of one process: packing, mixture and epochs depend on the step only. Save `step` of the iterator in your
    checkpoint, and pass it as `start`. A start takes the same time at any step, and may have another `of`.

    The tokens are in `data.cache`, or in the folder of the run. Missing ones are made first. `prep tokenize` makes them
    in several processes. Process 0 reads data files and tokens for their digests. All others open the tokens at once if
    the data files have unchanged sizes and times. Neither weights are read nor devices used, and jax
    is not imported.

    ```python
    batches = prep.batches("recipe.toml", process=0, of=2, start=100)
    for batch in batches:
        tokens = batch["tokens"]  # [batch.size / 2, data.seq_length]
    ```

    Args:
        recipe: A TOML file, or the name of one of `prep recipes`.
        process: Index of this process, from 0.
        of: Number of processes.
        start: Step of the first batch, from 0.
        out: Folder of the run, for its tokens. Default: `runs/NAME`.
        verify: Whether this process reads data files and tokens for their digests. Default: in process 0.
        progress: Receives the bytes tokenized. Default: none. See `Progress`.
        **options: See `DataOptions`.

    Returns:
        The iterator. It ends after the last step of the recipe. A copy in another process opens the tokens again,
        with this recipe even if its file changes. Other tokens are an error.

    Raises:
        UsageError: An argument or a key of the recipe is invalid, or the batch size depends on unknown devices.
        PrepError: The model, its tokenizer or the data cannot be used.
    """
    if verify is None:
        verify = process == 0
    folder = Path(out) if out is not None else None
    check_local_path(folder)
    loaded = load_recipe(find_training_recipe(Path(recipe)), as_tuple(options["overrides"])).recipe
    return _open_batches(
        loaded,
        process=process,
        of=of,
        start=start,
        out=folder,
        offline=options["offline"],
        verify=verify,
        observer=run_observer_of(progress),
    )


def _open_batches(
    recipe: Recipe,
    *,
    process: int,
    of: int,
    start: int,
    out: Path | None,
    offline: bool,
    verify: bool,
    observer: Observer,
) -> Batches:
    """Return the iterator of a loaded recipe. The arguments are as for `batches`."""
    from trainer.training.source_datasets import make_order

    batch_size = run_batch_size(recipe)
    # Before the data is read, which may take hours
    check_share(process, of, batch_size)
    datasets = open_datasets(
        recipe, out=out, offline=offline, observer=observer, checks_digests=verify
    )
    order = make_order(datasets, batch_size, seed=recipe.seed, shuffle=recipe.data.shuffle)
    return Batches(
        datasets.train,
        order,
        steps=recipe.train.steps or order.steps_for_epochs(recipe.train.epochs or 0),
        identity=datasets.identity,
        reopen=partial(_reopen_batches, recipe, process=process, of=of, out=out, offline=offline),
        process=process,
        of=of,
        start=start,
    )


def _reopen_batches(
    recipe: Recipe, *, process: int, of: int, start: int, out: Path | None, offline: bool
) -> Batches:
    """Return a copy of an iterator in another process, without progress."""
    # The first process has checked the digests, so its copies need not.
    with rendered_for_python():
        return _open_batches(
            recipe,
            process=process,
            of=of,
            start=start,
            out=out,
            offline=offline,
            verify=False,
            observer=run_observer_of(None),
        )
