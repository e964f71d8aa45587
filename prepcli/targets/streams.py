"""Streams of a plan, from the tensors of a source and their targets: shared by save-init, export and pad-vocab."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.planning.accounting import Accounting, vocab_tensors
from prepcli.planning.plan import DroppedTensor, Fill, Locations, Stream
from prepcli.planning.state_names import OPT_STATE, OPT_STATE_RULE, TRAINING_STATE_RULE, split_name
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.source import Source, SourceTensor


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Target of a tensor.

    Attributes:
        writes: Locations of the tensor in the output.
        rows: Rows of the tensor in the output; 1 for a 0-d tensor.
        dtype: Dtype in the output; empty for the tensor's own.
    """

    writes: Locations
    rows: int
    dtype: str = ""

    def cast_dtype(self, tensor: SourceTensor) -> str:
        """Return the target dtype of a cast; empty if it keeps its dtype."""
        return self.dtype if self.dtype != tensor.dtype else ""


@dataclass(frozen=True, slots=True)
class VocabResize:
    """Resize of the vocabulary.

    Attributes:
        vocabulary: True and stored size in the source.
        tensors: Names of the tensors whose first dim is the vocabulary.
        fill: Fill of rows beyond those of the source.
    """

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill


def output_rows(tensors: Iterable[SourceTensor], vocab_tensors: Collection[str], *, vocab_size: int) -> dict[str, int]:
    """Return the rows of each tensor in an output with `vocab_size` vocabulary rows; 1 for a 0-d tensor."""
    return {t.name: vocab_size if t.name in vocab_tensors else (t.shape[0] if t.shape else 1) for t in tensors}


def vocab_tensor_names(source: Source, accounting: Accounting) -> set[str]:
    """Return the names of tensors whose first dim is the vocabulary, including the training state."""
    names = vocab_tensors(accounting)
    state = ((tensor.name, *split_name(tensor.name)) for tensor in source.state_tensors)
    return names | {name for name, slot, tensor in state if slot and tensor in names}


def build_streams(
    source: Source, targets: Mapping[str, TensorTarget], *, resize: VocabResize, compared: Collection[str] = ()
) -> tuple[Stream, ...]:
    """Return the streams of all tensors with a target, in the source's order.

    A vocabulary tensor is split into its true rows and its padding; padding is copied as far as the source has it.

    Args:
        source: The opened source.
        targets: Target of each tensor, by name.
        resize: Resize of the vocabulary.
        compared: Names of tensors to read for equality checks, even without a target.

    Returns:
        Streams whose rows cover each tensor without gaps.
    """
    streams: list[Stream] = []
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            target = TensorTarget((), tensor.shape[0])
        if target is not None:
            streams += (
                _vocab_streams(tensor, target, resize)
                if tensor.name in resize.tensors
                else [_whole_stream(tensor, target)]
            )
    return tuple(streams)


def _whole_stream(tensor: SourceTensor, target: TensorTarget) -> Stream:
    rows = tensor.shape[0] if tensor.shape else 1
    return Stream(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        (0, rows),
        tensor.placement,
        target.writes,
        cast_to=target.cast_dtype(tensor),
    )


def _vocab_streams(tensor: SourceTensor, target: TensorTarget, resize: VocabResize) -> Iterator[Stream]:
    """Yield the streams of a vocabulary tensor: true rows, copied padding by digest range, and filled rows."""
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    cast = target.cast_dtype(tensor)
    true_stream = Stream(
        tensor.name,
        tensor.dtype,
        shape,
        (0, resize.vocabulary.true_size),
        tensor.placement,
        target.writes,
        cast_to=cast,
    )
    yield true_stream
    kept_rows = min(tensor.shape[0], target.rows)
    edges = sorted(
        {resize.vocabulary.true_size, kept_rows, *(low for low, _, _ in tensor.digests)}
    )  # the ranges of the recorded digests
    inside = [edge for edge in edges if resize.vocabulary.true_size <= edge <= kept_rows]
    for low, high in itertools.pairwise(inside):
        yield replace(true_stream, rows=(low, high))
    if target.rows > kept_rows:
        is_bias = len(tensor.shape) == 1  # the head's bias: its padding is zero for every fill
        fill = Fill("zeros") if is_bias else resize.fill
        yield replace(
            true_stream, dtype=true_stream.written_dtype, rows=(kept_rows, target.rows), reads=(), fill=fill, cast_to=""
        )


def dropped_state(source: Source) -> Iterator[DroppedTensor]:
    """Yield the parts of a training state other than parameters.

    They are the optimizer slots (subtrees with one leaf per parameter) and each leaf outside of slots.
    """
    groups: dict[str, int] = {}
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        groups[slot or name] = groups.get(slot or name, 0) + tensor.nbytes
    for name, nbytes in groups.items():
        yield DroppedTensor(name, nbytes, OPT_STATE_RULE if name.split(".")[0] == OPT_STATE else TRAINING_STATE_RULE)
    yield from source.extra_entries


def optimizer_nbytes(source: Source) -> int:
    """Return the bytes of the optimizer state."""
    return sum(dropped.nbytes for dropped in dropped_state(source) if dropped.rule == OPT_STATE_RULE)


def dropped_padding(
    source: Source, targets: Mapping[str, TensorTarget], *, resize: VocabResize
) -> Iterator[DroppedTensor]:
    """Yield the source's padding rows beyond the rows of the target."""
    for tensor in source.tensors:
        target = targets.get(tensor.name)
        if target and tensor.name in resize.tensors and tensor.shape[0] > target.rows:
            rows = tensor.shape[0] - target.rows
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield DroppedTensor(tensor.name, nbytes, "padding taken off", (target.rows, tensor.shape[0]))
