"""From a source and a wish to the streams of a Plan: the part that saving, exporting and padding share."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.plan import Dropped, Fill, Side, Stream
from prepcli.sources import Source, SourceTensor
from prepcli.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Target:
    """Where a tensor goes, and the rows that it has there; 1 for a 0-d tensor."""

    side: Side
    rows: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The vocabulary, the tensors that have it as their first dim, and what rows that no source has are filled with."""

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill


def streams(
    source: Source, targets: Mapping[str, Target], cut: Cut, compared: Collection[str] = ()
) -> tuple[Stream, ...]:
    """The tensors that have a target, in the source's order; those `compared` are read even if they have none.

    A tensor of the vocabulary is cut in its true rows and its padding, which is copied as far as the source has it.
    """
    found: list[Stream] = []
    for tensor in source.tensors:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            target = Target((), tensor.shape[0])
        if target is not None:
            found += _vocab_streams(tensor, target, cut) if tensor.name in cut.tensors else [_whole(tensor, target)]
    return tuple(found)


def _whole(tensor: SourceTensor, target: Target) -> Stream:
    rows = tensor.shape[0] if tensor.shape else 1
    return Stream(tensor.name, tensor.dtype, tensor.shape, (0, rows), tensor.side, target.side)


def _vocab_streams(tensor: SourceTensor, target: Target, cut: Cut) -> Iterator[Stream]:
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    true = Stream(tensor.name, tensor.dtype, shape, (0, cut.vocabulary.true), tensor.side, target.side)
    yield true
    kept = min(tensor.shape[0], target.rows)
    edges = sorted({cut.vocabulary.true, kept, *(low for low, _, _ in tensor.digests)})  # as digests were taken
    inside = [edge for edge in edges if cut.vocabulary.true <= edge <= kept]
    for low, high in itertools.pairwise(inside):
        yield replace(true, rows=(low, high))
    if target.rows > kept:
        bias = len(tensor.shape) == 1  # of a head: its padding is 0 whatever the rows are filled with
        yield replace(true, rows=(kept, target.rows), left=(), fill=Fill("zeros") if bias else cut.fill)


def taken_off(source: Source, targets: Mapping[str, Target], cut: Cut) -> Iterator[Dropped]:
    """Rows of padding that the source has and the target has not."""
    for tensor in source.tensors:
        target = targets.get(tensor.name)
        if target and tensor.name in cut.tensors and tensor.shape[0] > target.rows:
            rows = tensor.shape[0] - target.rows
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield Dropped(tensor.name, nbytes, "padding taken off", (target.rows, tensor.shape[0]))
