"""Tables of recipes: schedules, optimizers, data sources and fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.planning.manifest_fields import ScheduleRecord
from trainer.recipe import BatchShape, batch_shape, load_recipe, recipe_to_toml
from trainer.recipe.key_types import describe_type
from trainer.recipe.lr_schedule import (
    DECAYS,
    LRSchedule,
    RampShape,
    ScheduleKind,
    build_lr_schedule,
    rate_at_step,
)
from trainer.recipe.optimizer_tables import (
    OPTIMIZER_TABLES,
    AdamWTable,
    PalmTable,
)
from trainer.recipe.tables import KEY_SCHEMAS, Batch, Recipe, keys_of
from trainer.recipe.text_fields import (
    Field,
    TextField,
    TokenField,
    TokenIdsField,
    parse_fields,
)

# Batch shape and learning rate schedule of a recipe.


def batch(**keys: int) -> Batch:
    """Return the `[batch]` table of a recipe."""
    return Batch.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "n_devices", "n_replicas", "shape"),
    [
        ({"size": 24}, 8, 1, (24, 1)),
        # `per_device` counts all devices, although dp is 1.
        ({"per_device": 3}, 8, 1, (24, 1)),
        ({"per_replica": 4}, 16, 2, (8, 1)),
        # This is the batch of redco on one node.
        ({"size": 8, "per_replica": 4}, 8, 1, (8, 2)),
        ({"size": 64, "per_device": 2}, 8, 4, (64, 4)),
        ({"size": 64, "accumulate": 4}, 8, 8, (64, 4)),
        ({"per_device": 2, "accumulate": 3}, 8, 4, (48, 3)),
    ],
)
def test_batch_shape_resolves_rows_and_accumulation(
    keys: dict[str, int], n_devices: int, n_replicas: int, shape: tuple[int, int]
):
    resolved = batch_shape(batch(**keys), n_devices=n_devices, n_replicas=n_replicas)
    assert (resolved.size, resolved.accumulate, resolved.micro_batch_size) == (
        *shape,
        shape[0] // shape[1],
    )


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"size": 24, "per_device": 5},
            "`batch.size` 24 is not a whole number of micro-batches - per_device 5 x 8 devices = 40; 24 mod 40 = 24"
            " - `--set batch.size=40`",
        ),
        (
            {"size": 10, "per_replica": 1},
            "`batch.size` 10 is not a whole number of micro-batches - per_replica 1 x 4 replicas = 4; 10 mod 4 = 2"
            " - `--set batch.size=12`",
        ),
        (
            {"size": 10, "accumulate": 4},
            "`batch.size` 10 is not a whole number of micro-batches - accumulate is 4; 10 mod 4 = 2"
            " - `--set batch.size=16`",
        ),
        (
            {"size": 24, "accumulate": 4},
            "a micro-batch of 6 does not divide among 4 replicas - `batch.size` 24 / accumulate 4 = 6; 6 mod 4 = 2"
            " - `--set batch.size=32`",
        ),
    ],
)
def test_batch_shape_rejects_indivisible_batch(keys: dict[str, int], text: str):
    with pytest.raises(PrepError) as caught:
        batch_shape(batch(**keys), n_devices=8, n_replicas=4)
    assert text in caught.value.message
    assert caught.value.code == USAGE


COUNTS = st.integers(1, 6)


@given(COUNTS, COUNTS, COUNTS, COUNTS, st.sampled_from(["size", "accumulate"]))
def test_batch_shape_computes_the_third_key(
    mp: int, replicas: int, micro: int, accumulate: int, third: str
):
    size = micro * mp * replicas * accumulate
    second_key = {"accumulate": accumulate} if third == "size" else {"size": size}
    expected = BatchShape(size, accumulate)
    assert (
        batch_shape(
            batch(per_device=micro, **second_key), n_devices=mp * replicas, n_replicas=replicas
        )
        == expected
    )
    assert (
        batch_shape(
            batch(per_replica=micro * mp, **second_key),
            n_devices=mp * replicas,
            n_replicas=replicas,
        )
        == expected
    )


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 6))
def test_batch_shape_hint_is_valid(size: int, accumulate: int, replicas: int):
    try:
        batch_shape(
            batch(size=size, accumulate=accumulate), n_devices=replicas, n_replicas=replicas
        )
    except PrepError as error:
        (better,) = map(int, re.findall(r"size=(\d+)`", error.hint))
        assert better > size
        assert (
            batch_shape(
                batch(size=better, accumulate=accumulate), n_devices=replicas, n_replicas=replicas
            ).size
            == better
        )
    else:
        assert size % (accumulate * replicas) == 0


@pytest.mark.parametrize(
    ("keys", "warmup", "decay"),
    [
        ({}, 0, 1000),
        ({"warmup_steps": 10}, 10, 1000),
        ({"warmup_ratio": 0.07}, 70, 1000),
        ({"warmup_ratio": 0.1, "decay_steps": 200}, 100, 200),
        ({"warmup_steps": 2000, "schedule": "constant"}, 2000, 1000),
    ],
)
def test_schedule_has_steps_of_both_phases(keys: dict[str, Any], warmup: int, decay: int):
    schedule = build_lr_schedule(AdamWTable.model_validate({"lr": 1.0, **keys}), 1000)
    assert (schedule.warmup, schedule.decay, schedule.cooldown) == (warmup, decay, 0)


def test_warmup_as_long_as_the_run_is_rejected():
    with pytest.raises(
        PrepError, match="warm-up takes the first 1000 steps, and the run has 1000 steps"
    ):
        build_lr_schedule(AdamWTable.model_validate({"lr": 1.0, "warmup_ratio": 1.0}), 1000)


# The tagged union of optimizers in a recipe.

TABLES = {
    "model": {"path": "tiny-init"},
    "data": {"type": "text", "path": "train.txt", "seq_length": 8},
    "batch": {"size": 4},
    "train": {"steps": 20},
}


def make_recipe(**optimizer: object) -> Recipe:
    """Return a small recipe with an optimizer."""
    return Recipe.model_validate(
        {"name": "small", **TABLES, "optimizer": {"lr": 1e-3, **optimizer}}
    )


def test_optimizer_type_defaults_to_adamw():
    assert make_recipe().optimizer == make_recipe(type="adamw").optimizer == AdamWTable(lr=1e-3)


def test_optimizer_tables_are_named_by_their_type():
    types = {name: table.model_fields["type"] for name, table in OPTIMIZER_TABLES.items()}
    assert {name: get_args(field.annotation) for name, field in types.items()} == {
        name: (name,) for name in types
    }
    assert [name for name, field in types.items() if not field.is_required()] == ["adamw"]


@pytest.mark.parametrize(
    ("value", "text"), [("adam", '"adam"'), (3, '"3"'), (["adamw"], '["adamw"]')]
)
def test_unknown_optimizer_is_reported_with_other_errors(tmp_path: Path, value: object, text: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(PrepError) as caught:
        load_recipe(path, [f"optimizer.type={value}", "optimizer.lr=0", "optimizer.b1=2"])
    lines = caught.value.why.splitlines()
    assert len(lines) == 3
    (line,) = (line for line in lines if "`optimizer.type`" in line)
    assert line.startswith(
        f'`--set`: `optimizer.type` is {text} - it takes "adamw", "adafactor", "lion", '
    )


def test_type_lists_all_members_of_the_union():
    schema = KEY_SCHEMAS["optimizer.type"]
    assert describe_type(schema) == '"adamw", "adafactor", "lion", "muon", "sgd" or "palm"'
    assert (
        "`adamw`: Adam with decoupled weight decay. `adafactor`: second moments of row"
        in schema["description"]
    )
    assert schema.get("default") == "adamw"
    assert {
        "optimizer.weight_decay",
        "optimizer.momentum",
        "optimizer.update_rms",
    } <= KEY_SCHEMAS.keys()


def test_recipe_has_only_keys_of_its_optimizer():
    recipe = make_recipe(type="lion")
    missing = {*KEY_SCHEMAS} - {*keys_of(recipe)}
    names = (
        "eps",
        "momentum",
        "nesterov",
        "decay_rate",
        "factored",
        "min_factored_size",
        "clip_threshold",
    )
    others = (
        "scale_by_parameter",
        "scale_by",
        "newton_schulz_steps",
        "update_rms",
        "bias_correction",
    )
    assert missing == {f"optimizer.{name}" for name in (*names, *others)}
    assert "\neps" not in recipe_to_toml(recipe, {})


def test_palm_has_the_defaults_of_easylm():
    table = make_recipe(type="palm").optimizer
    assert isinstance(table, PalmTable)
    values = (
        table.lr,
        table.momentum,
        table.decay_rate,
        table.weight_decay,
        table.clip_norm,
        table.schedule,
    )
    assert values[1:] == (0.9, 0.99, 1e-4, 1.0, "rsqrt")
    assert PalmTable(type="palm").lr == 0.01
    assert build_lr_schedule(table, 20).warmup == 10_000


@pytest.mark.parametrize(
    ("optimizer", "key", "hint"),
    [
        ("lion", "eps=1e-8", "`eps` is a key of adamw, muon"),
        ("adamw", "momentum=0.9", "`momentum` is a key of adafactor, muon, sgd, palm"),
        ("sgd", "update_rms=0.1", "`update_rms` is a key of muon"),
    ],
)
def test_keys_of_other_optimizers_are_unknown(tmp_path: Path, optimizer: str, key: str, hint: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(type=optimizer), {}))
    with pytest.raises(
        PrepError, match=f"unknown key `optimizer.{key.partition('=')[0]}`"
    ) as caught:
        load_recipe(path, [f"optimizer.{key}"])
    assert hint in str(caught.value)


@pytest.mark.parametrize("key", ["freeze", "decay_exclude", "decay_include"])
def test_invalid_patterns_are_reported(tmp_path: Path, key: str):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(PrepError, match=f"`optimizer.{key}` has the invalid pattern `re:\\(`"):
        load_recipe(path, [f"optimizer.{key}=re:("])


def test_loss_scale_needs_float16(tmp_path: Path):
    path = tmp_path / "small.toml"
    path.write_text(recipe_to_toml(make_recipe(), {}))
    with pytest.raises(
        PrepError,
        match=r"`optimizer\.loss_scale` is 64\.0 - `model\.dtype` is float32, which needs none",
    ):
        load_recipe(path, ["optimizer.loss_scale=64.0"])
    assert (
        load_recipe(
            path, ["optimizer.loss_scale=dynamic", "model.dtype=float16"]
        ).recipe.model.dtype
        == "float16"
    )


# Tests of the learning rate schedule against optax and transformers.


def learning_rates(schedule: LRSchedule, *steps: int) -> list[float]:
    """Return the learning rate of each step."""
    return [float(schedule.learning_rate(jnp.int32(step))) for step in steps]


def test_each_schedule_of_recipes_has_a_decay():
    assert list(DECAYS) == [*get_args(ScheduleKind)]


def test_manifest_has_a_type_for_each_field_of_a_schedule():
    assert {*ScheduleRecord.__annotations__} == {*LRSchedule.__dataclass_fields__}


def test_cosine_schedule_matches_optax():
    schedule = LRSchedule(1e-2, 1e-3, "cosine", 2000, 500_000)
    optax_schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2000, 500_000, 1e-3)
    steps = (0, 1, 1000, 2000, 251_000, 500_000, 600_000)
    expected = [float(np.asarray(optax_schedule(step))) for step in steps]
    assert learning_rates(schedule, *steps) == pytest.approx(expected, rel=1e-4)
    expected = [0.0, 5e-6, 5e-3, 1e-2, 5.5e-3]
    assert learning_rates(schedule, 0, 1, 1000, 2000, 251_000) == pytest.approx(expected, rel=1e-3)


def test_linear_schedule_stays_at_its_end():
    schedule = LRSchedule(1.0, 0.2, "linear", 0, 10)
    assert learning_rates(schedule, 0, 5, 10, 11) == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_constant_schedule_stays_at_its_peak_after_warmup():
    schedule = LRSchedule(1.0, 0.5, "constant", 4, 8)
    assert learning_rates(schedule, 0, 2, 4, 8, 100) == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0])


def test_lr_schedule_fields_match_saved_manifests():
    """Runs compare it with the one in their checkpoints when they resume (FIXED_ON_RESUME)."""
    table = AdamWTable(lr=3e-4, end_lr=1e-5, schedule="cosine", warmup_ratio=0.03)
    expected = {"peak": 0.0003, "end": 1e-05, "kind": "cosine", "warmup": 30, "decay": 1000}
    assert build_lr_schedule(table, 1000).manifest_fields() == expected


def test_wsd_schedule_decays_in_a_tenth_of_the_steps():
    assert build_lr_schedule(AdamWTable(lr=1.0, schedule="wsd"), 50).cooldown == 5


def test_wsd_phases_must_not_overlap():
    table = AdamWTable(lr=1.0, schedule="wsd", warmup_steps=15, cooldown_steps=8)
    with pytest.raises(PrepError, match="warm-up and decay of `wsd` overlap") as caught:
        build_lr_schedule(table, 20)
    assert caught.value.hint == "`--set optimizer.cooldown_steps=5`"


def transformers_rates(name: str, n: int, **arguments: Any) -> list[float]:
    """Return the learning rates of a schedule of transformers for the peak 1, steps 0 to n - 1."""
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = getattr(optimization, name)(optimizer, **arguments)
    rates: list[float] = []
    for _ in range(n):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize(("warmup", "n", "cycles"), [(0, 30, 3), (7, 100, 1), (11, 487, 6)])
def test_cosine_restarts_equals_transformers(warmup: int, n: int, cycles: int):
    expected = transformers_rates(
        "get_cosine_with_hard_restarts_schedule_with_warmup",
        n + 5,
        num_warmup_steps=warmup,
        num_training_steps=n,
        num_cycles=cycles,
    )
    table = AdamWTable(lr=1.0, schedule="cosine_restarts", warmup_steps=warmup, cycles=cycles)
    assert_equal_rates(build_lr_schedule(table, n), expected)


@pytest.mark.parametrize("cooldown_shape", ["linear", "cosine", "1-sqrt"])
@pytest.mark.parametrize("warmup_shape", ["linear", "cosine", "1-sqrt"])
def test_wsd_equals_transformers(warmup_shape: RampShape, cooldown_shape: RampShape):
    expected = transformers_rates(
        "get_wsd_schedule",
        105,
        num_warmup_steps=11,
        num_decay_steps=37,
        num_training_steps=100,
        warmup_type=warmup_shape,
        decay_type=cooldown_shape,
        min_lr_ratio=0.1,
    )
    table = AdamWTable(
        lr=1.0,
        init_lr=0.1,
        end_lr=0.1,
        schedule="wsd",
        warmup_steps=11,
        cooldown_steps=37,
        warmup_shape=warmup_shape,
        cooldown_shape=cooldown_shape,
    )
    assert_equal_rates(build_lr_schedule(table, 100), expected)


def test_wsd_with_waves_equals_transformers():
    expected = transformers_rates(
        "get_wsd_schedule",
        45,
        num_warmup_steps=0,
        num_decay_steps=30,
        num_training_steps=40,
        num_cycles=1.25,
    )
    table = AdamWTable(
        lr=1.0, schedule="wsd", cooldown_steps=30, cooldown_shape="cosine", cooldown_waves=1.25
    )
    assert_equal_rates(build_lr_schedule(table, 40), expected)


def assert_equal_rates(schedule: LRSchedule, expected: list[float]) -> None:
    """Check the rates of all steps, in float32 in a training step and in float64 from the manifest."""
    steps = range(len(expected))
    assert learning_rates(schedule, *steps) == pytest.approx(expected, abs=5e-7)
    fields = schedule.manifest_fields()
    assert [rate_at_step(fields, step) for step in steps] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("warmup", [0, 3])
def test_rate_at_step_equals_the_rate_of_the_step(kind: ScheduleKind, warmup: int):
    schedule = LRSchedule(3e-4, 1e-5, kind, warmup, 20, initial=1e-6, cooldown=6)
    fields = schedule.manifest_fields()
    exact = [rate_at_step(fields, step) for step in range(25)]
    assert learning_rates(schedule, *range(25)) == pytest.approx(exact, rel=1e-6)


def test_rate_of_a_schedule_without_an_end_needs_no_fields_of_it():
    assert rate_at_step({"kind": "constant", "peak": 0.5, "unknown": "x"}, 7) == 0.5


def test_cycles_restart_where_float32_would_round_down():
    """1 / 49 in float32, 49 times, is less than 1."""
    schedule = LRSchedule(1.0, 0.0, "cosine_restarts", 0, 49 * 3, cycles=49)
    assert learning_rates(schedule, *range(0, 147, 3)) == [1.0] * 49


@pytest.mark.parametrize(
    ("cycles", "steps", "maximum"), [(21, 20, "20"), (2000, 2_000_000, "1073")]
)
def test_more_cycles_than_steps_are_an_error(cycles: int, steps: int, maximum: str):
    table = AdamWTable(lr=1.0, schedule="cosine_restarts", cycles=cycles)
    with pytest.raises(PrepError, match=r"`optimizer\.cycles` is") as caught:
        build_lr_schedule(table, steps)
    assert caught.value.hint == f"`--set optimizer.cycles={maximum}`"


def test_rsqrt_schedule_matches_t5():
    """The rate is 1 / sqrt(max(step, warm-up)) (arXiv:1910.10683). `init_lr` = `lr` keeps it constant in warm-up."""
    schedule = build_lr_schedule(
        AdamWTable(lr=0.01, init_lr=0.01, schedule="rsqrt", warmup_steps=10_000), 10**6
    )
    steps = (0, 1, 9_999, 10_000, 10_001, 40_000, 10**6)
    assert learning_rates(schedule, *steps) == pytest.approx(
        [1 / math.sqrt(max(s, 10_000)) for s in steps], rel=1e-6
    )


# Schedules of the systems whose jobs prep runs: keys, and the rate of step s of n as their code has it


def gpt_neo(s: int, n: int) -> float:
    """transformers-research-projects, run_clm_mp.py: linear to 4e-6 over 10 steps, then linear to 0."""
    return 4e-6 * s / 10 if s < 10 else 4e-6 * (1 - (s - 10) / (n - 10))


def llamabpt_adamw(s: int, n: int) -> float:
    """ringattention, tux/optimizers.py: cosine from 1e-4, after a warm-up from 1e-6; the decay includes the warm-up."""
    if s < 10:
        return 1e-6 + (1e-4 - 1e-6) * s / 10
    progress = min((s - 10) / (60 - 10), 1)
    return 1e-5 + (1e-4 - 1e-5) * (1 + math.cos(math.pi * progress)) / 2


def llamabpt_palm(s: int, n: int) -> float:
    """ringattention, tux/optimizers.py: relative to 0.01, with the inverse square root of the step."""
    return (0.005 / 0.01) / math.sqrt(max(s, 10))


def redco_cosine(s: int, n: int) -> float:
    """redco, deployers/utils.py: linear to 2e-5 over a tenth of the steps, then a cosine to 0."""
    warmup = n // 10
    return (
        2e-5 * s / warmup
        if s < warmup
        else 2e-5 * (1 + math.cos(math.pi * (s - warmup) / (n - warmup))) / 2
    )


GPT_NEO = AdamWTable(lr=4e-6, warmup_steps=10)

LLAMABPT = AdamWTable(
    lr=1e-4, init_lr=1e-6, end_lr=1e-5, schedule="cosine", warmup_steps=10, decay_steps=60
)

PALM = PalmTable(type="palm", lr=0.005, warmup_steps=10)

REDCO_COSINE = AdamWTable(lr=2e-5, warmup_ratio=0.1, schedule="cosine")


@pytest.mark.parametrize(
    ("table", "formula"),
    [
        (GPT_NEO, gpt_neo),
        (LLAMABPT, llamabpt_adamw),
        (PALM, llamabpt_palm),
        (REDCO_COSINE, redco_cosine),
    ],
)
def test_schedule_equals_formula_of_the_other_trainer(
    table: AdamWTable | PalmTable, formula: Callable[[int, int], float]
):
    n = 100
    schedule = build_lr_schedule(table, n)
    expected = [formula(step, n) for step in range(n)]
    assert learning_rates(schedule, *range(n)) == pytest.approx(expected, rel=2e-6, abs=1e-12)


# Parsing of `data.fields`.

NAMES = (
    st.text(st.characters(exclude_characters="[]{},+<|>"), min_size=1).map(str.strip).filter(bool)
)

FIELDS: st.SearchStrategy[Field] = st.one_of(
    st.lists(NAMES, min_size=1, max_size=3).map(lambda names: TextField(tuple(names))),
    NAMES.map(TokenIdsField),
    st.integers(0, 2**32).map(TokenField),
    st.sampled_from([TokenField("bos"), TokenField("eos")]),
)


def write(field: Field) -> str:
    """Return a field in the grammar."""
    if isinstance(field, TextField):
        return "+".join(field.columns)
    return f"{{{field.column}}}" if isinstance(field, TokenIdsField) else f"<|{field.token}|>"


@given(st.lists(st.tuples(FIELDS, st.booleans()), min_size=1), st.randoms())
def test_parse_fields_round_trips_formatted_fields(items: list[tuple[Field, bool]], random):
    items.append((TextField(("last", "target")), False))
    texts = [
        f"[ {write(field)} ]" if is_bracketed else f"  {write(field)}"
        for field, is_bracketed in items
    ]
    fields = parse_fields(f"{' ' * random.randrange(3)},".join(texts))
    assert fields.items == tuple(items)
    assert fields.source == tuple(field for field, is_bracketed in items if is_bracketed)
    assert fields.target == tuple(field for field, is_bracketed in items if not is_bracketed)


def test_comma_in_brackets_separates_fields_of_the_bracket():
    assert parse_fields("[a, b+c, <|5|>], d") == parse_fields("[a], [b + c], [<|5|>], d")


def test_columns_in_brackets_come_first():
    assert parse_fields("a+b, [c], {d}, <|bos|>, [{e}]").columns == ("c", "e", "a", "b", "d")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a]", "put one field outside brackets"),
        ("[a], [b]", "put one field outside brackets"),
        ("[], b", "a field is empty"),
        ("[ ], b", "a field is empty"),
        ("[a,], b", "a field is empty"),
        ("[a] b", "commas must separate"),
        ("a], b", "commas must separate"),
        ("[[a]], b", "commas must separate"),
        ("[a],", "a field is empty"),
        ("[a], ,b", "a field is empty"),
        ("a,", "a field is empty"),
        ("a+", '"a+" lacks a column beside +'),
        ("{a", '"{a" is neither a column'),
        ("{a}+b", '"{a}+b" is neither a column'),
        ("{}, b", '"{}" is neither a column'),
        ("<|eos|> a", '"<|eos|> a" is neither a column'),
        ("<|pad|>, a", "<|pad|> is not `<|bos|>`"),
        ("<|-1|>, a", "<|-1|> is not `<|bos|>`"),
    ],
)
def test_malformed_field_list_is_rejected(text: str, why: str):
    with pytest.raises(PrepError) as caught:
        parse_fields(text)
    assert caught.value.code == USAGE
    assert f'"{text}"' in caught.value.what
    assert why in caught.value.why
