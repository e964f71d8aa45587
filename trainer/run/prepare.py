"""The preparation of a run: its model, its attention kernel, its tokens, and the configuration of its loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.execution.training_storage import TOKENS_FOLDER
from prepcli.formats.run_steps import RECIPE_FILE
from prepcli.planning.manifest_fields import Manifest
from prepcli.sources.folders import make_access
from prepcli.sources.generation_config import folder_generation_defaults
from prepcli.stores.paths import create_temporary_folder
from trainer.planning.model_shapes import model_of_manifest
from trainer.planning.step_inputs import run_dropout
from trainer.planning.training_plan import with_overrides
from trainer.recipe import LoadedRecipe, Recipe, recipe_to_toml
from trainer.run.checks import check_machine, disk_warnings
from trainer.run.continued_state import (
    cast_warning,
    check_continued_start,
    unread_warning,
)
from trainer.run.display import tokenize_progress
from trainer.run.environment import (
    environment_warning,
    rounding_environment,
)
from trainer.run.recipe_data import DataFinder
from trainer.run.run import PreparedRun, Run
from trainer.run.start import StartCheckpoint, choose_base_dtypes
from trainer.run.storage import changed_keys

if TYPE_CHECKING:
    from prepcli.models.dropout_config import DropoutConfig
    from trainer.data.token_changes import RecordedTokens
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.training.samples import Sampler
    from trainer.training.source_datasets import Datasets


def prepare_run(
    run: Run, start: StartCheckpoint, sharding: ShardingContext, *, scratch_dir: Path | None
) -> PreparedRun:
    """Check the recipe against the model and the machine, tokenize the data, and configure the loop.

    Args:
        run: The run.
        start: Open start checkpoint.
        sharding: Devices and rules of the run.
        scratch_dir: Folder for missing tokens in a dry run. It must not write to the run's folder. None
            if it is not a dry run.

    Raises:
        PrepError: The recipe does not fit the model, the machine, the data or the run so far.
    """
    from trainer.distributed import hosts
    from trainer.training.loop_config import build_loop_config
    from trainer.training.setup import choose_kernel

    recipe = run.recipe
    manifest, model = _start_model(recipe, start, sharding)
    dropout = _dropout_rates(recipe, manifest["config"], model)
    kernel = choose_kernel(recipe, model, sharding, warn=run.observer.warn, dropout=dropout)
    processes_per_host = hosts.processes_per_host(run.group)
    memory = check_machine(
        run,
        with_overrides(recipe, {"model.attention_kernel": kernel.name}),
        model_of_manifest(manifest),
        sharding,
        processes_per_host=processes_per_host,
    )
    # Before the data is tokenized, which may take hours: a prompt or tokenizer that cannot work is found here.
    sampler = build_sampler(
        recipe,
        model,
        manifest["config"],
        files=start.tokenizer_folder,
        sharding=sharding,
        note=run.observer.note,
    )
    changed = _check_changed_keys(run, start)
    datasets = _tokenize_data(
        run,
        start,
        model,
        model_config=manifest["config"],
        scratch_dir=scratch_dir,
        recorded=_recorded_tokens(run, start, changed),
    )
    loop = build_loop_config(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel.name,
        datasets=datasets,
        dropout=dropout,
        manifest_fields=_manifest_fields(run.loaded, sharding),
        token_functions=run.request.token_functions,
        stop_after=run.request.stop_after,
        base_dtypes=_base_dtypes(recipe, start, model),
        sampler=sampler,
    )
    prepared = PreparedRun(
        run,
        start,
        model_config=manifest["config"],
        loop=loop,
        kernel=kernel,
        memory=memory,
        processes_per_host=processes_per_host,
    )
    # Another process may not see the run's folder.
    if run.is_first:
        _check_loop(prepared, model, changed)
    return prepared


def _start_model(
    recipe: Recipe, start: StartCheckpoint, sharding: ShardingContext
) -> tuple[Mapping[str, Any], ModelSpec]:
    """Return the manifest of the start checkpoint, with the recipe's changes, and its model.

    The model is checked against the recipe.
    """
    from trainer.nn.model_spec import model_from_manifest
    from trainer.training import setup
    from trainer.training.recipe_checks import check_model

    manifest = start.manifest
    # The manifest of a step of the run has the recipe's changes already. The base of a LoRA run has not.
    if not start.resume_step or start.lora is not None:
        manifest = setup.override_config(manifest, recipe)
    model = model_from_manifest(manifest)
    check_model(recipe, model)
    setup.check_model_layout(recipe, model, sharding)
    return manifest, model


def build_sampler(
    recipe: Recipe,
    model: ModelSpec,
    config: HFConfig,
    *,
    files: Path,
    sharding: ShardingContext,
    note: Callable[[str], None] = lambda line: None,
) -> Sampler | None:
    """Build the sampler of a run.

    None without prompts.

    Args:
        recipe: The recipe.
        model: The model.
        config: Its config.json.
        files: Folder of its tokenizer and of generation_config.json.
        sharding: Mesh and rules of the run.
        note: Called with lines about the rules of generation.

    Raises:
        PrepError: There is no tokenizer, or the model cannot generate from the prompts.
    """
    from trainer.data.tokenizer import load_tokenizer
    from trainer.training.datasets import decoder_start_token_id
    from trainer.training.samples import SAMPLES_KEY, Sampler

    if recipe.log.samples is None:
        return None
    try:
        tokenizer = load_tokenizer(Path(recipe.data.tokenizer) if recipe.data.tokenizer else files)
    except PrepError as error:
        what = text("{} needs a tokenizer", Key(SAMPLES_KEY))
        why = text("{}: {}", error.what, error.why)
        hint = text("set {}, or remove {}", Key("data.tokenizer"), Key(SAMPLES_KEY))
        raise PrepError(what, why, hint) from error
    vocab = model.true_vocab_size
    defaults = folder_generation_defaults(config, files, vocab)
    for line in defaults.notes:
        note(line)
    decoder_start_id = None
    if model.arch_config.encoder is not None:
        decoder_start_id = decoder_start_token_id(config, vocab)
    return Sampler(
        recipe.log.samples,
        tokenizer,
        model,
        sharding=sharding,
        dtype=recipe.model.dtype,
        max_new_tokens=recipe.log.sample_tokens,
        eos_token_ids=defaults.eos_token_ids,
        rules=defaults.rules,
        stop_texts=defaults.stop_texts,
        decoder_start_id=decoder_start_id,
    )


def _manifest_fields(loaded: LoadedRecipe, sharding: ShardingContext) -> Manifest:
    """Return the entries with equal values in the manifests of all steps."""
    text = recipe_to_toml(loaded.recipe, loaded.origins)
    return Manifest(recipe=text, environment=rounding_environment(sharding))


def _dropout_rates(recipe: Recipe, config: HFConfig, model: ModelSpec) -> DropoutConfig:
    """Return the dropout of a run."""
    dropout = run_dropout(recipe, config)
    if model.adapters is None:
        return dropout
    # The rate of adapters of a file is in their settings.
    return replace(dropout, adapters=model.adapters.config.dropout)


def _base_dtypes(recipe: Recipe, start: StartCheckpoint, model: ModelSpec) -> Mapping[str, str]:
    """Return the dtype of each parameter of the base of adapters. Empty without adapters."""
    if start.lora is None:
        return {}
    return choose_base_dtypes(start, model, recipe.lora.base_dtype)


def _check_changed_keys(run: Run, start: StartCheckpoint) -> dict[str, tuple[Any, Any]]:
    """Return the changed recipe keys of a resumed run, after the check whether they may change.

    Empty for a new run, and on other processes, which may not see the run's folder.
    """
    from trainer.training.resume import check_changed_keys

    if not run.is_first or not start.resume_step:
        return {}
    # A dry run must not write to the run's folder: a bucket's recipe is downloaded to a temporary folder.
    recipe_file = run.storage.fetch_file(RECIPE_FILE, create_temporary_folder())
    changed = changed_keys(recipe_file, run.recipe)
    check_changed_keys(changed)
    return changed


def _recorded_tokens(
    run: Run, start: StartCheckpoint, changed: Mapping[str, tuple[Any, Any]]
) -> RecordedTokens | None:
    """Return the tokens with which a resumed run began. None for a new run, and on other processes."""
    from trainer.data.token_changes import BOS_KEY, RecordedTokens

    if not run.is_first or not start.resume_step:
        return None
    add_bos = run.recipe.data.add_bos
    if BOS_KEY in changed:
        add_bos, _ = changed[BOS_KEY]
    return RecordedTokens(tuple(start.step_reader.manifest.data.split()), add_bos)


def _tokenize_data(
    run: Run,
    start: StartCheckpoint,
    model: ModelSpec,
    *,
    model_config: HFConfig,
    scratch_dir: Path | None,
    recorded: RecordedTokens | None,
) -> Datasets:
    """Tokenize the data with progress, or map the tokens of an earlier run."""
    from trainer.training.datasets import build_datasets

    observer = run.observer
    folders = {"tokenizer": start.tokenizer_folder, "cache": run.folder / TOKENS_FOLDER}
    if scratch_dir is not None:
        folders["spare"] = scratch_dir
    return build_datasets(
        run.recipe,
        model,
        model_config=model_config,
        folders=folders,
        stop_ids=folder_generation_defaults(
            model_config, start.tokenizer_folder, model.true_vocab_size
        ).eos_token_ids,
        group=run.group,
        remote=DataFinder(make_access(observer, offline=run.request.offline), observer.note),
        recorded=recorded,
        progress=tokenize_progress(observer),
        note=observer.note,
    )


def _check_loop(
    prepared: PreparedRun, model: ModelSpec, changed: Mapping[str, tuple[Any, Any]]
) -> None:
    """Check whether the run may continue with this recipe, and print warnings about the recipe and the disk."""
    from trainer.training.preflight import run_warnings
    from trainer.training.resume import check_resumable

    run = prepared.run
    loop = prepared.loop
    step = prepared.step
    manifest = prepared.start.step_reader.manifest
    if step:
        check_resumable(manifest, loop, changed=changed, step=step)
    elif run.recipe.model.training_state:
        check_continued_start(prepared.start, loop)
        for describe in (cast_warning, unread_warning):
            if warning := describe(prepared.start, loop):
                run.observer.warn(warning)
    if 0 < step < loop.steps:
        now = loop.manifest_fields.environment or {}
        if warning := environment_warning(manifest.environment, now, step=step):
            run.observer.warn(warning)
    for warning in run_warnings(run.recipe, loop, last_step=step):
        run.observer.warn(warning)
    if run.storage.is_on_disk:
        steps_left = loop.steps - step
        for warning in disk_warnings(run.folder, run.recipe, model.saved_leaves, steps_left):
            run.observer.warn(warning)
