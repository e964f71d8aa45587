"""`prep train`: train with a recipe, from the recipe's checkpoint or from the last step of the run."""

# pyright: reportTypedDictNotRequiredAccess=false
# The decorator `public` has added the default of each option.

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Unpack

from prepcli.commands.console.notebook import run_observer_of
from prepcli.commands.console.stdio import prepare_jax
from prepcli.commands.operations.compute_options import TrainOptions
from prepcli.commands.operations.export import export
from prepcli.commands.operations.operation import public
from prepcli.commands.operations.recipes import find_training_recipe
from prepcli.commands.operations.run_results import TrainingRun
from prepcli.core.observer import Observer, Progress, SilentCommandObserver
from prepcli.core.option_spec import PathLike, as_tuple
from trainer.recipe import load_recipe
from trainer.run.run import TrainResult, TrainSettings
from trainer.run.train import train as run_training
from trainer.training.eval_metrics import TokenFunctions, TokenLoss, TokenMetrics


@public
def train(
    recipe: PathLike,
    out: PathLike | None = None,
    *,
    dry_run: bool = False,
    loss_fn: TokenLoss | None = None,
    metric_fn: TokenMetrics | None = None,
    progress: Progress | Observer | Literal["notebook"] | None = None,
    **options: Unpack[TrainOptions],
) -> TrainingRun:
    """Train from a recipe, or resume a run that was stopped.

    `loss_fn(logits, targets)` replaces the cross entropy in training. It is called for chunks of tokens with float32
    logits `[rows, tokens, vocabulary]` without padding and int32 targets `[rows, tokens]`, and returns a loss for each
    token, `[rows, tokens]`. It is traced by `jax.jit`. prep multiplies the losses by the weights of the tokens, and
    divides the sum of the batch by the sum of the weights. The function must compute each token by itself: the result
    then depends neither on the mesh nor on micro-batches nor on chunks, beyond rounding, and the logits of all tokens
    never exist. `metric_fn(logits, targets)` is called in the same way in evaluation, and returns a dict of values
    `[rows, tokens]`. The weighted mean of `NAME` is logged as `eval_NAME`. Evaluation always reports the
    cross entropy.

    Args:
        recipe: A TOML file, or the name of one of `prep recipes`. `prep docs recipes` lists its keys.
        out: Folder of the run. Default: `runs/NAME`.
        dry_run: Check the run and estimate its memory. No step is taken and no file is written.
        loss_fn: Loss of each token. Default: the cross entropy. A run resumes with a function of the same name. Not
            supported with `train.reduction = "exact"` and the keys of `[loss]`.
        metric_fn: Values of each token to evaluate. Not supported with `train.reduction = "exact"`.
        progress: Receives the bytes downloaded, checked or tokenized. Default: none. See `Progress`. "notebook" shows
            the run in the output of a notebook's cell.
        **options: See `TrainOptions`.

    Returns:
        The run. A run stopped by `stop_after` or a signal is not an exception: its `is_finished` is False.

    Raises:
        UsageError: An argument or a key of the recipe is invalid.
        DamagedError: Files of the checkpoint are damaged.
        PrepError: Training failed.
    """
    started_s = time.monotonic()
    settings = TrainSettings(
        Path(recipe),
        Path(out) if out is not None else None,
        restart=options["restart"],
        stop_after=options["stop_after"],
        dry_run=dry_run,
        offline=options["offline"],
        stream=options["stream"],
        verify=options["verify"],
        force=options["force"],
        token_functions=TokenFunctions(loss_fn, metric_fn),
    )
    loaded = load_recipe(find_training_recipe(Path(recipe)), as_tuple(options["overrides"]))
    settings.token_functions.check(loaded.recipe)
    observer = run_observer_of(progress)
    prepare_jax(observer)
    result = run_training(loaded, settings, observer, _export_step)
    return TrainingRun(
        path=Path(result.run),
        step=result.step,
        is_finished=result.is_finished if dry_run else result.error is None,
        seconds=time.monotonic() - started_s,
        details=_result_details(result),
        error=result.error,
        process=result.process,
    )


def _export_step(step: str, out: Path, repository: str | None) -> Mapping[str, str]:
    """Export a step to a folder without messages, and upload it. See `ExportStep`. The run reports the errors."""
    observer = SilentCommandObserver(command="export")
    if repository is None:
        export(step, out, progress=observer)
        return {}
    return export(step, out, progress=observer, push=repository).details["pushed"]


def _result_details(result: TrainResult) -> dict[str, object]:
    """Return the fields of the JSON object of a run."""
    details: dict[str, object] = {
        "output": result.output,
        "run": result.run,
        "step": result.step,
        "steps": result.steps,
        "resumed_at": result.resumed_at,
        "mesh": result.mesh,
        "attention_kernel": result.attention_kernel,
        **result.metrics,
    }
    if result.memory is not None:
        details |= {"memory": result.memory, "dry_run": True}
    elif result.error is None and result.pushed is not None:
        details["pushed"] = result.pushed
    if result.end_reason:
        details["end_reason"] = result.end_reason
    return details
