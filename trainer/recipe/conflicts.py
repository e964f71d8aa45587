"""Conflicts of recipe keys: a table of rows, and checks of the values that have a grammar of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from functools import partial
from typing import NamedTuple

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.core.formatting import did_you_mean
from prepcli.models.activation_memory import check_remat
from prepcli.models.attention_kernels import check_saved_scores
from prepcli.models.layer_config import DROPOUT_KEY, FCM_KEY, check_dropout_table, check_fcm_ratio
from prepcli.models.lora_config import MAX_ALPHA
from prepcli.models.mesh import DCN_KEY, check_slices, parse_mesh, parse_slice_counts
from prepcli.models.param_tree import PATTERN_KEYS, check_regular_expressions
from prepcli.models.rules import merge_rules
from trainer.recipe.data_table import (
    DATASET_KEYS,
    EVAL_KEYS,
    SOURCES_KEY,
    SPAN_CORRUPTION,
    Data,
    has_eval_data,
    parse_sources,
    recipe_span_sizes,
    source_data,
)
from trainer.recipe.formatting import example_value, format_value, to_toml
from trainer.recipe.key_types import MAX_INT32
from trainer.recipe.lr_schedule import DECAYS, build_lr_schedule
from trainer.recipe.model_table import Lora
from trainer.recipe.rope_overrides import SCALING_KEY, THETA_KEY, check_rope_scaling
from trainer.recipe.tables import EVAL_METRICS, KEY_SCHEMAS, Recipe, keys_of, value_of
from trainer.recipe.text_fields import (
    AUTO,
    CHAT_FORMATS,
    CONCATENATED,
    DEFAULT_FIELDS,
    FORMAT_FIELDS,
    PLAIN,
    TRAINING,
    WHOLE_TOKENS,
    parse_fields,
)

# The optimizer's numbers are float32.
MAX_FLOAT32 = 3.4e38
# Smaller ones are 0 on devices, and larger ones below 1 are 1. With `eps = 0` or `b2 = 1` AdamW divides 0 by 0.
MIN_FLOAT32 = 1.2e-38
MAX_BELOW_1 = 0.99999994
INT32_KEYS = (
    *("train.steps", "train.max_skipped", "data.seq_length", "data.source_length"),
    "model.max_position_embeddings",
    *(f"model.{name}_chunk_size" for name in ("head", "ffn", "q", "k")),
)
REPOSITORY = re.compile(r"[^\s/@]+/[^\s/@]+(@[^\s@]+)?")
WANDB_KEY = "log.wandb"
WANDB_KEYS = ("project", "entity", "group", "name", "notes", "job_type", "tags", "offline")
# Limit of W&B, which raises a ValueError for longer tags.
MAX_TAG_CHARS = 64
# Settings of adapters besides their rank
LORA_KEYS = tuple(f"lora.{name}" for name in Lora.model_fields if name not in ("rank", "path"))
NOISE_KEYS = ("data.noise_density", "data.mean_noise_span_length")
# Keys of records with columns, and what they do.
COLUMN_USES = {
    "data.fields": "names a column",
    "data.fields_from_example": "names a column",
    "data.format": "is for columns",
    "data.subfield_separator": "is for columns",
}
CHAT_KEYS = (
    *("data.chat_template", "data.template_args", "data.template_date"),
    *("data.loss", "data.loss_reasoning"),
)
# Keys whose values a chat template gets as JSON.
JSON_KEYS = ("data.template_args", "log.samples")
REMOVE_ONE = "remove one of them"


class Problem(NamedTuple):
    """A conflict of keys, or a value out of range. It is reported at the first key set by the user."""

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


class Conflict(NamedTuple):
    """Keys that have no meaning together with the rest of a recipe, as a row of a table."""

    # Keys with blanks between them. Each is a problem of its own if it differs from its default. Keys with `&`
    # between them are one problem, if all differ. The name of a table counts as set.
    keys: str
    when: object  # Whether the rest of the recipe is in conflict with the keys
    why: str  # The values that cause it
    fix: str  # How to fix it
    what: str = ""  # What is wrong. By default the keys with their values.


class ValueCheck(NamedTuple):
    """A check of the values of keys, which raises PrepError, as a row of a table."""

    keys: str
    check: Callable[[], object]


Rows = Iterator[Conflict | ValueCheck]


def find_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of a recipe whose keys have valid types."""
    yield from _overflow_problems(recipe)
    for rows in (_run_rows, _evaluation_rows, _model_rows, _lora_rows, _optimizer_rows):
        yield from _problems(rows(recipe), recipe)
    if recipe.data.sources is None:
        yield from _problems(_dataset_rows(recipe.data), recipe)
        # With several sources only some may be chats: checked when their files are read.
        yield from chat_problems(recipe.data)
    else:
        yield from _mixture_problems(recipe)


def _problems(rows: Rows, recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of the rows that apply to a recipe."""
    for row in rows:
        if isinstance(row, ValueCheck):
            try:
                row.check()
            except PrepError as error:
                yield Problem(tuple(row.keys.split()), error.what, error.why, error.hint)
            continue
        groups = [[key] for key in row.keys.split()]
        if "&" in row.keys:
            groups = [row.keys.split(" & ")]
        for group in groups:
            if row.when and all(_is_set(recipe, key) for key in group):
                what = row.what or " and ".join(_value_text(recipe, key) for key in group)
                yield Problem(tuple(reversed(group)), what, row.why, row.fix)


def _is_set(recipe: Recipe, key: str) -> bool:
    """Return whether the value of a key is not its default. The name of a table counts as set."""
    # A default counts as absent, even if it is written: the complete recipe that a run keeps
    # has all keys, and must load without errors.
    table, _, name = key.rpartition(".")
    if not table:
        return True
    model = value_of(recipe, table)
    value = getattr(model, name)
    return value is not None and value != type(model).model_fields[name].default


def _value_text(recipe: Recipe, key: str) -> str:
    return f"`{key}` is {format_value(value_of(recipe, key))}"


def _run_rows(recipe: Recipe) -> Rows:
    """Yield the rows of mesh, batch, length, checkpoints and logs."""
    batch = recipe.batch
    train = recipe.train
    checkpoint = recipe.checkpoint
    yield ValueCheck("mesh", lambda: parse_mesh(recipe.mesh, Key("mesh")))
    yield ValueCheck(DCN_KEY, lambda: _check_dcn_mesh(recipe))
    yield ValueCheck("rules", lambda: merge_rules(recipe.rules or (), origin=Key("rules")))
    yield ValueCheck(WANDB_KEY, lambda: check_wandb_table(recipe.log.wandb))
    yield ValueCheck("train.profile", lambda: _check_profile(train.profile))
    for key in JSON_KEYS:
        yield ValueCheck(key, partial(_check_json_values, key, value_of(recipe, key)))
    why = "both set the size of a micro-batch"
    yield Conflict("batch.per_device & batch.per_replica", True, why, REMOVE_ONE)
    micro_keys = [name for name in ("per_device", "per_replica") if getattr(batch, name)]
    why = f"`size` and `{''.join(micro_keys)}` already determine it"
    is_determined = batch.size and len(micro_keys) == 1
    yield Conflict("batch.accumulate", is_determined, why, "remove one of the three")
    what = "`batch` does not set the sequences per step"
    why = "none of `size`, `per_device` and `per_replica` is set"
    has_size = batch.size or micro_keys
    yield Conflict("batch", not has_size, why, "`size = 32` in [batch]", what)
    yield Conflict("train.steps & train.epochs", True, "both set the length of the run", REMOVE_ONE)
    what = "`train` does not set the length of the run"
    why = "neither `steps` nor `epochs` is set"
    has_length = train.steps or train.epochs
    yield Conflict("train", not has_length, why, "`steps = 1000` in [train]", what)
    why = "both set the same interval"
    yield Conflict("train.eval_every & train.eval_every_epochs", True, why, REMOVE_ONE)
    yield Conflict("checkpoint.every & checkpoint.every_epochs", True, why, REMOVE_ONE)
    dtype = recipe.model.param_dtype
    is_resumed = checkpoint.optimizer_state and checkpoint.dtype != dtype
    why = f"to resume with its optimizer state, a run needs saved {dtype} parameters"
    hint = "`optimizer_state = false` in [checkpoint]"
    yield Conflict("checkpoint.dtype", is_resumed, why, hint)
    is_repository = REPOSITORY.fullmatch(checkpoint.push or "")
    why = "it has the form OWNER/NAME or OWNER/NAME@BRANCH"
    hint = '`push = "me/llama-13b"` in [checkpoint]'
    yield Conflict("checkpoint.push", not is_repository, why, hint)
    why = "there are no prompts: `log.samples` is not set"
    hint = '`samples = ["Once upon a time"]` in [log]'
    yield Conflict("log.sample_every log.sample_tokens", recipe.log.samples is None, why, hint)


def _evaluation_rows(recipe: Recipe) -> Rows:
    """Yield the rows of evaluations, and of the best step that they find."""
    has_data = has_eval_data(recipe.data)
    has_interval = recipe.train.eval_every or recipe.train.eval_every_epochs is not None
    best = recipe.checkpoint.best
    best_is = recipe.checkpoint.best_is
    why = "both set the evaluation data"
    yield Conflict("data.holdout & data.eval_path", True, why, REMOVE_ONE)
    yield Conflict("data.holdout & data.eval_split", True, why, REMOVE_ONE)
    why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
    hint = "`holdout = 0.05` in [data]"
    keys = "train.eval_every train.eval_every_epochs eval.limit checkpoint.best eval.patience"
    yield Conflict(keys, not has_data, why, hint)
    yield Conflict("eval.at_start", not has_data and recipe.eval.at_start, why, hint)
    why = "the run evaluates only after its last step"
    hint = "`eval_every = 500` in [train]"
    yield Conflict("checkpoint.best eval.patience", has_data and not has_interval, why, hint)
    why = "`checkpoint.best` is not set"
    hint = '`best = "eval_loss"` in [checkpoint]'
    yield Conflict("checkpoint.best_is", best is None, why, hint)
    direction = EVAL_METRICS.get(best or "")
    why = "whether its lowest or its highest value is the best is missing"
    hint = '`best_is = "highest"` or `best_is = "lowest"` in [checkpoint]'
    yield Conflict("checkpoint.best", direction is None and best_is is None, why, hint)
    is_other = direction is not None and direction != best_is
    yield Conflict(
        "checkpoint.best_is", is_other, f"the {direction} {best} is the best", "remove it"
    )
    length = recipe.data.seq_length
    why = f"windows have {length} tokens (`data.seq_length`), so tokens between them would be left out"
    is_longer = (recipe.eval.stride or 0) > length
    yield Conflict("eval.stride", is_longer, why, f"`stride = {max(1, length // 2)}` in [eval]")


def _model_rows(recipe: Recipe) -> Rows:
    """Yield the rows of the start, of saved activations, and of the rotary embedding."""
    model = recipe.model
    policy = model.remat_policy
    scaling = model.rope_scaling
    why = "it is for a random start, and `model.init` is checkpoint"
    hint = '`init = "random"` in [model], without `path`'
    yield Conflict("model.preset model.config", not model.is_random, why, hint)
    why = "no checkpoint is read: `model.init` is random"
    keys = "model.path model.lock model.training_state"
    yield Conflict(keys, model.is_random, why, REMOVE_ONE)
    why = "both set the config of the model"
    yield Conflict("model.preset & model.config", model.is_random, why, REMOVE_ONE)
    what = "`model` does not set the config of the model"
    why = "neither `preset` nor `config` is set, and `init` is random"
    lacks_config = model.is_random and model.preset is None and model.config is None
    yield Conflict("model.init", lacks_config, why, '`preset = "gpt2"`', what)
    keys = "model.remat_policy model.offload"
    yield ValueCheck(
        keys, lambda: check_remat(policy, model.offload, ffn_chunk_size=model.ffn_chunk_size)
    )
    yield ValueCheck(keys, lambda: check_saved_scores(policy, model.attention_kernel))
    if scaling is not None:
        yield ValueCheck(SCALING_KEY, lambda: check_rope_scaling(scaling))
        what = f"{_value_text(recipe, THETA_KEY)}, and `{SCALING_KEY}` has a `rope_theta`"
        why = "both set the base of the rotary frequencies"
        yield Conflict(THETA_KEY, "rope_theta" in scaling, why, REMOVE_ONE, what)
    dropout = model.dropout
    if isinstance(dropout, dict):
        yield ValueCheck(DROPOUT_KEY, lambda: check_dropout_table(dropout))
    yield ValueCheck(FCM_KEY, lambda: check_fcm_ratio(model.fcm_ratio))


def _lora_rows(recipe: Recipe) -> Rows:
    """Yield the rows of adapters."""
    lora = recipe.lora
    # The dtype of the base is a choice of the run, not of the adapter's files.
    keys = " ".join(key for key in LORA_KEYS if key != "lora.base_dtype")
    why = f"`lora.path` is {format_value(lora.path)}, and the adapter has its own"
    yield Conflict(f"lora.rank {keys}", lora.path is not None, why, "remove it")
    is_empty = not lora.targets and not lora.target_parameters
    yield Conflict("lora.targets", is_empty, "no projection has an adapter", "remove it")
    why = "`lora.target_parameters` is set, and PEFT has no dropout for experts in one tensor"
    yield Conflict("lora.dropout", lora.target_parameters, why, REMOVE_ONE)
    for key, alphas in (
        ("lora.alpha", [lora.alpha or 1.0]),
        ("lora.alpha_pattern", lora.alpha_pattern.values()),
    ):
        is_outside = not all(1 / MAX_ALPHA <= alpha <= MAX_ALPHA for alpha in alphas)
        why = f"an alpha is at least {1 / MAX_ALPHA:g} and at most {MAX_ALPHA:g}"
        yield Conflict(key, is_outside, why, "`alpha = 32` in [lora]")
    what = "`lora` needs a checkpoint"
    why = "adapters are trained for a checkpoint, and `model.init` is random"
    hint = "remove [lora], or set `model.path`"
    key = "lora.rank" if _is_set(recipe, "lora.rank") else "lora.path"
    yield Conflict(key, recipe.model.is_random, why, hint, what)
    why = "the adapters have moments of their own, which the checkpoint lacks"
    yield Conflict("model.training_state", lora.is_enabled, why, "remove [lora] or the key")
    changed = [key for key in LORA_KEYS if _is_set(recipe, key)]
    why = "there are no adapters: `lora.rank` is 0"
    if changed:
        yield Conflict(changed[0], not lora.is_enabled, why, "`rank = 16` in [lora]")


def _optimizer_rows(recipe: Recipe) -> Rows:
    """Yield the rows of the learning rate, its schedule, and patterns of leaves."""
    table = recipe.optimizer
    warmup_keys = "optimizer.warmup_steps optimizer.warmup_ratio"
    why = "both set the length of warm-up"
    yield Conflict(warmup_keys.replace(" ", " & "), True, why, REMOVE_ONE)
    yield ValueCheck(warmup_keys, lambda: _check_schedule(recipe))
    for kind, decay in DECAYS.items():
        keys = " ".join(f"optimizer.{name}" for name in decay.keys)
        why = f"`optimizer.schedule` is {table.schedule}"
        hint = f"`schedule = {format_value(kind)}` in [optimizer]"
        yield Conflict(keys, table.schedule != kind, why, hint)
    is_straight = table.schedule == "wsd" and table.cooldown_shape != "cosine"
    why = f"`optimizer.cooldown_shape` is {table.cooldown_shape or 'linear'}"
    hint = '`cooldown_shape = "cosine"` in [optimizer]'
    yield Conflict("optimizer.cooldown_waves", is_straight, why, hint)
    lacks_cycles = table.schedule == "cosine_restarts" and table.cycles is None
    why = "the number of cosines is missing"
    yield Conflict("optimizer.schedule", lacks_cycles, why, "`cycles = 4` in [optimizer]")
    dtype = recipe.model.dtype
    why = f"`model.dtype` is {dtype}, which needs none"
    hint = '`dtype = "float16"` in [model]'
    yield Conflict("optimizer.loss_scale", dtype != "float16", why, hint)
    for name in PATTERN_KEYS:
        key = f"optimizer.{name}"
        yield ValueCheck(key, partial(check_regular_expressions, getattr(table, name), key))


def _dataset_rows(data: Data) -> Rows:
    """Yield the rows of the keys that turn the records of one dataset into examples."""
    has_columns = data.type in DEFAULT_FIELDS
    from_example = data.fields_from_example
    for key, use in COLUMN_USES.items():
        # The recipes that earlier versions kept with a run have the format `text` for all types.
        is_other = not has_columns and getattr(data, key.removeprefix("data.")) != PLAIN
        why = f"it {use} of json objects, but `data.type` is {data.type}"
        yield Conflict(key, is_other, why, text("{}", Key("data.type", "json")))
    has_fields_twice = has_columns and from_example is not None
    why = f"`data.fields_from_example` is {format_value(from_example)}"
    yield Conflict("data.fields", has_fields_twice, why, REMOVE_ONE)
    yield Conflict(
        "data.format", has_fields_twice and data.format in FORMAT_FIELDS, why, REMOVE_ONE
    )
    is_chat = data.format in CHAT_FORMATS
    has_list = has_columns and from_example is None and not is_chat and not data.has_auto_shape
    if has_list:
        yield ValueCheck("data.fields", lambda: parse_fields(data.fields or ""))
    corrupts_spans = data.objective == SPAN_CORRUPTION
    may_lack_source = from_example is None and not data.has_auto_shape
    lacks_source = may_lack_source and not (has_list and _may_have_source(data.fields or ""))
    why = "`data.fields` has no source in brackets"
    hint = text("{}", Key("data.fields", "[article], summary"))
    # Span corruption makes sources from the text itself, and needs their length.
    yield Conflict("data.source_length", lacks_source and not corrupts_spans, why, hint)
    yield Conflict("data.source_prefix", lacks_source, why, hint)
    why = f"`data.objective` is {data.objective}"
    hint = text("{}", Key("data.objective", SPAN_CORRUPTION))
    yield Conflict(" ".join(NOISE_KEYS), not corrupts_spans, why, hint)
    if not corrupts_spans:
        return
    keys = f"data.source_length data.seq_length {' '.join(NOISE_KEYS)}"
    yield ValueCheck(keys, lambda: recipe_span_sizes(data))
    why = "span corruption takes blocks of concatenated text"
    keys = "data.fields_from_example data.packing data.always_start_with_bos"
    yield Conflict(keys, True, why, "remove it")
    yield Conflict("data.format", data.format != PLAIN, why, "remove it")
    yield Conflict("data.fields", "[" in (data.fields or ""), why, "remove it")


def _mixture_rows(data: Data) -> Rows:
    """Yield the rows of `data.sources`, and of keys of one dataset next to them."""
    for name in DATASET_KEYS:
        why = f"`{SOURCES_KEY}` names the datasets"
        hint = f"`{name}` in the tables of `{SOURCES_KEY}`, or no tables"
        yield Conflict(f"data.{name}", True, why, hint)
    has_own = any({*EVAL_KEYS} & {*table} for table in data.sources or ())
    what = f"`data.holdout` is {data.holdout:g}, and tables of `{SOURCES_KEY}` have evaluation data of their own"
    yield Conflict("data.holdout", has_own, "both set the evaluation data", REMOVE_ONE, what)


def _mixture_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield the problems of `data.sources`, of each of them, and of keys of one dataset next to them."""
    yield from _problems(_mixture_rows(recipe.data), recipe)
    try:
        sources = parse_sources(recipe.data)
    except PrepError as error:
        yield Problem((SOURCES_KEY,), error.what, error.why, error.hint)
        return
    for source in sources:
        data = source_data(recipe.data, source)
        part = recipe.model_copy(update={"data": data})
        for problem in _problems(_dataset_rows(data), part):
            what = text("source `{}`: {}", source.name, problem.what)
            yield Problem((SOURCES_KEY,), what, problem.why, problem.hint)


def _overflow_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield numbers that are too large or too small for int32 or float32."""
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
        why = ""
        if value > maximum:
            why = f"out of range: the maximum is {maximum:,}"
        elif 0 < value < MIN_FLOAT32:
            why = f"out of range: the smallest number above 0 is {MIN_FLOAT32:,}"
        elif MAX_BELOW_1 < value < 1 and "exclusiveMaximum" in KEY_SCHEMAS[key]:
            why = f"out of range: the largest number below 1 is {MAX_BELOW_1}"
        if why:
            hint = f"`{key} = {example_value(KEY_SCHEMAS[key])}`"
            yield Problem((key,), _value_text(recipe, key), why, hint)


def _may_have_source(fields: str) -> bool:
    """Return whether a list of fields has a source in brackets, or is invalid, which is reported elsewhere."""
    try:
        return bool(parse_fields(fields).source)
    except PrepError:
        return True


def _check_dcn_mesh(recipe: Recipe) -> None:
    """Raise UsageError if the slices are invalid, or do not divide the mesh of the recipe."""
    if slices := parse_slice_counts(recipe.cluster.dcn_mesh):
        check_slices(parse_mesh(recipe.mesh, Key("mesh")), slices)


def _check_schedule(recipe: Recipe) -> None:
    """Raise UsageError if warm-up and decay do not fit into the steps of the run."""
    table = recipe.optimizer
    if table.warmup_steps is not None and table.warmup_ratio is not None:
        return
    # The number of steps of a run by epochs is unknown here: that schedule is checked again when the data is known.
    # Steps of warm-up and decay can be compared without it, a ratio cannot.
    steps = recipe.train.steps
    if not steps and table.warmup_ratio is None:
        steps = table.decay_steps
    if steps:
        build_lr_schedule(table, steps)


def _check_profile(profile: Mapping[str, object] | None) -> None:
    """Raise UsageError if the table of a profile is invalid."""
    if profile is None:
        return
    # `isinstance(True, int)` is true, and a bool is no number of steps.
    invalid = [key for key, value in profile.items() if type(value) is not int or value < 1]
    why = ""
    if {*profile} != {"start", "steps"}:
        why = f"its keys are {', '.join(profile) or 'missing'}, not start and steps"
    elif invalid:
        why = f"{invalid[0]} is {format_value(profile[invalid[0]])}, not a positive integer"
    if why:
        raise usage_error(
            "`train.profile` is invalid", why, "`profile = { start = 10, steps = 3 }`"
        )


def _check_json_values(key: str, value: object) -> None:
    """Raise UsageError if a value has a date or a time. TOML has them, and JSON does not."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, Mapping):
            pending += item.values()
        elif isinstance(item, list | tuple):
            pending += item
        elif isinstance(item, date | time):
            why = "a chat template gets values of JSON, which has no dates"
            raise usage_error(
                f"`{key}` has {to_toml(item)}", why, f"quote it: `{to_toml(str(item))}`"
            )


def chat_problems(data: Data, *, is_only: bool = True) -> Iterator[Problem]:
    """Yield keys that do not fit conversations, and keys of conversations for other data.

    Args:
        data: Data of one source. Any of it may be found by its columns, if it names no format.
        is_only: Whether it is the only source. In a mixture the keys may be meant for another one.
    """
    if data.format == AUTO:
        return
    if data.format not in CHAT_FORMATS:
        if is_only:
            why = f"there are no conversations: `data.format` is {data.format}"
            yield from _set_key_problems(data, CHAT_KEYS, why)
        return
    if data.type in DEFAULT_FIELDS and data.fields_from_example is None:
        why = f"`data.format` is {data.format}, and its template makes the text"
        yield from _set_key_problems(data, ("data.prepend_text", "data.subfield_separator"), why)
    # The loss of turns that TRAINING can find
    if data.chat_template == TRAINING and data.loss not in (("assistant",), ("last",)):
        why = "`data.chat_template` is training, which finds the turns of the assistant only"
        yield Problem(
            ("data.loss",),
            f"`data.loss` is {format_value(data.loss)}",
            why,
            '"assistant" or "last"',
        )


def _set_key_problems(data: Data, keys: Iterable[str], why: str) -> Iterator[Problem]:
    """Yield the keys that do not have their default."""
    for key in keys:
        # A default counts as absent, even if it is written: the complete recipe that a run keeps
        # has all keys, and must load without errors.
        name = key.removeprefix("data.")
        value = getattr(data, name)
        if value != type(data).model_fields[name].default:
            yield Problem((key,), f"`{key}` is {format_value(value)}", why, "remove it")


def check_source_length(data: Data, *, has_encoder: bool) -> None:
    """Raise UsageError if an encoder reads sources of the data and the recipe does not limit their length."""
    if not has_encoder or data.source_length is not None:
        return
    if data.fields_from_example is not None or (data.fields and parse_fields(data.fields).source):
        why = "the model has an encoder, which reads at most that number of tokens of a source"
        raise usage_error(
            "`data.source_length` is missing", why, text("{}", Key("data.source_length", 512))
        )


def check_packing(data: Data, *, has_encoder: bool) -> None:
    """Raise UsageError if a model with or without an encoder cannot train on the sequences of the data."""
    if has_encoder and data.packing != CONCATENATED:
        why = (
            "the model has an encoder: each pair of a source and a target is a sequence of its own"
        )
        raise usage_error(f"`data.packing` is {format_value(data.packing)}", why, "remove it")
    if data.overlong != WHOLE_TOKENS and (has_encoder or data.type not in DEFAULT_FIELDS):
        why = "files of this type have no records, whose tokens can be cut"
        if has_encoder:
            why = "the model has an encoder: sources and targets are truncated"
        raise usage_error(f"`data.overlong` is {format_value(data.overlong)}", why, "remove it")
    if data.objective == SPAN_CORRUPTION and not has_encoder:
        why = "the model has no encoder to read the text without the spans"
        raise usage_error(
            f"`data.objective` is {format_value(data.objective)}",
            why,
            "remove it, or take a T5 model",
        )


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
        if key == "offline":
            is_valid = isinstance(value, bool)
        elif key == "tags":
            is_valid = isinstance(value, list) and all(map(_is_tag, value))
        else:
            is_valid = isinstance(value, str) and bool(value)
        if not is_valid:
            tags = f"a list of texts of 1 to {MAX_TAG_CHARS} characters"
            kind = {"tags": tags, "offline": "true or false"}.get(key, "text")
            raise usage_error(
                f"`{key}` in `{WANDB_KEY}` is {value!r:.60}", f"it takes {kind}", f"change `{key}`"
            )
    if "project" not in table:
        raise usage_error(
            f"`{WANDB_KEY}` has no `project`", "W&B groups runs by project", '`project = "NAME"`'
        )


def _is_tag(value: object) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= MAX_TAG_CHARS
