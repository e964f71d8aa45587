"""ItemReader: values are at their places, and no byte is read twice, in units and by many requests at once."""

# pyright: reportTypedDictNotRequiredAccess=false
# The manifests of complete outputs have the keys that these tests read.

from __future__ import annotations

import itertools
import math
import mmap
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prepcli as prep
from bench.throttled_store import ThrottledStore, Traffic, serve_throttled
from prepcli.algebra.boxes import Box, full_box
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.commands.cli.main import main
from prepcli.commands.operations.inspect import select_tensors
from prepcli.core.errors import PrepError
from prepcli.core.observer import SilentObserver
from prepcli.engine.files import Files
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import read_item
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.tensors import LeafSpec
from prepcli.restore import item_reader, weights_reader
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.stores import byte_ranges
from prepcli.stores.buffers import ByteArray
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.orbax_items import random_array, write_item
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, same_bits

Spans = list[tuple[int, int, int]]  # file, first byte, one past the last


def record_reads(patch: pytest.MonkeyPatch) -> Spans:
    """Record all byte ranges read from files from now on."""
    spans: Spans = []
    original_read_run, original_read_at = Files.read_run, Files.read_at

    def read_run(self: Files, copy: StridedCopy, into: ByteArray) -> ByteArray:
        spans.append((copy.file, copy.file_offset, copy.file_offset + copy.width))
        return original_read_run(self, copy, into)

    def read_at(self: Files, file: int, offset: int, into: ByteArray) -> None:
        spans.append((file, offset, offset + into.size))
        original_read_at(self, file, offset, into)

    patch.setattr(Files, "read_run", read_run)
    patch.setattr(Files, "read_at", read_at)
    return spans


def write_and_open(
    folder: Path, leaves: dict[str, tuple[np.ndarray, tuple[int, ...]]], gap: int = 0
) -> ItemReader:
    arrays = {
        unplaced_array((name,), a.shape, a.dtype.name, chunk): a
        for name, (a, chunk) in leaves.items()
    }
    write_item(folder, arrays, gap)
    return ItemReader(read_item(folder), NO_MANIFEST)


def read_boxes(
    reader: ItemReader, name: str, boxes: Sequence[Box], dtype: str
) -> dict[Box, np.ndarray]:
    parts = {
        box: np.full([high - low for low, high in box], 77, numpy_dtype(dtype)) for box in boxes
    }
    reader.read(name, parts)
    return parts


def check_parts(array: np.ndarray, parts: dict[Box, np.ndarray]) -> None:
    for box, part in parts.items():
        assert same_bits(part, array[(*(slice(*span) for span in box), ...)].astype(part.dtype))


def check_no_byte_read_twice(spans: Spans) -> None:
    """Assert that no byte was read twice."""
    ordered = sorted(spans)
    assert all(a[0] != b[0] or a[2] <= b[1] for a, b in itertools.pairwise(ordered))


@st.composite
def leaf_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Box]]:
    shape = tuple(draw(st.lists(st.integers(1, 7), max_size=4)))
    chunk = tuple(draw(st.integers(1, n + 1)) for n in shape)
    span = [
        st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda s: (min(s), max(s)))
        for n in shape
    ]
    boxes = draw(st.lists(st.tuples(*span), min_size=1, max_size=4, unique=True))
    return (
        shape,
        chunk,
        [
            *boxes,
            *([full_box(shape)] if draw(st.booleans()) and full_box(shape) not in boxes else []),
        ],
    )


@pytest.mark.parametrize(
    ("piece", "run"),
    slow_except([(1 << 22, 1 << 15), (64, 0), (64, 24), (4, 0)], [(1 << 22, 1 << 15), (64, 24)]),
)
@given(drawn=leaf_and_boxes(), gap=st.sampled_from([0, 3]))
def test_read_fills_any_boxes_of_any_leaf(
    tmp_path_factory, piece: int, run: int, drawn: Any, gap: int
):
    shape, chunk, boxes = drawn
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        spans = record_reads(patch)
        patch.setattr(item_reader, "PIECE_NBYTES", piece)
        patch.setattr(item_reader, "MIN_GAP_NBYTES", run)
        reader = write_and_open(
            tmp_path_factory.mktemp("item") / "item", {"x": (array, chunk)}, gap
        )
        check_parts(array, read_boxes(reader, "x", boxes, "int32"))
    check_no_byte_read_twice(spans)
    assert reader.read_nbytes == sum(high - low for _, low, high in spans)


@pytest.mark.parametrize(
    "stored", ["float16", "bfloat16", "float32", "float64", "int32", "bool", "float8_e4m3fn"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_read_casts_values(tmp_path: Path, stored: str, dtype: str):
    numbers = np.random.default_rng(0).standard_normal((5, 6, 7))
    array = numbers.astype(numpy_dtype(stored))
    reader = write_and_open(tmp_path / "item", {"x": (array, (1, 6, 4))})
    check_parts(
        array, read_boxes(reader, "x", [full_box(array.shape), ((2, 4), (0, 6), (1, 7))], dtype)
    )


def test_read_keeps_bits_of_the_same_dtype(tmp_path: Path):
    array = random_array("float32", (64, 100))  # NaN of all kinds
    reader = write_and_open(tmp_path / "item", {"x": (array, (16, 100))})
    assert same_bits(
        read_boxes(reader, "x", [full_box(array.shape)], "float32")[full_box(array.shape)], array
    )


def test_read_returns_and_casts_a_scalar(tmp_path: Path):
    reader = write_and_open(tmp_path / "item", {"step": (np.array(7, np.int32), ())})
    assert read_boxes(reader, "step", [()], "int32")[()] == 7
    assert read_boxes(reader, "step", [()], "float32")[()].dtype == np.float32


def page_aligned_array(shape: tuple[int, ...]) -> np.ndarray:
    """Return a float32 array that begins at a memory page."""
    return np.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), np.float32).reshape(shape)


@pytest.mark.parametrize("shift", [0, 1])
def test_read_is_direct_if_page_offsets_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
):
    """Direct reads need chunks that begin at a page of their file."""
    array = random_array("float32", (2, 64, 1024))
    reader = write_and_open(tmp_path / "item", {"x": (array, (1, 64, 1024))}, gap=4 * shift)
    direct_nbytes = []
    read_at = Files.read_at
    monkeypatch.setattr(
        Files, "read_at", lambda *args: (direct_nbytes.append(args[3].size), read_at(*args))
    )
    target = page_aligned_array(array.shape)
    reader.read("x", {full_box(array.shape): target})
    assert same_bits(target, array)
    assert direct_nbytes == ([] if shift else [1 << 18, 1 << 18])


def test_read_touches_only_needed_chunks(tmp_path: Path):
    array = random_array("float32", (8, 16, 32))
    reader = write_and_open(tmp_path / "item", {"x": (array, (1, 4, 32))})
    boxes = [((2, 4), (4, 8), (0, 32)), ((2, 3), (0, 16), (5, 6))]
    check_parts(array, read_boxes(reader, "x", boxes, "float32"))
    # Two whole chunks, and of three others the run from the column in row 0 to the one in row 3, with its short gaps.
    nbytes = 2 * 4 * 32 * 4 + 3 * (3 * 32 * 4 + 4)
    assert reader.read_nbytes == nbytes
    read_boxes(reader, "x", [((0, 0), (0, 16), (0, 32))], "float32")
    assert reader.read_nbytes == nbytes


@pytest.mark.parametrize(
    ("box", "nbytes"),
    [
        (((0, 4), (0, 1 << 13)), 4 << 15),  # a quarter, in long runs
        (((0, 4), (100, 104)), 4 * 16),  # a few bytes of each row, without the long gaps
        (((3, 4), (100, 104)), 16),  # one run
        (((1, 3), (0, 1 << 15)), 2 << 17),  # rows
        (((0, 4), (0, 20000)), 4 * 80000),  # most of the chunk, without its long gaps
    ],
)
def test_read_of_part_of_a_chunk_limits_bytes(tmp_path: Path, box: Box, nbytes: int):
    array = random_array("float32", (4, 1 << 15))
    reader = write_and_open(tmp_path / "item", {"x": (array, array.shape)})
    check_parts(array, read_boxes(reader, "x", [box], "float32"))
    assert reader.read_nbytes == nbytes


def test_open_reader_opens_an_init_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
        part = read_boxes(reader, "params.layers.attn.q.weight", [box], "float32")[box][0]
        assert same_bits(part, q[:, 2:8, 16:].astype(np.float32))


def test_read_errors_name_leaf_and_file(tmp_path: Path):
    array = random_array("float32", (4, 1024))
    reader = write_and_open(tmp_path / "item", {"x": (array, (1, 1024))})
    with pytest.raises(PrepError, match="has no leaf y"):
        reader.read("y", {})
    with pytest.raises(ValueError, match=r"box \(\(0, 5\), \(0, 1024\)\)"):
        read_boxes(reader, "x", [((0, 5), (0, 1024))], "float32")
    with pytest.raises(ValueError, match="must be contiguous and have the shape of box"):
        reader.read("x", {full_box(array.shape): np.empty((4, 1023), np.float32)})
    with pytest.raises(ValueError, match="must be contiguous and have the shape of box"):
        reader.read("x", {full_box(array.shape): np.empty((1024, 4), np.float32).T})
    (file,) = [path for path in (tmp_path / "item/d").iterdir() if path.name[:2] == "aa"]
    with file.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(PrepError, match="cannot read x of") as caught:
        read_boxes(reader, "x", [full_box(array.shape)], "float32")
    assert file.name in caught.value.why


def test_open_reader_rejects_other_folders(tmp_path: Path):
    with pytest.raises(PrepError, match="holds no Orbax checkpoint"):
        open_reader(tmp_path)
    write_item(
        tmp_path / "item",
        {unplaced_array(("x",), (2,), "int32", (2,)): np.arange(2, dtype=np.int32)},
    )
    with pytest.raises(PrepError, match="was not written by prep"):
        open_reader(tmp_path / "item")


def count_open_files(folder: Path) -> int:
    """Count the open file descriptors of this process in a folder."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(link.startswith(str(folder.resolve())) for link in links)


# The warning is about errors in callbacks of weak references.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_read_interrupted_anywhere_ends_and_can_be_repeated(tmp_path: Path):
    array = random_array("float32", (64, 64))
    reader = write_and_open(tmp_path / "item", {"w": (array, (16, 16))})
    boxes = [full_box(array.shape)]
    num_events = run_interrupted(lambda: read_boxes(reader, "w", boxes, "float32"), None).num_events
    for at in random.Random(0).sample(range(num_events), 60):
        error = run_interrupted(lambda: read_boxes(reader, "w", boxes, "float32"), at).error
        assert error is None or isinstance(error, SimulatedSignal), repr(error)
        check_parts(array, read_boxes(reader, "w", boxes, "float32"))


def test_files_are_closed_without_close(tmp_path: Path):
    reader = write_and_open(tmp_path / "item", {"x": (np.arange(4, dtype=np.int32), (4,))})
    assert count_open_files(tmp_path) >= 1
    reader.close()
    reader.close()
    assert count_open_files(tmp_path) == 0
    reopened = ItemReader(read_item(tmp_path / "item"), NO_MANIFEST)
    assert count_open_files(tmp_path) >= 1
    del reopened
    assert count_open_files(tmp_path) == 0


# A block of the checksums of an item.
PIECE_NBYTES = 1 << 20
RATE = float(16 << 20)
DELAY_S = 0.1
# boto3 and Run:ai keep 8 to 10 requests under way, TensorStore 32.
MIN_CONCURRENT = 20


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of 16 pieces per embedding, and its init."""
    folder = tmp_path_factory.mktemp("bucket")
    make_checkpoint(folder / "model", LLAMA, "float16", vocab_size=1 << 18)
    prep.save_init(folder / "model", out=folder / "item")
    return folder


@contextmanager
def serve_bucket(bucket: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThrottledStore]:
    """Serve a folder as `s3://bucket`."""
    with serve_throttled(bucket, RATE, DELAY_S) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AWS_REGION", "x")
        yield store


def load(bucket: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Load a checkpoint of the bucket, and return the traffic."""
    monkeypatch.setattr(weights_reader, "PIECE_NBYTES", PIECE_NBYTES)
    monkeypatch.setattr(item_reader, "PIECE_NBYTES", PIECE_NBYTES)
    with serve_bucket(bucket, monkeypatch) as store:
        params = prep.load_params(f"s3://bucket/{name}", dtype="keep")
        local = prep.load_params(bucket / name, dtype="keep")
        np.testing.assert_array_equal(params["head"]["weight"], local["head"]["weight"])
        return store.traffic()


@pytest.mark.slow
def test_hf_folder_is_read_by_many_requests_at_once(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(bucket, "model", monkeypatch).max_concurrent >= MIN_CONCURRENT


def test_item_is_read_by_many_requests_at_once(bucket: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(bucket, "item", monkeypatch).max_concurrent >= MIN_CONCURRENT


# An output of prep is read once more, and compared with its digests.
@pytest.mark.parametrize(
    ("name", "reads"), slow_except([("model", 1), ("item", 2)], [("model", 1)])
)
def test_statistics_read_several_tensors_at_once(
    bucket: Path, monkeypatch: pytest.MonkeyPatch, name: str, reads: int
):
    with serve_bucket(bucket, monkeypatch) as store:
        remote = select_tensors(f"s3://bucket/{name}", SilentObserver(), {}, stats=True)
        traffic = store.traffic()
    local = select_tensors(str(bucket / name), SilentObserver(), {}, stats=True)
    assert remote.statistics == local.statistics
    assert traffic.repeated_nbytes < traffic.nbytes * (reads - 1) / reads + (1 << 20)
    assert traffic.max_concurrent > byte_ranges.MAX_IN_FLIGHT


UP = "params.layers.mlp.up.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint(folder, GPT_NEO, hidden_size=64)
    return folder


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit checksum blocks to 2 KiB, so that a layer has several."""
    monkeypatch.setattr(stored_arrays, "BLOCK_NBYTES", 2 << 10)
    monkeypatch.setattr("prepcli.formats.checksums.BLOCK_NBYTES", 2 << 10)


def unit_boxes(spec: LeafSpec) -> list[Box]:
    """Return the boxes of all read units of a leaf."""
    spans = (
        [(low, min(low + length, extent)) for low in range(0, extent, length)]
        for extent, length in zip(spec.shape, spec.read_unit, strict=True)
    )
    return list(itertools.product(*spans))


def bytes_read(reader: ItemReader | WeightsReader, name: str, boxes: Sequence[Box]) -> int:
    """Read boxes in one call each, and return the number of bytes read."""
    before = reader.read_nbytes
    for box in boxes:
        reader.read(
            name, {box: np.empty([high - low for low, high in box], reader.leaves[name].dtype)}
        )
    return reader.read_nbytes - before


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "options",
    [("--mesh", "1,2,4"), (), ("--mesh", "1,2,2", "--compress", "zstd"), ("--no-scan",)],
    ids=["meshed", "plain", "packed", "apart"],
)
def test_units_of_an_init_are_read_separately(
    model: Path, tmp_path: Path, options: tuple[str, ...]
):
    run_ok("save-init", str(model), "--pad-vocab", "8", "--out", str(tmp_path / "init"), *options)
    with open_reader(tmp_path / "init") as reader:
        for name, spec in reader.leaves.items():
            nbytes = int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize
            assert bytes_read(reader, name, unit_boxes(spec)) == nbytes, name
        if "--compress" not in options:
            assert any(len(unit_boxes(spec)) > spec.shape[0] for spec in reader.leaves.values())


@pytest.mark.usefixtures("small_blocks")
def test_units_of_a_hugging_face_folder_are_rows(tmp_path: Path):
    # Each row is a read of its own.
    make_checkpoint(
        tmp_path / "m", GPT_NEO, vocab_size=29, max_position_embeddings=16, hidden_size=16
    )
    source = open_source(locate(str(tmp_path / "m")))
    with WeightsReader(source) as reader:
        assert not reader.is_remote
        read = sum(
            bytes_read(reader, name, unit_boxes(spec)) for name, spec in reader.leaves.items()
        )
        assert read == sum(tensor.nbytes for tensor in source.tensors)
        layers, *shape = reader.leaves[UP].shape
        assert len(unit_boxes(reader.leaves[UP])) == layers * max(shape)


@pytest.mark.usefixtures("small_blocks")
def test_checked_read_skips_blocks_between_its_boxes(model: Path, tmp_path: Path):
    run_ok("save-init", str(model), "--out", str(tmp_path / "init"))
    with open_reader(tmp_path / "init") as reader:
        boxes = unit_boxes(reader.leaves[UP])
        first, last = boxes[0], boxes[len(boxes) // reader.leaves[UP].shape[0] - 1]
        arrays = {
            box: np.empty([high - low for low, high in box], np.float32) for box in (first, last)
        }
        reader.read(UP, arrays)
        assert reader.read_nbytes == sum(array.nbytes for array in arrays.values())
