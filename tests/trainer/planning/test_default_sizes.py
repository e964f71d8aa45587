"""Tests of the sizes of tiles and head chunks that fit the devices."""

from __future__ import annotations

import pytest

from prepcli.models.attention_kernels import ANY_ACCELERATOR, CPU, DeviceKind
from trainer.planning.step_inputs import ChunkSizes, default_chunk_sizes


@pytest.mark.parametrize(("length", "tile_size"), [(2, 64), (1024, 64), (1025, 128), (32768, 128)])
def test_cpu_tiles_grow_with_the_length(length: int, tile_size: int):
    sizes = default_chunk_sizes(CPU, length=length, num_rows=8)
    assert sizes == ChunkSizes(tile_size, tile_size, head=32)


@pytest.mark.parametrize(("num_rows", "head"), [(1, 256), (2, 128), (3, 85), (256, 1), (1000, 1)])
def test_cpu_head_chunk_shares_its_tokens_among_rows(num_rows: int, head: int):
    assert default_chunk_sizes(CPU, length=512, num_rows=num_rows).head == head


@pytest.mark.parametrize(
    "device", [DeviceKind("tpu"), DeviceKind("cuda", (9, 0)), DeviceKind("rocm"), ANY_ACCELERATOR]
)
def test_accelerator_sizes_do_not_depend_on_the_batch(device: DeviceKind):
    for length, num_rows in ((2, 1), (32768, 64)):
        assert default_chunk_sizes(device, length=length, num_rows=num_rows) == ChunkSizes(
            512, 512, head=512
        )
