"""The static parts of a run and of its step: built from a recipe, a model and devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.models.attention_kernels import (
    AUTO,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
)
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.registry import family_of
from prepcli.models.rope_config import Rope
from prepcli.models.rule_text import merge_rules
from prepcli.models.rules import Rules
from prepcli.planning.manifest_fields import Manifest
from trainer.data.order import RowOrder, num_eval_batches
from trainer.data.packing import Dataset
from trainer.distributed.sharding import ShardingContext, device_kind
from trainer.nn.kernels.probe import find_mismatch
from trainer.nn.lm_head import LossTerms
from trainer.nn.model_spec import (
    AttentionOptions,
    ForwardConfig,
    ModelSpec,
    check_mesh_divides,
    rules_from_manifest,
    unscannable_error,
)
from trainer.planning.model_shapes import recipe_config
from trainer.planning.step_flops import count_step_flops
from trainer.planning.step_inputs import (
    ModelShapes,
    Shapes,
    check_exact_model,
    check_token_split,
    chunk_sizes,
    run_dropout,
    run_kernels,
    split_batch,
    step_inputs,
    with_adapters,
)
from trainer.planning.step_time import accelerator_of
from trainer.recipe import Recipe
from trainer.recipe.rope_overrides import SCALING_KEY, THETA_KEY, override_rope
from trainer.recipe.tables import Model
from trainer.training.eval_metrics import (
    NO_TOKEN_FUNCTIONS,
    BestMetric,
    Patience,
    TokenFunctions,
    best_metric,
)
from trainer.training.events import Interval, is_due, num_due
from trainer.training.optimizers import build_optimizer
from trainer.training.step import LossScale, StepSetup

if TYPE_CHECKING:
    # Plans compile a step without generating texts.
    from trainer.training.samples import Sampler

# The forward pass takes about a third of the operations of a training step: the backward pass takes twice as many.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class LoopConfig:
    """Complete description of a run for the loop. Equal configs that start from equal states end in equal states."""

    setup: StepSetup  # Model, forward config, optimizer and accumulation of a step
    # Recipe of the run. The loop reads its tables `train`, `eval`, `checkpoint` and `log`.
    recipe: Recipe
    steps: int  # Number of the last step
    order: RowOrder  # Rows of each step
    train: Dataset  # Rows to train on
    evaluation: Dataset | None  # Rows to evaluate on. None without evaluation.
    eval_every: Interval  # Steps between two evaluations. 0 evaluates only after the last step.
    save_every: Interval  # Steps between two checkpoints. 0 saves only after the last step.
    manifest_fields: Manifest  # Extra entries for the manifest of every checkpoint
    stop_after: int = 0  # Steps that this process takes. 0 means no limit.
    # Seconds of the model operations of a step at the devices' peak. None if it is unknown.
    peak_step_s: float | None = None
    # Generates texts from the prompts of the recipe. None without prompts.
    sampler: Sampler | None = None

    @property
    def evaluates_at_start(self) -> bool:
        """Whether the start parameters are evaluated before the first step."""
        at_start = self.recipe.eval.at_start
        return self.eval_every > 0 if at_start is None else at_start

    @property
    def save_intervals(self) -> tuple[Interval, ...]:
        """Intervals at which checkpoints are saved: `save_every`, milestones and exports."""
        table = self.recipe.checkpoint
        return (self.save_every, table.milestones, table.export_every)

    @property
    def best_metric(self) -> BestMetric:
        """The value of evaluations that selects the best step."""
        return best_metric(self.recipe)

    def is_evaluation_due(self, step: int) -> bool:
        """Return whether the parameters are evaluated after a step, or before the first one."""
        if self.evaluation is None:
            return False
        if step == 0:
            return self.evaluates_at_start
        return step == self.steps or is_due(step, self.eval_every)

    def num_samples_due(self, step: int, *, ends_early: bool = False) -> int:
        """Return the number of texts that are generated after a step, or before the first one.

        Args:
            step: The step.
            ends_early: Whether it is the last step of a run that ends early.
        """
        every = self.recipe.log.sample_every
        is_last = ends_early or step == self.steps
        is_sampled = is_last or is_due(step, every) or (step == 0 and bool(every))
        if self.sampler is None or not is_sampled:
            return 0
        return len(self.sampler.prompts)

    def is_save_due(self, step: int) -> bool:
        """Return whether a step is saved, whatever its loss is."""
        return step == self.steps or any(is_due(step, every) for every in self.save_intervals)

    def end_reason(self, step: int, patience: Patience) -> str:
        """Return why a run ends with a step before its last one, or an empty text. See `Patience`."""
        if step >= self.steps:
            return ""
        return patience.end_reason(self.recipe.eval.patience, self.best_metric)

    @property
    def saves_best(self) -> bool:
        """Whether each step with the best evaluation so far is saved, with its value in the manifest."""
        return self.recipe.checkpoint.best is not None

    @property
    def records_evaluations(self) -> bool:
        """Whether the manifest of a step has its evaluation, so that a step is saved after it."""
        return self.saves_best or self.recipe.eval.patience > 0

    @property
    def saved_dtype(self) -> str | None:
        """Dtype of the saved parameters, or None without a cast. Resuming needs them without a cast."""
        dtype = self.recipe.checkpoint.dtype
        return None if dtype == self.setup.param_dtype else dtype

    @property
    def eval_batch_size(self) -> int:
        """Sequences of an evaluation batch.

        As many as in a training micro-batch, which is known to fit into memory. With an exact reduction, a batch of
        logical shards.
        """
        if self.setup.reduction_shards:
            return self.order.batch_size
        return self.order.batch_size // self.setup.accumulate

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a training step: targets and sources, with padding."""
        columns = self.train.columns
        tokens_per_row = 0
        for name in ("tokens", "source"):
            if name in columns:
                tokens_per_row += columns[name][0]
        return self.order.batch_size * tokens_per_row

    def remaining_s(self, step: int, *, step_s: float, seconds: Mapping[str, float]) -> float:
        """Estimate the seconds from a step to the end of the run, with its evaluations, samples and saves.

        Args:
            step: The last finished step.
            step_s: Seconds of a step.
            seconds: Seconds of the last event of each kind. See `EventTimes`.
        """
        total_s = step_s * (self.steps - step)
        if self.evaluation is not None:
            num_batches = num_eval_batches(
                self.evaluation.n_rows, self.eval_batch_size, limit=self.recipe.eval.limit
            )
            num_steps = num_batches * self.eval_batch_size / self.order.batch_size
            evaluation_s = seconds.get("evaluate", FORWARD_SHARE * step_s * num_steps)
            total_s += evaluation_s * num_due(step, self.steps, self.eval_every)
        if self.sampler is not None:
            sample_every = self.recipe.log.sample_every
            total_s += seconds.get("sample", 0.0) * num_due(step, self.steps, sample_every)
        num_saves = max(num_due(step, self.steps, every) for every in self.save_intervals)
        total_s += seconds.get("save", 0.0) * num_saves
        # The run waits for the last save, which is written in the background.
        return total_s + seconds.get("write", 0.0)


def override_config(manifest: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the manifest of a start checkpoint, with the recipe's changes of its config.

    The manifest of a step to resume from has them already.

    Raises:
        PrepError: The model does not support the recipe's rotary embedding, or a field or its value is invalid.
    """
    table = recipe.model
    if table.is_random:
        # The config has the recipe's other overrides already, and its vocabulary may have been padded since.
        config = override_rope(manifest["config"], table.rope_overrides)
    else:
        config = recipe_config(manifest["config"], table)
    _check_mrope(manifest, config, table)
    return {**manifest, "config": config}


def _check_mrope(manifest: Mapping[str, Any], config: HFConfig, table: Model) -> None:
    """Raise UsageError for another rope type of a multimodal model with M-RoPE.

    M-RoPE has positions for time, height and width. Text has three equal positions per token, so training does not
    test the other cases.
    """
    towers = manifest.get("towers") or {}
    if not towers.get("mrope"):
        return
    before = _read_rope(manifest["config"])
    rope = _read_rope(config)
    if before is None or rope is None or rope.rope_type == "default":
        return
    # A checkpoint may have another type itself, and keeps it with a new theta.
    if table.rope_overrides.scaling is None and replace(rope, theta=before.theta) == before:
        return
    key = "model.overrides" if table.rope_overrides.scaling is None else SCALING_KEY
    what = f"`{key}` of type {rope.rope_type} is not supported for {towers.get('model_type')}"
    why = "its rotary embedding has three positions per token (M-RoPE)"
    raise usage_error(what, why, f"set `{THETA_KEY}`, or remove `{key}`")


def _read_rope(config: HFConfig) -> Rope | None:
    """Return the rotary embedding of a config.json."""
    return family_of(config).arch_config(config).rope


def dropout_rates(recipe: Recipe, config: HFConfig, model: ModelSpec) -> DropoutConfig:
    """Return the dropout of a run."""
    dropout = run_dropout(recipe, config)
    if model.adapters is None:
        return dropout
    # The rate of adapters of a file is in their settings.
    return replace(dropout, adapters=model.adapters.config.dropout)


def check_model_layout(recipe: Recipe, model: ModelSpec, sharding: ShardingContext) -> None:
    """Check the layout of the model against the recipe: layers to scan, and the mesh.

    Raises:
        UsageError: `scan_layers` is set but the layers are not stacked, or the mesh does not divide a parameter.
    """
    if recipe.model.scan_layers and not model.has_stacked_layers:
        raise unscannable_error()
    check_mesh_divides(model, sharding)


def partition_rules(recipe: Recipe, manifest: Mapping[str, Any]) -> Rules:
    """Return the partition rules of a run: the recipe's, or else the start checkpoint's."""
    if recipe.rules is None:
        return rules_from_manifest(manifest)
    return merge_rules(recipe.rules, origin=Key("rules"))


def check_batch(recipe: Recipe, sharding: ShardingContext) -> None:
    """Raise UsageError if the batch of a recipe, its logical shards, or its tokens do not divide among the devices."""
    assert sharding.mesh is not None
    split_batch(recipe, sharding.mesh, sharding.rules)
    check_token_split(recipe, sharding.sequence_parallel_size)


def build_step_setup(
    recipe: Recipe,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: str,
    steps: int,
    dropout: DropoutConfig = NO_DROPOUT,
    token_functions: TokenFunctions = NO_TOKEN_FUNCTIONS,
    device: DeviceKind | None = None,
) -> StepSetup:
    """Build the static parts of the training step.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        kernel: Name of the attention kernel.
        steps: Steps of the run, for the learning rate schedule.
        dropout: Rates of dropout and forgetful causal masking.
        token_functions: A user's loss and metrics.
        device: Kind of the devices, for default sizes. The kind of the mesh's devices if it is
            None.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together, or a pattern matches
            no parameter.
    """
    assert sharding.mesh is not None
    batch = split_batch(recipe, sharding.mesh, sharding.rules)
    if batch.num_shards:
        check_exact_model(model.arch_config, kernel)
    sizes = chunk_sizes(recipe, device or device_kind(sharding), num_rows=batch.num_rows)
    forward_config = ForwardConfig(
        dtype=recipe.model.dtype,
        scan_layers=recipe.model.scan_layers,
        remat_policy=recipe.model.remat_policy,
        offload=recipe.model.offload,
        head_chunk_size=sizes.head,
        ffn_chunk_size=recipe.model.ffn_chunk_size,
        sharding=sharding,
        attention_options=AttentionOptions(kernel, sizes.queries, sizes.keys),
    )
    return StepSetup(
        model,
        forward_config,
        build_optimizer(recipe.optimizer, steps),
        accumulate=batch.shape.accumulate,
        loss_terms=LossTerms(
            recipe.loss.z_loss, recipe.loss.label_smoothing, token_functions.loss_fn
        ),
        dropout=dropout,
        seed=recipe.seed,
        metric_fn=token_functions.metric_fn,
        loss_scale=_loss_scale(recipe),
        reduction_shards=batch.num_shards,
        param_dtype=recipe.model.param_dtype,
    )


def _loss_scale(recipe: Recipe) -> LossScale | None:
    """Return the loss scale of a run in float16.

    None in other dtypes.
    """
    if recipe.model.dtype != "float16":
        return None
    scale = recipe.optimizer.loss_scale
    if isinstance(scale, int | float):
        return LossScale(scale, is_dynamic=False)
    return LossScale()


def peak_step_s(recipe: Recipe, model: ModelSpec, sharding: ShardingContext) -> float | None:
    """Return the seconds that the model operations of a step take at the devices' dense bfloat16 peak.

    Masked pairs of attention count, as in published figures and in `prep plan`: with packed
    documents also the pairs between documents, and the padding of sequences. Frozen parameters count
    without their gradients.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: Mesh and rules of the run.

    Returns:
        The seconds. None if the peak of the devices is unknown.
    """
    if sharding.mesh is None or sharding.device_mesh is None:
        return None
    kind = accelerator_of(sharding.device_mesh.devices.flat[0].device_kind)
    if kind is None:
        return None
    # Parameters that are trained as a whole beside adapters belong to the model too.
    matrices: Mapping[str, ParamLeaf] = {}
    if model.adapters is not None:
        matrices = model.adapters.matrices
    base_leaves = {path: leaf for path, leaf in model.leaves.items() if path not in matrices}
    base = ModelShapes(model.arch_config, base_leaves)
    inputs = step_inputs(recipe, base, mesh=sharding.mesh, rules=sharding.rules)
    if model.adapters is not None:
        inputs = with_adapters(inputs, recipe, model.adapters.leaves)
    return count_step_flops(inputs).model_flops_of_all_pairs / (
        sharding.mesh.n_devices * kind.peak_flops
    )


# The reference kernel is the standard of the comparison, so it is never compared with itself.
UNCHECKED = "reference"


def choose_kernel(
    recipe: Recipe,
    model: Shapes,
    sharding: ShardingContext,
    *,
    warn: Callable[[str], None],
    dropout: DropoutConfig = NO_DROPOUT,
) -> KernelChoice:
    """Choose the attention kernel of a run, and compare it with the reference kernel on a small random case.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its rules.
        warn: Called with a message for each kernel that `auto` skips because it failed the comparison.
        dropout: Rates of dropout and forgetful causal masking.

    Returns:
        The kernel, and the reason for it.

    Raises:
        UsageError: The recipe names a kernel that cannot compute the model's attention on these devices.
        PrepError: The recipe names a kernel that failed the comparison.
    """
    device = device_kind(sharding)
    needs, choices = run_kernels(
        recipe, model, sharding.mesh, sharding.rules, device=device, dropout=dropout
    )
    return first_correct(
        choices, needs, device, is_auto=recipe.model.attention_kernel == AUTO, warn=warn
    )


def first_correct(
    choices: Sequence[KernelChoice],
    needs: AttentionNeeds,
    device: DeviceKind,
    *,
    is_auto: bool,
    warn: Callable[[str], None],
) -> KernelChoice:
    """Return the first kernel with the results of the reference kernel.

    Args:
        choices: Kernels in order of preference, at least one.
        needs: Requirements of the run.
        device: Kind of the devices.
        is_auto: Whether to go on to the next kernel after a failure.
        warn: Called with a message for each failure of `auto`.

    Raises:
        PrepError: The requested kernel failed, or all kernels.
    """
    failures: list[str] = []
    for choice in choices:
        failure = ""
        if choice.name != UNCHECKED:
            failure = find_mismatch(choice.name, needs, device)
        if not failure:
            return KernelChoice(choice.name, "; ".join([choice.reason, *failures]))
        what = f"attention kernel `{choice.name}` failed its numeric check"
        if not is_auto:
            raise PrepError(what, failure, text("{}", Key("model.attention_kernel", AUTO)))
        warn(f"{what}: {failure}")
        failures.append(f"{choice.name} failed its numeric check")
    raise PrepError(
        "all attention kernels failed their numeric check",
        "; ".join(failures),
        "use a `mesh` without sp",
    )
