"""From a recipe, a checkpoint and devices to what a run does."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.order import Order
from trainer.data.packing import Blocks, Dataset, split
from trainer.data.seq2seq import pairs
from trainer.data.store import Tokens
from trainer.data.tokenize import Request, prepare
from trainer.distributed.sharding import Shards
from trainer.models.errors import PrepError, usage
from trainer.models.mesh import Rules, with_rules
from trainer.models.registry import family_of
from trainer.nn.transformer import Compute, Model, build, layers_apart
from trainer.recipe import Recipe, batch_shape, schedule_of
from trainer.recipe.checks import MAX_INT
from trainer.recipe.tables import Data, Optimizer
from trainer.training.loop import Job
from trainer.training.optimizers import AdamW, Rate
from trainer.training.step import Setup

# What may differ between a run and its continuation; all other keys change what is computed, or on which data. The
# mesh and what goes with it change results within rounding. Steps and the schedule's keys are held by the rate that
# they make, the batch's by its size.
FREE_TO_CHANGE = frozenset(
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
HELD = {"data": "the data", "batch_size": "the batch", "rate": "the learning rate's schedule"}


@dataclass(frozen=True, slots=True)
class Texts:
    """What is trained and what is evaluated on; `identity` says what they are made of."""

    train: Dataset
    evaluation: Dataset | None
    identity: str


def architecture(facts: Mapping[str, Any]) -> Model:
    """The model that a checkpoint's manifest describes, its leaves as they are stored."""
    config = facts["config"]
    return build(family_of(config), config, facts["tied"], facts["scan"], facts["scan_axis"])


def check_computes(recipe: Recipe, model: Model, on: Shards) -> None:
    """Usage PrepErrors where a mesh does not divide the parameters, and for a scan over layers that are apart."""
    if recipe.model.scan_layers and not model.stacked:
        raise layers_apart()
    check_divides(model, on)


def check_divides(model: Model, on: Shards) -> None:
    """Usage PrepErrors where a mesh does not divide the parameters."""
    for leaf in model.leaves.values():
        try:
            on.spec_of(leaf)
        except PrepError as error:
            made = f"`prep save-init MODEL --mesh {on.mesh} --pad-vocab auto`, or with `--rule`"
            raise usage(error.what, error.why, f"another mesh, or a checkpoint made for this one: {made}") from error


def rules_of(facts: Mapping[str, Any]) -> Rules:
    """The rules by which a checkpoint was laid out."""
    return with_rules(facts["rules"])


def texts(
    recipe: Recipe,
    model: Model,
    facts: Mapping[str, Any],
    folders: Mapping[str, Path],
    progress: Callable[[int, int], None],
    note: Callable[[str], None],
) -> Texts:
    """The data of a recipe, tokenised; `folders`: where `tokenizer` and `cache` are unless the recipe says it, and
    `spare`, where tokens that the cache lacks are made, if nothing may be written to it."""
    data = recipe.data
    request = Request(
        type=data.type,
        paths=data.path,
        fields=data.fields or "",
        seq_length=data.seq_length,
        tokenizer=Path(data.tokenizer) if data.tokenizer else folders["tokenizer"],
        eos_id=_end_of_text(facts["config"]),
        vocab=model.vocab,
        cache=Path(data.cache) if data.cache else folders["cache"],
        spare=folders.get("spare"),
        source_length=data.source_length or 0,
        prefix=data.source_prefix or "",
    )
    _check_source(request, model)
    if request.read.source:
        start_token(facts["config"], request.vocab)  # before all texts are tokenised
        if request.eos_id is None:
            note("config.json has no eos_token_id: nothing says where a target ends")
    if data.eval_path is None:
        tokens = prepare(request, progress, note)
        train, held = split(_rows(tokens, request, facts["config"]), data.holdout)
        return Texts(train, held, tokens.identity)
    other = prepare(_with_paths(request, data.eval_path), progress, note)  # first: faults of a small file show early
    tokens = prepare(request, progress, note)
    train, held = (_rows(each, request, facts["config"]) for each in (tokens, other))
    return Texts(train, held, f"{tokens.identity} {other.identity}")


def _rows(tokens: Tokens, request: Request, config: Mapping[str, Any]) -> Dataset:
    if not request.read.source:
        return Blocks(tokens, 0, tokens.n_blocks)
    return pairs(tokens, request.source_length, start_token(config, request.vocab), request.eos_id)


def _with_paths(request: Request, paths: tuple[str, ...]) -> Request:
    return dataclasses.replace(request, paths=paths)


def check_length(data: Data, model: Model) -> None:
    """Usage PrepError where sequences are longer than the model has learned positions for."""
    most = model.traits.positions
    if model.traits.learns_positions and data.seq_length > most:
        why = f"the model has {most} positions"
        raise usage(f"`data.seq_length` is {data.seq_length}", why, f"`--set data.seq_length={most}`")


def _check_source(request: Request, model: Model) -> None:
    """Usage PrepError where the data has a source and the model no encoder, or the other way round."""
    has_encoder, name = model.traits.encoder is not None, model.family.name
    if request.read.source and not has_encoder:
        why = f"{name} has no encoder, which would read what stands in brackets"
        raise usage(f"`data.fields` is {request.fields!r:.60}", why, "`--set data.fields=text`")
    if has_encoder and not request.read.source:
        why = "it learns to make a target of a source; to learn from texts alone (spans left out) is not there"
        hint = '`type = "json"` and `fields = "[article], summary"`'
        raise usage(f"{name} has an encoder, and the data has nothing for it", why, hint)


def start_token(config: Mapping[str, Any], vocab: int) -> int:
    """What a decoder that has an encoder before it is given before the first token; PrepError where nothing says it, or
    it is none of the vocabulary."""
    ids = (config.get(key) for key in ("decoder_start_token_id", "pad_token_id"))
    found = next((each for each in ids if each is not None), None)
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found < vocab:
        why = f"decoder_start_token_id is {found!r:.60}, it has to be a token of {vocab:,}"
        raise PrepError("config.json does not say what a decoder begins with", why)
    return found


def _end_of_text(config: Mapping[str, Any]) -> int | None:
    """The token after each document; the first, where a config names several."""
    found = config.get("eos_token_id")
    found = found[0] if isinstance(found, list) and found else found
    return found if isinstance(found, int) else None


def job(recipe: Recipe, model: Model, on: Shards, found: Texts, facts: Mapping[str, Any], stop_after: int = 0) -> Job:
    """What a run does. Usage PrepErrors where batch, schedule or mesh do not go together."""
    assert on.mesh is not None
    shape = batch_shape(recipe.batch, on.mesh.n_devices, on.replicas)
    order = Order(found.train.n, shape.size, recipe.seed, recipe.data.shuffle)
    steps = recipe.train.steps or order.steps(recipe.train.epochs or 0)
    if steps > MAX_INT:
        why = f"{recipe.train.epochs:g} epochs of {found.train.n:,} sequences; a run has at most {MAX_INT:,} steps"
        raise usage("`train.epochs` is too large", why, "`--set train.epochs=3`")
    adamw = optimizer(recipe.optimizer, steps)
    how = Compute(
        recipe.model.dtype, recipe.model.scan_layers, recipe.model.remat_policy, recipe.model.head_chunk_size, on
    )
    return Job(
        setup=Setup(model, how, adamw, shape.accumulate),
        steps=steps,
        order=order,
        train=found.train,
        evaluation=found.evaluation,
        eval_limit=recipe.eval.limit,
        log_every=recipe.train.log_every,
        eval_every=recipe.train.eval_every,
        save_every=recipe.checkpoint.every,
        optimizer_state=recipe.checkpoint.optimizer_state,
        max_skipped=recipe.train.max_skipped,
        facts={**facts, "data": found.identity, "batch_size": shape.size, "rate": dataclasses.asdict(adamw.rate)},
        stop_after=stop_after,
    )


def optimizer(asked: Optimizer, steps: int) -> AdamW:
    """The optimizer of a run of so many steps."""
    schedule = schedule_of(asked, steps)
    rate = Rate(asked.lr, asked.end_lr, asked.schedule, schedule.warmup, schedule.decay)
    return AdamW(rate, asked.b1, asked.b2, asked.eps, asked.weight_decay, asked.decay_embeddings, asked.clip_norm)


def check_continues(before: Mapping[str, Any], now: Job, changed: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """PrepError unless a job goes on where the checkpoint of `step`, whose manifest is `before`, stopped.

    `changed`: the recipe's values then and now, of the keys in which they differ.
    """
    fixed = {key: pair for key, pair in changed.items() if key not in FREE_TO_CHANGE}
    way_out = "`--restart` begins anew, another `name` keeps both"
    if fixed:
        texts = ", ".join(f"{key}: {then!r} -> {new!r}" for key, (then, new) in sorted(fixed.items()))
        raise PrepError("the run began with another recipe", texts, way_out)
    for key, what in HELD.items():
        if before.get(key) != now.facts[key]:
            raise PrepError(
                f"{what} has changed since the run began", f"{before.get(key)}, now {now.facts[key]}", way_out
            )
    if step > now.steps:
        raise PrepError(f"the run is at step {step}", f"the recipe asks for {now.steps} steps", way_out)
