"""Checks of a recipe for values out of range and for conflicting keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from trainer.models import mesh
from trainer.models.attention_kernels import check_saved_scores
from trainer.models.dropout_config import DROPOUT_KEY, FCM_KEY, check_dropout_table, check_fcm_ratio
from trainer.models.errors import PrepError
from trainer.models.remat import check_remat
from trainer.models.rope_overrides import SCALING_KEY, THETA_KEY, check_rope_scaling
from trainer.models.rule_text import merge_rules
from trainer.models.slices import DCN_KEY, check_slices, parse_slice_counts
from trainer.recipe.formatting import example_value, format_value
from trainer.recipe.log_keys import WANDB_KEY, check_wandb_table
from trainer.recipe.resolve import warmup_decay
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, keys_of, value_of
from trainer.recipe.text_fields import DEFAULT_FIELDS, parse_fields

# Steps and lengths are int32 on devices, and the optimizer's numbers are float32.
MAX_INT32, MAX_FLOAT32 = 2**31 - 1, 3.4e38
INT32_KEYS = (
    *("train.steps", "train.max_skipped", "data.seq_length", "data.source_length", "model.max_position_embeddings"),
    *(f"model.{name}_chunk_size" for name in ("head", "ffn", "q", "k")),
)
SOURCE_KEYS = ("data.source_length", "data.source_prefix")


@dataclass(frozen=True, slots=True)
class Problem:
    """A conflict of keys, or a value out of range.

    Attributes:
        keys: Keys at fault; the error is reported at the first key set by the user.
        what: What is wrong.
        why: The values that cause it.
        hint: How to fix it.
    """

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


def find_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a recipe whose keys have valid types."""
    yield from _problem_if_raised(lambda: mesh.parse_mesh(recipe.mesh, origin="mesh"), "mesh")
    yield from _problem_if_raised(lambda: _check_dcn_mesh(recipe), DCN_KEY)
    yield from _problem_if_raised(lambda: merge_rules(recipe.rules or (), origin="rules"), "rules")
    yield from _problem_if_raised(lambda: check_wandb_table(recipe.log.wandb), WANDB_KEY)
    yield from _overflow_problems(recipe)
    yield from _start_problems(recipe)
    yield from _model_problems(recipe)
    yield from _rope_problems(recipe)
    yield from _dropout_problems(recipe)
    yield from _field_problems(recipe)
    yield from _source_problems(recipe)
    yield from _batch_problems(recipe)
    yield from _run_length_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _schedule_problems(recipe)


def _check_dcn_mesh(recipe: Recipe) -> None:
    """Raise UsageError if the slices are invalid, or do not divide the mesh of the recipe."""
    if slices := parse_slice_counts(recipe.cluster.dcn_mesh):
        check_slices(mesh.parse_mesh(recipe.mesh, origin="mesh"), slices)


def _overflow_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield numbers that int32 or float32 cannot hold."""
    for key in keys_of(recipe):
        value = value_of(recipe, key)
        if not isinstance(value, int | float) or not (
            key in INT32_KEYS or key.startswith(("batch.", "optimizer.", "loss."))
        ):
            continue
        maximum = MAX_INT32 if isinstance(value, int) else MAX_FLOAT32
        if value > maximum:
            why, hint = f"out of range: the maximum is {maximum:,}", f"`{key} = {example_value(KEY_SCHEMAS[key])}`"
            yield Problem((key,), f"`{key}` is {format_value(value)}", why, hint)


def _problem_if_raised(check: Callable[[], object], *keys: str) -> Iterator[Problem]:
    try:
        check()
    except PrepError as error:
        yield Problem(keys, error.what, error.why, error.hint)


def _start_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys of another kind of start than that of `model.init`; a missing path is reported by the loader."""
    model = recipe.model
    if not model.is_random:
        for key in ("model.preset", "model.config"):
            if value_of(recipe, key) is not None:
                why = "it is for a random start, and `model.init` is checkpoint"
                yield Problem((key,), _key_is(recipe, key), why, '`init = "random"` in [model], without `path`')
        return
    if model.path is not None:
        why = "no checkpoint is read: `model.init` is random"
        yield Problem(("model.path",), _key_is(recipe, "model.path"), why, "remove one of them")
    if model.preset is not None and model.config is not None:
        yield _exclusive_keys(recipe, "model.preset", "model.config", "both set the config of the model")
    if model.preset is None and model.config is None:
        why = "neither `preset` nor `config` is set, and `init` is random"
        yield Problem(("model.init",), "`model` does not set the config of the model", why, '`preset = "gpt2"`')


def _key_is(recipe: Recipe, key: str) -> str:
    return f"`{key}` is {format_value(value_of(recipe, key))}"


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    check_policy = partial(check_remat, model.remat_policy, model.offload, ffn_chunk_size=model.ffn_chunk_size)
    check_kernel = partial(check_saved_scores, model.remat_policy, model.attention_kernel)
    for check in (check_policy, check_kernel):
        yield from _problem_if_raised(check, "model.remat_policy", "model.offload")


def _rope_problems(recipe: Recipe) -> Iterator[Problem]:
    scaling, theta = recipe.model.rope_scaling, recipe.model.rope_theta
    if scaling is None:
        return
    yield from _problem_if_raised(lambda: check_rope_scaling(scaling), SCALING_KEY)
    if theta is not None and "rope_theta" in scaling:
        what = f"`{THETA_KEY}` is {format_value(theta)}, and `{SCALING_KEY}` has a `rope_theta`"
        yield Problem((THETA_KEY,), what, "both set the base of the rotary frequencies", "remove one of them")


def _dropout_problems(recipe: Recipe) -> Iterator[Problem]:
    dropout, fcm_ratio = recipe.model.dropout, recipe.model.fcm_ratio
    if isinstance(dropout, dict):
        yield from _problem_if_raised(lambda: check_dropout_table(dropout), DROPOUT_KEY)
    yield from _problem_if_raised(lambda: check_fcm_ratio(fcm_ratio), FCM_KEY)


def _field_problems(recipe: Recipe) -> Iterator[Problem]:
    key, data_type = "data.fields", recipe.data.type
    if data_type not in DEFAULT_FIELDS and recipe.data.fields is not None:
        what = f"`{key}` is {format_value(recipe.data.fields)}"
        why = f"it names a column of json objects, but `data.type` is {data_type}"
        yield Problem((key,), what, why, '`type = "json"`')
        return
    yield from _problem_if_raised(lambda: parse_fields(recipe.data.fields or ""), key)


def _source_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a source without a length, and source keys without a source."""
    data = recipe.data
    try:
        has_source = data.type in DEFAULT_FIELDS and bool(parse_fields(data.fields or "").source)
    except PrepError:
        return  # reported by _field_problems
    if has_source:
        if data.source_length is None:
            why = f"`data.fields` has a source: {format_value(data.fields)}"
            hint = "`source_length = 512` in [data]"
            yield Problem(("data.fields",), "`data.source_length` is missing", why, hint)
        return
    for key in SOURCE_KEYS:
        if value_of(recipe, key) is not None:
            what, why = f"`{key}` is {format_value(value_of(recipe, key))}", "`data.fields` has no source in brackets"
            yield Problem((key,), what, why, '`fields = "[article], summary"`')


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    micro_keys = [key for key in ("batch.per_device", "batch.per_replica") if value_of(recipe, key)]
    if len(micro_keys) == 2:
        yield _exclusive_keys(recipe, "batch.per_device", "batch.per_replica", "both set the size of a micro-batch")
    elif not micro_keys and not batch.size:
        why = "none of `size`, `per_device` and `per_replica` is set"
        yield Problem(("batch",), "`batch` does not set the sequences per step", why, "`size = 32` in [batch]")
    elif micro_keys and batch.size and batch.accumulate:
        why = f"`size` and `{micro_keys[0].partition('.')[2]}` already determine it"
        what = f"`batch.accumulate` is {batch.accumulate}"
        yield Problem(("batch.accumulate",), what, why, "remove one of the three")


def _run_length_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.steps and recipe.train.epochs:
        yield _exclusive_keys(recipe, "train.steps", "train.epochs", "both set the length of the run")
    elif not recipe.train.steps and not recipe.train.epochs:
        why = "neither `steps` nor `epochs` is set"
        yield Problem(("train",), "`train` does not set the length of the run", why, "`steps = 1000` in [train]")


def _evaluation_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if data.holdout and data.eval_path:
        yield _exclusive_keys(recipe, "data.holdout", "data.eval_path", "both set the evaluation data")
    for key in ("train.eval_every", "eval.limit"):
        if value_of(recipe, key) and not data.holdout and not data.eval_path:
            why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
            yield Problem((key,), f"`{key}` is {value_of(recipe, key)}", why, "`holdout = 0.05` in [data]")


def _schedule_problems(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    warmup_keys = ("optimizer.warmup_steps", "optimizer.warmup_ratio")
    if optimizer.warmup_steps is not None and optimizer.warmup_ratio is not None:
        yield _exclusive_keys(recipe, *warmup_keys, "both set the length of warm-up")
        return
    # The number of steps of a run by epochs is unknown here: that schedule is checked again when the data is known.
    n_steps = recipe.train.steps or (optimizer.decay_steps if optimizer.warmup_ratio is None else None)
    if n_steps:
        yield from _problem_if_raised(lambda: warmup_decay(optimizer, n_steps), *warmup_keys)


def _exclusive_keys(recipe: Recipe, first: str, second: str, why: str) -> Problem:
    what = " and ".join(f"`{key}` is {format_value(value_of(recipe, key))}" for key in (first, second))
    return Problem((second, first), what, why, "remove one of them")
