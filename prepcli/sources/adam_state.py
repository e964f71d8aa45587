"""The neutral form of a training state: the moments of Adam by tensor, counters, and settings of the optimizer.

A training step of prep and a checkpoint of another library have the same names here. The moments of a tensor are
`opt_state.adam.mu/TENSOR` and `opt_state.adam.nu/TENSOR`, as in `planning.tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Key, Option, PrepError, text
from prepcli.engine.blobs import MemoryBlob, open_blobs
from prepcli.engine.digest import TensorDigest
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.param_tree import DecayRule
from prepcli.planning.arrays import whole_array
from prepcli.planning.libraries import AdamNumbers, AdamSettings, LayoutScale
from prepcli.planning.plan import SourceFile, Stream
from prepcli.planning.tensors import (
    COUNTERS,
    FIRST_MOMENT,
    FLOAT_DTYPES,
    MOMENTS,
    NUM_UPDATES,
    SECOND_MOMENT,
    SKIPPED,
    SKIPPED_IN_ROW,
    STEP,
    is_leaf_path,
    qualify,
    split_name,
)
from prepcli.sources.source import (
    AVERAGE_SLOT,
    Source,
    SourceTensor,
    match_source_tensors,
    stored_axis_maps,
)
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.stores.paths import AnyPath

WITHOUT_STATE_HINT = text("convert it without {}", Option("training_state", True))
# Counters are stored as int32.
MAX_COUNT = (1 << 31) - 1
# Bytes of a counter in memory.
COUNTER_NBYTES = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState(AdamNumbers):
    """The training state of a source, without the parameters.

    Attributes:
        first: First moment of each parameter, by the name of the parameter.
        second: Second moment of each parameter.
        counters: Tensors of the counters, by name.
        batch_size: Sequences of a step. 1 if it is unknown.
        averages: Average of each parameter, by the name of the parameter. Empty if there are none.
        left_out: Other state. No other library has a place for it.
        decay_rule: Rule for the parameters with weight decay. None if it is unknown.
    """

    first: Mapping[str, SourceTensor]
    second: Mapping[str, SourceTensor]
    counters: Mapping[str, SourceTensor]
    batch_size: int
    averages: Mapping[str, SourceTensor]
    left_out: tuple[SourceTensor, ...]
    decay_rule: DecayRule | None = None

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The moments and the averages of all parameters."""
        return *self.first.values(), *self.second.values(), *self.averages.values()

    def without_averages(self) -> AdamState:
        """Return the state for a library without a place for averages."""
        left_out = (*self.averages.values(), *self.left_out)
        return replace(self, averages={}, left_out=left_out)


def read_adam_state(source: Source) -> AdamState:
    """Return the training state of a source, with the settings that another library stores.

    Only the counters are read.
    """
    if not source.state_tensors:
        hint = text("name a run of {}, or one of its steps", Command("train"))
        what = f"{source.display_name} has no training state"
        raise PrepError(what, "it has parameters only", hint)
    slots: dict[str, dict[str, SourceTensor]] = {slot: {} for slot in (*MOMENTS, AVERAGE_SLOT)}
    counters: dict[str, SourceTensor] = {}
    left_out: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot in MOMENTS or (slot == AVERAGE_SLOT and not is_leaf_path(name)):
            slots[slot][name] = tensor
        elif not slot and name in COUNTERS:
            counters[name] = tensor
        else:
            left_out.append(tensor)
    name = source.display_name
    trained = trained_tensors(source)
    if not slots[FIRST_MOMENT] and not slots[SECOND_MOMENT]:
        others = sorted({split_name(tensor.name)[0] for tensor in left_out} - {""})
        why = "the step was saved without its optimizer state"
        if others:
            why = f"its optimizer has {', '.join(others)}"
        hint = text("{} chooses the optimizer of a run", Key("optimizer.type", "adamw"))
        raise PrepError(f"{name} has no moments of AdamW", why, hint)
    for slot, moments in slots.items():
        if slot == AVERAGE_SLOT and not moments:
            continue
        # A slot without some of the parameters has paths of leaves as names.
        is_partial = any(map(is_leaf_path, moments))
        for parameter in trained:
            if is_partial or parameter.name not in moments:
                what = f"{name} has no {slot} of {source.file_name(parameter)}"
                why = text("{} leaves parameters without moments", Key("optimizer.freeze"))
                if source.training_record is not None:
                    why = "the parameter was frozen, or the checkpoint is incomplete"
                raise PrepError(what, why, WITHOUT_STATE_HINT)
    return AdamState(
        first=slots[FIRST_MOMENT],
        second=slots[SECOND_MOMENT],
        step=_read_counter(source, counters, STEP),
        num_updates=_read_counter(source, counters, NUM_UPDATES),
        settings=recorded_settings(source),
        counters=counters,
        batch_size=(source.manifest or NO_MANIFEST).batch_size,
        averages=slots[AVERAGE_SLOT],
        left_out=tuple(left_out),
    )


def trained_tensors(source: Source) -> tuple[SourceTensor, ...]:
    """Return the parameters of the model, without a stored copy of a tied embedding and without buffers."""
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    return tuple(tensor for tensor in source.tensors if tensor.name in match.uses)


def require_settings(source: Source, state: AdamState) -> AdamSettings:
    """Return the settings of the optimizer. Raise PrepError if the source does not have them."""
    if state.settings is not None:
        return state.settings
    hint = text("train a step with {}, and export that one", Key("model.training_state", True))
    raise PrepError(
        f"{source.display_name} has no settings of its optimizer",
        "the framework that wrote the state does not store them",
        hint,
    )


def _read_counter(source: Source, counters: Mapping[str, SourceTensor], name: str) -> int:
    """Return the value of a counter."""
    if name not in counters:
        what = f"{source.display_name} has no {name}"
        raise DamagedError(what, "its training state is incomplete", GET_AGAIN_HINT)
    (value,) = read_scalars(source, [counters[name]])
    return int(value)


def read_scalars(source: Source, tensors: Sequence[SourceTensor]) -> list[float]:
    """Return the values of tensors with one element each, compared with their recorded digests."""
    for tensor in tensors:
        if math.prod(tensor.shape) != 1:
            why = f"{tensor.name} is {list(tensor.shape)}, and must have one element"
            raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    values: list[float] = []
    for tensor, content in zip(tensors, read_small_tensors(source, tensors), strict=True):
        values.append(np.frombuffer(content, numpy_dtype(tensor.dtype))[0].item())
    return values


def read_small_tensors(source: Source, tensors: Sequence[SourceTensor]) -> list[bytes]:
    """Return the bytes of tensors with a few elements, compared with their recorded digests."""
    contents: list[bytes] = []
    buffers = allocate_run_buffers(COUNTER_NBYTES)
    with open_blobs(source.byte_sources) as files:
        for tensor in tensors:
            rows = (0, tensor.shape[0] if tensor.shape else 1)
            stream = Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
            pieces = [bytes(data) for _, data in read_values(files, stream, buffers=buffers)]
            contents.append(b"".join(pieces))
            for _, _, expected in tensor.digests:
                if TensorDigest(contents[-1]).hexdigest() != expected:
                    why = f"{tensor.name} differs from its digest"
                    raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    return contents


def check_count(source: Source, value: float, why: str) -> int:
    """Return a counter as an integer. Raise DamagedError with `why` if it is negative, fractional or too large."""
    # A NaN fails the first comparison.
    if not 0 <= value <= MAX_COUNT or value != int(value):
        raise DamagedError(f"{source.display_name} is damaged", why, GET_AGAIN_HINT)
    return int(value)


def recorded_settings(source: Source) -> AdamSettings | None:
    """Return the settings in the record of a state from another library, or of a state for one."""
    record = source.training_record or (source.manifest or NO_MANIFEST).training_state
    if not record or not record["optimizer"]:
        return None
    return AdamSettings(**record["optimizer"])


def moment_names(parameter: str) -> tuple[str, str]:
    """Return the names of a parameter's first and second moment."""
    return qualify(FIRST_MOMENT, parameter), qualify(SECOND_MOMENT, parameter)


def slot_scales(slot: str, parameter_scales: Mapping[str, LayoutScale]) -> dict[str, LayoutScale]:
    """Return the scales of a slot, by the names of the parameters' scales."""
    scales: dict[str, LayoutScale] = {}
    for name, parameter_scale in parameter_scales.items():
        # An average has the scale of its parameter.
        scale = parameter_scale
        if slot != AVERAGE_SLOT:
            scale = parameter_scale.of_moment(1 + MOMENTS.index(slot))
        if scale:
            scales[name] = scale
    return scales


def add_training_state(
    source: Source,
    numbers: AdamNumbers,
    moments: Sequence[SourceTensor],
    left_out: Sequence[str],
    *,
    files: tuple[AnyPath, ...] = (),
    stamps: tuple[SourceFile, ...] = (),
) -> Source:
    """Return a source with the training state of another library.

    Args:
        source: The source with the parameters.
        numbers: Counters and settings.
        moments: Both moments of each parameter, and averages. Their files follow the byte sources of `source`.
        left_out: Names of the parts without a counterpart.
        files: Files of the moments, in addition to those of the source.
        stamps: Size, time and digest of these files.
    """
    for moment in moments:
        if moment.dtype not in FLOAT_DTYPES:
            what = f"the moments of {source.display_name} are not supported"
            why = f"{moment.name} is {moment.dtype}, and must be a float"
            raise PrepError(what, why, WITHOUT_STATE_HINT)
    if numbers.num_updates > numbers.step:
        # The learning rate of prep is that of `step - skipped`, which must be the number of updates.
        what = f"{source.display_name} has more updates than steps"
        why = f"it is at step {numbers.step}, and its moments have {numbers.num_updates} updates"
        raise PrepError(what, why, WITHOUT_STATE_HINT)
    # Steps with a loss that is not finite have no update. Trainer counts them, and Adam does not.
    counters = {
        NUM_UPDATES: numbers.num_updates,
        STEP: numbers.step,
        SKIPPED: numbers.step - numbers.num_updates,
        SKIPPED_IN_ROW: 0,
    }
    values = np.array([*counters.values()], np.dtype("<i4"))
    blobs = (*source.byte_sources, *files)
    tensors: list[SourceTensor] = []
    for number, name in enumerate(counters):
        counter = whole_array(name, "int32", (), (len(blobs), number * values.itemsize))
        whole = ((0, 1, TensorDigest(values[number].tobytes()).hexdigest()),)
        tensors.append(SourceTensor(qualify("", name), "int32", (), (counter,), whole))
    return replace(
        source,
        state_tensors=(*source.state_tensors, *moments, *tensors),
        blobs=(*blobs, MemoryBlob("counters", values.tobytes())),
        files=(*source.files, *files),
        file_stamps=(*source.file_stamps, *stamps),
        training_record=numbers.record(left_out),
    )
