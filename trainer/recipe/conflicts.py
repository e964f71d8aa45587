"""Conflicts of recipe keys: a table of rows, and checks of the values that have a grammar of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from functools import partial
from typing import NamedTuple

from prepcli.core.errors import Key, PrepError, text, usage_error
from prepcli.models.activation_memory import check_remat
from prepcli.models.attention_kernels import check_saved_scores
from prepcli.models.layer_config import DROPOUT_KEY, FCM_KEY, check_dropout_table, check_fcm_ratio
from prepcli.models.lora_config import MAX_ALPHA
from prepcli.models.mesh import DCN_KEY, check_slices, parse_mesh, parse_slice_counts
from prepcli.models.param_tree import PATTERN_KEYS, check_regular_expressions
from prepcli.models.rope_config import MAX_FLOAT32
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
from trainer.recipe.key_types import MAX_INT32, format_value, parse_table, to_toml
from trainer.recipe.lr_schedule import DECAYS, build_lr_schedule
from trainer.recipe.model_table import SCALING_KEY, THETA_KEY, Lora, check_rope_scaling
from trainer.recipe.tables import (
    EVAL_METRICS,
    KEY_SCHEMAS,
    Profile,
    Recipe,
    WandbRun,
    example_line,
    keys_of,
    value_of,
)
from trainer.recipe.text_fields import (
    AUTO,
    CHAT_FORMATS,
    DEFAULT_FIELDS,
    FORMAT_FIELDS,
    PLAIN,
    TRAINING,
    parse_fields,
)

# The numbers of the optimizer are float32: smaller ones are 0, and larger ones below 1 are 1. With `eps = 0` or
# `b2 = 1`, AdamW divides 0 by 0.
MIN_FLOAT32 = 1.2e-38
MAX_BELOW_1 = 0.99999994
INT32_KEYS = (
    *("train.steps", "train.max_skipped", "data.seq_length", "data.source_length"),
    "model.max_position_embeddings",
    *(f"model.{name}_chunk_size" for name in ("head", "ffn", "q", "k")),
)
REPOSITORY = re.compile(r"[^\s/@]+/[^\s/@]+(@[^\s@]+)?")
# Keys with a table as their value, whose keys a model describes.
NESTED_TABLES = {"log.wandb": WandbRun, "train.profile": Profile}
# Settings of adapters besides their rank
LORA_KEYS = tuple(f"lora.{name}" for name in Lora.model_fields if name not in ("rank", "path"))
NOISE_KEYS = ("data.noise_density", "data.mean_noise_span_length")
# Keys of records with columns
COLUMN_KEYS = (
    *("data.fields", "data.fields_from_example"),
    *("data.format", "data.subfield_separator"),
)
CHAT_KEYS = (
    *("data.chat_template", "data.template_args", "data.template_date"),
    *("data.loss", "data.loss_reasoning"),
)
# Keys whose values a chat template gets as JSON.
JSON_KEYS = ("data.template_args", "log.samples")
# Pairs of keys that set the same thing
SAME_MEANING = {
    "batch.per_device & batch.per_replica": "the size of a micro-batch",
    "train.steps & train.epochs": "the length of the run",
    "train.eval_every & train.eval_every_epochs": "the same interval",
    "checkpoint.every & checkpoint.every_epochs": "the same interval",
    "data.holdout & data.eval_path": "the evaluation data",
    "data.holdout & data.eval_split": "the evaluation data",
    "optimizer.warmup_steps & optimizer.warmup_ratio": "the length of warm-up",
}
REMOVE_IT = "remove it"
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
    fix: str  # How to fix it, or a key that does, which is shown with its example
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
                hint = example_line(row.fix) if row.fix in KEY_SCHEMAS else row.fix
                yield Problem(tuple(reversed(group)), what, row.why, hint)


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


def _keys(names: Iterable[str], table: str = "") -> str:
    """Return keys, or names of keys in a table, as a row has them."""
    return " ".join(f"{table}{name}" for name in names)


def _run_rows(recipe: Recipe) -> Rows:
    """Yield the rows of mesh, batch, length, checkpoints and logs."""
    batch = recipe.batch
    train = recipe.train
    checkpoint = recipe.checkpoint
    yield ValueCheck("mesh", lambda: parse_mesh(recipe.mesh, Key("mesh")))
    yield ValueCheck(DCN_KEY, lambda: _check_dcn_mesh(recipe))
    yield ValueCheck("rules", lambda: merge_rules(recipe.rules or (), origin=Key("rules")))
    for key, model in NESTED_TABLES.items():
        table = value_of(recipe, key)
        if table is not None:
            yield ValueCheck(key, partial(parse_table, model, table, f"`{key}`"))
    for key in JSON_KEYS:
        yield ValueCheck(key, partial(_check_json_values, key, value_of(recipe, key)))
    for keys, meaning in SAME_MEANING.items():
        yield Conflict(keys, True, f"both set {meaning}", REMOVE_ONE)
    micro_keys = [name for name in ("per_device", "per_replica") if getattr(batch, name)]
    why = f"`size` and `{''.join(micro_keys)}` already determine it"
    is_determined = batch.size and len(micro_keys) == 1
    yield Conflict("batch.accumulate", is_determined, why, "remove one of the three")
    what = "`batch` does not set the sequences per step"
    why = "none of `size`, `per_device` and `per_replica` is set"
    has_size = batch.size or micro_keys
    yield Conflict("batch", not has_size, why, "batch.size", what)
    what = "`train` does not set the length of the run"
    why = "neither `steps` nor `epochs` is set"
    has_length = train.steps or train.epochs
    yield Conflict("train", not has_length, why, "train.steps", what)
    dtype = recipe.model.param_dtype
    is_resumed = checkpoint.optimizer_state and checkpoint.dtype != dtype
    why = f"to resume with its optimizer state, a run needs saved {dtype} parameters"
    hint = "`optimizer_state = false` in [checkpoint]"
    yield Conflict("checkpoint.dtype", is_resumed, why, hint)
    is_repository = REPOSITORY.fullmatch(checkpoint.push or "")
    why = "it has the form OWNER/NAME or OWNER/NAME@BRANCH"
    yield Conflict("checkpoint.push", not is_repository, why, "checkpoint.push")
    why = "there are no prompts: `log.samples` is not set"
    has_prompts = recipe.log.samples is not None
    yield Conflict("log.sample_every log.sample_tokens", not has_prompts, why, "log.samples")


def _evaluation_rows(recipe: Recipe) -> Rows:
    """Yield the rows of evaluations, and of the best step that they find."""
    has_data = has_eval_data(recipe.data)
    has_interval = recipe.train.eval_every or recipe.train.eval_every_epochs is not None
    best = recipe.checkpoint.best
    best_is = recipe.checkpoint.best_is
    why = "there is no evaluation data: neither `holdout` nor `eval_path` is set"
    keys = "train.eval_every train.eval_every_epochs eval.limit checkpoint.best eval.patience"
    yield Conflict(keys, not has_data, why, "data.holdout")
    yield Conflict("eval.at_start", not has_data and recipe.eval.at_start, why, "data.holdout")
    why = "the run evaluates only after its last step"
    is_late = has_data and not has_interval
    yield Conflict("checkpoint.best eval.patience", is_late, why, "train.eval_every")
    why = "`checkpoint.best` is not set"
    yield Conflict("checkpoint.best_is", best is None, why, "checkpoint.best")
    direction = EVAL_METRICS.get(best or "")
    why = "whether its lowest or its highest value is the best is missing"
    hint = '`best_is = "highest"` or `best_is = "lowest"` in [checkpoint]'
    yield Conflict("checkpoint.best", direction is None and best_is is None, why, hint)
    is_other = direction is not None and direction != best_is
    yield Conflict("checkpoint.best_is", is_other, f"the {direction} {best} is the best", REMOVE_IT)
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
    yield Conflict("model.init", lacks_config, why, "model.preset", what)
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
    keys = _keys(key for key in LORA_KEYS if key != "lora.base_dtype")
    why = f"`lora.path` is {format_value(lora.path)}, and the adapter has its own"
    yield Conflict(f"lora.rank {keys}", lora.path is not None, why, REMOVE_IT)
    is_empty = not lora.targets and not lora.target_parameters
    yield Conflict("lora.targets", is_empty, "no projection has an adapter", REMOVE_IT)
    why = "`lora.target_parameters` is set, and PEFT has no dropout for experts in one tensor"
    yield Conflict("lora.dropout", lora.target_parameters, why, REMOVE_ONE)
    why = f"an alpha is at least {1 / MAX_ALPHA:g} and at most {MAX_ALPHA:g}"
    for key, alphas in (
        ("lora.alpha", [lora.alpha or 1.0]),
        ("lora.alpha_pattern", lora.alpha_pattern.values()),
    ):
        is_outside = not all(1 / MAX_ALPHA <= alpha <= MAX_ALPHA for alpha in alphas)
        yield Conflict(key, is_outside, why, "lora.alpha")
    what = "`lora` needs a checkpoint"
    why = "adapters are trained for a checkpoint, and `model.init` is random"
    hint = "remove [lora], or set `model.path`"
    key = "lora.rank" if _is_set(recipe, "lora.rank") else "lora.path"
    yield Conflict(key, recipe.model.is_random, why, hint, what)
    why = "the adapters have moments of their own, which the checkpoint lacks"
    yield Conflict("model.training_state", lora.is_enabled, why, "remove [lora] or the key")
    changed = _keys([key for key in LORA_KEYS if _is_set(recipe, key)][:1])
    why = "there are no adapters: `lora.rank` is 0"
    yield Conflict(changed, not lora.is_enabled, why, "lora.rank")


def _optimizer_rows(recipe: Recipe) -> Rows:
    """Yield the rows of the learning rate, its schedule, and patterns of leaves."""
    table = recipe.optimizer
    warmup_keys = "optimizer.warmup_steps optimizer.warmup_ratio"
    yield ValueCheck(warmup_keys, lambda: _check_schedule(recipe))
    for kind, decay in DECAYS.items():
        why = f"`optimizer.schedule` is {table.schedule}"
        hint = f"`schedule = {format_value(kind)}` in [optimizer]"
        yield Conflict(_keys(decay.keys, "optimizer."), table.schedule != kind, why, hint)
    is_straight = table.schedule == "wsd" and table.cooldown_shape != "cosine"
    why = f"`optimizer.cooldown_shape` is {table.cooldown_shape or 'linear'}"
    hint = '`cooldown_shape = "cosine"` in [optimizer]'
    yield Conflict("optimizer.cooldown_waves", is_straight, why, hint)
    lacks_cycles = table.schedule == "cosine_restarts" and table.cycles is None
    why = "the number of cosines is missing"
    yield Conflict("optimizer.schedule", lacks_cycles, why, "optimizer.cycles")
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
    # The recipes that earlier versions kept with a run have the format `text` for all types.
    keys = _keys(key for key in COLUMN_KEYS if getattr(data, key.removeprefix("data.")) != PLAIN)
    why = f"it is for columns of json objects, but `data.type` is {data.type}"
    yield Conflict(keys, not has_columns, why, text("{}", Key("data.type", "json")))
    has_fields_twice = has_columns and from_example is not None
    why = f"`data.fields_from_example` is {format_value(from_example)}"
    yield Conflict("data.fields", has_fields_twice, why, REMOVE_ONE)
    has_format_twice = has_fields_twice and data.format in FORMAT_FIELDS
    yield Conflict("data.format", has_format_twice, why, REMOVE_ONE)
    may_lack_source = from_example is None and not data.has_auto_shape
    has_list = has_columns and may_lack_source and data.format not in CHAT_FORMATS
    if has_list:
        yield ValueCheck("data.fields", lambda: parse_fields(data.fields or ""))
    corrupts_spans = data.objective == SPAN_CORRUPTION
    lacks_source = may_lack_source and not (has_list and _may_have_source(data.fields or ""))
    why = "`data.fields` has no source in brackets"
    hint = text("{}", Key("data.fields", "[article], summary"))
    # Span corruption makes sources from the text itself, and needs their length.
    yield Conflict("data.source_length", lacks_source and not corrupts_spans, why, hint)
    yield Conflict("data.source_prefix", lacks_source, why, hint)
    why = f"`data.objective` is {data.objective}"
    hint = text("{}", Key("data.objective", SPAN_CORRUPTION))
    yield Conflict(_keys(NOISE_KEYS), not corrupts_spans, why, hint)
    if not corrupts_spans:
        return
    keys = f"data.source_length data.seq_length {_keys(NOISE_KEYS)}"
    yield ValueCheck(keys, lambda: recipe_span_sizes(data))
    why = "span corruption takes blocks of concatenated text"
    keys = "data.fields_from_example data.packing data.always_start_with_bos"
    yield Conflict(keys, True, why, REMOVE_IT)
    yield Conflict("data.format", data.format != PLAIN, why, REMOVE_IT)
    yield Conflict("data.fields", "[" in (data.fields or ""), why, REMOVE_IT)


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


def chat_problems(data: Data, *, is_only: bool = True) -> Iterator[Problem]:
    """Yield keys that do not fit conversations, and keys of conversations for other data.

    Args:
        data: Data of one source. Any of it may be found by its columns, if it names no format.
        is_only: Whether it is the only source. In a mixture the keys may be meant for another one.
    """
    if data.format != AUTO:
        yield from _problems(_chat_rows(data, is_only), Recipe.model_construct(data=data))


def _chat_rows(data: Data, is_only: bool) -> Rows:
    """Yield the rows of conversations in data with a known format."""
    is_chat = data.format in CHAT_FORMATS
    why = f"there are no conversations: `data.format` is {data.format}"
    yield Conflict(_keys(CHAT_KEYS), is_only and not is_chat, why, REMOVE_IT)
    has_template = is_chat and data.type in DEFAULT_FIELDS and data.fields_from_example is None
    why = f"`data.format` is {data.format}, and its template makes the text"
    yield Conflict("data.prepend_text data.subfield_separator", has_template, why, REMOVE_IT)
    # The loss of turns that TRAINING can find
    is_other = data.chat_template == TRAINING and data.loss not in (("assistant",), ("last",))
    why = "`data.chat_template` is training, which finds the turns of the assistant only"
    hint = '`loss = "assistant"` or `loss = "last"` in [data]'
    yield Conflict("data.loss", is_chat and is_other, why, hint)


def check_model_fit(data: Data, *, has_encoder: bool) -> None:
    """Raise UsageError if a model with or without an encoder cannot train on the sequences of the data."""
    for problem in _problems(_encoder_rows(data, has_encoder), Recipe.model_construct(data=data)):
        raise usage_error(problem.what, problem.why, problem.hint)


def _encoder_rows(data: Data, has_encoder: bool) -> Rows:
    """Yield the rows of data for a model with or without an encoder."""
    why = "the model has an encoder: each pair of a source and a target is a sequence of its own"
    yield Conflict("data.packing", has_encoder, why, REMOVE_IT)
    why = "the model has an encoder: sources and targets are truncated"
    yield Conflict("data.overlong", has_encoder, why, REMOVE_IT)
    why = "files of this type have no records, whose tokens can be cut"
    yield Conflict("data.overlong", data.type not in DEFAULT_FIELDS, why, REMOVE_IT)
    why = "the model has no encoder to read the text without the spans"
    yield Conflict("data.objective", not has_encoder, why, "remove it, or take a T5 model")
    lacks_length = has_encoder and data.source_length is None
    has_source = data.fields_from_example is not None
    if lacks_length and not has_source and data.fields is not None:
        has_source = bool(parse_fields(data.fields).source)
    what = "`data.source_length` is missing"
    why = "the model has an encoder, which reads at most that number of tokens of a source"
    hint = text("{}", Key("data.source_length", 512))
    yield Conflict("data", lacks_length and has_source, why, hint, what)


def _overflow_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yield numbers that are too large or too small for int32 or float32."""
    for key in keys_of(recipe):
        value = value_of(recipe, key)
        is_computed = key in INT32_KEYS or key.startswith(("batch.", "optimizer.", "loss."))
        if not is_computed or not isinstance(value, int | float):
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
            yield Problem((key,), _value_text(recipe, key), why, example_line(key))


# --- Checks of values


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
            hint = f"quote it: `{to_toml(str(item))}`"
            raise usage_error(f"`{key}` has {to_toml(item)}", why, hint)
