"""The neutral form of a training state: the moments of Adam by tensor, counters, and settings of the optimizer.

A training step of prep and a checkpoint of another framework have the same names here. The moments of a tensor are
`opt_state.adam.mu/TENSOR` and `opt_state.adam.nu/TENSOR`, as in `planning.state_names`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from prepcli.core.errors import GET_AGAIN_HINT, Command, DamagedError, Key, Option, PrepError, text
from prepcli.engine.blobs import open_blobs
from prepcli.engine.digest import digest
from prepcli.engine.fills import numpy_dtype
from prepcli.engine.stream_values import allocate_run_buffers, read_values
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.models.decayed_leaves import DecayRule
from prepcli.planning.plan import Stream
from prepcli.planning.state_names import OPT_STATE, qualify, split_name
from prepcli.planning.state_rows import is_leaf_path
from prepcli.planning.tensor_match import DEFAULT_MATCH_OPTIONS
from prepcli.sources.averages import AVERAGE_SLOT
from prepcli.sources.source import Source, SourceTensor, match_source_tensors, stored_axis_maps

FIRST_MOMENT = f"{OPT_STATE}.adam.mu"
SECOND_MOMENT = f"{OPT_STATE}.adam.nu"
MOMENTS = (FIRST_MOMENT, SECOND_MOMENT)
# Leaves outside of slots: updates of Adam, steps, and steps without an update.
NUM_UPDATES = f"{OPT_STATE}.adam.count"
STEP = "step"
SKIPPED = "skipped"
SKIPPED_IN_ROW = "skipped_in_row"
COUNTERS = (NUM_UPDATES, STEP, SKIPPED, SKIPPED_IN_ROW)
# Bytes of a counter in memory.
COUNTER_NBYTES = 1 << 12


@dataclass(frozen=True, slots=True)
class AdamSettings:
    """Settings of AdamW at a step.

    Attributes:
        lr: Learning rate of the next update.
        peak_lr: Learning rate after warm-up.
        b1: Decay rate of the first moment.
        b2: Decay rate of the second moment.
        eps: Added to the denominator.
        weight_decay: Weight decay, before it is scaled by the learning rate.
    """

    lr: float
    peak_lr: float
    b1: float
    b2: float
    eps: float
    weight_decay: float

    def to_json(self) -> dict[str, float]:
        """Return the settings for a manifest."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class AdamState:
    """The training state of a source, without the parameters.

    Attributes:
        first: First moment of each parameter, by the name of the parameter.
        second: Second moment of each parameter.
        step: Number of the last step.
        num_updates: Number of updates in the moments. Skipped steps have none.
        settings: Settings of the optimizer. None if the source does not have them.
        counters: Tensors of the counters, by name.
        batch_size: Sequences of a step. 1 if it is unknown.
        averages: Average of each parameter, by the name of the parameter. Empty if there are none.
        left_out: Other state. No other framework has a place for it.
        clip_norm: Maximum norm of gradients, or 0 without clipping. None if it is unknown.
        decay_rule: Rule for the parameters with weight decay. None if it is unknown.
    """

    first: Mapping[str, SourceTensor]
    second: Mapping[str, SourceTensor]
    step: int
    num_updates: int
    settings: AdamSettings | None
    counters: Mapping[str, SourceTensor]
    batch_size: int
    averages: Mapping[str, SourceTensor]
    left_out: tuple[SourceTensor, ...]
    clip_norm: float | None = None
    decay_rule: DecayRule | None = None

    @property
    def tensors(self) -> tuple[SourceTensor, ...]:
        """The moments and the averages of all parameters."""
        return *self.first.values(), *self.second.values(), *self.averages.values()

    def without_averages(self) -> AdamState:
        """Return the state for a framework without a place for averages."""
        left_out = (*self.averages.values(), *self.left_out)
        return replace(self, averages={}, left_out=left_out)


def read_adam_state(source: Source) -> AdamState:
    """Return the training state of a source, with the settings that another framework stores.

    Only the counters are read.

    Args:
        source: The opened source.

    Raises:
        PrepError: The source has no state of AdamW, or moments of some parameters are missing.
    """
    name = source.display_name
    if not source.state_tensors:
        hint = text("name a run of {}, or one of its steps", Command("train"))
        raise PrepError(f"{name} has no training state", "it has parameters only", hint)
    slots: dict[str, dict[str, SourceTensor]] = {slot: {} for slot in MOMENTS}
    averages: dict[str, SourceTensor] = {}
    counters: dict[str, SourceTensor] = {}
    left_out: list[SourceTensor] = []
    for tensor in source.state_tensors:
        slot, tensor_name = split_name(tensor.name)
        if slot in slots:
            slots[slot][tensor_name] = tensor
        elif slot == AVERAGE_SLOT and not is_leaf_path(tensor_name):
            averages[tensor_name] = tensor
        elif not slot and tensor_name in COUNTERS:
            counters[tensor_name] = tensor
        else:
            left_out.append(tensor)
    trained = trained_tensors(source)
    _check_moments(source, trained, slots, averages, left_out)
    return AdamState(
        first=slots[FIRST_MOMENT],
        second=slots[SECOND_MOMENT],
        step=_read_counter(source, counters, STEP),
        num_updates=_read_counter(source, counters, NUM_UPDATES),
        settings=_stored_settings(source),
        counters=counters,
        batch_size=(source.manifest or NO_MANIFEST).batch_size,
        averages=averages,
        left_out=tuple(left_out),
    )


def trained_tensors(source: Source) -> tuple[SourceTensor, ...]:
    """Return the parameters of the model, without a stored copy of a tied embedding and without buffers."""
    match = match_source_tensors(source, stored_axis_maps(source), DEFAULT_MATCH_OPTIONS)
    return tuple(tensor for tensor in source.tensors if tensor.name in match.uses)


def require_settings(source: Source, state: AdamState) -> AdamSettings:
    """Return the settings of the optimizer.

    Raises:
        PrepError: The source does not have them.
    """
    if state.settings is not None:
        return state.settings
    hint = text("train a step with {}, and export that one", Key("model.training_state", True))
    raise PrepError(
        f"{source.display_name} has no settings of its optimizer",
        "the framework that wrote the state does not store them",
        hint,
    )


def _check_moments(
    source: Source,
    trained: Sequence[SourceTensor],
    slots: Mapping[str, Mapping[str, SourceTensor]],
    averages: Mapping[str, SourceTensor],
    left_out: list[SourceTensor],
) -> None:
    """Raise PrepError unless each parameter has both moments, and an average if there are any."""
    name = source.display_name
    if not slots[FIRST_MOMENT] and not slots[SECOND_MOMENT]:
        others = sorted({split_name(tensor.name)[0] for tensor in left_out} - {""})
        why = "the step was saved without its optimizer state"
        if others:
            why = f"its optimizer has {', '.join(others)}"
        raise PrepError(
            f"{name} has no moments of AdamW",
            why,
            text("{} chooses the optimizer of a run", Key("optimizer.type", "adamw")),
        )
    all_slots = dict(slots)
    if averages:
        all_slots[AVERAGE_SLOT] = averages
    for slot, moments in all_slots.items():
        # A slot without some of the parameters has paths of leaves as names.
        is_partial = any(map(is_leaf_path, moments))
        for parameter in trained:
            if is_partial or parameter.name not in moments:
                what = f"{name} has no {slot} of {source.file_name(parameter)}"
                why = text("{} leaves parameters without moments", Key("optimizer.freeze"))
                if source.training_record is not None:
                    why = "the parameter was frozen, or the checkpoint is incomplete"
                hint = text("convert it without {}", Option("training_state", True))
                raise PrepError(what, why, hint)


def _read_counter(source: Source, counters: Mapping[str, SourceTensor], name: str) -> int:
    """Return the value of a counter."""
    if name not in counters:
        what = f"{source.display_name} has no {name}"
        raise DamagedError(what, "its training state is incomplete", GET_AGAIN_HINT)
    return int(read_scalar(source, counters[name]))


def read_scalar(source: Source, tensor: SourceTensor) -> float:
    """Return the value of a tensor with one element, compared with its recorded digest.

    Raises:
        DamagedError: It has more elements or none, or differs from its digest.
    """
    if math.prod(tensor.shape) != 1:
        what = f"{source.display_name} is damaged"
        why = f"{tensor.name} is {list(tensor.shape)}, and must have one element"
        raise DamagedError(what, why, GET_AGAIN_HINT)
    content = read_small_tensor(source, tensor)
    return np.frombuffer(content, numpy_dtype(tensor.dtype))[0].item()


def read_small_tensor(source: Source, tensor: SourceTensor) -> bytes:
    """Return the bytes of a tensor with a few elements, compared with its recorded digest.

    Raises:
        DamagedError: It differs from its digest.
    """
    num_rows = tensor.shape[0] if tensor.shape else 1
    stream = Stream(tensor.name, tensor.dtype, tensor.shape, (0, num_rows), tensor.placement, ())
    with open_blobs(source.byte_sources) as files:
        buffers = allocate_run_buffers(COUNTER_NBYTES)
        content = b"".join(bytes(data) for _, data in read_values(files, stream, buffers=buffers))
    for _, _, expected in tensor.digests:
        if digest(content) != expected:
            what = f"{source.display_name} is damaged"
            raise DamagedError(what, f"{tensor.name} differs from its digest", GET_AGAIN_HINT)
    return content


def _stored_settings(source: Source) -> AdamSettings | None:
    """Return the settings that the framework of origin stores."""
    record = source.training_record or (source.manifest or NO_MANIFEST).training_state
    if record is None or not record["optimizer"]:
        return None
    return AdamSettings(**record["optimizer"])


def moment_names(parameter: str) -> tuple[str, str]:
    """Return the names of a parameter's first and second moment."""
    return qualify(FIRST_MOMENT, parameter), qualify(SECOND_MOMENT, parameter)
