"""From a recipe, a checkpoint and devices to what a run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.order import SampleOrder
from trainer.data.packing import Dataset, PackedDataset, split_holdout
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.store import MappedTokens
from trainer.data.tokenize import TokenizeConfig, tokenize_files
from trainer.distributed.sharding import ShardingContext
from trainer.models.errors import PrepError, usage_error
from trainer.models.mesh import Rules, merge_rules
from trainer.models.registry import family_of
from trainer.nn.transformer import ForwardConfig, ModelSpec, build_model, unscannable_error
from trainer.recipe import Recipe, batch_shape, warmup_decay
from trainer.recipe.checks import MAX_INT32
from trainer.recipe.tables import Data, Optimizer
from trainer.training.loop import Job
from trainer.training.optimizers import AdamW, LRSchedule
from trainer.training.step import StepSetup

# What may differ between a run and its continuation; all other keys change what is computed, or on which data. The
# mesh and what goes with it change results within rounding. Steps and the schedule's keys are held by the rate that
# they make, the batch's by its size.
CHANGEABLE_ON_RESUME = frozenset(
    {
        "name",
        "mesh",
        "model.path",
        "model.scan_layers",
        "model.remat_policy",
        "model.head_chunk_size",
        "data.cache",
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
        "train.max_skipped",
        "eval.limit",
        "checkpoint.every",
        "checkpoint.keep",
        "checkpoint.optimizer_state",
    }
)
FIXED_ON_RESUME = {"data": "the data", "batch_size": "the batch", "rate": "the learning rate's schedule"}


@dataclass(frozen=True, slots=True)
class Datasets:
    """What is trained and what is evaluated on; `identity` says what they are made of."""

    train: Dataset
    evaluation: Dataset | None
    identity: str


def model_from_manifest(manifest: Mapping[str, Any]) -> ModelSpec:
    """The model that a checkpoint's manifest describes, its leaves as they are stored."""
    config = manifest["config"]
    return build_model(family_of(config), config, manifest["tied"], manifest["scan"], manifest["scan_axis"])


def check_model_layout(recipe: Recipe, model: ModelSpec, sharding: ShardingContext) -> None:
    """Usage PrepErrors where a mesh does not divide the parameters, and for a scan over layers that are apart."""
    if recipe.model.scan_layers and not model.has_stacked_layers:
        raise unscannable_error()
    check_mesh_divides(model, sharding)


def check_mesh_divides(model: ModelSpec, sharding: ShardingContext) -> None:
    """Usage PrepErrors where a mesh does not divide the parameters."""
    for leaf in model.leaves.values():
        try:
            sharding.param_spec(leaf)
        except PrepError as error:
            made = f"`prep save-init MODEL --mesh {sharding.mesh} --pad-vocab auto`, or with `--rule`"
            raise usage_error(
                error.what, error.why, f"another mesh, or a checkpoint made for this one: {made}"
            ) from error


def rules_from_manifest(manifest: Mapping[str, Any]) -> Rules:
    """The rules by which a checkpoint was laid out."""
    return merge_rules(manifest["rules"])


def build_datasets(
    recipe: Recipe,
    model: ModelSpec,
    manifest: Mapping[str, Any],
    folders: Mapping[str, Path],
    progress: Callable[[int, int], None],
    note: Callable[[str], None],
) -> Datasets:
    """The data of a recipe, tokenised; `folders`: where `tokenizer` and `cache` are unless the recipe says it, and
    `spare`, where tokens that the cache lacks are made, if nothing may be written to it."""
    data = recipe.data
    request = TokenizeConfig(
        type=data.type,
        paths=data.path,
        fields=data.fields or "",
        seq_length=data.seq_length,
        tokenizer=Path(data.tokenizer) if data.tokenizer else folders["tokenizer"],
        eos_id=_eos_token_id(manifest["config"]),
        vocab=model.true_vocab_size,
        cache=Path(data.cache) if data.cache else folders["cache"],
        scratch_dir=folders.get("spare"),
        source_length=data.source_length or 0,
        prefix=data.source_prefix or "",
    )
    _check_encoder_fields(request, model)
    if request.parsed_fields.source:
        decoder_start_token_id(manifest["config"], request.vocab)  # before all texts are tokenised
        if request.eos_id is None:
            note("config.json has no eos_token_id: nothing says where a target ends")
    if data.eval_path is None:
        tokens = tokenize_files(request, progress, note)
        train, held = split_holdout(_build_dataset(tokens, request, manifest["config"]), data.holdout)
        return Datasets(train, held, tokens.identity)
    other = tokenize_files(
        _with_paths(request, data.eval_path), progress, note
    )  # first: faults of a small file show early
    tokens = tokenize_files(request, progress, note)
    train, held = (_build_dataset(each, request, manifest["config"]) for each in (tokens, other))
    return Datasets(train, held, f"{tokens.identity} {other.identity}")


def _build_dataset(tokens: MappedTokens, config: TokenizeConfig, model_config: Mapping[str, Any]) -> Dataset:
    if not config.parsed_fields.source:
        return PackedDataset(tokens, 0, tokens.n_blocks)
    return seq2seq_dataset(
        tokens, config.source_length, decoder_start_token_id(model_config, config.vocab), config.eos_id
    )


def _with_paths(config: TokenizeConfig, paths: tuple[str, ...]) -> TokenizeConfig:
    return dataclasses.replace(config, paths=paths)


def check_seq_length(data: Data, model: ModelSpec) -> None:
    """Usage PrepError where sequences are longer than the model has learned positions for."""
    most = model.arch_config.max_positions
    if model.arch_config.has_learned_positions and data.seq_length > most:
        why = f"the model has {most} positions"
        raise usage_error(f"`data.seq_length` is {data.seq_length}", why, f"`--set data.seq_length={most}`")


def _check_encoder_fields(config: TokenizeConfig, model: ModelSpec) -> None:
    """Usage PrepError where the data has a source and the model no encoder, or the other way round."""
    has_encoder, name = model.arch_config.encoder is not None, model.family.name
    if config.parsed_fields.source and not has_encoder:
        why = f"{name} has no encoder, which would read what stands in brackets"
        raise usage_error(f"`data.fields` is {config.fields!r:.60}", why, "`--set data.fields=text`")
    if has_encoder and not config.parsed_fields.source:
        why = "it learns to make a target of a source; to learn from texts alone (spans left out) is not there"
        hint = '`type = "json"` and `fields = "[article], summary"`'
        raise usage_error(f"{name} has an encoder, and the data has nothing for it", why, hint)


def decoder_start_token_id(config: Mapping[str, Any], vocab: int) -> int:
    """What a decoder that has an encoder before it is given before the first token; PrepError where nothing says it, or
    it is none of the vocabulary."""
    ids = (config.get(key) for key in ("decoder_start_token_id", "pad_token_id"))
    found = next((each for each in ids if each is not None), None)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < vocab:
        why = f"decoder_start_token_id is {found!r:.60}, it has to be a token of {vocab:,}"
        raise PrepError("config.json does not say what a decoder begins with", why)
    return found


def _eos_token_id(config: Mapping[str, Any]) -> int | None:
    """The token after each document; the first, where a config names several."""
    found = config.get("eos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) else None


def build_job(
    recipe: Recipe,
    model: ModelSpec,
    sharding: ShardingContext,
    datasets: Datasets,
    manifest_fields: Mapping[str, Any],
    stop_after: int = 0,
) -> Job:
    """What a run does. Usage PrepErrors where batch, schedule or mesh do not go together."""
    assert sharding.mesh is not None
    shape = batch_shape(recipe.batch, sharding.mesh.n_devices, sharding.data_parallel_size)
    order = SampleOrder(datasets.train.n_rows, shape.size, recipe.seed, recipe.data.shuffle)
    steps = recipe.train.steps or order.steps_for_epochs(recipe.train.epochs or 0)
    if steps > MAX_INT32:
        why = f"{recipe.train.epochs:g} epochs of {datasets.train.n_rows:,} sequences; a run has at most {MAX_INT32:,} steps"
        raise usage_error("`train.epochs` is too large", why, "`--set train.epochs=3`")
    adamw = build_optimizer(recipe.optimizer, steps)
    how = ForwardConfig(
        recipe.model.dtype, recipe.model.scan_layers, recipe.model.remat_policy, recipe.model.head_chunk_size, sharding
    )
    return Job(
        setup=StepSetup(model, how, adamw, shape.accumulate),
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
            "rate": dataclasses.asdict(adamw.lr_schedule),
        },
        stop_after=stop_after,
    )


def build_optimizer(config: Optimizer, steps: int) -> AdamW:
    """The optimizer of a run of so many steps."""
    schedule = warmup_decay(config, steps)
    rate = LRSchedule(config.lr, config.end_lr, config.schedule, schedule.warmup_steps, schedule.decay_steps)
    return AdamW(rate, config.b1, config.b2, config.eps, config.weight_decay, config.decay_embeddings, config.clip_norm)


def check_resumable(manifest: Mapping[str, Any], job: Job, changed: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """PrepError unless a job goes on where the checkpoint of `step`, whose manifest is `before`, stopped.

    `changed`: the recipe's values then and now, of the keys in which they differ.
    """
    fixed = {key: pair for key, pair in changed.items() if key not in CHANGEABLE_ON_RESUME}
    way_out = "`--restart` begins anew, another `name` keeps both"
    if fixed:
        texts = ", ".join(f"{key}: {then!r} -> {new!r}" for key, (then, new) in sorted(fixed.items()))
        raise PrepError("the run began with another recipe", texts, way_out)
    for key, what in FIXED_ON_RESUME.items():
        if manifest.get(key) != job.manifest_fields[key]:
            raise PrepError(
                f"{what} has changed since the run began",
                f"{manifest.get(key)}, now {job.manifest_fields[key]}",
                way_out,
            )
    if step > job.steps:
        raise PrepError(f"the run is at step {step}", f"the recipe asks for {job.steps} steps", way_out)
