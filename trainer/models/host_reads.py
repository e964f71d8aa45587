"""What each host of a mesh must read of a checkpoint, and how much more that is than what it needs. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.models.mesh import Box, Mesh, Spec, device_boxes, shard_shape


@dataclass(frozen=True, slots=True)
class HostReads:
    """Of a host and a leaf: bytes that its devices hold (the same box once), and bytes of the chunks they lie in."""

    needed_bytes: int
    read_bytes: int


def reads_per_host(
    shape: Sequence[int], chunk: Sequence[int], itemsize: int, spec: Spec, mesh: Mesh, devices_per_host: int
) -> list[HostReads]:
    """What each host must read of a leaf stored in `chunk`s; consecutive devices of the mesh share a host.

    The work grows with the devices, not with the chunks. Chunks at the edge count whole, as they are stored.
    """
    boxes = device_boxes(spec, mesh, shape)
    box_bytes, chunk_bytes = math.prod(shard_shape(spec, shape)) * itemsize, math.prod(chunk) * itemsize
    hosts = []
    for first in range(0, len(boxes), devices_per_host):
        held = set(boxes[first : first + devices_per_host])
        touched = {tuple((low // c, -(-high // c)) for (low, high), c in zip(box, chunk)) for box in held}
        hosts.append(HostReads(len(held) * box_bytes, _union_volume(touched) * chunk_bytes))
    return hosts


def _union_volume(boxes: Collection[Box]) -> int:
    """Cells of a grid that lie in any of the boxes."""
    edges = [sorted({edge for ends in column for edge in ends}) for column in zip(*boxes)]
    place = [{edge: i for i, edge in enumerate(line)} for line in edges]
    covered: set[tuple[int, ...]] = set()
    for box in boxes:
        covered.update(itertools.product(*(range(at[low], at[high]) for at, (low, high) in zip(place, box))))
    return sum(math.prod(line[i + 1] - line[i] for line, i in zip(edges, cell)) for cell in covered)


def read_amplification(leaves: Iterable[Sequence[HostReads]]) -> float:
    """Bytes read for each byte held, over all leaves, of the host where that is worst."""
    hosts = zip(*leaves, strict=True)
    return max(sum(r.read_bytes for r in host) / sum(r.needed_bytes for r in host) for host in hosts)
