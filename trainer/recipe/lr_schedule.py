"""Learning rate schedules: their keys in `[optimizer]`, and the rates of steps for training, plans and reports. No jax.

A new schedule needs its name in `ScheduleKind`, an entry of `DECAYS`, and its own keys in `ScheduleTable`. A key with
the name of a field of `LRSchedule` is copied to it. `ScheduleRecord` has the type of each field in a manifest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, Field

from prepcli.core.errors import Key, Text, text, usage_error
from prepcli.core.json_values import JsonObject
from trainer.recipe.key_types import (
    MAX_INT32,
    STRICT,
    InSchedule,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    if_absent,
)

if TYPE_CHECKING:
    from prepcli.planning.manifest_fields import ScheduleRecord

ScheduleKind = Literal["linear", "cosine", "cosine_restarts", "constant", "wsd", "rsqrt"]
# Shapes of a rise or a fall of the learning rate
RampShape = Literal["linear", "cosine", "1-sqrt"]

# Length of the decay of wsd, as a fraction of the steps until its end.
DEFAULT_COOLDOWN = 0.1
# Fields without effect in schedules that never end.
OPEN_FIELDS = ("end", "decay")
# A cosine falls once in half a wave.
HALF_WAVE = 0.5


class ScheduleTable(BaseModel):
    """The keys of `[optimizer]` for the learning rate."""

    model_config = STRICT
    # Steps of warm-up without a key for them
    default_warmup_steps: ClassVar[int] = 0

    lr: PositiveFloat = Field(
        description="peak learning rate, reached after warm-up", examples=[2e-5]
    )
    init_lr: NonNegativeFloat = Field(
        default=0.0, description="learning rate of the first step of warm-up", examples=[1e-6]
    )
    end_lr: NonNegativeFloat = Field(
        default=0.0,
        description="learning rate at the end of the decay. A schedule that never ends does not use it",
        examples=[2e-6],
    )
    schedule: ScheduleKind = Field(
        default="linear",
        description="shape of the learning rate decay. `wsd`: constant, then a decay in the last `cooldown_steps`. "
        "`cosine_restarts`: `cycles` cosines, each from `lr`. `rsqrt`: with the inverse square root of the step",
        examples=["cosine"],
    )
    warmup_steps: InSchedule[NonNegativeInt | None] = Field(
        default=None,
        description="steps in which the learning rate rises from `init_lr`",
        examples=[100],
        json_schema_extra=if_absent("from `warmup_ratio`, or 0"),
    )
    warmup_ratio: InSchedule[Annotated[float, Field(ge=0, le=1)] | None] = Field(
        default=None,
        description="warm-up as a fraction of the run's steps, rounded to whole steps",
        examples=[0.03],
        json_schema_extra=if_absent("from `warmup_steps`, or 0"),
    )
    warmup_shape: RampShape = Field(
        default="linear",
        description="shape of the rise in warm-up. `1-sqrt`: 1 - sqrt(1 - progress)",
        examples=["cosine"],
    )
    decay_steps: InSchedule[PositiveInt | None] = Field(
        default=None,
        description="step at which `end_lr` is reached, counted from 0, warm-up included",
        examples=[10000],
        json_schema_extra=if_absent("the run's steps"),
    )
    cooldown_steps: PositiveInt | None = Field(
        default=None,
        description="steps of the decay of wsd, which ends at `decay_steps`",
        examples=[1000],
        json_schema_extra=if_absent("a tenth of the steps, for wsd"),
    )
    cooldown_shape: RampShape | None = Field(
        default=None,
        description="shape of the decay of wsd. `1-sqrt`: 1 - sqrt(progress)",
        examples=["1-sqrt"],
        json_schema_extra=if_absent("linear, for wsd"),
    )
    cooldown_waves: PositiveFloat | None = Field(
        default=None,
        description='waves of the decay of wsd with `cooldown_shape = "cosine"`. `0.5`: one fall',
        examples=[0.5],
        json_schema_extra=if_absent("0.5, for a cosine"),
    )
    cycles: PositiveInt | None = Field(
        default=None,
        description="cosines of cosine_restarts between the end of warm-up and `decay_steps`, of equal length",
        examples=[4],
        json_schema_extra=if_absent("needed by cosine_restarts"),
    )

    def initial_and_peak(self, warmup_steps: int) -> tuple[float, float]:
        """Return the learning rates of step 0 and after warm-up."""
        return self.init_lr, self.lr


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """A learning rate schedule: warm-up from `initial` to `peak`, then decay to `end`."""

    peak: float  # Learning rate after warm-up
    end: float  # Learning rate from step `decay` on. Not used by schedules that never end.
    kind: ScheduleKind  # Shape of the decay, a name of DECAYS
    warmup: int  # Steps of warm-up
    decay: int  # Step at which the decay ends, counted from 0 with warm-up included
    initial: float = 0.0  # Learning rate of step 0, if there is warm-up
    cooldown: int = 0  # Steps of the decay of `wsd`
    warmup_shape: RampShape = "linear"  # Shape of the rise
    cooldown_shape: RampShape = "linear"  # Shape of the decay of `wsd`
    cooldown_waves: float = HALF_WAVE  # Waves of the decay of `wsd` with the shape `cosine`
    cycles: int = 1  # Falls of `cosine_restarts`

    def learning_rate(self, step: Any) -> Any:
        """Compute the learning rate [] of the update with index `step` (the first is 0).

        Args:
            step: Integer array [] of JAX, for a float32 result, or of NumPy, for a float64 result.
        """
        xp = step.__array_namespace__()
        float_step = xp.asarray(step, dtype=float)
        # Without warm-up, the divisor 1 avoids 0 / 0, and no step is selected.
        length = max(self.warmup, 1)
        rise = self.peak - self.initial
        if self.warmup_shape == "linear":
            warmup_rate = self.initial + rise * float_step / length
        else:
            # Later steps are not selected. They are clipped for the square root.
            remaining = 1.0 - xp.clip(float_step / length, 0.0, 1.0)
            warmup_rate = self.initial + rise * _fall(remaining, self.warmup_shape, HALF_WAVE, xp)
        decayed_rate = DECAYS[self.kind].rate(self, step, xp)
        return xp.where(step < self.warmup, warmup_rate, decayed_rate)

    def manifest_fields(self) -> ScheduleRecord:
        """Return the fields for a manifest, without optional fields at their defaults, so that earlier runs resume."""
        kept: JsonObject = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                kept[field.name] = value
        return cast("ScheduleRecord", kept)


@dataclass(frozen=True, slots=True)
class Decay:
    """The learning rate after warm-up with one value of `optimizer.schedule`."""

    # Function of the schedule, the step [] and the array namespace that returns the learning rate []
    rate: Callable[[LRSchedule, Any, Any], Any]
    meaning: str  # Its description by the keys of a recipe, for the reference page
    text: str  # Its description in a plan, a format of the schedule's fields
    is_open: bool = False  # Whether it never ends: `end` and `decay` have no effect
    keys: tuple[str, ...] = ()  # Keys of `[optimizer]` that only this schedule has


def _fall(progress: Any, shape: RampShape, waves: float, xp: Any) -> Any:
    """Return the part of a fall that remains: 1 at its start, and 0 at its end with half a wave."""
    if shape == "linear":
        return 1.0 - progress
    if shape == "cosine":
        return 0.5 * (1.0 + xp.cos(2.0 * waves * math.pi * progress))
    return 1.0 - xp.sqrt(progress)


def _progress(start: int, end: int, step: Any, xp: Any) -> Any:
    """Return the done fraction of the steps from `start` to `end`."""
    float_step = xp.asarray(step, dtype=float)
    return xp.clip((float_step - start) / max(end - start, 1), 0.0, 1.0)


def _between(schedule: LRSchedule, remaining: Any) -> Any:
    """Return the learning rate at which this part of the decay remains."""
    return schedule.end + (schedule.peak - schedule.end) * remaining


def _one_fall(schedule: LRSchedule, step: Any, xp: Any) -> Any:
    progress = _progress(schedule.warmup, schedule.decay, step, xp)
    shape = cast("RampShape", schedule.kind)
    return _between(schedule, _fall(progress, shape, HALF_WAVE, xp))


def _restarts(schedule: LRSchedule, step: Any, xp: Any) -> Any:
    """Fall in each cycle, e.g. to the middle after half a cycle (arXiv:1608.03983)."""
    length = max(schedule.decay - schedule.warmup, 1)
    # In integers: 3 cycles of 10 steps restart at step 10, where 3 * (10 / 30) may round to less than 1.
    done = xp.clip(step - schedule.warmup, 0, length)
    fraction = xp.asarray(done * schedule.cycles % length, dtype=float) / length
    progress = xp.where(done < length, fraction, 1.0)
    return _between(schedule, _fall(progress, "cosine", HALF_WAVE, xp))


def _constant(schedule: LRSchedule, step: Any, xp: Any) -> Any:
    return _between(schedule, xp.ones_like(xp.asarray(step, dtype=float)))


def _warmup_stable_decay(schedule: LRSchedule, step: Any, xp: Any) -> Any:
    """Keep the peak, then fall (arXiv:2404.06395), e.g. from step 800 with decay 1,000 and cooldown 200."""
    progress = _progress(schedule.decay - schedule.cooldown, schedule.decay, step, xp)
    remaining = _fall(progress, schedule.cooldown_shape, schedule.cooldown_waves, xp)
    # Other waves than half ones do not end at 0.
    return _between(schedule, xp.where(progress < 1.0, remaining, 0.0))


def _inverse_square_root(schedule: LRSchedule, step: Any, xp: Any) -> Any:
    """Return peak * sqrt(warmup / step): at step = warmup it is `peak`, at step = 4 * warmup half of it."""
    start = float(max(schedule.warmup, 1))
    float_step = xp.asarray(step, dtype=float)
    return schedule.peak * math.sqrt(start) / xp.sqrt(xp.maximum(float_step, start))


# `optimizer.schedule` -> the learning rate after warm-up
DECAYS: Mapping[ScheduleKind, Decay] = {
    "linear": Decay(_one_fall, "decays to `end_lr`", "linear to {0.end:g} at step {0.decay:,}"),
    "cosine": Decay(_one_fall, "decays to `end_lr`", "cosine to {0.end:g} at step {0.decay:,}"),
    "cosine_restarts": Decay(
        _restarts,
        "decays to `end_lr` in each of `cycles` cosines of equal length, which begin at `lr`",
        "{0.cycles} cosines to {0.end:g} until step {0.decay:,}",
        keys=("cycles",),
    ),
    "constant": Decay(_constant, "stays at `lr`", "constant", is_open=True),
    "wsd": Decay(
        _warmup_stable_decay,
        "stays at `lr`, then decays to `end_lr` in the last `cooldown_steps` before `decay_steps`",
        "constant, {0.cooldown_shape} to {0.end:g} in the last {0.cooldown:,} steps before step {0.decay:,}",
        keys=("cooldown_steps", "cooldown_shape", "cooldown_waves"),
    ),
    "rsqrt": Decay(
        _inverse_square_root, "`lr` * sqrt(`warmup_steps` / step)", "rsqrt", is_open=True
    ),
}


def rate_at_step(schedule: Mapping[str, object], step: int) -> float:
    """Return the learning rate of the update with index `step` (the first is 0).

    Args:
        schedule: Fields of the schedule, as `LRSchedule.manifest_fields` returns them.
        step: Index of the update.
    """
    # Recipes are read without NumPy.
    import numpy as np

    # Schedules of other frameworks lack the fields without effect.
    fields: dict[str, Any] = {"warmup": 0, "decay": 0, "end": 0.0}
    for field in dataclasses.fields(LRSchedule):
        if field.name in schedule:
            fields[field.name] = schedule[field.name]
    return float(LRSchedule(**fields).learning_rate(np.int64(step)))


def changed_fields(
    before: Mapping[str, object], after: Mapping[str, object]
) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two schedules of manifests differ, except fields without effect in both.

    Args:
        before: Fields of the manifest of a checkpoint.
        after: Fields of the resuming run.

    Returns:
        The value before and after, by field. None if the field is missing.
    """
    open_kinds = {kind for kind, decay in DECAYS.items() if decay.is_open}
    is_open = {before.get("kind"), after.get("kind")} <= open_kinds
    changed: dict[str, tuple[Any, Any]] = {}
    for name in {**before, **after}:
        has_effect = not (is_open and name in OPEN_FIELDS)
        if has_effect and before.get(name) != after.get(name):
            changed[name] = (before.get(name), after.get(name))
    return changed


def build_lr_schedule(table: ScheduleTable, steps: int) -> LRSchedule:
    """Build the schedule of a run of `steps` steps.

    Raises:
        UsageError: The decay would end before the warm-up does, or has more cycles than steps.
    """
    warmup = warmup_steps_of(table, steps)
    decay = table.decay_steps or steps
    options: dict[str, Any] = {}
    if table.schedule == "wsd":
        options["cooldown"] = table.cooldown_steps or max(1, round(decay * DEFAULT_COOLDOWN))
    for name in DECAYS[table.schedule].keys:
        value = getattr(table, name)
        if name in LRSchedule.__dataclass_fields__ and value is not None:
            options[name] = value
    initial, peak = table.initial_and_peak(warmup)
    schedule = LRSchedule(
        peak,
        end=table.end_lr,
        kind=table.schedule,
        warmup=warmup,
        decay=decay,
        initial=initial,
        warmup_shape=table.warmup_shape,
        **options,
    )
    if not DECAYS[table.schedule].is_open:
        _check_decay(schedule, table, steps)
    return schedule


def warmup_steps_of(table: ScheduleTable, steps: int) -> int:
    """Return the steps of warm-up, from its steps, its ratio, or the default of the optimizer."""
    if table.warmup_steps is not None:
        return table.warmup_steps
    if table.warmup_ratio is not None:
        return round(table.warmup_ratio * steps)
    return table.default_warmup_steps


def _check_decay(schedule: LRSchedule, table: ScheduleTable, steps: int) -> None:
    """Raise UsageError if the steps after warm-up do not suffice for the decay."""
    warmup = schedule.warmup
    decay = schedule.decay
    if decay <= warmup:
        end = f"the run has {steps} steps"
        if table.decay_steps:
            end = f"`optimizer.decay_steps` is {decay}"
        key = "warmup_ratio"
        if table.warmup_steps:
            key = "warmup_steps"
        raise usage_error(
            f"`optimizer.{key}` leaves no steps for the decay",
            f"warm-up takes the first {warmup} steps, and {end}, warm-up included",
            text("use fewer warm-up steps, or {}", _set_hint("schedule", "constant")),
        )
    if schedule.kind == "cosine_restarts":
        # The step multiplies its number by the cycles in int32.
        maximum = min(decay - warmup, MAX_INT32 // (decay - warmup))
        if schedule.cycles > maximum:
            what = f"`optimizer.cycles` is {schedule.cycles:,}"
            why = f"the decay takes {decay - warmup:,} steps, for which the maximum is {maximum:,}"
            raise usage_error(what, why, _set_hint("cycles", maximum))
    if warmup + schedule.cooldown > decay:
        why = f"warm-up takes {warmup} steps, the decay {schedule.cooldown}, which ends at step {decay}"
        hint = _set_hint("cooldown_steps", decay - warmup)
        raise usage_error("warm-up and decay of `wsd` overlap", why, hint)


def _set_hint(name: str, value: object) -> Text:
    return text("{}", Key(f"optimizer.{name}", value, is_override=True))
