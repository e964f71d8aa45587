"""Stored duplicates of tensors, such as the head of a tied model, which must equal their originals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prepcli.core.counts import count_text
from prepcli.engine.compare import compare_streams
from prepcli.planning.plan import EqualityCheck, Stream
from prepcli.planning.tensor_match import not_equal_error
from prepcli.sources.source import Source, SourceTensor

# Duplicates of each tensor, by its name. Tensors without duplicates are absent.
Duplicates = Mapping[str, Sequence[SourceTensor]]


def find_duplicates(source: Source, checks: Sequence[EqualityCheck], *, verify: bool) -> Duplicates:
    """Return the duplicates to compare byte by byte while parts of their originals are read.

    A tensor with digests to check is always read completely. Its duplicates are compared here: by their digests, or by
    their bytes if the digests differ.

    Args:
        source: The checkpoint.
        checks: Each duplicate with its original.
        verify: Whether tensors with digests are compared with them when they are read.

    Raises:
        PrepError: A duplicate differs.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    duplicates: dict[str, list[SourceTensor]] = {}
    for check in checks:
        duplicate = tensors[check.name]
        original = tensors[check.duplicate_of]
        # A window of the original is read together with the same window of the duplicate, so that both
        # are read once. Whole tensors are compared by digests alone.
        if not (verify and original.digests):
            duplicates.setdefault(original.name, []).append(duplicate)
        elif duplicate.digests != original.digests:
            check_equal(source, check)
    return duplicates


def check_equal(source: Source, check: EqualityCheck) -> None:
    """Read a tensor and its duplicate.

    Raises:
        PrepError: They differ. The error has the number of differences and the first one.
    """
    tensors = {tensor.name: tensor for tensor in source.tensors}
    pair = [tensors[name] for name in (check.name, check.duplicate_of)]
    result = compare_streams(
        source.byte_sources,
        _tensor_stream(pair[0]),
        blobs_b=source.byte_sources,
        stream_b=_tensor_stream(pair[1]),
    )
    if result.count:
        first = f"{list(result.index)}: {result.value_a}, {result.value_b}"
        difference = (
            f"{count_text(result.count, 'value differs', 'values differ')}, the first at {first}"
        )
        display_names = {tensor.name: source.names.display_name(tensor.name) for tensor in pair}
        raise not_equal_error(
            source.family, check, display_names=display_names, difference=difference
        )


def _tensor_stream(tensor: SourceTensor) -> Stream:
    """Return a read-only stream of a whole tensor."""
    rows = (0, tensor.shape[0] if tensor.shape else 1)
    return Stream(tensor.name, tensor.dtype, tensor.shape, rows, tensor.placement, ())
