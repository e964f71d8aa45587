"""The shapes of the chunks of stored leaves. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from prepcli.models.partition import Spec, shard_shape
from prepcli.models.rules import EXPERT_DIMS, STACKED_DIMS, LeafDims

# Largest chunk of a leaf that is written without a mesh.
UNSHARDED_CHUNK_BYTES = 4 << 20
# Leaves below this size per layer have one chunk per layer even on a mesh, e.g. norms and biases.
MIN_SPLIT_NBYTES = 1 << 20


def chunk_shape(
    dims: LeafDims,
    shape: Sequence[int],
    *,
    spec: Spec | None,
    itemsize: int,
    min_split_bytes: int = MIN_SPLIT_NBYTES,
    stacked_dims: Collection[str] = STACKED_DIMS,
) -> tuple[int, ...]:
    """Return the chunk shape of a stored leaf. It divides the shape of the leaf.

    With a mesh a chunk is a shard, so that each host reads only its own bytes. Without a mesh it is
    a run of consecutive elements of at most UNSHARDED_CHUNK_BYTES.

    Args:
        dims: Named axes (atoms) of each dim of the leaf.
        shape: Shape of the leaf.
        spec: Sharding of the leaf on a mesh, or None.
        itemsize: Bytes of an element.
        min_split_bytes: Size per layer below which a leaf is not split.
        stacked_dims: Logical dims with one source tensor per index. Chunks have extent 1 there.

    Returns:
        The shape of a chunk.
    """
    one_layer = tuple(
        1 if {*dim[:1]} & {*stacked_dims} else extent
        for dim, extent in zip(dims, shape, strict=True)
    )
    if spec is None:
        return _contiguous_chunk(one_layer, UNSHARDED_CHUNK_BYTES // itemsize)
    if math.prod(one_layer) * itemsize < min_split_bytes:
        return one_layer
    return tuple(map(min, one_layer, shard_shape(spec, shape)))


def join_experts(
    chunk: Sequence[int],
    dims: LeafDims,
    shape: Sequence[int],
    *,
    spec: Spec | None,
    itemsize: int,
) -> tuple[int, ...]:
    """Return a chunk shape with several experts, of at most UNSHARDED_CHUNK_BYTES.

    The experts of a chunk are in one shard.

    Args:
        chunk: Result of `chunk_shape`.
        dims: Named axes (atoms) of each dim of the leaf.
        shape: Shape of the leaf.
        spec: Sharding of the leaf on a mesh, or None.
        itemsize: Bytes of an element.

    >>> dims = [("layers",), ("experts",), ("embed",)]
    >>> join_experts((1, 1, 1 << 18), dims, (2, 12, 1 << 18), spec=None, itemsize=4)
    (1, 4, 262144)
    """
    joined = [*chunk]
    for axis, dim in enumerate(dims):
        if {*dim[:1]}.isdisjoint(EXPERT_DIMS):
            continue
        extent = shape[axis]
        if spec is not None:
            extent //= spec.shards_per_dim[axis]
        nbytes = math.prod(joined) * itemsize
        joined[axis] *= _largest_divisor(extent // chunk[axis], UNSHARDED_CHUNK_BYTES // nbytes)
    return tuple(joined)


def _contiguous_chunk(shape: Sequence[int], n_elements: int) -> tuple[int, ...]:
    """Return the largest chunk of consecutive elements: whole inner dims, a divisor of the next dim, then ones."""
    chunk: list[int] = []
    remaining = n_elements
    for extent in reversed(shape):
        length = _largest_divisor(extent, remaining)
        chunk.append(length)
        # Once a dim is cut, outer dims have extent 1. Otherwise the elements are not consecutive.
        remaining = remaining // length if length == extent else 1
    return tuple(reversed(chunk))


def _largest_divisor(extent: int, limit: int) -> int:
    """Return the largest divisor of `extent` up to `limit`."""
    small_divisors = [i for i in range(1, math.isqrt(extent) + 1) if extent % i == 0]
    # Each divisor up to the square root has a partner above it, e.g. 3 and 4 for 12.
    divisors = [*small_divisors, *(extent // i for i in small_divisors)]
    return max(divisor for divisor in divisors if divisor <= max(limit, 1))
