"""What the keys of a recipe say about one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.models import mesh
from trainer.models.errors import PrepError
from trainer.recipe.formatting import example_value, format_value
from trainer.recipe.resolve import warmup_decay
from trainer.recipe.tables import KEY_SCHEMAS, Recipe, value_of
from trainer.recipe.text_fields import parse_fields

MAX_INT32, MAX_FLOAT32 = 2**31 - 1, 3.4e38  # steps and lengths are int32 on devices, numbers of the optimizer float32
INT32_KEYS = ("train.steps", "train.max_skipped", "data.seq_length", "data.source_length", "model.head_chunk_size")
SOURCE_KEYS = ("data.source_length", "data.source_prefix")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a recipe. `keys`: those at fault; the first one that was given is shown."""

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


def find_problems(recipe: Recipe) -> Iterator[Problem]:
    """All that is wrong with a recipe whose keys are each right by themselves."""
    yield from _problem_if_raised(lambda: mesh.parse_mesh(recipe.mesh, origin="mesh"), "mesh")
    yield from _overflow_problems(recipe)
    yield from _field_problems(recipe)
    yield from _source_problems(recipe)
    yield from _batch_problems(recipe)
    yield from _run_length_problems(recipe)
    yield from _evaluation_problems(recipe)
    yield from _schedule_problems(recipe)


def _overflow_problems(recipe: Recipe) -> Iterator[Problem]:
    """Numbers that the dtypes of a step cannot hold."""
    for key in KEY_SCHEMAS:
        value = value_of(recipe, key)
        if not isinstance(value, int | float) or not (key in INT32_KEYS or key.startswith(("batch.", "optimizer."))):
            continue
        most = MAX_INT32 if isinstance(value, int) else MAX_FLOAT32
        if value > most:
            what = f"`{key}` is {format_value(value)}"
            yield Problem(
                (key,), what, f"it is too large: the most is {most:,}", f"`{key} = {example_value(KEY_SCHEMAS[key])}`"
            )


def _problem_if_raised(check: Callable[[], object], *keys: str) -> Iterator[Problem]:
    try:
        check()
    except PrepError as error:
        yield Problem(keys, error.what, error.why, error.hint)


def _field_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.type == "text" and recipe.data.fields is not None:
        what = f"`data.fields` is {format_value(recipe.data.fields)}"
        yield Problem(
            ("data.fields",), what, "it names the text in an object, and `data.type` is text", '`type = "json"`'
        )
        return
    yield from _problem_if_raised(lambda: parse_fields(recipe.data.fields or ""), "data.fields")


def _source_problems(recipe: Recipe) -> Iterator[Problem]:
    """Lengths and prefixes of sources that there are, and of no others."""
    data, given = recipe.data, [key for key in SOURCE_KEYS if value_of(recipe, key) is not None]
    try:
        has_source = data.type == "json" and bool(parse_fields(data.fields or "").source)
    except PrepError:
        return
    if has_source and data.source_length is None:
        why = f"`data.fields` has a source: {format_value(data.fields)}"
        yield Problem(("data.fields",), "`data.source_length` is missing", why, "`source_length = 512` in [data]")
    for key in given if not has_source else ():
        why = "nothing in `data.fields` stands in brackets, which would be read by an encoder"
        yield Problem(
            (key,), f"`{key}` is {format_value(value_of(recipe, key))}", why, '`fields = "[article], summary"`'
        )


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    micro = [key for key in ("batch.per_device", "batch.per_replica") if value_of(recipe, key)]
    if len(micro) == 2:
        yield _exclusive_keys(recipe, "batch.per_device", "batch.per_replica", "each says what a micro-batch is")
    elif not micro and not batch.size:
        why = "none of size, per_device and per_replica is given"
        yield Problem(("batch",), "`batch` does not say how many sequences a step has", why, "`size = 32` in [batch]")
    elif micro and batch.size and batch.accumulate:
        why = f"size and {micro[0].partition('.')[2]} say it already"
        yield Problem(("batch.accumulate",), f"`batch.accumulate` is {batch.accumulate}", why, "two of the three")


def _run_length_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.steps and recipe.train.epochs:
        yield _exclusive_keys(recipe, "train.steps", "train.epochs", "each says how long the run is")
    elif not recipe.train.steps and not recipe.train.epochs:
        why = "neither steps nor epochs is given"
        yield Problem(("train",), "`train` does not say how long the run is", why, "`steps = 1000` in [train]")


def _evaluation_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.holdout and recipe.data.eval_path:
        yield _exclusive_keys(recipe, "data.holdout", "data.eval_path", "each says what validates")
    for key in ("train.eval_every", "eval.limit"):
        if value_of(recipe, key) and not recipe.data.holdout and not recipe.data.eval_path:
            what = f"`{key}` is {value_of(recipe, key)}"
            yield Problem((key,), what, "nothing validates: no holdout and no eval_path", "`holdout = 0.05` in [data]")


def _schedule_problems(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if optimizer.warmup_steps is not None and optimizer.warmup_ratio is not None:
        yield _exclusive_keys(
            recipe, "optimizer.warmup_steps", "optimizer.warmup_ratio", "each says how long warm-up is"
        )
        return
    n_steps = recipe.train.steps or (optimizer.decay_steps if optimizer.warmup_ratio is None else None)
    if n_steps:  # a run of epochs may have to be asked again when the data is known
        warmup = ("optimizer.warmup_steps", "optimizer.warmup_ratio")
        yield from _problem_if_raised(lambda: warmup_decay(optimizer, n_steps), *warmup)


def _exclusive_keys(recipe: Recipe, first: str, second: str, why: str) -> Problem:
    values = " and ".join(f"`{key}` is {format_value(value_of(recipe, key))}" for key in (first, second))
    return Problem((second, first), values, f"{why}, and only one can", "take one of them out")
