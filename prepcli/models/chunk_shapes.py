"""The shapes of the chunks of stored leaves, and the bytes that each host of a mesh reads of them. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import Box
from prepcli.models.mesh import Mesh
from prepcli.models.partition import Spec, device_boxes, shard_shape
from prepcli.models.rules import EXPERT_DIMS, STACKED_DIMS, LeafDims


@dataclass(frozen=True, slots=True)
class HostReads:
    """Bytes of a leaf for one host.

    Attributes:
        needed_bytes: Bytes of the distinct shards of its devices.
        read_bytes: Bytes of the chunks with elements of these shards.
    """

    needed_bytes: int
    read_bytes: int


def reads_per_host(
    shape: Sequence[int],
    chunk: Sequence[int],
    *,
    itemsize: int,
    spec: Spec,
    mesh: Mesh,
    devices_per_host: int,
) -> list[HostReads]:
    """Return the bytes of a leaf that each host needs and reads.

    The time grows with the number of devices, not with the number of chunks.

    Args:
        shape: Shape of the leaf.
        chunk: Shape of its stored chunks. Chunks at the edge have their full size.
        itemsize: Bytes of an element.
        spec: Sharding of the leaf.
        mesh: Device mesh. Consecutive devices share a host.
        devices_per_host: Number of devices of a host.

    Returns:
        One entry per host, in the order of the devices.
    """
    boxes = device_boxes(spec, mesh, shape)
    box_bytes = math.prod(shard_shape(spec, shape)) * itemsize
    chunk_bytes = math.prod(chunk) * itemsize
    reads = []
    for first in range(0, len(boxes), devices_per_host):
        host_boxes = set(boxes[first : first + devices_per_host])
        # Two shards may need the same chunk. The union counts it once per host.
        chunk_boxes: set[Box] = set()
        for box in host_boxes:
            # E.g. [3, 9) with chunks of 4 overlaps the chunks [0, 3).
            edges = zip(box, chunk)
            chunk_boxes.add(tuple((low // n, -(-high // n)) for (low, high), n in edges))
        reads.append(
            HostReads(len(host_boxes) * box_bytes, _union_volume(chunk_boxes) * chunk_bytes)
        )
    return reads


def _union_volume(boxes: Collection[Box]) -> int:
    """Return the number of grid cells in the union of the boxes."""
    # All edges of the boxes cut each axis into intervals. A box covers whole cells of this irregular
    # grid, e.g. [0, 4) and [2, 6) have the edges 0, 2, 4, 6 and cover cells {0, 1} and {1, 2}.
    edges = [sorted(set(itertools.chain.from_iterable(column))) for column in zip(*boxes)]
    edge_indices = [dict(zip(line, itertools.count())) for line in edges]
    covered: set[tuple[int, ...]] = set()
    for box in boxes:
        ranges = (
            range(indices[low], indices[high]) for indices, (low, high) in zip(edge_indices, box)
        )
        covered.update(itertools.product(*ranges))
    volume = 0
    for cell in covered:
        volume += math.prod(line[i + 1] - line[i] for line, i in zip(edges, cell))
    return volume


def read_amplification(leaves: Iterable[Sequence[HostReads]]) -> float:
    """Return the bytes read per byte needed, over all leaves, of the host with the highest ratio."""
    # `leaves` has one entry per leaf with one item per host. `zip` groups the items by host.
    ratios: list[float] = []
    for host in zip(*leaves, strict=True):
        read_bytes = sum(reads.read_bytes for reads in host)
        ratios.append(read_bytes / sum(reads.needed_bytes for reads in host))
    return max(ratios)


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
