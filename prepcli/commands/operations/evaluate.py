"""`prep eval`: loss, perplexity and accuracy of any checkpoint on data files, by source."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Unpack

from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.checkpoint_options import CommonOptions, common_options
from prepcli.commands.operations.compute_options import (
    EFFECTIVE_KEYS,
    EvaluateOptions,
    option_of_key,
)
from prepcli.commands.operations.computing import (
    compute_together,
    open_parameters,
    process_index,
    resolve_compute_dtype,
    source_generation_defaults,
    tokenizer_path,
)
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.run_results import Evaluation, EvaluationScores
from prepcli.core.errors import Key, Option, PrepError, Style, text, usage_error
from prepcli.core.formatting import count_text, format_duration, suggest
from prepcli.core.observer import CommandObserver, Observer, PacedNotes, Progress, ticking
from prepcli.core.option_spec import PathLike, as_tuple
from prepcli.sources.open_folder import make_access
from prepcli.sources.source import Source
from trainer.data.find_files import DataFinder
from trainer.recipe import Recipe
from trainer.recipe.key_types import TomlTable
from trainer.recipe.loading import RawRecipe, complete_recipe
from trainer.run.params import OpenedModel
from trainer.run.recipe_data import tokenize_progress

if TYPE_CHECKING:
    from prepcli.models.param_tree import Tree
    from trainer.data.packing import Dataset
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import EvalStep
    from trainer.training.metrics import EvaluationResult

MAX_DEFAULT_LENGTH = 1024
# An evaluation has no recipe file. Messages about recipe keys without an option show this name.
RECIPE_NAME = Path("prep eval")
SOURCE_NAME = re.compile(r"[\w.-]*")


def data_sources(files: Sequence[str]) -> dict[str, list[str]]:
    """Return the paths of each source of data, by its name.

    Raises:
        UsageError: There is no file, or a source has an empty name or path.
    """
    named_file = Option("data", "NAME=FILE")
    if not files:
        raise usage_error(
            "no data was given",
            "the loss is computed on data files",
            text("{}, or {}", Option("data", "FILE"), named_file),
        )
    paths: dict[str, list[str]] = {}
    for file in files:
        name, separator, path = file.partition("=")
        # A path of an existing file or a matching glob may contain a `=`, as partitioned datasets have: `data/lang=en`.
        is_named = bool(separator) and SOURCE_NAME.fullmatch(name) is not None
        if not is_named or os.path.exists(file) or glob(file):
            name = path = file
        if not name or not path:
            raise usage_error(
                text("{} is invalid", Option("data", file)),
                "it has an empty name or path",
                text("{}", named_file),
            )
        paths.setdefault(name, []).append(path)
    return paths


def evaluation_recipe(
    options: EvaluateOptions,
    paths: Sequence[str],
    *,
    checkpoint: str,
    dtype: str,
    max_positions: int,
) -> Recipe:
    """Return the recipe that computes the loss on one source of data."""
    overrides = as_tuple(options.get("overrides", ()))
    for override in overrides:
        _check_override(override)
    default_length = min(max_positions or MAX_DEFAULT_LENGTH, MAX_DEFAULT_LENGTH)
    data_table: TomlTable = {
        "path": list(paths),
        "seq_length": options.get("seq_length") or default_length,
    }
    for key in ("type", "fields"):
        value = options.get(key)
        if value is not None:
            data_table[key] = value
    # A recipe needs a batch, an optimizer and steps. An evaluation uses none of them.
    tables: TomlTable = {
        "model": {"path": checkpoint, "dtype": dtype},
        "data": data_table,
        "batch": {"size": 1},
        "optimizer": {"lr": 1.0},
        "train": {"steps": 1},
    }
    # No file has the values: hints of errors name options instead of lines of a file.
    raw = RawRecipe(RECIPE_NAME, tables, is_of_options=True)
    return complete_recipe(raw, overrides).recipe


def _check_override(override: str) -> None:
    """Raise UsageError if the key of a `KEY=VALUE` has no effect on an evaluation."""
    key = override.partition("=")[0].strip()
    if ".".join(key.split(".")[:2]) in EFFECTIVE_KEYS:
        return
    hint = text("{}", Option("overrides", "data.source_length=512"))
    similar_key = suggest(key, sorted(EFFECTIVE_KEYS))
    if similar_key:
        hint = text("did you mean {}?", Key(similar_key))
    raise usage_error(
        text("{} is not supported", Option("overrides", override)),
        f"an evaluation does not use `{key}`",
        hint,
    )


# --- The model on its devices


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its devices, and the options of its evaluation."""

    params: Tree
    forward_config: ForwardConfig
    eval_step: EvalStep
    batch_size: int


def load_model(
    options: EvaluateOptions, opened: OpenedModel, recipe: Recipe, observer: Observer
) -> LoadedModel:
    """Load the parameters in the dtype of the computation, and choose how to compute."""
    from trainer.distributed.compilation import CompiledFunction
    from trainer.distributed.sharding import device_kind
    from trainer.generation.decode import inference_dtype
    from trainer.nn.model_spec import AttentionOptions, ForwardConfig
    from trainer.planning.step_inputs import check_token_split, chunk_sizes
    from trainer.training.evaluation import jit_eval_step, jit_row_eval_step
    from trainer.training.setup import choose_kernel

    sharding = opened.sharding
    check_token_split(recipe, sharding.sequence_parallel_size)
    exact = Option("reduction", "exact")
    is_exact = options["reduction"] == "exact"
    if is_exact and opened.model.arch_config.encoder is not None:
        raise usage_error(
            text("{} is not supported for models with an encoder", exact),
            "equal results for every mesh and batch size are ensured only without an encoder",
            text("{}", Option("reduction", "fast")),
        )
    if is_exact and sharding.sequence_parallel_size > 1:
        raise usage_error(
            text("{} is not supported with {}", exact, Option("mesh", sharding.mesh)),
            "each sequence is computed on one device",
            "use a mesh without sp",
        )
    # Each replica computes the same number of rows.
    num_replicas = sharding.data_parallel_size
    batch_size = -(-options["batch_size"] // num_replicas) * num_replicas
    kernel = choose_kernel(recipe, opened.model, sharding, warn=observer.warn)
    sizes = chunk_sizes(recipe, device_kind(sharding), num_rows=batch_size // num_replicas)
    forward_config = ForwardConfig(
        recipe.model.dtype,
        scan_layers=opened.model.has_stacked_layers,
        head_chunk_size=sizes.head,
        sharding=sharding,
        attention_options=AttentionOptions(kernel.name, sizes.queries, sizes.keys),
    )
    observer.note("loading the parameters")
    params = opened.load(lambda path: inference_dtype(path, recipe.model.dtype))
    jit_step = jit_row_eval_step if is_exact else jit_eval_step
    eval_step = CompiledFunction(jit_step(opened.model, forward_config))
    return LoadedModel(params, forward_config, eval_step, batch_size)


# --- Metrics of generated targets


def check_target_metrics(options: EvaluateOptions, opened: OpenedModel) -> None:
    """Check that the metrics of the options can be computed."""
    names = as_tuple(options["metrics"])
    if not names:
        return
    from trainer.generation.text_metrics import check_metrics

    option = Option("metrics", names[0])
    if opened.model.arch_config.encoder is None:
        why = f"targets are generated from sources, and {opened.model.family.name} has no encoder"
        raise usage_error(
            text("{} is not supported for this model", option),
            why,
            text("remove {}", Option("metrics")),
        )
    if opened.sharding.sequence_parallel_size > 1:
        why = "generation appends one token at a time, so that there are no tokens to split"
        raise usage_error(
            text("{} is not supported with {}", option, Option("mesh", opened.sharding.mesh)),
            why,
            "use a mesh without sp",
        )
    check_metrics(names)


def target_metrics(
    options: EvaluateOptions,
    dataset: Dataset,
    source: Source,
    opened: OpenedModel,
    *,
    loaded: LoadedModel,
    observer: Observer,
) -> dict[str, float | None]:
    """Generate the targets of a dataset, and return their metrics.

    Infinite and NaN values are None.
    """
    metrics = as_tuple(options["metrics"])
    if not metrics:
        return {}
    from trainer.data.tokenizer import load_tokenizer
    from trainer.generation.decode import GenerationConfig
    from trainer.generation.generator import Generator
    from trainer.generation.text_metrics import score_texts
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.datasets import decoder_start_token_id
    from trainer.training.samples import generate_targets

    model = opened.model
    config = source.config
    forward_config = ForwardConfig(
        loaded.forward_config.dtype, scan_layers=model.has_stacked_layers, sharding=opened.sharding
    )
    defaults = source_generation_defaults(source, model.true_vocab_size, note=observer.note)
    generation_config = GenerationConfig(
        dataset.seq_length, defaults.eos_token_ids, rules=defaults.rules
    )
    targets = list(
        generate_targets(
            Generator(
                loaded.params,
                model,
                forward_config=forward_config,
                generation_config=generation_config,
            ),
            dataset,
            load_tokenizer(tokenizer_path(source, options["tokenizer"], purpose="decode targets")),
            decoder_start_id=decoder_start_token_id(config, model.true_vocab_size),
            batch_size=min(loaded.batch_size, dataset.n_rows),
            limit=options["limit"],
        )
    )
    observer.note(f"generated {count_text(len(targets), 'target')}")
    if num_longer := sum(target.is_longer for target in targets):
        observer.warn(
            text(
                "{:,} of {:,} references are longer than {} tokens, where generated texts end ({})",
                num_longer,
                len(targets),
                dataset.seq_length,
                Option("seq_length"),
            )
        )
    texts = [target.text for target in targets]
    references = [target.reference for target in targets]
    scores = score_texts(metrics, texts, references)
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


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
    prepare_jax(observer)
    from trainer.distributed.exact_reduction import start_exact_backend
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.training.evaluation import combine_results

    # The backend reads the settings of exact sums when it starts, so nothing may use a device before this.
    if options["reduction"] == "exact":
        start_exact_backend()
    with ExitStack() as stack:
        stack.enter_context(catch_out_of_memory(OUT_OF_MEMORY_HINT))
        _, source, opened = stack.enter_context(
            open_parameters(common, options["mesh"], verify=options["verify"], observer=observer)
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
        sources = _score_sources(
            options, datasets, results, source, opened, loaded=loaded, observer=observer
        )
    num_sequences = sum(scores.sequences for scores in sources.values())
    observer.note(
        f"{count_text(num_sequences, 'sequence')} in {format_duration(compute_s)}, compilation included"
    )
    return Evaluation(
        **vars(_make_scores(combine_results(results.values()), num_sequences, {})),
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


def _score_sources(
    options: EvaluateOptions,
    datasets: Mapping[str, Dataset],
    results: Mapping[str, EvaluationResult],
    source: Source,
    opened: OpenedModel,
    *,
    loaded: LoadedModel,
    observer: Observer,
) -> dict[str, EvaluationScores]:
    """Return the scores of each source of data, with the metrics of its generated targets."""
    sources: dict[str, EvaluationScores] = {}
    for name, dataset in datasets.items():
        metrics = target_metrics(options, dataset, source, opened, loaded=loaded, observer=observer)
        num_sequences = min(dataset.n_rows, options["limit"] or dataset.n_rows)
        sources[name] = _make_scores(results[name], num_sequences, metrics)
    return sources


def _make_scores(
    result: EvaluationResult, num_sequences: int, metrics: Mapping[str, float | None]
) -> EvaluationScores:
    """Return scores. Infinite and NaN values, which JSON lacks, are None."""

    def finite(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return EvaluationScores(
        loss=finite(result.mean_loss),
        perplexity=finite(result.perplexity),
        accuracy=finite(result.accuracy),
        tokens=result.num_tokens,
        sequences=num_sequences,
        metrics=metrics,
    )


def _make_recipes(
    files: Sequence[str],
    options: EvaluateOptions,
    source: Source,
    opened: OpenedModel,
    *,
    remote: DataFinder,
) -> dict[str, Recipe]:
    """Return the checked recipe of each source of data: the settings that reading and computing need."""
    from trainer.run.checks import check_inputs, check_model

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
    from trainer.data.packing import with_stride
    from trainer.training.datasets import DatasetBuilder

    datasets = DatasetBuilder(
        recipe,
        opened.model,
        model_config=opened.reader.manifest["config"],
        tokenizer=tokenizer_path(source, options["tokenizer"], purpose="encode the data"),
        cache=Path(options["cache"] or scratch_dir),
        stop_ids=source_generation_defaults(source, opened.model.true_vocab_size).eos_token_ids,
        remote=remote,
        progress=tokenize_progress(observer),
        note=observer.note,
    ).build()
    return with_stride(datasets.train, recipe.eval.stride)
