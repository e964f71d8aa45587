"""Build the configuration of the training loop from a recipe, a checkpoint manifest and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prepcli.core.errors import Key, text, usage_error
from prepcli.core.json_values import HFConfig
from prepcli.models.attention_kernels import DeviceKind
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.registry import family_of
from prepcli.models.rope_config import Rope
from prepcli.models.rule_text import merge_rules
from prepcli.models.rules import Rules
from prepcli.planning.manifest_fields import Manifest
from trainer.data.order import RowOrder
from trainer.distributed.mesh_devices import device_kind
from trainer.distributed.sharding import ShardingContext
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.loss_terms import LossTerms
from trainer.nn.model_spec import ForwardConfig, ModelSpec, unscannable_error
from trainer.planning.accelerators import accelerator_of
from trainer.planning.exact_reduction import check_exact_model, reduction_shards, rows_per_device
from trainer.planning.model_shapes import recipe_config
from trainer.planning.step_flops import count_step_flops
from trainer.planning.step_inputs import (
    ModelShapes,
    check_patterns,
    chunk_sizes,
    step_inputs,
    with_adapters,
)
from trainer.recipe import Recipe, batch_shape
from trainer.recipe.key_types import MAX_INT32
from trainer.recipe.rope_overrides import SCALING_KEY, THETA_KEY, override_rope
from trainer.recipe.tables import Model
from trainer.training.events import Interval
from trainer.training.loop_config import LoopConfig
from trainer.training.loss_scale import LossScale
from trainer.training.manifest_model import check_mesh_divides, rules_from_manifest
from trainer.training.optimizers.optimizer import build_optimizer
from trainer.training.samples import Sampler
from trainer.training.source_datasets import Datasets, make_order
from trainer.training.step import StepSetup
from trainer.training.token_functions import NO_TOKEN_FUNCTIONS, TokenFunctions


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


def build_loop_config(
    recipe: Recipe,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: str,
    datasets: Datasets,
    dropout: DropoutConfig,
    manifest_fields: Manifest,
    token_functions: TokenFunctions = NO_TOKEN_FUNCTIONS,
    stop_after: int = 0,
    base_dtypes: Mapping[str, str] | None = None,
    sampler: Sampler | None = None,
) -> LoopConfig:
    """Build the configuration of a run.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        kernel: Name of the attention kernel.
        datasets: Training and evaluation data.
        dropout: Rates of dropout and forgetful causal masking.
        manifest_fields: Extra entries for the manifest of every checkpoint.
        token_functions: A user's loss and metrics.
        stop_after: Steps after which this process stops. 0 means no limit.
        base_dtypes: Dtype of each parameter of the base of adapters, by path. None means float32.
        sampler: Generates texts from the prompts of the recipe.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together, or the run has too
            many steps.
    """
    assert sharding.mesh is not None
    _check_stride(recipe, datasets)
    check_patterns(recipe.optimizer, model.saved_leaves)
    shape = batch_shape(
        recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size
    )
    n_rows = datasets.train.n_rows
    order = make_order(datasets, shape.size, seed=recipe.seed, shuffle=recipe.data.shuffle)
    steps = recipe.train.steps or order.steps_for_epochs(recipe.train.epochs or 0)
    if steps > MAX_INT32:
        why = f"{recipe.train.epochs:g} epochs of {n_rows:,} sequences; a run has at most {MAX_INT32:,} steps"
        raise usage_error(
            "`train.epochs` is too large", why, text("{}", Key("train.epochs", 3, is_override=True))
        )
    setup = build_step_setup(
        recipe,
        model,
        sharding=sharding,
        kernel=kernel,
        steps=steps,
        dropout=dropout,
        token_functions=token_functions,
    )
    setup = replace(setup, base_dtypes=base_dtypes or {})
    return LoopConfig(
        setup=setup,
        recipe=recipe,
        steps=steps,
        order=order,
        train=datasets.train,
        evaluation=datasets.evaluation,
        eval_every=_make_interval(recipe.train.eval_every, recipe.train.eval_every_epochs, order),
        save_every=_make_interval(recipe.checkpoint.every, recipe.checkpoint.every_epochs, order),
        manifest_fields=manifest_fields
        | token_functions.manifest_fields
        | Manifest(
            data=datasets.identity,
            batch_size=shape.size,
            rate=setup.optimizer.lr_schedule.manifest_fields(),
        )
        | _evaluation_fields(recipe, datasets),
        stop_after=stop_after,
        peak_step_s=peak_step_s(recipe, model, sharding),
        sampler=sampler,
    )


def _check_stride(recipe: Recipe, datasets: Datasets) -> None:
    """Raise UsageError if a recipe sets the stride of an evaluation that has no data."""
    if recipe.eval.stride is not None and datasets.evaluation is None:
        why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
        hint = text("{}", Key("data.holdout", 0.05, is_override=True))
        raise usage_error(f"`eval.stride` is {recipe.eval.stride}", why, hint)


def _evaluation_fields(recipe: Recipe, datasets: Datasets) -> Manifest:
    """Return the manifest entries that tell which evaluations of saved steps are comparable.

    The data is fixed in a run.
    """
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
    shape = batch_shape(
        recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size
    )
    num_shards = reduction_shards(recipe, shape, mesh=sharding.mesh, rules=sharding.rules)
    if num_shards:
        check_exact_model(model.arch_config, kernel)
    num_rows = rows_per_device(shape, num_shards, num_replicas=sharding.data_parallel_size)
    sizes = chunk_sizes(recipe, device or device_kind(sharding), num_rows=num_rows)
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
        accumulate=shape.accumulate,
        loss_terms=LossTerms(
            recipe.loss.z_loss, recipe.loss.label_smoothing, token_functions.loss_fn
        ),
        dropout=dropout,
        seed=recipe.seed,
        metric_fn=token_functions.metric_fn,
        loss_scale=_loss_scale(recipe),
        reduction_shards=num_shards,
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
    adapters: Mapping[str, ParamLeaf] = {}
    if model.adapters is not None:
        adapters = model.adapters.leaves
    base_leaves = {path: leaf for path, leaf in model.leaves.items() if path not in adapters}
    base = ModelShapes(model.arch_config, base_leaves)
    inputs = step_inputs(recipe, base, mesh=sharding.mesh, rules=sharding.rules)
    if model.adapters is not None:
        inputs = with_adapters(inputs, recipe, adapters)
    return count_step_flops(inputs).model_flops_of_all_pairs / (
        sharding.mesh.n_devices * kind.peak_flops
    )
