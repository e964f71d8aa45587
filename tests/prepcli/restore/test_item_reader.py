"""Leaves of an item into arrays: every value in its place, no byte read twice, errors with their leaf and file."""

from __future__ import annotations

import itertools
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prepcli.cli.main import main
from prepcli.engine.files import ByteArray, Files
from prepcli.engine.fills import numpy_dtype
from prepcli.errors import PrepError
from prepcli.formats.orbax import ArrayMeta
from prepcli.formats.orbax_read import read_item
from prepcli.planning.boxes import Box, full_box
from prepcli.planning.strided_copies import StridedCopy
from prepcli.restore import item_reader
from prepcli.restore.item_reader import ItemReader, open_reader
from tests.helpers.orbax_items import random_array, write_item
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint, same_bits

Spans = list[tuple[int, int, int]]  # file, first byte, one past the last


def spy(patch: pytest.MonkeyPatch) -> Spans:
    """What is read of which file, from now on."""
    spans: Spans = []
    run, at = Files.read_run, Files.read_at

    def read_run(self: Files, copy: StridedCopy, into: ByteArray) -> ByteArray:
        spans.append((copy.file, copy.file_offset, copy.file_offset + copy.width))
        return run(self, copy, into)

    def read_at(self: Files, file: int, offset: int, into: ByteArray) -> None:
        spans.append((file, offset, offset + into.size))
        at(self, file, offset, into)

    patch.setattr(Files, "read_run", read_run)
    patch.setattr(Files, "read_at", read_at)
    return spans


def reader_of(folder: Path, leaves: dict[str, tuple[np.ndarray, tuple[int, ...]]], gap: int = 0) -> ItemReader:
    arrays = {ArrayMeta((name,), a.shape, a.dtype.name, chunk): a for name, (a, chunk) in leaves.items()}
    write_item(folder, arrays, gap)
    return ItemReader(read_item(folder), {})


def read(reader: ItemReader, name: str, boxes: Sequence[Box], dtype: str) -> dict[Box, np.ndarray]:
    parts = {box: np.full([high - low for low, high in box], 77, numpy_dtype(dtype)) for box in boxes}
    reader.read(name, parts)
    return parts


def check(array: np.ndarray, parts: dict[Box, np.ndarray]) -> None:
    for box, found in parts.items():
        assert same_bits(found, array[(*(slice(*span) for span in box), ...)].astype(found.dtype))


def check_once(spans: Spans) -> None:
    """No byte was read twice."""
    ordered = sorted(spans)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ordered))


@st.composite
def leaf_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    chunk = tuple(draw(st.integers(1, n + 1)) for n in shape)
    span = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda s: (min(s), max(s))) for n in shape]
    boxes = draw(st.lists(st.tuples(*span), min_size=1, max_size=4, unique=True))
    return shape, chunk, [*boxes, *([full_box(shape)] if draw(st.booleans()) and full_box(shape) not in boxes else [])]


@pytest.mark.parametrize(("piece", "run"), [(1 << 22, 1 << 15), (64, 0), (64, 24), (4, 0)])
@settings(deadline=None)
@given(drawn=leaf_and_boxes(), gap=st.sampled_from([0, 3]))
def test_any_boxes_of_any_leaf(tmp_path_factory, piece: int, run: int, drawn: Any, gap: int):
    shape, chunk, boxes = drawn
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        spans = spy(patch)
        patch.setattr(item_reader, "PIECE_NBYTES", piece)
        patch.setattr(item_reader, "MIN_RUN_NBYTES", run)
        reader = reader_of(tmp_path_factory.mktemp("item") / "item", {"x": (array, chunk)}, gap)
        check(array, read(reader, "x", boxes, "int32"))
    check_once(spans)
    assert reader.read_nbytes == sum(high - low for _, low, high in spans)


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float32", "float64", "int32", "bool", "float8_e4m3fn"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_values_are_cast_on_the_way(tmp_path: Path, stored: str, wanted: str):
    numbers = np.random.default_rng(0).standard_normal((5, 6, 7))
    array = numbers.astype(numpy_dtype(stored))
    reader = reader_of(tmp_path / "item", {"x": (array, (1, 6, 4))})
    check(array, read(reader, "x", [full_box(array.shape), ((2, 4), (0, 6), (1, 7))], wanted))


def test_bits_of_the_same_dtype_are_kept(tmp_path: Path):
    array = random_array("float32", (64, 100))  # NaN of all kinds
    reader = reader_of(tmp_path / "item", {"x": (array, (16, 100))})
    assert same_bits(read(reader, "x", [full_box(array.shape)], "float32")[full_box(array.shape)], array)


def test_a_number_is_read(tmp_path: Path):
    reader = reader_of(tmp_path / "item", {"step": (np.array(7, np.int32), ())})
    assert read(reader, "step", [()], "int32")[()] == 7
    assert read(reader, "step", [()], "float32")[()].dtype == np.float32


def pages(shape: tuple[int, ...]) -> np.ndarray:
    """An array of float32 that begins at a page."""
    return np.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), np.float32).reshape(shape)


@pytest.mark.parametrize("shift", [0, 1])
def test_whole_chunks_go_straight_to_where_pages_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int):
    """The second chunk begins at a page of its file, or not."""
    array = random_array("float32", (2, 64, 1024))
    reader = reader_of(tmp_path / "item", {"x": (array, (1, 64, 1024))}, gap=4 * shift)
    straight = []
    at = Files.read_at
    monkeypatch.setattr(Files, "read_at", lambda *args: (straight.append(args[3].size), at(*args)))
    found = pages(array.shape)
    reader.read("x", {full_box(array.shape): found})
    assert same_bits(found, array)
    assert straight == ([] if shift else [1 << 18, 1 << 18])


def test_only_chunks_that_are_touched_are_read(tmp_path: Path):
    array = random_array("float32", (8, 16, 32))
    reader = reader_of(tmp_path / "item", {"x": (array, (1, 4, 32))})
    boxes = [((2, 4), (4, 8), (0, 32)), ((2, 3), (0, 16), (5, 6))]
    check(array, read(reader, "x", boxes, "float32"))
    assert reader.read_nbytes == 5 * 4 * 32 * 4  # whole runs of them: those of some bytes are not picked out
    read(reader, "x", [((0, 0), (0, 16), (0, 32))], "float32")
    assert reader.read_nbytes == 5 * 4 * 32 * 4


@pytest.mark.parametrize(
    ("box", "nbytes"),
    [
        (((0, 4), (0, 1 << 13)), 4 << 15),  # a quarter in long runs
        (((0, 4), (100, 104)), 4 << 17),  # some bytes of each: all in between too
        (((3, 4), (100, 104)), 16),  # one run
        (((1, 3), (0, 1 << 15)), 2 << 17),  # rows
        (((0, 4), (0, 20000)), 4 << 17),  # most of it
    ],
)
def test_of_a_chunk_no_more_is_read_than_pays(tmp_path: Path, box: Box, nbytes: int):
    array = random_array("float32", (4, 1 << 15))
    reader = reader_of(tmp_path / "item", {"x": (array, array.shape)})
    check(array, read(reader, "x", [box], "float32"))
    assert reader.read_nbytes == nbytes


def test_an_init_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(Path("m"), GPT_NEO, "bfloat16")
    assert main(["save-init", "./m", "--mesh", "1,2,1", "--pad-vocab", "8", "-q"]) == 0
    with open_reader(Path("m-init")) as reader:
        assert reader.manifest["kind"] == "init"
        assert (reader.folder / "hf/config.json").exists()
        assert reader.leaves["params.embed.tokens"].shape == (136, 32)
        assert reader.leaves["params.embed.tokens"].dtype == "bfloat16"
        box = ((1, 3), (0, 4), (2, 8), (16, 32))
        q = tensors["transformer.h.1.attn.attention.q_proj.weight"].reshape(4, 8, 32)
        found = read(reader, "params.layers.attn.q.weight", [box], "float32")[box][0]
        assert same_bits(found, q[:, 2:8, 16:].astype(np.float32))


def test_errors_name_leaf_and_file(tmp_path: Path):
    array = random_array("float32", (4, 1024))
    reader = reader_of(tmp_path / "item", {"x": (array, (1, 1024))})
    with pytest.raises(PrepError, match="has no leaf y"):
        reader.read("y", {})
    with pytest.raises(ValueError, match=r"box \(\(0, 5\), \(0, 1024\)\)"):
        read(reader, "x", [((0, 5), (0, 1024))], "float32")
    with pytest.raises(ValueError, match="an array of shape"):
        reader.read("x", {full_box(array.shape): np.empty((4, 1023), np.float32)})
    with pytest.raises(ValueError, match="an array of shape"):
        reader.read("x", {full_box(array.shape): np.empty((1024, 4), np.float32).T})
    (file,) = [path for path in (tmp_path / "item/d").iterdir() if path.name[:2] == "aa"]
    with file.open("r+b") as opened:
        opened.truncate(100)
    with pytest.raises(PrepError, match="cannot read x of") as caught:
        read(reader, "x", [full_box(array.shape)], "float32")
    assert file.name in caught.value.why


def test_what_is_no_checkpoint_of_prep_is_named(tmp_path: Path):
    with pytest.raises(PrepError, match="holds no Orbax checkpoint"):
        open_reader(tmp_path)
    write_item(tmp_path / "item", {ArrayMeta(("x",), (2,), "int32", (2,)): np.arange(2, dtype=np.int32)})
    with pytest.raises(PrepError, match="was not written by prep"):
        open_reader(tmp_path / "item")


def opened_below(folder: Path) -> int:
    """Descriptors that this process has of files in a folder."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(folder.resolve())) for link in links)


def test_files_are_closed_also_where_nobody_asks_for_it(tmp_path: Path):
    reader = reader_of(tmp_path / "item", {"x": (np.arange(4, dtype=np.int32), (4,))})
    assert opened_below(tmp_path) >= 1
    reader.close()
    reader.close()
    assert opened_below(tmp_path) == 0
    again = ItemReader(read_item(tmp_path / "item"), {})
    assert opened_below(tmp_path) >= 1
    del again
    assert opened_below(tmp_path) == 0
