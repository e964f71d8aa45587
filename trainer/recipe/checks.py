"""Checks of a recipe for values out of range and for conflicting keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from prepcli.core.errors import Key, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models import mesh
from prepcli.models.attention_kernels import check_saved_scores
from prepcli.models.dropout_config import DROPOUT_KEY, FCM_KEY, check_dropout_table, check_fcm_ratio
from prepcli.models.leaf_patterns import PATTERN_KEYS, check_regular_expressions
from prepcli.models.remat import check_remat
from prepcli.models.rule_text import merge_rules
from prepcli.models.slices import DCN_KEY, check_slices, parse_slice_counts
from trainer.recipe.data_sources import (
    DATASET_KEYS,
    EVAL_KEYS,
    SOURCES_KEY,
    has_eval_data,
    parse_sources,
    source_data,
)
from trainer.recipe.field_checks import chat_problems, field_problems
from trainer.recipe.formatting import example_value, format_value
from trainer.recipe.lora_table import Lora
from trainer.recipe.problems import Problem, problem_if_raised
from trainer.recipe.resolve import MAX_INT32, warmup_decay
from trainer.recipe.rope_overrides import SCALING_KEY, THETA_KEY, check_rope_scaling
from trainer.recipe.run_tables import EVAL_METRICS, Log
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, keys_of, value_of

# Steps and lengths are int32 on devices, and the optimizer's numbers are float32.
MAX_FLOAT32 = 3.4e38
INT32_KEYS = (
    *(
        "train.steps",
        "train.max_skipped",
        "data.seq_length",
        "data.source_length",
        "model.max_position_embeddings",
    ),
    *(f"model.{name}_chunk_size" for name in ("head", "ffn", "q", "k")),
)
# Keys that only one schedule has
SCHEDULE_OF_KEY = {
    "optimizer.cooldown_steps": "wsd",
    "optimizer.cooldown_shape": "wsd",
    "optimizer.cooldown_waves": "wsd",
    "optimizer.cycles": "cosine_restarts",
}
PROFILE_KEY = "train.profile"
PUSH_KEY = "checkpoint.push"
REPOSITORY = re.compile(r"[^\s/@]+/[^\s/@]+(@[^\s@]+)?")
EPOCH_KEYS = {
    "train.eval_every_epochs": "train.eval_every",
    "checkpoint.every_epochs": "checkpoint.every",
}
WANDB_KEY = "log.wandb"
TEXT_KEYS = ("project", "entity", "group", "name", "notes", "job_type")
WANDB_KEYS = (*TEXT_KEYS, "tags", "offline")


def find_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a recipe whose keys have valid types."""
    yield from problem_if_raised(lambda: mesh.parse_mesh(recipe.mesh, Key("mesh")), "mesh")
    yield from problem_if_raised(lambda: _check_dcn_mesh(recipe), DCN_KEY)
    yield from problem_if_raised(
        lambda: merge_rules(recipe.rules or (), origin=Key("rules")), "rules"
    )
    yield from problem_if_raised(lambda: check_wandb_table(recipe.log.wandb), WANDB_KEY)
    yield from _overflow_problems(recipe)
    yield from _start_problems(recipe)
    yield from _model_problems(recipe)
    yield from _rope_problems(recipe)
    yield from _dropout_problems(recipe)
    yield from _lora_problems(recipe)
    yield from _dataset_problems(recipe)
    yield from _batch_problems(recipe)
    yield from _run_length_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _stride_problems(recipe)
    yield from _best_step_problems(recipe)
    yield from _sample_problems(recipe)
    yield from _schedule_problems(recipe)
    yield from _shape_problems(recipe)
    yield from _loss_scale_problems(recipe)
    for key in (f"optimizer.{name}" for name in PATTERN_KEYS):
        yield from problem_if_raised(
            partial(check_regular_expressions, value_of(recipe, key), key), key
        )
    yield from _save_problems(recipe)


def _check_dcn_mesh(recipe: Recipe) -> None:
    """Raise UsageError if the slices are invalid, or do not divide the mesh of the recipe."""
    if slices := parse_slice_counts(recipe.cluster.dcn_mesh):
        check_slices(mesh.parse_mesh(recipe.mesh, Key("mesh")), slices)


def _overflow_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield numbers that int32 or float32 cannot hold."""
    for key in keys_of(recipe):
        value = value_of(recipe, key)
        if not isinstance(value, int | float) or not (
            key in INT32_KEYS or key.startswith(("batch.", "optimizer.", "loss."))
        ):
            continue
        # The step computes in int32 and float32: a larger number would wrap around or be infinite.
        maximum = MAX_FLOAT32
        if isinstance(value, int):
            maximum = MAX_INT32
        if value > maximum:
            why = f"out of range: the maximum is {maximum:,}"
            hint = f"`{key} = {example_value(KEY_SCHEMAS[key])}`"
            yield Problem((key,), f"`{key}` is {format_value(value)}", why, hint)


def _start_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of keys that do not belong to the value of `model.init`. The loader reports a missing path."""
    model = recipe.model
    if not model.is_random:
        for key in ("model.preset", "model.config"):
            if value_of(recipe, key) is not None:
                why = "it is for a random start, and `model.init` is checkpoint"
                yield Problem(
                    (key,),
                    _key_value_text(recipe, key),
                    why,
                    '`init = "random"` in [model], without `path`',
                )
        return
    for key in ("model.path", "model.lock"):
        if value_of(recipe, key) is not None:
            why = "no checkpoint is read: `model.init` is random"
            yield Problem((key,), _key_value_text(recipe, key), why, "remove one of them")
    if model.training_state:
        why = "no checkpoint is read: `model.init` is random"
        yield Problem(
            ("model.training_state",), "`model.training_state` is true", why, "remove one of them"
        )
    if model.preset is not None and model.config is not None:
        yield _exclusive_keys(
            recipe, "model.preset", "model.config", "both set the config of the model"
        )
    if model.preset is None and model.config is None:
        why = "neither `preset` nor `config` is set, and `init` is random"
        yield Problem(
            ("model.init",),
            "`model` does not set the config of the model",
            why,
            '`preset = "gpt2"`',
        )


def _key_value_text(recipe: Recipe, key: str) -> str:
    return f"`{key}` is {format_value(value_of(recipe, key))}"


def _model_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield conflicts of saved activations, offloading and the kernel of attention."""
    model = recipe.model
    check_policy = partial(
        check_remat, model.remat_policy, model.offload, ffn_chunk_size=model.ffn_chunk_size
    )
    check_kernel = partial(check_saved_scores, model.remat_policy, model.attention_kernel)
    for check in (check_policy, check_kernel):
        yield from problem_if_raised(check, "model.remat_policy", "model.offload")


def _rope_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield conflicts of the rotary embedding's keys."""
    scaling = recipe.model.rope_scaling
    theta = recipe.model.rope_theta
    if scaling is None:
        return
    yield from problem_if_raised(lambda: check_rope_scaling(scaling), SCALING_KEY)
    if theta is not None and "rope_theta" in scaling:
        what = f"`{THETA_KEY}` is {format_value(theta)}, and `{SCALING_KEY}` has a `rope_theta`"
        yield Problem(
            (THETA_KEY,), what, "both set the base of the rotary frequencies", "remove one of them"
        )


def _dropout_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield invalid rates of dropout and of forgetful causal masking."""
    dropout = recipe.model.dropout
    fcm_ratio = recipe.model.fcm_ratio
    if isinstance(dropout, dict):
        yield from problem_if_raised(lambda: check_dropout_table(dropout), DROPOUT_KEY)
    yield from problem_if_raised(lambda: check_fcm_ratio(fcm_ratio), FCM_KEY)


def _lora_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings of adapters that another key determines, or that have no effect without adapters."""
    lora = recipe.lora
    default = Lora()
    changed: list[str] = []
    for key in Lora.model_fields:
        if key == "path":
            continue
        if getattr(lora, key) != getattr(default, key):
            changed.append(key)
    for key in changed:
        # The dtype of the base is a choice of the run, not of the adapter's files.
        if lora.path is not None and key != "base_dtype":
            why = f"`lora.path` is {format_value(lora.path)}, and the adapter has its own"
            yield Problem(
                (f"lora.{key}",),
                f"`lora.{key}` is {format_value(getattr(lora, key))}",
                why,
                "remove it",
            )
    if not lora.targets and not lora.target_parameters:
        yield Problem(
            ("lora.targets",), "`lora.targets` is []", "no projection has an adapter", "remove it"
        )
    if lora.dropout and lora.target_parameters:
        yield Problem(
            ("lora.dropout",),
            f"`lora.dropout` is {lora.dropout:g}",
            "`lora.target_parameters` is set, and PEFT has no dropout for experts in one tensor",
            "remove one of them",
        )
    if lora.is_enabled and recipe.model.is_random:
        why = "adapters are trained for a checkpoint, and `model.init` is random"
        yield Problem(
            ("lora.rank", "lora.path"),
            "`lora` needs a checkpoint",
            why,
            "remove [lora], or set `model.path`",
        )
    if lora.is_enabled and recipe.model.training_state:
        why = "the adapters have moments of their own, which the checkpoint lacks"
        yield Problem(
            ("model.training_state",),
            "`model.training_state` is true",
            why,
            "remove [lora] or the key",
        )
    if not lora.is_enabled and changed:
        what = f"`lora.{changed[0]}` is {format_value(getattr(lora, changed[0]))}"
        yield Problem(
            (f"lora.{changed[0]}",),
            what,
            "there are no adapters: `lora.rank` is 0",
            "`rank = 16` in [lora]",
        )


def _dataset_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the fields of each dataset and of `data.sources`, and keys of one dataset next to it."""
    data = recipe.data
    if data.sources is None:
        yield from field_problems(recipe)
        # With several sources only some may be chats: checked per source below.
        yield from chat_problems(data)
        return
    problems = list(problem_if_raised(lambda: parse_sources(data), SOURCES_KEY))
    yield from problems or _source_field_problems(recipe)
    for key in (f"data.{name}" for name in DATASET_KEYS):
        if value_of(recipe, key) is not None:
            why = f"`{SOURCES_KEY}` names the datasets"
            hint = f"`{key.removeprefix('data.')}` in the tables of `{SOURCES_KEY}`, or no tables"
            yield Problem((key,), f"`{key}` is {format_value(value_of(recipe, key))}", why, hint)
    if data.holdout and any({*EVAL_KEYS} & {*table} for table in data.sources):
        what = f"`data.holdout` is {data.holdout:g}, and tables of `{SOURCES_KEY}` have evaluation data of their own"
        yield Problem(("data.holdout",), what, "both set the evaluation data", "remove one of them")


def _source_field_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the fields of each source."""
    for source in parse_sources(recipe.data):
        part = recipe.model_copy(update={"data": source_data(recipe.data, source)})
        for problem in field_problems(part):
            what = text("source `{}`: {}", source.name, problem.what)
            yield Problem((SOURCES_KEY,), what, problem.why, problem.hint)


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield conflicts of the keys for the batch size."""
    batch = recipe.batch
    micro_keys = [key for key in ("batch.per_device", "batch.per_replica") if value_of(recipe, key)]
    if len(micro_keys) == 2:
        yield _exclusive_keys(
            recipe, "batch.per_device", "batch.per_replica", "both set the size of a micro-batch"
        )
    elif not micro_keys and not batch.size:
        why = "none of `size`, `per_device` and `per_replica` is set"
        yield Problem(
            ("batch",), "`batch` does not set the sequences per step", why, "`size = 32` in [batch]"
        )
    elif micro_keys and batch.size and batch.accumulate:
        why = f"`size` and `{micro_keys[0].partition('.')[2]}` already determine it"
        what = f"`batch.accumulate` is {batch.accumulate}"
        yield Problem(("batch.accumulate",), what, why, "remove one of the three")


def _run_length_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if a recipe sets two lengths of the run, or none."""
    if recipe.train.steps and recipe.train.epochs:
        yield _exclusive_keys(
            recipe, "train.steps", "train.epochs", "both set the length of the run"
        )
    elif not recipe.train.steps and not recipe.train.epochs:
        why = "neither `steps` nor `epochs` is set"
        yield Problem(
            ("train",),
            "`train` does not set the length of the run",
            why,
            "`steps = 1000` in [train]",
        )


def _evaluation_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield conflicts of the keys for evaluation."""
    data = recipe.data
    for key in ("data.eval_path", "data.eval_split"):
        if data.holdout and value_of(recipe, key):
            yield _exclusive_keys(recipe, "data.holdout", key, "both set the evaluation data")
    for key in ("train.eval_every", "train.eval_every_epochs", "eval.limit", "eval.at_start"):
        if value_of(recipe, key) and not has_eval_data(data):
            why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
            what = f"`{key}` is {format_value(value_of(recipe, key))}"
            yield Problem((key,), what, why, "`holdout = 0.05` in [data]")


def _stride_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield a problem if evaluation windows leave out tokens between them."""
    key = "eval.stride"
    stride = recipe.eval.stride
    length = recipe.data.seq_length
    if stride is not None and stride > length:
        why = f"windows have {length} tokens (`data.seq_length`), so tokens between them would be left out"
        yield Problem(
            (key,), _key_value_text(recipe, key), why, f"`stride = {max(1, length // 2)}` in [eval]"
        )


def _best_step_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield problems of the keys that compare evaluations: the best step, and the early end of a run."""
    table = recipe.checkpoint
    train = recipe.train
    for key in ("checkpoint.best", "eval.patience"):
        if not value_of(recipe, key):
            continue
        if not has_eval_data(recipe.data):
            why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
            yield Problem((key,), _key_value_text(recipe, key), why, "`holdout = 0.05` in [data]")
        elif not train.eval_every and train.eval_every_epochs is None:
            why = "the run evaluates only after its last step"
            yield Problem(
                (key,), _key_value_text(recipe, key), why, "`eval_every = 500` in [train]"
            )
    key = "checkpoint.best_is"
    if table.best is None and table.best_is is not None:
        why = "`checkpoint.best` is not set"
        hint = '`best = "eval_loss"` in [checkpoint]'
        yield Problem((key,), _key_value_text(recipe, key), why, hint)
        return
    if table.best is None:
        return
    direction = EVAL_METRICS.get(table.best)
    if direction is None and table.best_is is None:
        why = "whether its lowest or its highest value is the best is missing"
        hint = '`best_is = "highest"` or `best_is = "lowest"` in [checkpoint]'
        yield Problem(("checkpoint.best",), _key_value_text(recipe, "checkpoint.best"), why, hint)
    if direction is not None and table.best_is not in (None, direction):
        why = f"the {direction} {table.best} is the best"
        yield Problem((key,), _key_value_text(recipe, key), why, "remove it")


def _sample_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield settings of samples that have no effect without prompts."""
    log = recipe.log
    default = Log()
    for key in ("sample_every", "sample_tokens"):
        if log.samples is None and getattr(log, key) != getattr(default, key):
            why = "there are no prompts: `log.samples` is not set"
            hint = '`samples = ["Once upon a time"]` in [log]'
            yield Problem((f"log.{key}",), _key_value_text(recipe, f"log.{key}"), why, hint)


def _schedule_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield conflicts of warm-up and decay."""
    optimizer = recipe.optimizer
    warmup_keys = ("optimizer.warmup_steps", "optimizer.warmup_ratio")
    if optimizer.warmup_steps is not None and optimizer.warmup_ratio is not None:
        yield _exclusive_keys(recipe, *warmup_keys, "both set the length of warm-up")
        return
    # The number of steps of a run by epochs is unknown here: that schedule is checked again when the data is known.
    # Steps of warm-up and decay can be compared without it, a ratio cannot.
    n_steps = recipe.train.steps
    if not n_steps and optimizer.warmup_ratio is None:
        n_steps = optimizer.decay_steps
    if n_steps:
        yield from problem_if_raised(lambda: warmup_decay(optimizer, n_steps), *warmup_keys)


def _shape_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield keys of one schedule that another one has, or that `cosine_restarts` lacks."""
    optimizer = recipe.optimizer
    schedule = optimizer.schedule
    for key, needed in SCHEDULE_OF_KEY.items():
        if value_of(recipe, key) is not None and schedule != needed:
            hint = f"`schedule = {format_value(needed)}` in [optimizer]"
            why = f"`optimizer.schedule` is {schedule}"
            yield Problem((key,), _key_value_text(recipe, key), why, hint)
    key = "optimizer.cooldown_waves"
    if optimizer.cooldown_waves and schedule == "wsd" and optimizer.cooldown_shape != "cosine":
        why = f"`optimizer.cooldown_shape` is {optimizer.cooldown_shape or 'linear'}"
        hint = '`cooldown_shape = "cosine"` in [optimizer]'
        yield Problem((key,), _key_value_text(recipe, key), why, hint)
    if schedule == "cosine_restarts" and optimizer.cycles is None:
        key = "optimizer.schedule"
        why = "the number of cosines is missing"
        yield Problem((key,), _key_value_text(recipe, key), why, "`cycles = 4` in [optimizer]")


def _loss_scale_problems(recipe: Recipe) -> Iterator[Problem]:
    key = "optimizer.loss_scale"
    scale = recipe.optimizer.loss_scale
    if scale is not None and recipe.model.dtype != "float16":
        what = f"`{key}` is {format_value(scale)}"
        why = f"`model.dtype` is {recipe.model.dtype}, which needs none"
        yield Problem((key,), what, why, '`dtype = "float16"` in [model]')


def _exclusive_keys(recipe: Recipe, first: str, second: str, why: str) -> Problem:
    """Return the problem of two keys that exclude each other."""
    what = " and ".join(
        f"`{key}` is {format_value(value_of(recipe, key))}" for key in (first, second)
    )
    return Problem((second, first), what, why, "remove one of them")


def _save_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of keys about saved, exported and pushed steps."""
    checkpoint = recipe.checkpoint
    train = recipe.train
    for key, step_key in EPOCH_KEYS.items():
        if value_of(recipe, key) is not None and value_of(recipe, step_key):
            what = f"{_key_value_text(recipe, key)} and {_key_value_text(recipe, step_key)}"
            yield Problem((key, step_key), what, "both set the same interval", "remove one of them")
    if checkpoint.dtype not in (None, recipe.model.param_dtype) and checkpoint.optimizer_state:
        key = "checkpoint.dtype"
        why = f"to resume with its optimizer state, a run needs saved {recipe.model.param_dtype} parameters"
        yield Problem(
            (key,), _key_value_text(recipe, key), why, "`optimizer_state = false` in [checkpoint]"
        )
    if checkpoint.push is not None and not REPOSITORY.fullmatch(checkpoint.push):
        why = "it has the form OWNER/NAME or OWNER/NAME@BRANCH"
        hint = '`push = "me/llama-13b"` in [checkpoint]'
        yield Problem((PUSH_KEY,), _key_value_text(recipe, PUSH_KEY), why, hint)
    if train.profile is not None and (reason := _invalid_profile(train.profile)):
        yield Problem(
            (PROFILE_KEY,),
            f"`{PROFILE_KEY}` is invalid",
            reason,
            "`profile = { start = 10, steps = 3 }`",
        )


def _invalid_profile(profile: Mapping[str, object]) -> str:
    """Return why a profile's table is invalid, or "" if it is valid."""
    if {*profile} != {"start", "steps"}:
        return f"its keys are {', '.join(profile) or 'missing'}, not start and steps"
    # `isinstance(True, int)` is true, and a bool is no number of steps.
    invalid = [key for key, value in profile.items() if type(value) is not int or value < 1]
    if invalid:
        return f"{invalid[0]} is {format_value(profile[invalid[0]])}, not a positive integer"
    return ""


def check_wandb_table(table: Mapping[str, object] | None) -> None:
    """Check the keys of `log.wandb`, which are arguments of `wandb.init`, and `offline`.

    Raises:
        UsageError: A key is unknown, `project` is missing, or a value has another type.
    """
    if table is None:
        return
    # JSON schemas of a recipe describe two levels, e.g. `log.wandb`. The third level is checked here.
    for key, value in table.items():
        if key not in WANDB_KEYS:
            hint = did_you_mean(key, WANDB_KEYS)
            raise usage_error(
                f"unknown key `{key}` in `{WANDB_KEY}`", f"known: {', '.join(WANDB_KEYS)}", hint
            )
        if not _is_valid(key, value):
            kind = {"tags": "a list of texts", "offline": "true or false"}.get(key, "text")
            raise usage_error(
                f"`{key}` in `{WANDB_KEY}` is {value!r:.60}", f"it takes {kind}", f"change `{key}`"
            )
    if "project" not in table:
        raise usage_error(
            f"`{WANDB_KEY}` has no `project`", "W&B groups runs by project", '`project = "NAME"`'
        )


def _is_valid(key: str, value: object) -> bool:
    if key == "offline":
        return isinstance(value, bool)
    if key == "tags":
        return isinstance(value, list) and all(isinstance(tag, str) for tag in value)
    return isinstance(value, str) and bool(value)
