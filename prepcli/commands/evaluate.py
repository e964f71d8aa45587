"""`prep eval`: loss, perplexity and accuracy of any checkpoint on data files, by source."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prepcli.commands.compute_together import compute_together
from prepcli.commands.evaluate_run import EvaluateRequest, LoadedModel
from prepcli.commands.evaluation_hints import option_hints
from prepcli.commands.evaluation_recipe import evaluation_recipe
from prepcli.commands.open_params import open_params
from prepcli.commands.target_metrics import check_target_metrics, target_metrics
from prepcli.console.formatting import format_duration
from prepcli.console.jax_logs import silence_jax
from prepcli.console.ui import Report, Ui, format_table
from prepcli.errors import usage_error
from prepcli.operations.conversion import (
    check_config_option,
    open_checkpoint,
    source_line,
)
from prepcli.operations.model_files import tokenizer_path
from prepcli.restore.params import OpenedModel
from prepcli.sources.folders import make_access
from prepcli.sources.source import Source
from prepcli.training_runs.observe import tokenize_progress
from prepcli.training_runs.remote_data import DataFinder
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.data.packing import Dataset
    from trainer.nn.model_spec import ForwardConfig
    from trainer.training.evaluation import EvalStep, EvaluationResult

OUT_OF_MEMORY_HINT = (
    "a smaller `--batch-size` or `--seq-length`, `--dtype bfloat16`, or more fsdp or mp in `--mesh`"
)


def evaluate(request: EvaluateRequest, ui: Ui) -> Report:
    """Compute the loss of a checkpoint on each source of data, and over all of them.

    In a job of several processes, all of them call it with a mesh of all their devices, and process 0 prints the
    result. Without a mesh each process evaluates alone.

    Args:
        request: Checkpoint, data and devices.
        ui: Receives notes, warnings and progress.

    Returns:
        Report with loss, perplexity, accuracy and tokens, in total and by source.

    Raises:
        PrepError: An option is invalid, or the checkpoint, the data or the devices cannot be used.
    """
    with option_hints():
        return compute_together(
            request.mesh,
            ui,
            phase="eval",
            compute=lambda _, process_ui: _evaluate(request, process_ui),
        )


def _evaluate(request: EvaluateRequest, ui: Ui) -> Report:
    """Load the model and the data, and compute the report. See `evaluate`."""
    silence_jax(ui)
    from trainer.distributed.exact_backend import start_exact_backend
    from trainer.distributed.sharding import catch_out_of_memory
    from trainer.training.evaluation import combine_results
    from trainer.training.evaluation import evaluate as evaluate_dataset

    if request.reduction == "exact":
        start_exact_backend()
    located, source = open_checkpoint(request.common, ui)
    check_config_option(request.common, source)
    ui.note(source_line(source))
    with ExitStack() as stack:
        stack.enter_context(catch_out_of_memory(OUT_OF_MEMORY_HINT))
        opened = stack.enter_context(
            open_params(located, source, request.mesh, verify=request.verify, ui=ui)
        )
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
        check_target_metrics(request.metrics, opened)
        recipes = _make_recipes(request, source, opened)
        datasets = {
            name: _open_dataset(request, recipe, source, opened, scratch_dir=scratch_dir, ui=ui)
            for name, recipe in recipes.items()
        }
        loaded = _load_model(request, opened, [*recipes.values()], ui)
        start_s = time.monotonic()
        ui.note("compiling for the first batch")
        results = {
            name: evaluate_dataset(
                loaded.params,
                dataset,
                eval_step=loaded.eval_step,
                sharding=opened.sharding,
                batch_size=loaded.batch_size,
                limit=request.limit,
            )
            for name, dataset in datasets.items()
        }
        seconds = time.monotonic() - start_s
        metrics = {
            name: target_metrics(request, dataset, source, opened, loaded=loaded, ui=ui)
            for name, dataset in datasets.items()
        }
    total = combine_results(results.values())
    num_rows = {
        name: min(data.n_rows, request.limit or data.n_rows) for name, data in datasets.items()
    }
    ui.note(
        f"{sum(num_rows.values()):,} sequences in {format_duration(seconds)}, compilation included"
    )
    fields = {
        "checkpoint": source.display_name,
        "step": source.tree_manifest.step,
        "mesh": str(opened.sharding.mesh) if opened.sharding.mesh else None,
        "dtype": loaded.forward_config.dtype,
        "reduction": request.reduction,
        "seq_length": next(iter(recipes.values())).data.seq_length,
        **result_fields(total, sum(num_rows.values())),
        "sources": {
            name: result_fields(result, num_rows[name]) | metrics[name]
            for name, result in results.items()
        },
        "seconds": round(seconds, 3),
    }
    return Report(_result_table(results, total, metrics, columns=ui.columns), fields)


def result_fields(result: EvaluationResult, num_sequences: int) -> dict[str, Any]:
    """Return a result as JSON values. Infinite and NaN values are None."""
    values = {
        "loss": result.mean_loss,
        "perplexity": result.perplexity,
        "accuracy": result.accuracy,
    }
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return {**finite, "tokens": result.num_tokens, "sequences": num_sequences}


def _result_table(
    results: Mapping[str, EvaluationResult],
    total: EvaluationResult,
    metrics: Mapping[str, Mapping[str, Any]],
    *,
    columns: int | None,
) -> str:
    """Return one line per source, one for all if there are several, and the metrics of generated targets."""
    rows = [*results.items(), *([("all", total)] if len(results) > 1 else [])]
    cells = [
        (name, f"{r.mean_loss:.6f}", f"{r.perplexity:,.4f}", f"{r.accuracy:.4f}", r.num_tokens)
        for name, r in rows
    ]
    header = ("source", "loss", "perplexity", "accuracy", "tokens")
    table = format_table(cells, header, right_aligned=header[1:], width=columns)
    lines = [
        f"{name}: {key} {'none' if value is None else f'{value:.4f}'}"
        for name, values in metrics.items()
        for key, value in values.items()
    ]
    return "\n".join([table, *lines])


def _make_recipes(
    request: EvaluateRequest, source: Source, opened: OpenedModel
) -> dict[str, Recipe]:
    """Return the recipe of each source of data: the settings that reading and computing need."""
    from trainer.training.setup import check_seq_length

    dtype = request.dtype or ("bfloat16" if opened.stored_dtypes() == {"bfloat16"} else "float32")
    recipes = {
        name: evaluation_recipe(
            request.data,
            paths,
            checkpoint=source.display_name,
            dtype=dtype,
            max_positions=opened.model.arch_config.max_positions,
        )
        for name, paths in request.data.sources().items()
    }
    for recipe in recipes.values():
        check_seq_length(recipe.data, opened.model)
    return recipes


def _open_dataset(
    request: EvaluateRequest,
    recipe: Recipe,
    source: Source,
    opened: OpenedModel,
    *,
    scratch_dir: Path,
    ui: Ui,
) -> Dataset:
    """Tokenize a source of data. Raise PrepError if it is invalid or does not fit the model."""
    from trainer.training.datasets import build_datasets

    folders = {
        "tokenizer": tokenizer_path(source, request.tokenizer, purpose="encode the data"),
        "cache": request.cache or scratch_dir,
    }
    return build_datasets(
        recipe,
        opened.model,
        manifest=opened.reader.manifest,
        folders=folders,
        remote=DataFinder(make_access(ui, offline=request.common.offline), ui.note),
        progress=tokenize_progress(ui),
        note=ui.note,
    ).train


def _load_model(
    request: EvaluateRequest, opened: OpenedModel, recipes: Sequence[Recipe], ui: Ui
) -> LoadedModel:
    """Load the parameters in the dtype of the computation, and choose how to compute."""
    from trainer.distributed.device_kind import device_kind
    from trainer.generation.decode import inference_dtype
    from trainer.nn.kernels.options import AttentionOptions
    from trainer.nn.model_spec import ForwardConfig
    from trainer.planning.step_inputs import check_token_split, chunk_sizes
    from trainer.training.attention_choice import choose_kernel

    sharding, recipe = opened.sharding, recipes[0]  # the recipes differ only in their data
    check_token_split(recipe, sharding.sequence_parallel_size)
    if request.reduction == "exact":
        _check_exact(opened)
    num_replicas = sharding.data_parallel_size
    batch_size = -(-request.batch_size // num_replicas) * num_replicas
    kernel = choose_kernel(recipe, opened.model, sharding, warn=ui.warn)
    sizes = chunk_sizes(recipe, device_kind(sharding), num_rows=batch_size // num_replicas)
    forward_config = ForwardConfig(
        recipe.model.dtype,
        scan_layers=opened.model.has_stacked_layers,
        head_chunk_size=sizes.head,
        sharding=sharding,
        attention_options=AttentionOptions(kernel.name, sizes.queries, sizes.keys),
    )
    ui.note("loading the parameters")
    params = opened.load(lambda path: inference_dtype(path, recipe.model.dtype))
    return LoadedModel(
        params, forward_config, _jit_step(request, opened, forward_config), batch_size
    )


def _jit_step(
    request: EvaluateRequest, opened: OpenedModel, forward_config: ForwardConfig
) -> EvalStep:
    from trainer.training.evaluation import jit_eval_step, jit_row_eval_step

    jit_step = jit_row_eval_step if request.reduction == "exact" else jit_eval_step
    return jit_step(opened.model, forward_config)


def _check_exact(opened: OpenedModel) -> None:
    """Raise UsageError if sequences cannot be computed one by one."""
    if opened.model.arch_config.encoder is not None:
        why = "its sums are not known to be equal in every program"
        raise usage_error(
            "`--reduction exact` is not supported for models with an encoder",
            why,
            "`--reduction fast`",
        )
    if opened.sharding.sequence_parallel_size > 1:
        why = "each sequence is computed on one device"
        raise usage_error(
            f"`--reduction exact` is not supported with `--mesh {opened.sharding.mesh}`",
            why,
            "a mesh without sp",
        )
