"""The preparation of a run: the configuration of its loop, and the state that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key, text, usage_error
from prepcli.formats.manifest import SAMPLE_DIGEST_KEY
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.item_reader import ItemReader
from trainer.planning.step_inputs import check_patterns, split_batch
from trainer.recipe import Recipe, recipe_to_toml
from trainer.recipe.data_table import has_eval_data
from trainer.recipe.key_types import MAX_INT32
from trainer.run.checks import check_before_steps, check_machine, check_model, check_overrides
from trainer.run.recipe_data import run_datasets
from trainer.run.resume import check_base
from trainer.run.run import Run, compare_start
from trainer.run.start import RandomReader, StartCheckpoint
from trainer.run.storage import explain_removed_step
from trainer.run.summary import rounding_environment, rounding_text, run_summary_lines

if TYPE_CHECKING:
    from prepcli.core.intervals import Interval
    from prepcli.models.layer_config import DropoutConfig
    from trainer.data.order import RowOrder
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.training.datasets import Datasets
    from trainer.training.events import LoopConfig
    from trainer.training.samples import Sampler
    from trainer.training.step import TrainState

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def configure(
    run: Run,
    start: StartCheckpoint,
    sharding: ShardingContext,
    *,
    changed: Mapping[str, tuple[Any, Any]],
    stack: ExitStack,
) -> tuple[LoopConfig, Mapping[str, int | None]]:
    """Check the recipe against the model and the machine, tokenize the data, and configure the loop.

    Args:
        run: The run.
        start: Open start checkpoint.
        sharding: Devices and rules of the run.
        changed: Recipe keys whose values differ, as (value when the run began, value now).
        stack: Removes the tokens of a dry run at its end.

    Returns:
        The configuration, and the memory estimate of a step.

    Raises:
        PrepError: The recipe does not fit the model, the machine, the data or the run so far.
    """
    from trainer.nn.model_spec import model_from_manifest
    from trainer.training.samples import build_sampler
    from trainer.training.setup import check_model_layout, choose_kernel, dropout_rates

    recipe = run.recipe
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
    # Before the data is tokenized, which may take hours: a prompt or tokenizer that cannot work is found here.
    sampler = build_sampler(
        recipe,
        model,
        manifest["config"],
        files=start.tokenizer_folder,
        sharding=sharding,
        note=run.observer.note,
    )
    scratch_dir: Path | None = None
    if run.options.dry_run:
        # A dry run must not write to the run's folder, so missing tokens go to a temporary one.
        scratch_dir = Path(stack.enter_context(TemporaryDirectory(prefix="prep-")))
    # This can take hours. The next start continues it after an interruption.
    datasets = run_datasets(
        run,
        start,
        model,
        model_config=manifest["config"],
        changed=changed,
        scratch_dir=scratch_dir,
    ).build()
    config = build_loop_config(
        run,
        start,
        model,
        sharding=sharding,
        kernel=kernel.name,
        dropout=dropout,
        datasets=datasets,
        sampler=sampler,
    )
    check_before_steps(run, start, config, changed)
    compare_start(
        run.group,
        start.manifest,
        step=start.steps_taken,
        data_identity=datasets.identity,
        kernel=kernel.name,
    )
    for line in run_summary_lines(run, start, config, kernel):
        run.observer.note(line)
    return config, memory


def build_loop_config(
    run: Run,
    start: StartCheckpoint,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: str,
    dropout: DropoutConfig,
    datasets: Datasets,
    sampler: Sampler | None,
) -> LoopConfig:
    """Build the configuration of the loop.

    Args:
        run: The run.
        start: Open start checkpoint.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        kernel: Name of the attention kernel.
        dropout: Rates of dropout and forgetful causal masking.
        datasets: Training and evaluation data.
        sampler: Generates texts from the prompts of the recipe.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together, or the run has too
            many steps.
    """
    from trainer.training.datasets import make_order
    from trainer.training.events import LoopConfig
    from trainer.training.setup import build_step_setup, peak_step_s

    recipe = run.recipe
    assert sharding.mesh is not None
    check_patterns(recipe.optimizer, model.saved_leaves)
    batch_size = split_batch(recipe, sharding.mesh, sharding.rules).shape.size
    order = make_order(datasets, batch_size, seed=recipe.seed, shuffle=recipe.data.shuffle)
    steps = _num_steps(recipe, datasets.train.n_rows, order)
    setup = build_step_setup(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel,
        steps=steps,
        dropout=dropout,
        token_functions=run.options.token_functions,
    )
    setup = replace(setup, base_dtypes=_base_dtypes(recipe, start, model))
    return LoopConfig(
        setup=setup,
        recipe=recipe,
        steps=steps,
        order=order,
        train=datasets.train,
        evaluation=datasets.evaluation,
        eval_every=_make_interval(recipe.train.eval_every, recipe.train.eval_every_epochs, order),
        save_every=_make_interval(recipe.checkpoint.every, recipe.checkpoint.every_epochs, order),
        manifest_fields=Manifest(
            recipe=recipe_to_toml(recipe, run.loaded.origins),
            environment=rounding_environment(sharding),
        )
        | run.options.token_functions.manifest_fields
        | Manifest(
            data=datasets.identity,
            batch_size=batch_size,
            rate=setup.optimizer.lr_schedule.manifest_fields(),
        )
        | _evaluation_fields(recipe, datasets),
        stop_after=run.options.stop_after,
        peak_step_s=peak_step_s(recipe, model, sharding),
        sampler=sampler,
    )


def _num_steps(recipe: Recipe, n_rows: int, order: RowOrder) -> int:
    """Return the number of steps of a run. Raise UsageError if they are too many."""
    steps = recipe.train.steps or order.steps_for_epochs(recipe.train.epochs or 0)
    if steps > MAX_INT32:
        why = f"{recipe.train.epochs:g} epochs of {n_rows:,} sequences; a run has at most {MAX_INT32:,} steps"
        raise usage_error(
            "`train.epochs` is too large", why, text("{}", Key("train.epochs", 3, is_override=True))
        )
    return steps


def _check_stride(recipe: Recipe) -> None:
    """Raise UsageError if a recipe sets the stride of an evaluation that has no data."""
    if recipe.eval.stride is not None and not has_eval_data(recipe.data):
        why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
        hint = text("{}", Key("data.holdout", 0.05, is_override=True))
        raise usage_error(f"`eval.stride` is {recipe.eval.stride}", why, hint)


def _evaluation_fields(recipe: Recipe, datasets: Datasets) -> Manifest:
    """Return the manifest entries that identify which evaluations of saved steps are comparable."""
    # The data is fixed in a run.
    is_recorded = recipe.checkpoint.best is not None or recipe.eval.patience
    if not is_recorded or datasets.evaluation is None:
        return Manifest()
    n_rows = datasets.evaluation.n_rows
    fields = Manifest(eval_sequences=min(n_rows, recipe.eval.limit or n_rows))
    if recipe.eval.stride is not None:
        fields |= Manifest(eval_stride=recipe.eval.stride)
    return fields


def _make_interval(steps: int, epochs: float | None, order: RowOrder) -> Interval:
    """Return an interval in steps. Epochs are converted if they are set."""
    if epochs is None:
        return steps
    return order.unrounded_steps_for_epochs(epochs)


def _base_dtypes(recipe: Recipe, start: StartCheckpoint, model: ModelSpec) -> Mapping[str, str]:
    """Return the dtype of each base parameter in device memory, by path. Empty without adapters."""
    if start.lora is None:
        return {}
    if recipe.lora.base_dtype != "stored":
        return dict.fromkeys(model.base_paths, recipe.lora.base_dtype)
    dtypes: dict[str, str] = {}
    for path in model.base_paths:
        dtype = start.model_reader.leaves[f"params.{path}"].dtype
        # Devices do not compute in float8.
        if dtype not in FLOAT_DTYPES:
            dtype = "float32"
        dtypes[path] = dtype
    return dtypes


def load_state(run: Run, start: StartCheckpoint, config: LoopConfig) -> TrainState:
    """Read the state to resume from, or initialize it with the start checkpoint's parameters or random ones.

    Each process reads the byte ranges of its own shards. Digests are checked during the read.

    Raises:
        PrepError: The state is damaged or cannot be resumed, or another process has removed the step meanwhile.
    """
    from trainer.training.checkpoint import init_state, random_state, restore_state

    setup = config.setup
    with explain_removed_step(run.storage, start.steps_taken):
        if isinstance(start.model_reader, RandomReader):
            return random_state(setup, run.recipe.seed)
        if not start.steps_taken and run.recipe.model.training_state:
            # The step of another run, with its moments. `check_continued_start` has checked it.
            assert isinstance(start.model_reader, ItemReader)
            return restore_state(start.model_reader, setup)
        if not start.steps_taken:
            return init_state(
                start.model_reader,
                setup,
                start.adapter_reader,
                on_rounding=lambda counts: run.observer.note(rounding_text(counts)),
            )
        if start.adapter_reader is None:
            return restore_state(start.model_reader, setup, None)
        return restore_state(start.adapter_reader, setup, start.model_reader)


def with_base_facts(
    run: Run, start: StartCheckpoint, config: LoopConfig, state: TrainState
) -> LoopConfig:
    """Return the config of a LoRA run that records its base in each manifest: its name and its digests.

    The first digest is of all frozen parameters on the devices. A resumed run compares it here. The second one is the
    `sample_digest` of the checkpoint, which `prep merge` compares.
    """
    from prepcli.models.param_tree import flatten_tree
    from trainer.training.checkpoint import digest_base_params

    if start.lora is None:
        return config
    name = run.recipe.model.path
    assert name is not None
    leaves = flatten_tree(state["params"])
    digest = digest_base_params({path: leaves[path] for path in config.setup.model.base_paths})
    base = {"name": name, "digest": digest, SAMPLE_DIGEST_KEY: start.sample_digest()}
    if start.steps_taken:
        check_base(start.step_reader.manifest, base)
    return replace(config, manifest_fields=config.manifest_fields | Manifest(base=base))
