"""From a source and a wish to the streams of a Plan: the part that saving, exporting and padding share."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.planning.accounting import Account, vocab_tensors
from prepcli.planning.plan import Dropped, Fill, Side, Stream
from prepcli.planning.slots import OPTIMIZER, OPTIMIZER_RULE, STATE_RULE, parted
from prepcli.planning.vocabulary import Vocabulary
from prepcli.sources.source import Source, SourceTensor


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes, and the rows that it has there; 1 for a 0-d tensor. `dtype`: empty for its own."""

    side: Side
    rows: int
    dtype: str = ""

    def cast(self, tensor: SourceTensor) -> str:
        """The dtype that a tensor is cast into; empty where it stays as it is."""
        return self.dtype if self.dtype != tensor.dtype else ""


@dataclass(frozen=True, slots=True)
class Cut:
    """The vocabulary, the tensors that have it as their first dim, and what rows that no source has are filled with."""

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill


def rows_of(tensors: Iterable[SourceTensor], vocab: Collection[str], size: int) -> dict[str, int]:
    """Rows of every tensor in an output with `size` rows of vocabulary; 1 for a 0-d tensor."""
    return {t.name: size if t.name in vocab else (t.shape[0] if t.shape else 1) for t in tensors}


def vocab_names(source: Source, counted: Account) -> set[str]:
    """Tensors whose first dim is the vocabulary, those of a training state among them."""
    found = vocab_tensors(counted)
    state = ((tensor.name, *parted(tensor.name)) for tensor in source.state)
    return found | {name for name, slot, tensor in state if slot and tensor in found}


def streams(
    source: Source, targets: Mapping[str, Target], cut: Cut, compared: Collection[str] = ()
) -> tuple[Stream, ...]:
    """The tensors that have a target, in the source's order; those `compared` are read even if they have none.

    A tensor of the vocabulary is cut in its true rows and its padding, which is copied as far as the source has it.
    """
    found: list[Stream] = []
    for tensor in source.everything:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            target = Target((), tensor.shape[0])
        if target is not None:
            found += _vocab_streams(tensor, target, cut) if tensor.name in cut.tensors else [_whole(tensor, target)]
    return tuple(found)


def _whole(tensor: SourceTensor, target: Target) -> Stream:
    rows = tensor.shape[0] if tensor.shape else 1
    return Stream(
        tensor.name, tensor.dtype, tensor.shape, (0, rows), tensor.side, target.side, cast=target.cast(tensor)
    )


def _vocab_streams(tensor: SourceTensor, target: Target, cut: Cut) -> Iterator[Stream]:
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    cast = target.cast(tensor)
    true = Stream(tensor.name, tensor.dtype, shape, (0, cut.vocabulary.true), tensor.side, target.side, cast=cast)
    yield true
    kept = min(tensor.shape[0], target.rows)
    edges = sorted({cut.vocabulary.true, kept, *(low for low, _, _ in tensor.digests)})  # as digests were taken
    inside = [edge for edge in edges if cut.vocabulary.true <= edge <= kept]
    for low, high in itertools.pairwise(inside):
        yield replace(true, rows=(low, high))
    if target.rows > kept:
        bias = len(tensor.shape) == 1  # of a head: its padding is 0 whatever the rows are filled with
        fill = Fill("zeros") if bias else cut.fill
        yield replace(true, dtype=true.written_dtype, rows=(kept, target.rows), left=(), fill=fill, cast="")


def left_out(source: Source) -> Iterator[Dropped]:
    """What a training state has besides parameters: each slot as a whole, and each leaf that stands alone."""
    groups: dict[str, int] = {}
    for tensor in source.state:
        slot, name = parted(tensor.name)
        groups[slot or name] = groups.get(slot or name, 0) + tensor.nbytes
    for name, nbytes in groups.items():
        yield Dropped(name, nbytes, OPTIMIZER_RULE if name.split(".")[0] == OPTIMIZER else STATE_RULE)
    yield from source.beside


def optimizer_nbytes(source: Source) -> int:
    """Bytes of the optimizer state."""
    return sum(dropped.nbytes for dropped in left_out(source) if dropped.rule == OPTIMIZER_RULE)


def taken_off(source: Source, targets: Mapping[str, Target], cut: Cut) -> Iterator[Dropped]:
    """Rows of padding that the source has and the target has not."""
    for tensor in source.tensors:
        target = targets.get(tensor.name)
        if target and tensor.name in cut.tensors and tensor.shape[0] > target.rows:
            rows = tensor.shape[0] - target.rows
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield Dropped(tensor.name, nbytes, "padding taken off", (target.rows, tensor.shape[0]))
