"""The checks of a run. Each raises the first problem, with what fixes it.

A run makes them in this order. `train.train` shows it:

1. `resume.read_changed_keys`: the recipe against the recipe of an earlier start.
2. `check_inputs` and `check_devices`: the recipe alone, before a model is located.
3. `machine.check_config`: the memory of a step, before a model is matched. Not for a checkpoint of prep.
4. `check_start`: the start checkpoint and the machine, before data is tokenized. In this order: what a restart would
   delete, the batch, the hub's repository of a new run, the model, its overrides, its layout on the mesh, the attention
   kernel, and memory and disk. The prompts of samples follow (`prepare.make_sampler`).
5. `check_before_steps`: the data, the earlier steps of the run, warnings, and the agreement of all processes.
6. `resume.check_resumable_step`: the state of the last step, unless the run is finished. A dry run ends here.
7. `train.check_unread`: the hub's repository of a resumed run, and tensors without checksums.
8. `resume.check_base`: the frozen parameters, once they are loaded.
9. `storage.check_last_step`: the last step again, before the first change of a saved file.
10. `eval_metrics.check_metric_name`: the metric of the best step, with the first batch of an evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key, Option, text, usage_error
from prepcli.models.activation_memory import OFFLOAD_NONE, saved_activations
from prepcli.models.architecture import ArchConfig
from prepcli.models.lora import Adapters, num_features, rank_axis
from prepcli.stores.addresses import is_url, parse_url
from trainer.data.dataset_layout import eval_selection, train_selection
from trainer.data.files import EmptyFileError, check_not_empty, check_readable
from trainer.data.find_files import (
    DataFinder,
    find_data_files,
    has_local_files,
    resolve_type,
)
from trainer.data.packing import stride_error
from trainer.data.tokenizer import check_tokenizer_exists
from trainer.recipe import Recipe
from trainer.recipe.conflicts import check_model_fit
from trainer.recipe.data_table import Data, has_eval_data, split_sources
from trainer.recipe.text_fields import CONCATENATED
from trainer.run.exports import EXPORTS_FOLDER, check_repository
from trainer.run.machine import check_machine, disk_warnings
from trainer.run.resume import (
    cast_warning,
    check_continued_start,
    check_resumable,
    environment_warning,
    unread_warning,
)
from trainer.run.run import Run, compare_start

if TYPE_CHECKING:
    from prepcli.execution.training_storage import RunStorage
    from prepcli.models.attention_kernels import KernelChoice
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.run.start import StartCheckpoint
    from trainer.training.datasets import DataModel
    from trainer.training.events import LoopConfig


def check_inputs(
    recipe: Recipe, remote: DataFinder | None = None, *, may_be_absent: bool = False
) -> None:
    """Check the inputs of a recipe that need neither the model nor the content of the data.

    Args:
        recipe: The recipe.
        remote: Finds the data files of URLs.
        may_be_absent: Check only inputs that are on this machine. A plan needs none of them.

    Raises:
        PrepError: A data file or the tokenizer is missing, unreadable or empty, the type of a file is unknown, or
            the data has no such split, configuration or revision.
    """
    for _, data in split_sources(recipe.data):
        for paths, selection in (
            (data.path, train_selection(data)),
            (data.eval_paths, eval_selection(data)),
        ):
            # `eval_paths` is None if the evaluation takes held-out sequences, or if there is none.
            if paths is not None and (not may_be_absent or has_local_files(paths)):
                files = find_data_files(paths, data.type, selection, remote=remote)
                if files:
                    resolve_type(files, data.type)
                empty: list[EmptyFileError] = []
                for file in files:
                    try:
                        if isinstance(file, Path):
                            check_readable(file)
                        else:
                            check_not_empty(file)
                    except EmptyFileError as error:
                        empty.append(error)
                if empty and len(empty) == len(files):
                    raise empty[0]
    tokenizer = recipe.data.tokenizer
    if tokenizer and not (may_be_absent and not os.path.exists(tokenizer)):
        check_tokenizer_exists(Path(tokenizer))


def check_start(
    run: Run, start: StartCheckpoint, sharding: ShardingContext
) -> tuple[ModelSpec, KernelChoice, dict[str, int | None]]:
    """Check the recipe against the start checkpoint and the machine, before data is tokenized, which may take hours.

    Args:
        run: The run.
        start: Open start checkpoint.
        sharding: Devices and rules of the run.

    Returns:
        The model to train, its attention kernel, and the memory estimate of a step.

    Raises:
        PrepError: The recipe does not fit the model or the machine, or a restart would delete the start checkpoint.
    """
    from trainer.nn.model_spec import model_from_manifest
    from trainer.training.setup import (
        check_batch,
        check_model_layout,
        choose_kernel,
        dropout_rates,
    )

    recipe = run.recipe
    if run.options.restart:
        check_restart_source(start, run.storage, recipe)
    # The rules of the checkpoint apply if the recipe has none.
    check_batch(recipe, sharding)
    if not (run.options.dry_run or start.steps_taken):
        check_repository(run)
    manifest = start.model_manifest(recipe)
    model = model_from_manifest(manifest)
    check_model(recipe, model)
    _check_stride(recipe)
    if recipe.model.overrides and not recipe.model.is_random:
        check_overrides(start, model)
    check_model_layout(recipe, model, sharding)
    dropout = dropout_rates(recipe, manifest["config"], model)
    kernel = choose_kernel(recipe, model, sharding, warn=run.observer.warn, dropout=dropout)
    memory = check_machine(run, manifest, sharding, kernel=kernel.name)
    return model, kernel, memory


def check_model(recipe: Recipe, model: DataModel) -> None:
    """Check a recipe against the architecture of its model.

    Raises:
        UsageError: `data.seq_length` exceeds the positions, `data.packing` does not fit an encoder,
            sources of an encoder have no maximum length, `eval.stride` has no concatenated texts, or `remat_policy`
            names the hidden units of experts.
    """
    has_encoder = model.arch_config.encoder is not None
    stride = recipe.eval.stride
    if stride is not None and (has_encoder or recipe.data.packing != CONCATENATED):
        raise stride_error(stride)
    for _, data in split_sources(recipe.data):
        check_model_fit(data, has_encoder=has_encoder)
    _check_seq_length(recipe.data, model.arch_config)
    saved = saved_activations(recipe.model.remat_policy, has_experts=True)
    if model.arch_config.experts_per_token and "mlp_hidden" in saved:
        why = f"the experts of {model.family.name} compute their hidden units again"
        raise usage_error("`model.remat_policy` has mlp_hidden", why, "remove it from the list")


def _check_stride(recipe: Recipe) -> None:
    """Raise UsageError if a recipe sets the stride of an evaluation that has no data."""
    if recipe.eval.stride is not None and not has_eval_data(recipe.data):
        why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
        hint = text("{}", Key("data.holdout", 0.05, is_override=True))
        raise usage_error(f"`eval.stride` is {recipe.eval.stride}", why, hint)


def check_overrides(start: StartCheckpoint, model: ModelSpec) -> None:
    """Check that `model.overrides` keep the parameters of the start checkpoint. Only headers are read.

    Raises:
        UsageError: The model has a parameter of another shape, or one that the checkpoint does not have.
    """
    stored = start.model_reader.leaves
    key = Key("model.overrides")
    hint = "remove the fields that decide sizes; only a random start may have other ones"
    for path in model.base_paths or model.leaves:
        leaf = model.leaves[path]
        spec = stored.get(f"params.{path}")
        if spec is None:
            raise usage_error(
                text("{} adds {}", key, path), "the checkpoint does not have it", hint
            )
        if spec.shape != leaf.shape:
            why = f"it is {list(spec.shape)} in the checkpoint, the model would have {list(leaf.shape)}"
            raise usage_error(text("{} changes the shape of {}", key, path), why, hint)


def check_restart_source(start: StartCheckpoint, storage: RunStorage, recipe: Recipe) -> None:
    """Raise UsageError if the recipe names a step or an export of the run, and a restart would delete it."""
    model = recipe.model.path
    root = start.model_root
    if isinstance(root, Path):
        # The step that has the parameters, if `model.path` is a run
        model = str(root)
    sources = {
        "model.path": model,
        "model.config": recipe.model.config,
        "lora.path": recipe.lora.path,
        "data.tokenizer": recipe.data.tokenizer,
    }
    for key, source in sources.items():
        if source is None:
            continue
        if deleted := _deleted_folder(source, storage):
            why = text("the run starts from it: it is the recipe's {}", Key(key))
            what = text("{} would delete {}", Option("restart", True), deleted)
            raise usage_error(what, why, text("use another {}", Key("name")))


def _deleted_folder(source: str, storage: RunStorage) -> str:
    """Return the path or URL of the step or exports above a path or URL. Empty if a restart keeps the path."""
    if is_url(source):
        # The slash keeps `gs://b/run2` from counting as below `gs://b/run`.
        if f"{parse_url(source)}/".startswith(f"{storage.name}/"):
            return source
        return ""
    # The exports of a run in a bucket are on this machine too.
    folders = [str(storage.local_folder / EXPORTS_FOLDER)]
    if storage.is_on_disk:
        folders += map(storage.step_name, storage.steps())
    path = Path(source).expanduser().resolve()
    for folder in folders:
        if path.is_relative_to(Path(folder).resolve()):
            return folder
    return ""


def _check_seq_length(data: Data, arch_config: ArchConfig) -> None:
    """Raise UsageError if sequences are longer than a model with limited positions computes."""
    max_positions = arch_config.max_positions
    if arch_config.has_limited_positions and data.seq_length > max_positions:
        why = f"the model has {max_positions} positions"
        raise usage_error(
            f"`data.seq_length` is {data.seq_length}",
            why,
            text("{}", Key("data.seq_length", max_positions, is_override=True)),
        )


def check_devices(recipe: Recipe, sharding: ShardingContext) -> None:
    """Raise UsageError if `model.offload` is set and the devices have no host memory to move arrays to."""
    if recipe.model.offload != OFFLOAD_NONE:
        sharding.check_host_memory()


def check_before_steps(
    run: Run,
    start: StartCheckpoint,
    config: LoopConfig,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Check whether the run may continue with this recipe, and whether all processes start alike.

    Args:
        run: The run. Process 0 compares it with its earlier steps, as another process may not see its folder.
        start: Open start checkpoint.
        config: Configuration of the loop.
        changed: Recipe keys whose values differ, as (value at the last start, value now).

    Raises:
        PrepError: The data, the batch size, the schedule or the training state do not fit the earlier steps, or
            processes read different checkpoints or data.
    """
    if run.is_process_0:
        _check_earlier_steps(run, start, config, changed)
    compare_start(
        run.group,
        start.manifest,
        step=start.steps_taken,
        data_identity=config.manifest_fields.data,
        kernel=config.setup.forward_config.attention_options.kernel,
    )


def _check_earlier_steps(
    run: Run,
    start: StartCheckpoint,
    config: LoopConfig,
    changed: Mapping[str, tuple[Any, Any]],
) -> None:
    """Check a run against its earlier steps, and print warnings about the recipe and the disk."""
    step = start.steps_taken
    manifest = start.step_reader.manifest
    warnings: list[str] = []
    if step:
        check_resumable(manifest, config, changed=changed, step=step)
    elif run.recipe.model.training_state:
        check_continued_start(start, config)
        warnings += [cast_warning(start, config), unread_warning(start, config)]
    if 0 < step < config.steps:
        now = config.manifest_fields.environment or {}
        warnings.append(environment_warning(manifest.environment, now, step=step))
    last_step = start.state_step(run.recipe)
    warnings += run_warnings(run.recipe, config, last_step=last_step)
    if run.storage.is_on_disk:
        leaves = config.setup.model.saved_leaves
        warnings += disk_warnings(
            run.folder,
            run.recipe,
            leaves,
            first_step=last_step + 1,
            save_steps=config.save_steps,
        )
    for warning in filter(None, warnings):
        run.observer.warn(warning)


MANY_EPOCHS = 1000  # a run of more epochs gets a warning


def run_warnings(recipe: Recipe, config: LoopConfig, *, last_step: int = 0) -> Iterator[str]:
    """Yield a warning for each setting in conflict with the data or the number of steps.

    Args:
        recipe: The recipe.
        config: Configuration of its loop.
        last_step: The step to continue after. 0 without one.
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
