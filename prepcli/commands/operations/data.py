"""The data of a recipe: `prep tokenize`, and the batches for a training loop of the user."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.operations.compute_options import DataOptions, TokenFormat
from prepcli.commands.operations.operation import (
    check_mutually_exclusive,
    public,
    rendered_for_python,
)
from prepcli.commands.operations.recipes import find_training_recipe
from prepcli.commands.operations.run_results import Tokenization, TokenizedData
from prepcli.commands.pages.html_page import check_page_path
from prepcli.commands.pages.samples_page import write_samples_page
from prepcli.core.errors import Option, text, usage_error
from prepcli.core.observer import Observer, Progress, RunObserver
from prepcli.core.option_spec import NonNegativeInt, PathLike, PositiveInt, as_tuple
from prepcli.core.signals import raise_on_signal
from prepcli.core.unexpected import label_errors
from prepcli.stores.addresses import check_local_path
from trainer.data.batches import BatchDigest, Batches, check_share
from trainer.data.sample_text import SampleCounts, SamplePart, TokenSample
from trainer.data.token_formats import check_exportable, export_tokens
from trainer.data.token_samples import count_samples, read_samples
from trainer.data.tokenize import TokenizedShare, tokenize_share
from trainer.data.tokenize_config import TokenizeConfig
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe import Recipe, load_recipe
from trainer.run.recipe_data import recipe_datasets, run_batch_size, tokenize_progress

__all__ = [
    "BatchDigest",
    "Batches",
    "SampleCounts",
    "SamplePart",
    "TokenSample",
    "batches",
    "tokenize_shard",
]


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
    from trainer.training.datasets import make_order

    batch_size = run_batch_size(recipe, offline=offline, observer=observer)
    # Before the data is read, which may take hours
    check_share(process, of, batch_size)
    datasets = recipe_datasets(
        recipe, out=out, offline=offline, observer=observer, checks_digests=verify
    ).build()
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


# --- prep tokenize


@public
def tokenize_shard(
    recipe: PathLike,
    process: NonNegativeInt = 0,
    *,
    of: PositiveInt = 1,
    out: PathLike | None = None,
    format: TokenFormat = "prep",
    show: NonNegativeInt | None = None,
    html: PathLike | None = None,
    dry_run: bool = False,
    progress: Progress | Observer | None = None,
    **options: Unpack[DataOptions],
) -> Tokenization:
    """Tokenize the share of one process of the data of a recipe. The last process to finish completes the tokens.

    The tokens have the same bytes as with one process. `prep train` and `prep.batches` find them in `data.cache`, or in
    the folder of the run. All processes must share it. A shard has 16 MiB of the data, or a thousandth of it if that is
    more. Compressed, Parquet and Arrow files are not divided. `data.bad_lines` and `data.max_examples` count over all
    files: with them, the first process makes all shards.

    A killed process loses the shard in work. Start it again with the same arguments, in any order and with any
    `of`. Calls for processes with nothing left to do return at once.

    Args:
        recipe: A TOML file, or the name of one of `prep recipes`.
        process: Index of this process, from 0.
        of: Number of processes.
        out: Folder of the run. With another format, the folder of its files (required).
        format: "megatron" writes `train.idx` and `train.bin` for Megatron-LM. "parquet" writes `train.parquet`, with a
            list of `input_ids` per document. `validation` has the evaluation data, and the names of sources come first.
        show: Number of samples of each source to read as text, with the counts of all samples. Default: neither.
        html: File of a page with the samples and the counts of `show`. Default: none.
        dry_run: Keep no tokens, and only return samples. Tokens that are missing in the cache are made in a temporary
            folder.
        progress: Receives the bytes tokenized. Default: none. See `Progress`.
        **options: See `DataOptions`.

    Returns:
        The tokens, or the number of missing shards. With `show`, also the samples of the training data.

    Raises:
        UsageError: An argument or a key of the recipe is invalid.
        PrepError: The data cannot be tokenized.
    """
    started_s = time.monotonic()
    if process >= of:
        raise usage_error(f"`process` is {process}", f"`of` is {of}", f"0 to {of - 1}")
    _check_format(format, out)
    _check_samples(show, html, dry_run=dry_run, is_only=of == 1, format=format)
    index = process if of > 1 else None
    observer = run_observer_of(progress).for_process(index)
    loaded = load_recipe(find_training_recipe(Path(recipe)), as_tuple(options["overrides"])).recipe
    target = Path(out) if out is not None else None
    check_local_path(target)
    with label_errors(index), raise_on_signal(), ExitStack() as stack:
        builder = recipe_datasets(
            loaded,
            out=target if format == "prep" else None,
            offline=options["offline"],
            observer=observer,
        )
        configs = dict(builder.configs())
        if format != "prep":
            for config in configs.values():
                check_exportable(config, format)
        scratch_dir: Path | None = None
        if dry_run:
            scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
            configs = {
                name: replace(config, scratch_dir=scratch_dir) for name, config in configs.items()
            }
        data: list[TokenizedData] = []
        for name, config in configs.items():
            tokens = tokenize_share(
                config, process, of, progress=tokenize_progress(observer), note=observer.note
            )
            path = _write_format(tokens, name, target, format)
            if tokens.folder.parent == scratch_dir:
                path = None
            part = _describe(name, tokens, path)
            if show is not None and tokens.is_described:
                part = _with_samples(part, tokens, config, show)
            data.append(part)
        if html is not None:
            _write_page(Path(html), str(recipe), data, observer)
    return Tokenization(
        is_complete=all(part.path is not None for part in data),
        data=tuple(data),
        seconds=time.monotonic() - started_s,
        process=index,
    )


def _write_page(
    path: Path, recipe: str, data: Sequence[TokenizedData], observer: RunObserver
) -> None:
    """Write the page of the samples, if this process has them."""
    counts = {part.name: part.counts for part in data if part.counts is not None}
    if not counts:
        return
    write_samples_page(path, recipe, counts, {part.name: part.samples for part in data})
    observer.note(f"wrote {path}")


def _check_format(format: TokenFormat, out: PathLike | None) -> None:
    """Raise UsageError for another format without a folder."""
    if format != "prep" and out is None:
        hint = text("{}", Option("out", "FOLDER"))
        why = "its files need a folder"
        raise usage_error(text("{} needs {}", Option("format", format), Option("out")), why, hint)


def _check_samples(
    show: int | None, html: PathLike | None, *, dry_run: bool, is_only: bool, format: TokenFormat
) -> None:
    """Raise UsageError for options of samples without effect, and PrepError for a page that cannot be written."""
    if html is not None:
        if show is None:
            what = text("{} needs {}", Option("html"), Option("show"))
            raise usage_error(what, "the page has the samples", text("{}", Option("show", "3")))
        check_page_path(Path(html))
    if not dry_run:
        return
    dry = Option("dry_run", True)
    if show is None:
        why = "it only shows samples"
        hint = text("{}", Option("show", "3"))
        raise usage_error(text("{} needs {}", dry, Option("show")), why, hint)
    check_mutually_exclusive({"dry_run": True, "format": format if format != "prep" else None})
    if not is_only:
        what = text("{} is for one process", dry)
        raise usage_error(what, "no tokens are kept that several make", "start one process")


def _write_format(
    tokens: TokenizedShare, name: str, target: Path | None, file_format: TokenFormat
) -> Path | None:
    """Write complete tokens in another format, and return the output. None if shards are missing."""
    if tokens.meta is None:
        return None
    if file_format == "prep" or target is None:
        return tokens.folder
    return export_tokens(tokens.folder, tokens.meta, target / name, file_format)


def _describe(name: str, tokens: TokenizedShare, path: Path | None) -> TokenizedData:
    n_tokens = n_documents = None
    if tokens.meta is not None:
        n_tokens = tokens.meta.n_tokens
        n_documents = tokens.meta.n_documents
    return TokenizedData(
        name,
        path,
        shards=tokens.n_shards,
        missing_shards=tokens.n_missing,
        tokens=n_tokens,
        documents=n_documents,
    )


def _with_samples(
    part: TokenizedData, tokens: TokenizedShare, config: TokenizeConfig, n_samples: int
) -> TokenizedData:
    """Return the description of a store with its counts, and with the first samples of training data."""
    assert tokens.tokens is not None
    counts = count_samples(
        tokens.tokens, source_length=config.encoder_length, has_blocks=config.has_blocks
    )
    samples: tuple[TokenSample, ...] = ()
    if not config.is_evaluation:
        tokenizer = load_tokenizer(config.tokenizer)
        samples = tuple(
            read_samples(tokens.tokens, tokenizer, n_samples, source_length=config.encoder_length)
        )
    return replace(part, counts=counts, samples=samples)
