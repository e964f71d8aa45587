"""Bytes of a checkpoint needed by each host of a mesh, and bytes read for them. No I/O, no jax."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.models.mesh import Mesh
from trainer.models.partition import Box, Spec, device_boxes, shard_shape


@dataclass(frozen=True, slots=True)
class HostReads:
    """Bytes of a leaf for one host: the distinct shards of its devices, and the chunks with these shards."""

    needed_bytes: int
    read_bytes: int


def reads_per_host(
    shape: Sequence[int], chunk: Sequence[int], *, itemsize: int, spec: Spec, mesh: Mesh, devices_per_host: int
) -> list[HostReads]:
    """Return the bytes of a leaf that each host needs and reads.

    The time grows with the number of devices, not with the number of chunks.

    Args:
        shape: Shape of the leaf.
        chunk: Shape of its stored chunks. Chunks at the edge have their full size.
        itemsize: Bytes of an element.
        spec: Sharding of the leaf.
        mesh: Device mesh; consecutive devices share a host.
        devices_per_host: Number of devices of a host.

    Returns:
        One entry per host, in the order of the devices.
    """
    boxes = device_boxes(spec, mesh, shape)
    box_bytes, chunk_bytes = math.prod(shard_shape(spec, shape)) * itemsize, math.prod(chunk) * itemsize
    reads = []
    for first in range(0, len(boxes), devices_per_host):
        host_boxes = set(boxes[first : first + devices_per_host])
        # Ranges of chunk indices that overlap each box.
        chunk_boxes = {tuple((low // c, -(-high // c)) for (low, high), c in zip(box, chunk)) for box in host_boxes}
        reads.append(HostReads(len(host_boxes) * box_bytes, _union_volume(chunk_boxes) * chunk_bytes))
    return reads


def _union_volume(boxes: Collection[Box]) -> int:
    """Return the number of grid cells in the union of the boxes."""
    edges = [sorted({edge for ends in column for edge in ends}) for column in zip(*boxes)]
    edge_indices = [{edge: i for i, edge in enumerate(line)} for line in edges]
    covered: set[tuple[int, ...]] = set()
    for box in boxes:
        ranges = (range(indices[low], indices[high]) for indices, (low, high) in zip(edge_indices, box))
        covered.update(itertools.product(*ranges))
    return sum(math.prod(line[i + 1] - line[i] for line, i in zip(edges, cell)) for cell in covered)


def read_amplification(leaves: Iterable[Sequence[HostReads]]) -> float:
    """Return the bytes read per byte needed, over all leaves, of the host with the highest ratio."""
    hosts = zip(*leaves, strict=True)
    return max(sum(r.read_bytes for r in host) / sum(r.needed_bytes for r in host) for host in hosts)
