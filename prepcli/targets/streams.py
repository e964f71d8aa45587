"""Streams of a plan, from the tensors of a source and their targets: shared by all conversions."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from prepcli.algebra.boxes import Range
from prepcli.planning.arrays import Locations
from prepcli.planning.libraries import LayoutScale
from prepcli.planning.manifest_fields import PADDING_RULE
from prepcli.planning.plan import DroppedTensor, Fill, Stream
from prepcli.planning.state_rows import DECODED, QUANTIZATION, QUANTIZATION_RULE
from prepcli.planning.tensor_match import Vocabulary
from prepcli.planning.tensors import OPT_STATE, OPT_STATE_RULE, TRAINING_STATE_RULE, split_name
from prepcli.sources.source import Source, SourceTensor
from prepcli.sources.vocabulary_tensors import check_prediction_rows


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Target of a tensor.

    Attributes:
        writes: Locations of the tensor in the output.
        rows: Rows of the tensor in the output, or 1 for a 0-d tensor.
        dtype: Dtype in the output, or empty for the tensor's own.
        scale: Scale of the values in the output, or None.
    """

    writes: Locations
    rows: int
    dtype: str = ""
    scale: LayoutScale | None = None

    def cast_dtype(self, tensor: SourceTensor) -> str:
        """Return the target dtype of a cast, or empty if it keeps its dtype."""
        if self.dtype == tensor.dtype:
            return ""
        return self.dtype


@dataclass(frozen=True, slots=True)
class VocabResize:
    """Resize of the vocabulary.

    Attributes:
        vocabulary: True and stored size in the source.
        tensors: Names of the tensors with one row per token.
        fill: Fill of the rows missing in the source.
        keeps_padding: Whether padding of the source is copied. Otherwise all rows after the true ones are filled.
        added_count: Number of tokens to add after the true vocabulary, if padding is not copied.
        added_fill: Fill of their rows.
        zero_tensors: Names of tensors whose added rows are zeros, e.g. moments: no step has changed the rows.
        dropped_rule: Rule of the omitted rows.
    """

    vocabulary: Vocabulary
    tensors: Collection[str]
    fill: Fill
    keeps_padding: bool = True
    added_count: int = 0
    added_fill: Fill | None = None
    dropped_rule: str = PADDING_RULE
    zero_tensors: Collection[str] = ()

    def copied_rows(self, tensor: SourceTensor, rows: int) -> int:
        """Return how many rows of a vocabulary tensor are copied to an output with `rows` rows."""
        if self.keeps_padding:
            return min(tensor.shape[0], rows)
        return self.vocabulary.true_size


def output_rows(
    tensors: Iterable[SourceTensor], vocab_tensors: Collection[str], *, vocab_size: int
) -> dict[str, int]:
    """Return the rows of each tensor in an output with `vocab_size` vocabulary rows, or 1 for a 0-d tensor."""
    rows: dict[str, int] = {}
    for tensor in tensors:
        if tensor.name in vocab_tensors:
            rows[tensor.name] = vocab_size
        else:
            rows[tensor.name] = _num_rows(tensor)
    return rows


def _num_rows(tensor: SourceTensor) -> int:
    """Return the rows of a tensor, or 1 for a 0-d tensor."""
    return tensor.shape[0] if tensor.shape else 1


def build_streams(
    source: Source,
    targets: Mapping[str, TensorTarget],
    *,
    resize: VocabResize,
    compared: Collection[str] = (),
) -> tuple[Stream, ...]:
    """Return the streams of all tensors with a target, in the source's order.

    A vocabulary tensor is split into its true rows and its padding. Padding is copied as far as the source has it.

    Args:
        source: The opened source.
        targets: Target of each tensor, by name.
        resize: Resize of the vocabulary.
        compared: Names of tensors to read for equality checks, even without a target.

    Returns:
        Streams of the rows of each tensor, without gaps.

    Raises:
        UsageError: Multi-token prediction has an embedding or a head that would not fit the resized vocabulary.
    """
    _check_resized(source, targets, resize)
    streams: list[Stream] = []
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None and tensor.name in compared:
            # A tied duplicate has no place in the output. It is read to check that it equals the original.
            target = TensorTarget((), tensor.shape[0])
        if target is None:
            continue
        if tensor.name in resize.tensors:
            streams += _vocab_streams(tensor, target, resize)
        else:
            streams.append(
                Stream(
                    tensor.name,
                    tensor.dtype,
                    tensor.shape,
                    (0, _num_rows(tensor)),
                    tensor.placement,
                    target.writes,
                    cast_to=target.cast_dtype(tensor),
                    scale=target.scale,
                )
            )
    return tuple(streams)


def _check_resized(
    source: Source, targets: Mapping[str, TensorTarget], resize: VocabResize
) -> None:
    """Raise UsageError if a vocabulary tensor would keep its rows while the other ones are resized."""
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None or tensor.name not in resize.tensors:
            continue
        has_new_tokens = resize.added_count > 0
        if has_new_tokens or target.rows != tensor.shape[0]:
            check_prediction_rows(
                source, resize.tensors, target.rows, has_new_tokens=has_new_tokens
            )
            return


def _vocab_streams(
    tensor: SourceTensor, target: TensorTarget, resize: VocabResize
) -> Iterator[Stream]:
    """Yield the streams of a vocabulary tensor: true rows, copied padding by digest range, and filled rows."""
    # A digest covers the rows of one stream. 100 true rows of 128 stored ones, resized to 192, are the
    # streams 0:100, 100:128 (copied padding) and 128:192 (filled). Padding that was filled by several
    # runs has several recorded digests, and becomes one stream for each.
    shape = (max(tensor.shape[0], target.rows), *tensor.shape[1:])
    true_size = resize.vocabulary.true_size
    cast = target.cast_dtype(tensor)
    true_stream = Stream(
        tensor.name,
        tensor.dtype,
        shape,
        (0, true_size),
        tensor.placement,
        target.writes,
        cast_to=cast,
        scale=target.scale,
    )
    yield true_stream
    kept_rows = resize.copied_rows(tensor, target.rows)
    edges = {true_size, kept_rows}
    edges.update(low for low, _, _ in tensor.digests)
    inside = [edge for edge in edges if true_size <= edge <= kept_rows]
    # E.g. true size 100, 128 stored rows, a digest from row 110: streams 100:110 and 110:128.
    for low, high in itertools.pairwise(sorted(inside)):
        yield replace(true_stream, rows=(low, high))
    added_stop = kept_rows + resize.added_count
    added_fill = resize.added_fill
    if tensor.name in resize.zero_tensors:
        added_fill = Fill("zeros")
    for rows, fill in (
        ((kept_rows, added_stop), added_fill),
        ((added_stop, target.rows), resize.fill),
    ):
        if fill is not None and rows[0] < rows[1]:
            yield _filled_stream(true_stream, rows, fill)


def _filled_stream(true_stream: Stream, rows: Range, fill: Fill) -> Stream:
    """Return the stream of new rows of a tensor."""
    # New rows of a head's bias are zeros, except for the mean of a token's pieces.
    if len(true_stream.shape) == 1 and fill.kind != "pieces":
        fill = Fill("zeros")
    return replace(
        true_stream,
        # A fill writes values of the output's dtype, so nothing is left to cast.
        dtype=true_stream.written_dtype,
        rows=rows,
        reads=(),
        fill=fill,
        cast_to="",
        # An export fills with zeros. A root keeps them.
        scale=None,
    )


def dropped_state(source: Source) -> Iterator[DroppedTensor]:
    """Yield the parts of a training state other than parameters.

    They are the optimizer slots (subtrees with one leaf per parameter) and each leaf outside of slots.
    """
    groups: dict[str, int] = {}
    for tensor in source.state_tensors:
        slot, name = split_name(tensor.name)
        if slot == DECODED:
            continue
        groups[slot or name] = groups.get(slot or name, 0) + tensor.nbytes
    for name, nbytes in groups.items():
        rule = TRAINING_STATE_RULE
        if name == QUANTIZATION:
            rule = QUANTIZATION_RULE
        if name.split(".")[0] == OPT_STATE:
            rule = OPT_STATE_RULE
        yield DroppedTensor(name, nbytes, rule)
    yield from source.extra_entries


def optimizer_nbytes(source: Source) -> int:
    """Return the bytes of the optimizer state."""
    return sum(part.nbytes for part in dropped_state(source) if part.rule == OPT_STATE_RULE)


def dropped_padding(
    source: Source, targets: Mapping[str, TensorTarget], *, resize: VocabResize
) -> Iterator[DroppedTensor]:
    """Yield the rows of the source's vocabulary left out of the output."""
    for tensor in source.all_tensors:
        target = targets.get(tensor.name)
        if target is None or tensor.name not in resize.tensors:
            continue
        copied_rows = resize.copied_rows(tensor, target.rows)
        if copied_rows < tensor.shape[0]:
            rows = tensor.shape[0] - copied_rows
            # Exact, because all rows have one size: 28 of 128 rows with 1,024 bytes in all are 224 bytes.
            nbytes = rows * tensor.nbytes // tensor.shape[0]
            yield DroppedTensor(
                tensor.name, nbytes, resize.dropped_rule, (copied_rows, tensor.shape[0])
            )
