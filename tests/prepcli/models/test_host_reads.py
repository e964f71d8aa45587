"""Bytes that hosts read of a leaf, compared with a count of elements and chunks."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.models.mesh import parse_mesh
from prepcli.models.partition import (
    HostReads,
    chunk_shape,
    device_boxes,
    partition_spec,
    read_amplification,
    reads_per_host,
)
from prepcli.models.rules import PARAM_RULES

DIMS = [("heads",), ("head_dim",), ("embed",)]


def count_elements(shape, chunk, spec, mesh, devices_per_host) -> list[tuple[int, int]]:
    """Count the elements needed by each host, and the elements of their chunks, one by one."""
    boxes = device_boxes(spec, mesh, shape)
    hosts = []
    for first in range(0, len(boxes), devices_per_host):
        on_host = boxes[first : first + devices_per_host]
        needed = {
            cell for box in on_host for cell in itertools.product(*(range(*ends) for ends in box))
        }
        chunks = {tuple(i // c for i, c in zip(cell, chunk)) for cell in needed}
        hosts.append((len(needed), len(chunks) * math.prod(chunk)))
    return hosts


@given(st.data())
def test_reads_per_host_equal_element_count(data):
    sizes = [data.draw(st.integers(1, 3)) for _ in range(3)]
    mesh = parse_mesh(",".join(map(str, sizes)))
    shape = (sizes[2] * data.draw(st.integers(1, 3)), 2, sizes[1] * data.draw(st.integers(1, 4)))
    chunk = tuple(data.draw(st.integers(1, extent + 1)) for extent in shape)
    devices_per_host = data.draw(st.integers(1, 9))
    spec = partition_spec(DIMS, shape, mesh, PARAM_RULES)
    reads = reads_per_host(
        shape, chunk, itemsize=2, spec=spec, mesh=mesh, devices_per_host=devices_per_host
    )
    expected = count_elements(shape, chunk, spec, mesh, devices_per_host)
    assert [(r.needed_bytes, r.read_bytes) for r in reads] == [
        (2 * needed, 2 * read) for needed, read in expected
    ]


def test_checkpoint_is_read_once_on_its_own_mesh():
    mesh, leaves = parse_mesh("1,64,4"), []
    for dims, shape in [
        ("vocab embed", (32000, 5120)),
        ("layers heads head_dim embed", (40, 40, 128, 5120)),
    ]:
        leaf_dims = [(name,) for name in dims.split()]
        spec = partition_spec(leaf_dims, shape, mesh, PARAM_RULES)
        chunk = chunk_shape(leaf_dims, shape, spec=spec, itemsize=2)
        leaves.append(
            reads_per_host(
                shape,
                chunk,
                itemsize=2,
                spec=spec,
                mesh=mesh,
                devices_per_host=4,
            )
        )
    assert len(leaves[0]) == 64
    assert sum(host.needed_bytes for host in leaves[0]) == 32000 * 5120 * 2
    assert read_amplification(leaves) == 1.0


def test_unsharded_chunks_amplify_reads():
    mesh, shape = parse_mesh("1,1,4"), (8, 2, 64)
    spec = partition_spec([("embed",), ("head_dim",), ("mlp",)], shape, mesh, PARAM_RULES)
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=1
                )
            ]
        )
        == 4.0
    )
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=2
                )
            ]
        )
        == 2.0
    )
    assert (
        read_amplification(
            [
                reads_per_host(
                    shape, (1, 2, 64), itemsize=2, spec=spec, mesh=mesh, devices_per_host=4
                )
            ]
        )
        == 1.0
    )


def test_read_amplification_is_maximum_over_hosts():
    leaves = [
        [HostReads(100, 100), HostReads(100, 100)],
        [HostReads(100, 100), HostReads(100, 300)],
    ]
    assert read_amplification(leaves) == pytest.approx(2.0)


def test_scalar_leaf_is_read_by_every_host():
    mesh = parse_mesh("1,2,4")
    assert (
        reads_per_host(
            (),
            (),
            itemsize=4,
            spec=partition_spec([], (), mesh, PARAM_RULES),
            mesh=mesh,
            devices_per_host=4,
        )
        == [HostReads(4, 4)] * 2
    )
