"""`prep eval`: loss, perplexity and accuracy of any checkpoint on data files, by source."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, TypedDict, Unpack

from prepcli.commands.console.stdio import silence_jax
from prepcli.commands.operations.compute_options import EvaluateOptions
from prepcli.commands.operations.compute_together import compute_together, process_index
from prepcli.commands.operations.evaluation_keys import option_of_key
from prepcli.commands.operations.evaluation_model import LoadedModel, load_model
from prepcli.commands.operations.evaluation_recipe import data_sources, evaluation_recipe
from prepcli.commands.operations.model_files import source_generation_defaults, tokenizer_path
from prepcli.commands.operations.open_params import open_params, resolve_compute_dtype
from prepcli.commands.operations.opening import (
    CommonOptions,
    check_config_option,
    common_options,
    open_checkpoint,
    source_line,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.results import Evaluation, EvaluationScores
from prepcli.commands.operations.target_metrics import check_target_metrics, target_metrics
from prepcli.core.errors import Option, PrepError, Style, text
from prepcli.core.formatting import count_text, format_duration
from prepcli.core.observer import CommandObserver, Observer, PacedNotes, Progress, ticking
from prepcli.core.option_spec import PathLike
from prepcli.sources.folders import make_access
from prepcli.sources.source import Source
from trainer.recipe import Recipe
from trainer.run.observe import tokenize_progress
from trainer.run.params import OpenedModel
from trainer.run.remote_data import DataFinder

if TYPE_CHECKING:
    from trainer.data.packing import Dataset
    from trainer.training.evaluation import EvaluationResult

OUT_OF_MEMORY_HINT = text(
    "use a smaller {} or {}, {}, or more fsdp or mp in {}",
    Option("batch_size"),
    Option("seq_length"),
    Option("dtype", "bfloat16"),
    Option("mesh"),
)


@public
def evaluate(
    checkpoint: PathLike | None = None,
    data: PathLike | Sequence[PathLike] = (),
    *,
    progress: Progress | Observer | None = None,
    **options: Unpack[EvaluateOptions],
) -> Evaluation:
    """Compute loss, perplexity and accuracy of a model on data files.

    In a job of several processes, all of them call it with a mesh of all their devices. Without a mesh each process
    evaluates alone.

    Args:
        checkpoint: Folder, alias, hub id, URL, training run, or a step of one. Default: the only checkpoint of prep in
            the current folder.
        data: One or more files, folders, globs or URLs. Each is a source with its own result. "NAME=PATH" names it.
        progress: Receives the bytes downloaded, checked or tokenized. Default: none. See `Progress`.
        **options: See `EvaluateOptions`.

    Returns:
        The scores over all data and of each source.

    Raises:
        UsageError: An argument is invalid.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: The checkpoint, the data or the devices cannot be used.
    """
    started_s = time.monotonic()
    common = common_options(checkpoint, None, options)
    files = [str(data)] if isinstance(data, str | Path) else [str(path) for path in data]
    with _options_in_errors(progress):
        evaluation = compute_together(
            options["mesh"],
            progress,
            phase="eval",
            compute=lambda group, observer: replace(
                _evaluate(common, files, options, observer), process=process_index(group)
            ),
        )
    return replace(evaluation, seconds=time.monotonic() - started_s)


@contextmanager
def _options_in_errors(progress: Progress | Observer | None) -> Iterator[None]:
    """Name options instead of recipe keys in the errors of the block: an evaluation has no recipe file."""
    language = "terminal" if isinstance(progress, CommandObserver) else "python"
    try:
        yield
    except PrepError as error:
        raise error.rendered(Style(language, rename_key=option_of_key)) from error.__cause__


def _evaluate(
    common: CommonOptions, files: Sequence[str], options: EvaluateOptions, observer: Observer
) -> Evaluation:
    """Load the model and the data, and compute the scores. See `evaluate`."""
    silence_jax(observer)
    from trainer.distributed.exact_backend import start_exact_backend
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.training.evaluation import combine_results

    # The backend reads the settings of exact sums when it starts, so nothing may use a device before this.
    if options["reduction"] == "exact":
        start_exact_backend()
    located, source = open_checkpoint(common, observer)
    check_config_option(common, source)
    observer.note(source_line(source))
    with ExitStack() as stack:
        stack.enter_context(catch_out_of_memory(OUT_OF_MEMORY_HINT))
        opened = stack.enter_context(
            open_params(
                located, source, options["mesh"], verify=options["verify"], observer=observer
            )
        )
        # Without `cache`, the tokens are kept here until the end of the call.
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
        check_target_metrics(options, opened)
        remote = DataFinder(make_access(observer, offline=options["offline"]), observer.note)
        recipes = _make_recipes(files, options, source, opened, remote=remote)
        # All data is read before the weights are loaded: invalid data is reported early.
        open_dataset = partial(
            _open_dataset,
            options,
            source,
            opened,
            remote,
            scratch_dir=scratch_dir,
            observer=observer,
        )
        datasets = {name: open_dataset(recipe) for name, recipe in recipes.items()}
        first_recipe = next(iter(recipes.values()))
        loaded = load_model(options, opened, first_recipe, observer)
        mesh = opened.sharding.mesh
        started_s = time.monotonic()
        observer.note("compiling for the first batch")
        results = _compute_results(options, datasets, opened, loaded, observer)
        compute_s = time.monotonic() - started_s
        score = partial(_score_source, options, source, opened, loaded=loaded, observer=observer)
        sources = {name: score(dataset, results[name]) for name, dataset in datasets.items()}
    num_sequences = sum(scores.sequences for scores in sources.values())
    observer.note(
        f"{count_text(num_sequences, 'sequence')} in {format_duration(compute_s)}, compilation included"
    )
    return Evaluation(
        **_make_scores(combine_results(results.values()), num_sequences=num_sequences),
        sources=sources,
        checkpoint=source.display_name,
        step=source.tree_manifest.step,
        mesh=str(mesh) if mesh else None,
        dtype=loaded.forward_config.dtype,
        reduction=options["reduction"],
        seq_length=first_recipe.data.seq_length,
        compute_seconds=compute_s,
        seconds=0.0,
    )


def _compute_results(
    options: EvaluateOptions,
    datasets: Mapping[str, Dataset],
    opened: OpenedModel,
    loaded: LoadedModel,
    observer: Observer,
) -> dict[str, EvaluationResult]:
    """Return the sums of losses and correct tokens of each source."""
    from trainer.training.evaluation import evaluate as evaluate_dataset

    notes = PacedNotes(observer)
    results: dict[str, EvaluationResult] = {}
    with ticking(notes.tick):
        for name, dataset in datasets.items():
            notes.begin(f"evaluating {name}")
            results[name] = evaluate_dataset(
                loaded.params,
                dataset,
                eval_step=loaded.eval_step,
                sharding=opened.sharding,
                batch_size=loaded.batch_size,
                limit=options["limit"],
                on_progress=notes.on_progress,
            )
    return results


def _score_source(
    options: EvaluateOptions,
    source: Source,
    opened: OpenedModel,
    dataset: Dataset,
    result: EvaluationResult,
    *,
    loaded: LoadedModel,
    observer: Observer,
) -> EvaluationScores:
    """Return the scores of a source of data, with the metrics of its generated targets."""
    num_sequences = min(dataset.n_rows, options["limit"] or dataset.n_rows)
    return EvaluationScores(
        **_make_scores(result, num_sequences=num_sequences),
        metrics=target_metrics(options, dataset, source, opened, loaded=loaded, observer=observer),
    )


class _Scores(TypedDict):
    """The fields that all `EvaluationScores` have. A number that is not finite is None."""

    loss: float | None
    perplexity: float | None
    accuracy: float | None
    tokens: int
    sequences: int


def _make_scores(result: EvaluationResult, *, num_sequences: int) -> _Scores:
    """Return the fields of `EvaluationScores`. Infinite and NaN values, which JSON lacks, are None."""
    return {
        "loss": _finite_or_none(result.mean_loss),
        "perplexity": _finite_or_none(result.perplexity),
        "accuracy": _finite_or_none(result.accuracy),
        "tokens": result.num_tokens,
        "sequences": num_sequences,
    }


def _finite_or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _make_recipes(
    files: Sequence[str],
    options: EvaluateOptions,
    source: Source,
    opened: OpenedModel,
    *,
    remote: DataFinder,
) -> dict[str, Recipe]:
    """Return the checked recipe of each source of data: the settings that reading and computing need."""
    from trainer.training.recipe_checks import check_inputs, check_model

    dtype = resolve_compute_dtype(options["dtype"], opened)
    recipes: dict[str, Recipe] = {}
    for name, paths in data_sources(files).items():
        recipes[name] = evaluation_recipe(
            options,
            paths,
            checkpoint=source.display_name,
            dtype=dtype,
            max_positions=opened.model.arch_config.max_positions,
        )
    for recipe in recipes.values():
        check_inputs(recipe, remote)
        check_model(recipe, opened.model)
    return recipes


def _open_dataset(
    options: EvaluateOptions,
    source: Source,
    opened: OpenedModel,
    remote: DataFinder,
    recipe: Recipe,
    *,
    scratch_dir: Path,
    observer: Observer,
) -> Dataset:
    """Tokenize a source of data. Raise PrepError if it is invalid or does not fit the model."""
    from trainer.data.windows import with_stride
    from trainer.training.datasets import build_datasets

    folders = {
        "tokenizer": tokenizer_path(source, options["tokenizer"], purpose="encode the data"),
        "cache": Path(options["cache"] or scratch_dir),
    }
    datasets = build_datasets(
        recipe,
        opened.model,
        model_config=opened.reader.manifest["config"],
        folders=folders,
        stop_ids=source_generation_defaults(source, opened.model.true_vocab_size).eos_token_ids,
        remote=remote,
        progress=tokenize_progress(observer),
        note=observer.note,
    )
    return with_stride(datasets.train, recipe.eval.stride)
