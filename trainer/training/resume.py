"""The check whether a run may continue with a changed recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prepcli.core.errors import Key, PrepError, text
from trainer.data.token_changes import BOS_KEY, restart_hint
from trainer.recipe.data_table import SOURCE_PATHS, SOURCES_KEY
from trainer.recipe.formatting import change_text
from trainer.recipe.lr_schedule import changed_fields
from trainer.training.loop_config import LoopConfig

# Recipe keys that may differ between a run and its continuation. Every other key changes the computation or the data.
# The mesh, the rules and the model keys below change results only within rounding. Steps and schedule keys are checked
# through the learning rate schedule that they produce, batch keys through the batch size, and the paths of data and
# tokenizer, the first token and the limit of documents through the identity of the tokens (FIXED_ON_RESUME).
CHANGEABLE_ON_RESUME = frozenset(
    {
        "name",
        "mesh",
        "rules",
        "model.path",
        "model.lock",
        "model.scan_layers",
        "model.remat_policy",
        "model.offload",
        "model.head_chunk_size",
        "model.ffn_chunk_size",
        "model.attention_kernel",
        "model.q_chunk_size",
        "model.k_chunk_size",
        "data.path",
        "data.eval_path",
        "data.tokenizer",
        BOS_KEY,
        "data.cache",
        "data.max_document_bytes",
        "batch.size",
        "batch.per_device",
        "batch.per_replica",
        "batch.accumulate",
        "optimizer.warmup_steps",
        "optimizer.warmup_ratio",
        "optimizer.decay_steps",
        "train.steps",
        "train.epochs",
        "train.log_every",
        "train.eval_every",
        "train.eval_every_epochs",
        "train.profile",
        "train.max_skipped",
        "eval.limit",
        "eval.at_start",
        "eval.patience",
        "eval.stride",
        "checkpoint.every",
        "checkpoint.every_epochs",
        "checkpoint.keep",
        "checkpoint.milestones",
        "checkpoint.best",
        "checkpoint.best_is",
        "checkpoint.optimizer_state",
        "checkpoint.dtype",
        "checkpoint.storage",
        "checkpoint.export_every",
        "checkpoint.push",
        "log.all_workers",
        "log.tensorboard",
        "log.wandb",
        "log.samples",
        "log.sample_every",
        "log.sample_tokens",
        "cluster.host0_address",
        "cluster.host0_port",
        "cluster.n_processes",
        "cluster.process_id",
        "cluster.n_local_devices",
        "cluster.dcn_mesh",
        "cluster.start_timeout",
        "cluster.heartbeat_timeout",
        "cluster.step_timeout",
    }
)
# Keys that change the schedule, and are no errors of their own.
SCHEDULE_KEYS = (
    *("train.steps", "train.epochs"),
    *("optimizer.warmup_steps", "optimizer.warmup_ratio", "optimizer.decay_steps"),
)
# Manifest keys that must be equal on resume, and their names in error messages.
FIXED_ON_RESUME = {
    "data": "the data",
    "batch_size": "the batch size",
    "loss_fn": "the loss function",
}


def check_changed_keys(changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Check whether a run may resume with changed recipe keys. The data is not read yet.

    Args:
        changed: Recipe keys whose values differ, as (value when the run began, value now).

    Raises:
        PrepError: A key changed that must not.
    """
    changes: list[str] = []
    for key, values in sorted(changed.items()):
        # The data is compared by content, so its files may move.
        has_moved = key == SOURCES_KEY and _have_moved(*values)
        if key not in CHANGEABLE_ON_RESUME and not has_moved:
            changes.append(f"{key}: {change_text(values)}")
    if changes:
        raise PrepError("the run began with another recipe", ", ".join(changes), restart_hint())


def check_resumable(
    manifest: Mapping[str, Any],
    config: LoopConfig,
    *,
    changed: Mapping[str, tuple[Any, Any]],
    step: int,
) -> None:
    """Check whether a run may resume from a checkpoint.

    Args:
        manifest: Manifest of the checkpoint.
        config: The resuming run.
        changed: Recipe keys whose values differ, as (value when the run began, value now).
        step: Step of the checkpoint.

    Raises:
        PrepError: The data, the batch size or the schedule changed, or `step` is past the last step.
    """
    hint = restart_hint()
    for key, label in FIXED_ON_RESUME.items():
        before = manifest.get(key)
        after = config.manifest_fields.get(key)
        if before != after:
            why = f"{before}, now {after}"
            raise PrepError(f"{label} has changed since the run began", why, hint)
    rates = changed_fields(manifest.get("rate", {}), config.manifest_fields.get("rate", {}))
    if rates:
        # Both fields follow from the number of steps.
        if "decay" in rates and {*rates} <= {"decay", "cooldown"}:
            decay_steps = Key("optimizer.decay_steps", rates["decay"][0], is_override=True)
            hint = text("{} keeps it; {}", decay_steps, hint)
        why = _schedule_change(rates, changed)
        raise PrepError("the learning rate schedule has changed since the run began", why, hint)
    if step > config.steps:
        raise PrepError(
            f"the run is at step {step}", f"the recipe has only {config.steps} steps", hint
        )


def _schedule_change(
    rates: Mapping[str, tuple[Any, Any]], changed: Mapping[str, tuple[Any, Any]]
) -> str:
    """Return the changed keys of the schedule, and the resulting changes of the schedule."""
    causes: list[str] = []
    for key in SCHEDULE_KEYS:
        if key in changed:
            causes.append(f"{key}: {change_text(changed[key])}")
    effects = ", ".join(f"{name} {change_text(values)}" for name, values in rates.items())
    if not causes:
        return effects
    return f"{', '.join(causes)} (of the schedule: {effects})"


def _have_moved(
    before: Sequence[Mapping[str, object]] | None, after: Sequence[Mapping[str, object]] | None
) -> bool:
    """Return whether the sources of a mixture differ only in the paths of their data."""
    return _without_paths(before or ()) == _without_paths(after or ())


def _without_paths(sources: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return sources of data without their paths."""
    kept: list[dict[str, object]] = []
    for source in sources:
        kept.append({key: value for key, value in source.items() if key not in SOURCE_PATHS})
    return kept
