"""Build a training job from a recipe, a checkpoint manifest and devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.data.order import SampleOrder
from trainer.data.packing import Dataset, PackedDataset, split_holdout
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.store import MappedTokens
from trainer.data.tokenize import TokenizeConfig
from trainer.distributed.device_kind import device_kind
from trainer.distributed.process_group import ProcessGroup, SingleProcess
from trainer.distributed.sharding import ShardingContext
from trainer.models.attention_kernels import DeviceKind
from trainer.models.dropout_config import NO_DROPOUT, DropoutConfig
from trainer.models.errors import PrepError, usage_error
from trainer.models.registry import family_of
from trainer.models.remat import saved_activations
from trainer.models.rope_overrides import override_rope
from trainer.models.rule_text import merge_rules
from trainer.models.rules import Rules, check_leaf_rules
from trainer.nn.kernels.options import AttentionOptions
from trainer.nn.lm_head import LossTerms
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model, unscannable_error
from trainer.planning.exact_reduction import check_exact_model, reduction_shards, rows_per_device
from trainer.planning.model_shapes import recipe_config
from trainer.planning.step_inputs import chunk_sizes
from trainer.recipe import Recipe, batch_shape
from trainer.recipe.checks import MAX_INT32
from trainer.recipe.tables import Data
from trainer.training.loop import Job
from trainer.training.optimizers import build_optimizer
from trainer.training.shared_tokens import tokenize_in_group
from trainer.training.step import StepSetup
from trainer.training.utilization import peak_step_s


@dataclass(frozen=True, slots=True)
class Datasets:
    """Training and evaluation datasets of a run.

    Attributes:
        train: Rows to train on.
        evaluation: Rows to evaluate on; None without evaluation.
        identity: Digest of the tokens of both, compared on resume.
    """

    train: Dataset
    evaluation: Dataset | None
    identity: str


def model_from_manifest(manifest: Mapping[str, Any]) -> ModelSpec:
    """Build the ModelSpec that a checkpoint's manifest describes; layers are stacked as in the checkpoint."""
    config = manifest["config"]
    return build_model(
        family_of(config), config, manifest["tied"], scan=manifest["scan"], scan_axis=manifest["scan_axis"]
    )


def override_config(manifest: Mapping[str, Any], recipe: Recipe) -> dict[str, Any]:
    """Return the manifest of a start checkpoint, with the recipe's changes of its config.

    The manifest of a step to resume from has them already.

    Raises:
        PrepError: The model does not support the recipe's rotary embedding, or a field or its value is invalid.
    """
    table = recipe.model
    if table.is_random:  # its overrides are in the config; the vocabulary may have been padded since
        return {**manifest, "config": override_rope(manifest["config"], table.rope_overrides)}
    return {**manifest, "config": recipe_config(manifest["config"], table)}


def check_model_layout(recipe: Recipe, model: ModelSpec, sharding: ShardingContext) -> None:
    """Check the model against the recipe: layers to scan, activations to save, and the mesh.

    Raises:
        UsageError: `scan_layers` is set but the layers are not stacked, the mesh does not divide a parameter, or
            `remat_policy` names the hidden units of experts.
    """
    if recipe.model.scan_layers and not model.has_stacked_layers:
        raise unscannable_error()
    saved = saved_activations(recipe.model.remat_policy, has_experts=True)
    if model.arch_config.experts_per_token and "mlp_hidden" in saved:
        why = f"the experts of {model.family.name} compute their hidden units again"
        raise usage_error("`model.remat_policy` has mlp_hidden", why, "remove it from the list")
    check_mesh_divides(model, sharding)


def check_mesh_divides(model: ModelSpec, sharding: ShardingContext) -> None:
    """Check that the mesh divides every parameter, and that each rule of leaves is for some of them.

    Raises:
        UsageError: The mesh does not divide a parameter, or a rule of leaves does not fit the parameters.
    """
    check_leaf_rules(sharding.rules, {path: leaf.dims for path, leaf in model.leaves.items()})
    for leaf in model.leaves.values():
        try:
            sharding.param_spec(leaf)
        except PrepError as error:
            command = f"`prep save-init MODEL --mesh {sharding.mesh} --pad-vocab auto`, or with `--rule`"
            hint = f"another mesh, or a checkpoint made for this one: {command}"
            raise usage_error(error.what, error.why, hint) from error


def rules_from_manifest(manifest: Mapping[str, Any]) -> Rules:
    """Return the partition rules of a checkpoint."""
    return merge_rules(manifest["rules"])


def partition_rules(recipe: Recipe, manifest: Mapping[str, Any]) -> Rules:
    """Return the partition rules of a run: those of the recipe, or else of the start checkpoint."""
    return rules_from_manifest(manifest) if recipe.rules is None else merge_rules(recipe.rules, origin="rules")


def build_datasets(
    recipe: Recipe,
    model: ModelSpec,
    *,
    manifest: Mapping[str, Any],
    folders: Mapping[str, Path],
    group: ProcessGroup | None = None,
    progress: Callable[[int, int], None],
    note: Callable[[str], None],
) -> Datasets:
    """Tokenize the data of a recipe, or map the tokens that an earlier run made.

    All processes of a job call it together.

    Args:
        recipe: The recipe.
        model: The model to train.
        manifest: Manifest of the start checkpoint.
        folders: `tokenizer` and `cache`: defaults for the recipe keys of these names. `spare`, optional: folder for
            tokens that the cache lacks, if the cache must not be written to.
        group: Processes of the job; None for one process.
        progress: Called with the bytes tokenized so far and the total bytes.
        note: Called with messages for the user.

    Returns:
        The training and evaluation datasets.

    Raises:
        PrepError: The data, the tokenizer or the holdout is invalid, or does not fit the model.
    """
    data, model_config = recipe.data, manifest["config"]
    config = TokenizeConfig(
        type=data.type,
        paths=data.path,
        fields=data.fields or "",
        seq_length=data.seq_length,
        tokenizer=Path(data.tokenizer) if data.tokenizer else folders["tokenizer"],
        eos_id=_eos_token_id(model_config),
        vocab=model.true_vocab_size,
        cache=Path(data.cache) if data.cache else folders["cache"],
        scratch_dir=folders.get("spare"),
        source_length=data.source_length or 0,
        prefix=data.source_prefix or "",
    )
    tokenize = partial(tokenize_in_group, group=group or SingleProcess(), progress=progress, note=note)
    _check_encoder_fields(config, model)
    if config.parsed_fields.source:
        decoder_start_token_id(model_config, config.vocab)  # fails before all files are tokenized
        if config.eos_id is None:
            note("config.json has no eos_token_id: targets get no end-of-sequence token")
    if data.eval_path is None:
        tokens = tokenize(config)
        train, evaluation = split_holdout(_build_dataset(tokens, config, model_config), data.holdout)
        return Datasets(train, evaluation, tokens.identity)
    # The evaluation files come first: they are usually small, so their errors show early.
    eval_tokens = tokenize(dataclasses.replace(config, paths=data.eval_path))
    train_tokens = tokenize(config)
    return Datasets(
        train=_build_dataset(train_tokens, config, model_config),
        evaluation=_build_dataset(eval_tokens, config, model_config),
        identity=f"{train_tokens.identity} {eval_tokens.identity}",
    )


def _build_dataset(tokens: MappedTokens, config: TokenizeConfig, model_config: Mapping[str, Any]) -> Dataset:
    if not config.parsed_fields.source:
        return PackedDataset(tokens, first_row=0, n_rows=tokens.n_blocks)
    return seq2seq_dataset(
        tokens,
        config.source_length,
        decoder_start_id=decoder_start_token_id(model_config, config.vocab),
        eos_id=config.eos_id,
    )


def check_seq_length(data: Data, model: ModelSpec) -> None:
    """Check that sequences are not longer than the model's learned position embeddings.

    Raises:
        UsageError: `data.seq_length` exceeds the learned positions.
    """
    max_positions = model.arch_config.max_positions
    if model.arch_config.has_learned_positions and data.seq_length > max_positions:
        why = f"the model has {max_positions} positions"
        raise usage_error(f"`data.seq_length` is {data.seq_length}", why, f"`--set data.seq_length={max_positions}`")


def _check_encoder_fields(config: TokenizeConfig, model: ModelSpec) -> None:
    """Raise UsageError if the data has a source and the model no encoder, or the model an encoder and no source."""
    has_encoder, name = model.arch_config.encoder is not None, model.family.name
    if config.parsed_fields.source and not has_encoder:
        why = f"{name} has no encoder to read the source columns in brackets"
        raise usage_error(f"`data.fields` is {config.fields!r:.60}", why, "`--set data.fields=text`")
    if has_encoder and not config.parsed_fields.source:
        why = "it trains on pairs of a source and a target; span-corruption pretraining is not supported"
        hint = '`type = "json"` and `fields = "[article], summary"`'
        raise usage_error(f"{name} has an encoder, but the data has no source column", why, hint)


def decoder_start_token_id(config: Mapping[str, Any], vocab: int) -> int:
    """Return the first token id of a decoder with an encoder: `decoder_start_token_id`, else `pad_token_id`.

    Args:
        config: The model's config.json.
        vocab: Vocabulary size.

    Raises:
        PrepError: The config has neither id, or the id is not in the vocabulary.
    """
    what = "config.json has no valid decoder_start_token_id"
    key = next((key for key in ("decoder_start_token_id", "pad_token_id") if config.get(key) is not None), None)
    if key is None:
        raise PrepError(what, "it has neither decoder_start_token_id nor pad_token_id")
    token_id = config[key]
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab:
        raise PrepError(what, f"{key} is {token_id!r:.60}; the vocabulary has {vocab:,} tokens")
    return token_id


def _eos_token_id(config: Mapping[str, Any]) -> int | None:
    """Return the config's end-of-sequence token id, the first of several; None if the config has none."""
    value = config.get("eos_token_id")
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, int) else None


def build_job(
    recipe: Recipe,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: str,
    datasets: Datasets,
    dropout: DropoutConfig,
    manifest_fields: Mapping[str, Any],
    stop_after: int = 0,
) -> Job:
    """Build the job of a run.

    Args:
        recipe: The recipe.
        model: The model to train.
        sharding: The mesh of devices and its partition rules.
        kernel: Name of the attention kernel.
        datasets: Training and evaluation data.
        dropout: Rates of dropout and forgetful causal masking.
        manifest_fields: Extra entries for the manifest of every checkpoint.
        stop_after: Steps after which this process stops; 0 for no limit.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together, or the run has too many steps.
    """
    assert sharding.mesh is not None
    shape = batch_shape(recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size)
    n_rows = datasets.train.n_rows
    order = SampleOrder(n_rows=n_rows, batch_size=shape.size, seed=recipe.seed, shuffle=recipe.data.shuffle)
    steps = recipe.train.steps or order.steps_for_epochs(recipe.train.epochs or 0)
    if steps > MAX_INT32:
        why = f"{recipe.train.epochs:g} epochs of {n_rows:,} sequences; a run has at most {MAX_INT32:,} steps"
        raise usage_error("`train.epochs` is too large", why, "`--set train.epochs=3`")
    setup = build_step_setup(recipe, model, sharding=sharding, kernel=kernel, steps=steps, dropout=dropout)
    return Job(
        setup=setup,
        steps=steps,
        order=order,
        train=datasets.train,
        evaluation=datasets.evaluation,
        eval_limit=recipe.eval.limit,
        log_every=recipe.train.log_every,
        eval_every=recipe.train.eval_every,
        save_every=recipe.checkpoint.every,
        optimizer_state=recipe.checkpoint.optimizer_state,
        max_skipped=recipe.train.max_skipped,
        manifest_fields={
            **manifest_fields,
            "data": datasets.identity,
            "batch_size": shape.size,
            "rate": dataclasses.asdict(setup.optimizer.lr_schedule),
        },
        stop_after=stop_after,
        peak_step_s=peak_step_s(recipe, model, sharding),
    )


def build_step_setup(
    recipe: Recipe,
    model: ModelSpec,
    *,
    sharding: ShardingContext,
    kernel: str,
    steps: int,
    dropout: DropoutConfig = NO_DROPOUT,
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
        device: Kind of the devices whose default sizes to use; None for that of the mesh.

    Raises:
        UsageError: Batch, learning rate schedule and mesh do not fit together.
    """
    assert sharding.mesh is not None
    shape = batch_shape(recipe.batch, n_devices=sharding.mesh.n_devices, n_replicas=sharding.data_parallel_size)
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
        loss_terms=LossTerms(recipe.loss.z_loss, recipe.loss.label_smoothing),
        dropout=dropout,
        seed=recipe.seed,
        reduction_shards=num_shards,
    )
