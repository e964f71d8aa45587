"""The training state of another framework, as a part of a source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, DamagedError, Option, PrepError, text
from prepcli.engine.blobs import MemoryBlob
from prepcli.engine.digest import digest
from prepcli.planning.plan import Contiguous, SourceFile
from prepcli.planning.state_names import qualify
from prepcli.planning.tensors import FLOAT_DTYPES
from prepcli.sources.adam_state import NUM_UPDATES, SKIPPED, SKIPPED_IN_ROW, STEP, AdamSettings
from prepcli.sources.decayed_tensors import decay_differences
from prepcli.sources.source import Source, SourceTensor

WITHOUT_STATE_HINT = text("convert it without {}", Option("training_state", True))
# Part of the state of frameworks without stored settings.
NO_SETTINGS = "settings of the optimizer"
# Counters are stored as int32.
MAX_COUNT = (1 << 31) - 1
BETAS = ("b1", "b2")
# Settings with one value for all parameters.
SHARED_KEYS = ("lr", *BETAS, "eps")


@dataclass(frozen=True, slots=True)
class ForeignState:
    """Adam's state of another framework.

    Attributes:
        moments: Both moments of each parameter, with the names of `adam_state`. Their files follow those of the source.
        step: Number of the last step.
        num_updates: Number of updates in the moments.
        settings: Settings of the optimizer. None if the framework does not store them.
        left_out: Names of the parts without a counterpart.
        files: Files of the moments, in addition to the files of the source.
        stamps: Size, time and digest of these files.
    """

    moments: tuple[SourceTensor, ...]
    step: int
    num_updates: int
    settings: AdamSettings | None
    left_out: tuple[str, ...]
    files: tuple[Path, ...] = ()
    stamps: tuple[SourceFile, ...] = ()


def add_foreign_state(source: Source, state: ForeignState) -> Source:
    """Return a source with a training state.

    Raises:
        PrepError: A moment is not of a floating-point dtype, or there are more updates than steps.
    """
    for moment in state.moments:
        if moment.dtype not in FLOAT_DTYPES:
            what = f"the moments of {source.display_name} are not supported"
            why = f"{moment.name} is {moment.dtype}, and must be a float"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    if state.num_updates > state.step:
        # The learning rate of prep is that of `step - skipped`, which must be the number of updates.
        what = f"{source.display_name} has more updates than steps"
        why = f"it is at step {state.step}, and its moments have {state.num_updates} updates"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    # Steps with a loss that is not finite have no update. Trainer counts them, and Adam does not.
    counters = {
        NUM_UPDATES: state.num_updates,
        STEP: state.step,
        SKIPPED: state.step - state.num_updates,
        SKIPPED_IN_ROW: 0,
    }
    values = np.array([*counters.values()], np.dtype("<i4"))
    blob_number = len(source.byte_sources) + len(state.files)
    tensors: list[SourceTensor] = []
    for number, name in enumerate(counters):
        placement = Contiguous(blob_number, number * values.itemsize)
        whole = ((0, 1, digest(values[number].tobytes())),)
        tensors.append(SourceTensor(qualify("", name), "int32", (), (placement,), whole))
    return replace(
        source,
        state_tensors=(*source.state_tensors, *state.moments, *tensors),
        blobs=(*source.byte_sources, *state.files, MemoryBlob("counters", values.tobytes())),
        files=(*source.files, *state.files),
        file_stamps=(*source.file_stamps, *state.stamps),
        training_record={
            "step": state.step,
            "updates": state.num_updates,
            "optimizer": state.settings.to_json() if state.settings else {},
            "left_out": state.left_out,
        },
    )


def check_count(source: Source, value: float, why: str) -> int:
    """Return a counter as an integer.

    Args:
        source: The opened source.
        value: The stored value.
        why: Description of the value in the error.

    Raises:
        DamagedError: The value is negative, fractional or too large.
    """
    # A NaN fails the first comparison.
    if not 0 <= value <= MAX_COUNT or value != int(value):
        raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    return int(value)


def one_count(source: Source, counts: Mapping[str, float]) -> int:
    """Return the number of updates of all parameters.

    Raises:
        DamagedError: A number is no count.
        PrepError: Parameters have different numbers.
    """
    names: dict[float, str] = {}
    for name, count in counts.items():
        check_count(source, count, f"{name} has {count:g} updates")
        names.setdefault(count, name)
    if len(names) > 1:
        listed = ", ".join(f"{count:g} of {name}" for count, name in list(names.items())[:2])
        raise PrepError(
            f"{source.display_name} has several numbers of updates",
            f"{listed}. prep has one number for all parameters",
            WITHOUT_STATE_HINT,
        )
    return int(next(iter(names)))


def decay_notes(source: Source, decays: Mapping[str, float]) -> tuple[str, ...]:
    """Return a description of the parameters with another weight decay than in a recipe with default keys.

    Args:
        source: The opened source.
        decays: Weight decay of each parameter, by its name in files.
    """
    decayed_names = [name for name, decay in decays.items() if decay]
    if not decayed_names:
        return ()
    return tuple(decay_differences(source, decayed_names))


def adam_settings(name: str, groups: Sequence[Mapping[Any, Any]]) -> AdamSettings:
    """Return the settings of the parameter groups of `torch.optim.AdamW`.

    The weight decay is the largest one: the group of norms and biases has none.

    Args:
        name: Name of the checkpoint in messages.
        groups: `param_groups` of the optimizer.

    Raises:
        PrepError: A setting is no number, differs between the groups, or is not supported.
    """
    what = f"the settings of the optimizer in {name} are not supported"
    shared: dict[str, float] = {}
    for key in SHARED_KEYS:
        values = [_setting(what, group, key) for group in groups]
        if len(set(values)) != 1:
            listed = " and ".join(f"{value:g}" for value in dict.fromkeys(values))
            why = f"{key} is {listed}, and prep has one for all parameters"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
        shared[key] = values[0]
    peak_lr = shared["lr"]
    if "initial_lr" in groups[0]:
        peak_lr = _setting(what, groups[0], "initial_lr")
    weight_decay = max(_setting(what, group, "weight_decay") for group in groups)
    for group in groups:
        for key in ("amsgrad", "maximize"):
            if group.get(key):
                raise PrepError(what, f"{key} is set", WITHOUT_STATE_HINT)
        if weight_decay and group.get("decoupled_weight_decay") is False:
            why = "its weight decay is a part of the gradient, as in Adam. prep continues AdamW"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    return AdamSettings(**shared, peak_lr=peak_lr, weight_decay=weight_decay)


def _setting(what: str, group: Mapping[Any, Any], key: str) -> float:
    """Return a setting of a group. `b1` and `b2` are the two `betas`.

    Raises:
        PrepError: It is no finite number.
    """
    if key in BETAS:
        betas = group.get("betas")
        value = None
        if isinstance(betas, list | tuple) and len(betas) == len(BETAS):
            value = betas[BETAS.index(key)]
    else:
        value = group.get(key)
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    why = f"{key} is not a number"
    if key not in BETAS and key not in group:
        why = f"{key} is missing"
    raise PrepError(what, why, WITHOUT_STATE_HINT)
