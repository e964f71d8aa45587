"""Bytes of a checkpoint needed by each host of a mesh, and bytes read for them. No I/O, no jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from prepcli.algebra.boxes import Box
from prepcli.models.mesh import Mesh
from prepcli.models.partition import Spec, device_boxes, shard_shape


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
