"""The static parts of a training step, built from a recipe, a model and devices: rules, batch, kernel and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from prepcli.core.errors import Key, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.models.attention_kernels import (
    AUTO,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
)
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.rules import Rules, merge_rules
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
from trainer.training.eval_metrics import (
    NO_TOKEN_FUNCTIONS,
    TokenFunctions,
)
from trainer.training.optimizers import build_optimizer
from trainer.training.step import LossScale, StepSetup


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
        # `[loss]` has the names of the terms.
        loss_terms=LossTerms(token_loss=token_functions.loss_fn, **recipe.loss.model_dump()),
        dropout=dropout,
        seed=recipe.seed,
        metric_fn=token_functions.metric_fn,
        loss_scale=_loss_scale(recipe),
        reduction_shards=batch.num_shards,
        param_dtype=recipe.model.param_dtype,
    )


def _loss_scale(recipe: Recipe) -> LossScale | None:
    """Return the loss scale of a run in float16. None in other dtypes."""
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
