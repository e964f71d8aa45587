"""From a source and a wish to the streams of a Plan: the part that saving, exporting and padding share."""

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
    """Where a tensor goes, and the rows that it has there; 1 for a 0-d tensor. `dtype`: empty for its own."""

    writes: Locations
    rows: int
    dtype: str = ""

    def cast_dtype(self, tensor: SourceTensor) -> str:
        """The dtype that a tensor is cast into; empty where it stays as it is."""
        return self.dtype if self.dtype != tensor.dtype else ""


@dataclass(frozen=True, slots=True)
class VocabResize:
    """The vocabulary, the tensors that have it as their first dim, and what rows that no source has are filled with."""

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill


def output_rows(tensors: Iterable[SourceTensor], vocab_tensors: Collection[str], vocab_size: int) -> dict[str, int]:
    """Rows of every tensor in an output with `size` rows of vocabulary; 1 for a 0-d tensor."""
    return {t.name: vocab_size if t.name in vocab_tensors else (t.shape[0] if t.shape else 1) for t in tensors}


def vocab_tensor_names(source: Source, accounting: Accounting) -> set[str]:
    """Tensors whose first dim is the vocabulary, those of a training state among them."""
    found = vocab_tensors(accounting)
    state = ((tensor.name, *split_name(tensor.name)) for tensor in source.state_tensors)
    return found | {name for name, slot, tensor in state if slot and tensor in found}


def build_streams(
    source: Source, targets: Mapping[str, TensorTarget], resize: VocabResize, compared: Collection[str] = ()
) -> tuple[Stream, ...]:
    """The tensors that have a target, in the source's order; those `compared` are read even if they have none.

    A tensor of the vocabulary is cut in its true rows and its padding, which is copied as far as the source has it.
    """
    found: list[Stream] = []
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            target = TensorTarget((), tensor.shape[0])
        if target is not None:
            found += (
                _vocab_streams(tensor, target, resize)
                if tensor.name in resize.tensors
                else [_whole_stream(tensor, target)]
            )
    return tuple(found)


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
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    cast = target.cast_dtype(tensor)
    true = Stream(
        tensor.name,
        tensor.dtype,
        shape,
        (0, resize.vocabulary.true_size),
        tensor.placement,
        target.writes,
        cast_to=cast,
    )
    yield true
    kept = min(tensor.shape[0], target.rows)
    edges = sorted({resize.vocabulary.true_size, kept, *(low for low, _, _ in tensor.digests)})  # as digests were taken
    inside = [edge for edge in edges if resize.vocabulary.true_size <= edge <= kept]
    for low, high in itertools.pairwise(inside):
        yield replace(true, rows=(low, high))
    if target.rows > kept:
        bias = len(tensor.shape) == 1  # of a head: its padding is 0 whatever the rows are filled with
        fill = Fill("zeros") if bias else resize.fill
        yield replace(true, dtype=true.written_dtype, rows=(kept, target.rows), reads=(), fill=fill, cast_to="")


def dropped_state(source: Source) -> Iterator[DroppedTensor]:
    """What a training state has besides parameters: each slot as a whole, and each leaf that stands alone."""
    groups: dict[str, int] = {}
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        groups[slot or name] = groups.get(slot or name, 0) + tensor.nbytes
    for name, nbytes in groups.items():
        yield DroppedTensor(name, nbytes, OPT_STATE_RULE if name.split(".")[0] == OPT_STATE else TRAINING_STATE_RULE)
    yield from source.extra_entries


def optimizer_nbytes(source: Source) -> int:
    """Bytes of the optimizer state."""
    return sum(dropped.nbytes for dropped in dropped_state(source) if dropped.rule == OPT_STATE_RULE)


def dropped_padding(
    source: Source, targets: Mapping[str, TensorTarget], resize: VocabResize
) -> Iterator[DroppedTensor]:
    """Rows of padding that the source has and the target has not."""
    for tensor in source.tensors:
        target = targets.get(tensor.name)
        if target and tensor.name in resize.tensors and tensor.shape[0] > target.rows:
            rows = tensor.shape[0] - target.rows
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield DroppedTensor(tensor.name, nbytes, "padding taken off", (target.rows, tensor.shape[0]))
