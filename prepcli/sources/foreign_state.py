"""The training state of another framework, as a part of a source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prepcli.engine.blobs import MemoryBlob
from prepcli.engine.digest import digest
from prepcli.errors import Option, PrepError, text
from prepcli.planning.plan import Contiguous, SourceFile
from prepcli.planning.state_names import qualify
from prepcli.sources.adam_state import NUM_UPDATES, SKIPPED, SKIPPED_IN_ROW, STEP, AdamSettings
from prepcli.sources.source import Source, SourceTensor

WITHOUT_STATE_HINT = text("convert it without {}", Option("training_state", True))


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
    """Return a source with a training state."""
    # Steps whose loss was not finite have no update. Trainer counts them, and Adam does not.
    counters = {
        NUM_UPDATES: state.num_updates,
        STEP: state.step,
        SKIPPED: max(0, state.step - state.num_updates),
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


def one_count(source: Source, counts: Mapping[str, float]) -> int:
    """Return the number of updates of all parameters.

    Raises:
        PrepError: Parameters have different numbers.
    """
    names: dict[float, str] = {}
    for name, count in counts.items():
        names.setdefault(count, name)
    if len(names) > 1:
        listed = ", ".join(f"{count:g} of {name}" for count, name in list(names.items())[:2])
        raise PrepError(
            f"{source.display_name} has several numbers of updates",
            f"{listed}. prep has one number for all parameters",
            WITHOUT_STATE_HINT,
        )
    return int(next(iter(names)))
