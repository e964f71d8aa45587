"""Tests of the learning rate schedule against optax and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prepcli.core.errors import PrepError
from trainer.recipe.lr_schedule import DECAYS, LRSchedule, build_lr_schedule, rate_at_step
from trainer.recipe.optimizer_tables import AdamWTable, PalmTable, RampShape, ScheduleKind


def learning_rates(schedule: LRSchedule, *steps: int) -> list[float]:
    """Return the learning rate of each step."""
    return [float(schedule.learning_rate(jnp.int32(step))) for step in steps]


def test_each_schedule_of_recipes_has_a_decay():
    assert list(DECAYS) == [*get_args(ScheduleKind)]


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


def test_wsd_schedule_is_constant_until_its_cooldown():
    schedule = build_lr_schedule(
        AdamWTable(
            lr=1.0, end_lr=0.2, init_lr=0.5, schedule="wsd", warmup_steps=4, cooldown_steps=8
        ),
        20,
    )
    expected = [0.5, 0.75, 1.0, 1.0, 1.0, 0.6, 0.2, 0.2]
    assert learning_rates(schedule, 0, 2, 4, 8, 12, 16, 20, 30) == pytest.approx(expected)
    assert schedule.manifest_fields().get("cooldown") == 8


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


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "wsd", "rsqrt"])
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


def redco(s: int, n: int) -> float:
    """redco, deployers/utils.py: linear to 2e-5 over a tenth of the steps, then linear to 0."""
    warmup = n // 10
    return 2e-5 * s / warmup if s < warmup else 2e-5 * (1 - (s - warmup) / (n - warmup))


def redco_cosine(s: int, n: int) -> float:
    """redco, deployers/utils.py: the same warm-up, then a cosine to 0."""
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
REDCO = AdamWTable(lr=2e-5, warmup_ratio=0.1)
REDCO_COSINE = AdamWTable(lr=2e-5, warmup_ratio=0.1, schedule="cosine")


@pytest.mark.parametrize(
    ("table", "formula"),
    [
        (GPT_NEO, gpt_neo),
        (LLAMABPT, llamabpt_adamw),
        (PALM, llamabpt_palm),
        (REDCO, redco),
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


def test_schedule_of_flaxlm_differs_in_its_warmup_only():
    """flaxlm, trainer.py: a warm-up of W + 1 steps is cut at step W, so that its rate jumps there."""
    n, warmup = 100, 10
    schedule = build_lr_schedule(AdamWTable(lr=3e-4, warmup_steps=warmup), n)
    after = [3e-4 * (1 - (step - warmup) / (n - warmup)) for step in range(warmup, n)]
    assert learning_rates(schedule, *range(warmup, n)) == pytest.approx(after, rel=2e-6, abs=1e-10)
    before = [3e-4 * step / (warmup + 1) * (warmup + 1) / warmup for step in range(warmup)]
    assert learning_rates(schedule, *range(warmup)) == pytest.approx(before, rel=2e-6, abs=1e-12)
