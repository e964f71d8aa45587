"""The preparation of a run: the configuration of its loop, and the state that it starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from prepcli.core.errors import Key, text, usage_error
from prepcli.formats.manifest import SAMPLE_DIGEST_KEY
from prepcli.planning.manifest_fields import Manifest
from prepcli.restore.item_reader import ItemReader
from trainer.planning.step_inputs import check_patterns, split_batch
from trainer.recipe import Recipe, recipe_to_toml
from trainer.recipe.key_types import MAX_INT32
from trainer.run.resume import check_base
from trainer.run.run import Run
from trainer.run.start import RandomReader, StartCheckpoint
from trainer.run.storage import explain_removed_step
from trainer.run.summary import rounding_environment, rounding_text

if TYPE_CHECKING:
    from prepcli.core.intervals import Interval
    from prepcli.models.attention_kernels import KernelChoice
    from trainer.data.order import RowOrder
    from trainer.distributed.sharding import ShardingContext
    from trainer.nn.model_spec import ModelSpec
    from trainer.training.datasets import Datasets
    from trainer.training.events import LoopConfig
    from trainer.training.samples import Sampler
    from trainer.training.step import TrainState

FLOAT_DTYPES = ("float32", "float16", "bfloat16")


def make_sampler(
    run: Run, start: StartCheckpoint, model: ModelSpec, sharding: ShardingContext
) -> Sampler | None:
    """Return the sampler of a run, None without prompts. A prompt or tokenizer that cannot work is an error."""
    from trainer.training.samples import build_sampler

    return build_sampler(
        run.recipe,
        model,
        start.model_manifest(run.recipe)["config"],
        files=start.tokenizer_folder,
        sharding=sharding,
        note=run.observer.note,
    )


def build_loop_config(
    run: Run,
    start: StartCheckpoint,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: KernelChoice,
    data: Datasets,
    sampler: Sampler | None,
) -> LoopConfig:
    """Build the configuration of the loop.

    Args:
        run: The run.
        start: Open start checkpoint.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        kernel: The attention kernel.
        data: Training and evaluation data.
        sampler: Generates texts from the prompts of the recipe.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together, or the run has too
            many steps.
    """
    from trainer.training.datasets import make_order
    from trainer.training.events import LoopConfig
    from trainer.training.setup import build_step_setup, dropout_rates, peak_step_s

    recipe = run.recipe
    assert sharding.mesh is not None
    check_patterns(recipe.optimizer, model.saved_leaves)
    batch_size = split_batch(recipe, sharding.mesh, sharding.rules).shape.size
    order = make_order(data, batch_size, seed=recipe.seed, shuffle=recipe.data.shuffle)
    steps = _num_steps(recipe, data.train.n_rows, order)
    setup = build_step_setup(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel.name,
        steps=steps,
        dropout=dropout_rates(recipe, start.model_manifest(recipe)["config"], model),
        token_functions=run.options.token_functions,
    )
    setup = replace(setup, base_dtypes=_base_dtypes(recipe, start, model))
    return LoopConfig(
        setup=setup,
        recipe=recipe,
        steps=steps,
        order=order,
        train=data.train,
        evaluation=data.evaluation,
        eval_every=_make_interval(recipe.train.eval_every, recipe.train.eval_every_epochs, order),
        save_every=_make_interval(recipe.checkpoint.every, recipe.checkpoint.every_epochs, order),
        manifest_fields=Manifest(
            recipe=recipe_to_toml(recipe, run.loaded.origins),
            environment=rounding_environment(sharding),
        )
        | run.options.token_functions.manifest_fields
        | Manifest(
            data=data.identity,
            batch_size=batch_size,
            rate=setup.optimizer.lr_schedule.manifest_fields(),
        )
        | _evaluation_fields(recipe, data),
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
