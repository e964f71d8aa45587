"""What the keys of a recipe say about one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trainer.models import mesh
from trainer.models.errors import PrepError
from trainer.recipe.batching import schedule_of
from trainer.recipe.spelling import example, shown
from trainer.recipe.tables import KEYS, Recipe, value_of
from trainer.recipe.text_fields import parse

MAX_INT, MAX_FLOAT = 2**31 - 1, 3.4e38  # steps and lengths are int32 on devices, numbers of the optimizer float32
ON_DEVICES = ("train.steps", "train.max_skipped", "data.seq_length", "data.source_length", "model.head_chunk_size")
SOURCE_KEYS = ("data.source_length", "data.source_prefix")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a recipe. `keys`: those at fault; the first one that was given is shown."""

    keys: tuple[str, ...]
    what: str
    why: str
    hint: str


def problems(recipe: Recipe) -> Iterator[Problem]:
    """All that is wrong with a recipe whose keys are each right by themselves."""
    yield from _raised(lambda: mesh.parse(recipe.mesh, origin="mesh"), "mesh")
    yield from _overflows(recipe)
    yield from _fields(recipe)
    yield from _sources(recipe)
    yield from _batch(recipe)
    yield from _lengths(recipe)
    yield from _evaluation(recipe)
    yield from _schedule(recipe)


def _overflows(recipe: Recipe) -> Iterator[Problem]:
    """Numbers that the dtypes of a step cannot hold."""
    for key in KEYS:
        value = value_of(recipe, key)
        if not isinstance(value, int | float) or not (key in ON_DEVICES or key.startswith(("batch.", "optimizer."))):
            continue
        most = MAX_INT if isinstance(value, int) else MAX_FLOAT
        if value > most:
            what = f"`{key}` is {shown(value)}"
            yield Problem((key,), what, f"it is too large: the most is {most:,}", f"`{key} = {example(KEYS[key])}`")


def _raised(work: Callable[[], object], *keys: str) -> Iterator[Problem]:
    try:
        work()
    except PrepError as error:
        yield Problem(keys, error.what, error.why, error.hint)


def _fields(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.type == "text" and recipe.data.fields is not None:
        what = f"`data.fields` is {shown(recipe.data.fields)}"
        yield Problem(
            ("data.fields",), what, "it names the text in an object, and `data.type` is text", '`type = "json"`'
        )
        return
    yield from _raised(lambda: parse(recipe.data.fields or ""), "data.fields")


def _sources(recipe: Recipe) -> Iterator[Problem]:
    """Lengths and prefixes of sources that there are, and of no others."""
    data, given = recipe.data, [key for key in SOURCE_KEYS if value_of(recipe, key) is not None]
    try:
        has_source = data.type == "json" and bool(parse(data.fields or "").source)
    except PrepError:
        return
    if has_source and data.source_length is None:
        why = f"`data.fields` has a source: {shown(data.fields)}"
        yield Problem(("data.fields",), "`data.source_length` is missing", why, "`source_length = 512` in [data]")
    for key in given if not has_source else ():
        why = "nothing in `data.fields` stands in brackets, which would be read by an encoder"
        yield Problem((key,), f"`{key}` is {shown(value_of(recipe, key))}", why, '`fields = "[article], summary"`')


def _batch(recipe: Recipe) -> Iterator[Problem]:
    batch = recipe.batch
    micro = [key for key in ("batch.per_device", "batch.per_replica") if value_of(recipe, key)]
    if len(micro) == 2:
        yield _both(recipe, "batch.per_device", "batch.per_replica", "each says what a micro-batch is")
    elif not micro and not batch.size:
        why = "none of size, per_device and per_replica is given"
        yield Problem(("batch",), "`batch` does not say how many sequences a step has", why, "`size = 32` in [batch]")
    elif micro and batch.size and batch.accumulate:
        why = f"size and {micro[0].partition('.')[2]} say it already"
        yield Problem(("batch.accumulate",), f"`batch.accumulate` is {batch.accumulate}", why, "two of the three")


def _lengths(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.steps and recipe.train.epochs:
        yield _both(recipe, "train.steps", "train.epochs", "each says how long the run is")
    elif not recipe.train.steps and not recipe.train.epochs:
        why = "neither steps nor epochs is given"
        yield Problem(("train",), "`train` does not say how long the run is", why, "`steps = 1000` in [train]")


def _evaluation(recipe: Recipe) -> Iterator[Problem]:
    if recipe.data.holdout and recipe.data.eval_path:
        yield _both(recipe, "data.holdout", "data.eval_path", "each says what validates")
    for key in ("train.eval_every", "eval.limit"):
        if value_of(recipe, key) and not recipe.data.holdout and not recipe.data.eval_path:
            what = f"`{key}` is {value_of(recipe, key)}"
            yield Problem((key,), what, "nothing validates: no holdout and no eval_path", "`holdout = 0.05` in [data]")


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    optimizer = recipe.optimizer
    if optimizer.warmup_steps is not None and optimizer.warmup_ratio is not None:
        yield _both(recipe, "optimizer.warmup_steps", "optimizer.warmup_ratio", "each says how long warm-up is")
        return
    n_steps = recipe.train.steps or (optimizer.decay_steps if optimizer.warmup_ratio is None else None)
    if n_steps:  # a run of epochs may have to be asked again when the data is known
        warmup = ("optimizer.warmup_steps", "optimizer.warmup_ratio")
        yield from _raised(lambda: schedule_of(optimizer, n_steps), *warmup)


def _both(recipe: Recipe, first: str, second: str, why: str) -> Problem:
    values = " and ".join(f"`{key}` is {shown(value_of(recipe, key))}" for key in (first, second))
    return Problem((second, first), values, f"{why}, and only one can", "take one of them out")
