"""Slabs: they fit the limit, tile their stream, and keep bands of chunks or pages whole where possible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap, bind_row
from prepcli.algebra.boxes import strides
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.rows import parse_row
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.casts import Cast, value_operations
from prepcli.planning.arrays import Array, MappedArray
from prepcli.planning.chunk_placement import LeafPiece, place_chunks
from prepcli.planning.plan import Stream
from prepcli.planning.slabs import (
    LONG_RUN_NBYTES,
    PAGE,
    Slab,
    min_buffer_nbytes,
    split_stream,
    split_stream_evenly,
)
from prepcli.planning.tensors import itemsize
from tests.helpers.plans import dividing_chunks, flat, make_save_plan, reverse_streams
from tests.helpers.strategies import complete_tables


def check_tiling(slabs: Sequence[Slab], stream: Stream, limit: int) -> None:
    low, high = stream.byte_range
    edges = [low, *(slab.start + slab.nbytes for slab in slabs)]
    assert [slab.start for slab in slabs] == edges[:-1]
    assert edges[-1] == high
    assert all(0 < slab.nbytes <= limit for slab in slabs)
    for slab, direction in itertools.product(slabs, ("reads", "writes")):
        copies: tuple[StridedCopy, ...] = getattr(slab, direction)
        assert sum(c.nbytes for c in copies) == (slab.nbytes if getattr(stream, direction) else 0)


@given(complete_tables(), st.data())
def test_slabs_tile_their_stream_within_the_limit(rows: tuple[AxisMap, ...], data):
    save_plan = make_save_plan(
        rows,
        [data.draw(dividing_chunks(row.leaf_shape)) for row in rows],
        shift=data.draw(st.integers(0, 20)),
    )
    limit = data.draw(st.integers(4, 200))
    streams = data.draw(
        st.sampled_from([save_plan.plan.streams, reverse_streams(save_plan.plan.streams)])
    )
    for number, stream in enumerate(streams):
        check_tiling(list(split_stream(number, stream, max_nbytes=limit)), stream, limit)
        check_tiling(list(split_stream_evenly(number, stream, max_nbytes=limit)), stream, limit)


def region(
    text: str, sizes: dict[str, int], chunk: tuple[int, ...], itemsize: int = 4, **at: int
) -> MappedArray:
    """Return a region whose chunks are stored one after another in file 0."""
    row = bind_row(parse_row(text), sizes)
    grid = ChunkGrid(row.leaf_shape, chunk)
    steps = strides(grid.chunk_counts, math.prod(chunk) * itemsize)
    dtype = {2: "bfloat16", 4: "float32"}[itemsize]
    chunks = StridedChunks(0, 0, (0,) * len(chunk), steps)
    leaf = Array("w", dtype, row.leaf_shape, chunk, chunks)
    return MappedArray(row, tuple(at.items()), leaf)


def stream_into(*regions: MappedArray, reads: tuple[MappedArray, ...] = ()) -> Stream:
    shape = regions[0].axis_map.source_shape
    dtype = regions[0].array.dtype
    return Stream("w", dtype, shape, (0, shape[0]), reads or (flat(dtype, shape),), regions)


def split_chunk_count(slabs: Iterable[Slab], direction: str, chunk_nbytes: int) -> int:
    """Return the number of chunks that more than one slab touches."""
    touched: dict[tuple[int, int], set[int]] = {}
    for number, slab in enumerate(slabs):
        for copy in getattr(slab, direction):
            for offset in copy.run_offsets():
                for chunk in range(
                    offset // chunk_nbytes, (offset + copy.run_nbytes - 1) // chunk_nbytes + 1
                ):
                    touched.setdefault((copy.file, chunk), set()).add(number)
    return sum(len(numbers) > 1 for numbers in touched.values())


CUTS = {  # row, sizes, chunk, rows of the tensor that fill whole chunks
    "rows": ("mlp embed <- w: mlp embed", {"mlp": 60, "embed": 8}, (12, 4), 12),
    "a prime": ("mlp embed <- w: mlp embed", {"mlp": 53, "embed": 6}, (10, 3), 10),
    "transposed": ("embed mlp <- w: mlp embed", {"mlp": 60, "embed": 8}, (4, 12), 12),
    "heads": (
        "heads dim embed <- w: (heads dim) embed",
        {"heads": 6, "dim": 5, "embed": 8},
        (2, 5, 4),
        10,
    ),
    "within heads": (
        "heads dim embed <- w: (heads dim) embed",
        {"heads": 6, "dim": 6, "embed": 8},
        (1, 3, 4),
        3,
    ),
    "merged otherwise": (
        "embed (heads dim) <- w: (heads dim) embed",
        {"heads": 6, "dim": 6, "embed": 4},
        (1, 12),
        12,
    ),
}


@pytest.mark.parametrize("case", CUTS)
@pytest.mark.parametrize("direction", ["reads", "writes"])
def test_slabs_keep_chunk_bands_whole_where_they_fit(case: str, direction: str):
    text, sizes, chunk, band = CUTS[case]
    region_part = region(text, sizes, chunk)
    stream = (
        stream_into(region_part)
        if direction == "writes"
        else reverse_streams([stream_into(region_part)])[0]
    )
    band_nbytes, chunk_nbytes = band * stream.row_nbytes, math.prod(chunk) * 4
    for limit in (band_nbytes, band_nbytes + 4, 2 * band_nbytes + stream.row_nbytes, 10**6):
        slabs = list(split_stream(0, stream, max_nbytes=limit))
        check_tiling(slabs, stream, limit)
        assert not split_chunk_count(slabs, direction, chunk_nbytes)
        assert len(slabs) == math.ceil(math.ceil(stream.shape[0] / band) / (limit // band_nbytes))
    assert split_chunk_count(
        split_stream(0, stream, max_nbytes=band_nbytes - stream.row_nbytes), direction, chunk_nbytes
    )


@pytest.mark.parametrize(("written", "read"), [(4, 6), (6, 4), (4, 60), (10, 4), (12, 5)])
def test_slabs_keep_written_chunks_whole_before_read_ones(written: int, read: int):
    text, sizes = "mlp embed <- w: mlp embed", {"mlp": 60, "embed": 8}
    stream = stream_into(region(text, sizes, (written, 4)), reads=(region(text, sizes, (read, 2)),))
    slabs = list(split_stream(0, stream, max_nbytes=13 * stream.row_nbytes))
    check_tiling(slabs, stream, 13 * stream.row_nbytes)
    assert not split_chunk_count(slabs, "writes", written * 4 * 4)


def test_slabs_follow_bands_of_each_fused_part():
    sizes = {"q": 24, "kv": 10, "embed": 4}
    region_parts = [
        region("q embed <- w: (>q | kv) embed", sizes, (8, 2)),
        region("kv embed <- w: (q | >kv) embed", sizes, (5, 2)),
    ]
    stream = stream_into(
        region_parts[0],
        region_parts[1].moved(1),
    )
    slabs = list(split_stream(0, stream, max_nbytes=11 * stream.row_nbytes))
    check_tiling(slabs, stream, 11 * stream.row_nbytes)
    assert [slab.nbytes // stream.row_nbytes for slab in slabs] == [8, 8, 8, 10]


def test_slabs_keep_written_bands_with_shifted_reads():
    sizes = {"q": 24, "kv": 10, "all": 34, "embed": 4}
    region_parts = [
        region("q embed <- w: (>q | kv) embed", sizes, (3, 2)),
        region("kv embed <- w: (q | >kv) embed", sizes, (5, 2)),
    ]
    stream = stream_into(*region_parts, reads=(region("all embed <- w: all embed", sizes, (2, 2)),))
    slabs = list(split_stream(0, stream, max_nbytes=7 * stream.row_nbytes))
    check_tiling(slabs, stream, 7 * stream.row_nbytes)
    assert [slab.nbytes // stream.row_nbytes for slab in slabs] == [6, 6, 6, 6, 5, 5]


def test_slabs_of_large_chunks_end_with_whole_heads():
    # EasyLM interleaves the halves of a head. A part of a head has runs of one value.
    sizes = {"heads": 32, "half": 8, "two": 2, "embed": 16}
    leaf = "embed (heads half two) <- w: (heads two half) embed"
    stream = stream_into(region(leaf, sizes, (16, 512)))
    head_nbytes = 16 * stream.row_nbytes
    slabs = list(split_stream(0, stream, max_nbytes=3 * head_nbytes + 7 * stream.row_nbytes))
    check_tiling(slabs, stream, 3 * head_nbytes + 7 * stream.row_nbytes)
    assert {slab.nbytes // head_nbytes for slab in slabs[:-1]} == {3}
    run_sizes = {copy.run_nbytes for slab in slabs[:-1] for copy in slab.writes}
    assert run_sizes == {3 * 16 * 4}


@pytest.mark.parametrize("columns", [256, 384, 1024])
@pytest.mark.parametrize("rows", [200, 205])
def test_slabs_split_large_chunks_at_pages(columns: int, rows: int):
    row = bind_row(parse_row("mlp embed <- w: mlp embed"), {"mlp": 2 * rows, "embed": 2 * columns})
    layout = place_chunks(
        [LeafPiece("w", row, (), ChunkGrid(row.leaf_shape, (rows, columns)), "float32")]
    )
    (stream,) = [stream_into(region_part) for region_part in layout.locations]
    limit = 64 * 2 * columns * 4
    slabs = list(split_stream(0, stream, max_nbytes=limit))
    check_tiling(slabs, stream, limit)
    ends = {
        layout.placed_chunks["w"][0].chunks.find(index)[1] + rows * columns * 4
        for index in np.ndindex(2, 2)
    }
    for copy in (copy for slab in slabs for copy in slab.writes):
        for offset in copy.run_offsets():
            assert offset % PAGE == 0
            assert copy.run_nbytes % PAGE == 0 or offset + copy.run_nbytes in ends


CACHED_SLABS = {  # row, chunk, bytes of a slab in KiB, if 256 KiB fit the caches and 4 MiB fit a buffer
    "runs of whole chunks": ("mlp embed <- w: mlp embed", (16, 64), 256),
    "one run of chunks from 1 MiB on": ("mlp embed <- w: mlp embed", (1024, 32), 1024),
    "runs of 256 KiB": ("mlp embed <- w: mlp embed", (8192, 128), 512),
    "runs below 256 KiB in each size": ("mlp embed <- w: mlp embed", (8192, 8), 4096),
    "transposed chunks of 64 KiB, four a run": ("embed mlp <- w: mlp embed", (32, 512), 2048),
    "transposed rows of 32 KiB": ("embed mlp <- w: mlp embed", (256, 8192), 4096),
}


@pytest.mark.parametrize("case", CACHED_SLABS)
@pytest.mark.parametrize("direction", ["reads", "writes"])
def test_slabs_fit_caches_if_runs_stay_long(case: str, direction: str):
    text, chunk, slab_kib = CACHED_SLABS[case]
    stream = stream_into(region(text, {"mlp": 8192, "embed": 256}, chunk))
    if direction == "reads":
        stream = reverse_streams([stream])[0]
    slabs = list(split_stream(0, stream, max_nbytes=4 << 20, cached_nbytes=256 << 10))
    check_tiling(slabs, stream, 4 << 20)
    assert {slab.nbytes for slab in slabs} == {slab_kib << 10}


def test_slabs_split_contiguous_bytes_at_written_pages():
    stream = Stream(
        "w",
        "uint8",
        (20_000,),
        (0, 20_000),
        (flat("uint8", (20_000,), 5),),
        (flat("uint8", (20_000,), 123),),
    )
    slabs = list(split_stream(0, stream, max_nbytes=2 * PAGE))
    check_tiling(slabs, stream, 2 * PAGE)
    assert all(slab.reads[0].width == slab.writes[0].width == slab.nbytes for slab in slabs)
    assert [slab.writes[0].file_offset for slab in slabs] == [123, 2 * PAGE, 4 * PAGE]
    assert [slab.reads[0].file_offset - slab.writes[0].file_offset for slab in slabs] == [-118] * 3
    assert [slab.nbytes for slab in split_stream(0, stream, max_nbytes=9_999)] == [
        2 * PAGE - 123,
        2 * PAGE,
        20_000 - 4 * PAGE + 123,
    ]


def test_slabs_smaller_than_a_page_end_at_page_boundaries():
    stream = Stream(
        "w",
        "uint8",
        (10_000,),
        (0, 10_000),
        (flat("uint8", (10_000,)),),
        (flat("uint8", (10_000,), 10),),
    )
    assert [slab.nbytes for slab in split_stream(0, stream, max_nbytes=3000)] == [
        3000,
        1086,
        3000,
        1096,
        1818,
    ]


@given(st.integers(4, 400), st.data())
def test_even_slabs_do_not_depend_on_locations(limit: int, data):
    text, sizes = "heads dim embed <- w: (heads dim) embed", {"heads": 6, "dim": 4, "embed": 7}
    region_a, region_b = (
        region(text, sizes, data.draw(dividing_chunks((6, 4, 7)))) for _ in range(2)
    )
    boundaries = [
        [
            (s.start, s.nbytes)
            for s in split_stream_evenly(0, stream_into(region_part), max_nbytes=limit)
        ]
        for region_part in (region_a, region_b)
    ]
    plain = Stream(
        "w",
        "float32",
        (24, 7),
        (0, 24),
        (flat("float32", (24, 7)),),
        (flat("float32", (24, 7), 77, 3),),
    )
    assert (
        boundaries[0]
        == boundaries[1]
        == [(s.start, s.nbytes) for s in split_stream_evenly(0, plain, max_nbytes=limit)]
    )


SPREADS = {  # row, sizes, chunk, bytes of the tensor that make long runs of whole chunks
    "in order": ("mlp embed <- w: mlp embed", {"mlp": 60, "embed": 8}, (60, 8), 0),
    "in strips": ("mlp embed <- w: mlp embed", {"mlp": 60, "embed": 8}, (12, 4), 12 * 8 * 4),
    "transposed": ("embed mlp <- w: mlp embed", {"mlp": 60, "embed": 8}, (8, 60), 60 * 8 * 4),
    "transposed in bands": (
        "embed mlp <- w: mlp embed",
        {"mlp": 60, "embed": 8},
        (8, 20),
        20 * 8 * 4,
    ),
    "transposed in chunks": (
        "embed mlp <- w: mlp embed",
        {"mlp": 60, "embed": 8},
        (4, 20),
        20 * 8 * 4,
    ),
    "each expert": (
        "n embed mlp <- w: n mlp embed",
        {"n": 5, "mlp": 60, "embed": 8},
        (5, 8, 60),
        60 * 8 * 4,
    ),
    "a part": (
        "mlp embed <- w: embed (qkv=1 mlp)",
        {"qkv": 3, "mlp": 6, "embed": 9},
        (6, 9),
        9 * 18 * 4,
    ),
    "long": (
        "embed mlp <- w: mlp embed",
        {"mlp": LONG_RUN_NBYTES, "embed": 2},
        (2, LONG_RUN_NBYTES),
        LONG_RUN_NBYTES // 4 * 2 * 4,
    ),
    "0-d": ("layers <- s.{layers}:", {"layers": 3}, (3,), 0),
}


@pytest.mark.parametrize("case", SPREADS)
def test_min_buffer_nbytes_gives_slabs_with_long_write_runs(case: str):
    text, sizes, chunk, nbytes = SPREADS[case]
    region_part = (
        region(text, sizes, chunk, layers=1) if case == "0-d" else region(text, sizes, chunk)
    )
    shape = region_part.axis_map.source_shape
    stream = Stream(
        "w",
        "float32",
        shape,
        (0, shape[0] if shape else 1),
        (flat("float32", shape),),
        (region_part,),
    )
    assert min_buffer_nbytes([stream]) == min_buffer_nbytes(reverse_streams([stream])) == nbytes
    assert min_buffer_nbytes([]) == 0
    for slab in split_stream(0, stream, max_nbytes=nbytes) if nbytes else ():
        assert slab.nbytes <= nbytes
        assert all(
            copy.run_nbytes
            >= min(LONG_RUN_NBYTES, math.prod(region_part.array.chunk_shape[1:]) * 4)
            for copy in slab.writes
        )


def test_min_buffer_fits_either_dtype():
    region_part = region("embed mlp <- w: mlp embed", {"mlp": 60, "embed": 8}, (8, 60), itemsize=2)
    stream = replace(stream_into(region_part), dtype="float32", operations=(Cast("bfloat16"),))
    assert min_buffer_nbytes([stream]) == 60 * 8 * 4
    assert (
        min_buffer_nbytes(
            [replace(reverse_streams([stream])[0], dtype="bfloat16", operations=(Cast("float32"),))]
        )
        == 60 * 8 * 4
    )
    (slab,) = split_stream(0, stream, max_nbytes=60 * 8 * 4)
    assert slab.written_nbytes == 60 * 8 * 2


@given(
    st.sampled_from([("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float16")]),
    st.data(),
)
def test_slabs_of_casts_fit_in_either_dtype(pair: tuple[str, str], data):
    dtype, cast = pair
    items = [itemsize(dtype), itemsize(cast)]
    shape = (data.draw(st.integers(1, 30)), data.draw(st.integers(1, 30)))
    stream = Stream(
        "w",
        dtype,
        shape,
        (0, shape[0]),
        (flat(dtype, shape, 3),),
        (flat(cast or dtype, shape, 5),),
        value_operations(dtype, cast or dtype),
    )
    limit = data.draw(st.integers(max(items), 2000))
    slabs = list(split_stream(0, stream, max_nbytes=limit))
    assert [slab.start for slab in slabs] == [
        0,
        *itertools.accumulate(slab.nbytes for slab in slabs),
    ][:-1]
    assert sum(slab.nbytes for slab in slabs) == stream.nbytes
    for slab in slabs:
        assert slab.nbytes <= limit
        assert slab.written_nbytes <= limit
        assert slab.changes_values
        assert slab.nbytes * items[1] == slab.written_nbytes * items[0]
        assert [c.nbytes for c in slab.reads] == [slab.nbytes]
        assert [(c.tensor_offset, c.file_offset, c.nbytes) for c in slab.writes] == [
            (slab.written_start, slab.written_start + 5, slab.written_nbytes)
        ]
