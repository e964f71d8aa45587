"""Tests of the slices of TPUs."""

from __future__ import annotations

import math
from importlib.util import find_spec

import pytest

from trainer.models.errors import USAGE, PrepError
from trainer.planning.accelerators import ACCELERATORS
from trainer.planning.tpu_topologies import SLICES, find_topology


@pytest.mark.parametrize(
    ("kind", "num_chips", "topology"),
    [("v5p", 256, "v5p:4x8x8"), ("v4", 4, "v4:2x2x1"), ("v5e", 1, "v5e:1x1"), ("v6e", 256, "v6e:16x16")],
)
def test_slices_are_found_by_number_of_chips(kind: str, num_chips: int, topology: str):
    assert find_topology(kind, num_chips) == topology


@pytest.mark.parametrize("kind", SLICES)
def test_slices_of_a_kind_differ_in_size_and_fit_a_pod(kind: str):
    sizes = [math.prod(map(int, shape.split("x"))) for shape in SLICES[kind]]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] <= ACCELERATORS[kind].domain_size


@pytest.mark.parametrize(
    ("kind", "num_chips", "nearest"),
    [("v5p", 2, "4"), ("v5e", 24, "16 or 32"), ("v6e", 512, "256"), ("v5p", 7000, "6,144")],
)
def test_errors_name_the_nearest_slices(kind: str, num_chips: int, nearest: str):
    with pytest.raises(PrepError, match=rf"^no slice of {kind} has {num_chips:,} chips - slices have ") as caught:
        find_topology(kind, num_chips)
    assert caught.value.hint == f"a mesh of {nearest} devices"
    assert caught.value.code == USAGE


@pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")
@pytest.mark.slow
def test_libtpu_has_a_device_per_chip_of_every_slice():
    from trainer.distributed.topology import tpu_devices

    for kind, shapes in SLICES.items():
        for shape in shapes:
            assert len(tpu_devices(f"{kind}:{shape}")) == math.prod(map(int, shape.split("x"))), (kind, shape)
