"""WeightsReader: boxes of leaves of every source format, and the bytes and memory that they take."""

from __future__ import annotations

import math
import tracemalloc
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.boxes import Box
from prepcli.core.errors import DamagedError
from prepcli.restore import box_reads, weights_reader
from prepcli.restore.item_reader import open_reader
from prepcli.restore.weights_reader import MAX_THREADS, WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.prepcli.commands.operations.test_families import make_formats, make_torch_formats

TORCH = ("bin", "meta")
KINDS = ("hf", "init", "init-zstd", "unscanned", "hf-flax", "easylm", "zarr3", *TORCH)
UP = "params.layers.mlp.up.weight"
WIDE = LLAMA | {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def formats(tmp_path_factory: pytest.TempPathFactory):
    """Return a function of a format's name that returns the folder of the same LLaMA in it."""
    root = tmp_path_factory.mktemp("formats")
    make_formats(root, "bfloat16")
    add_torch = cache(lambda: make_torch_formats(root))

    def folder(kind: str) -> Path:
        if kind in TORCH:
            pytest.importorskip("torch")
            add_torch()
        return root / kind

    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a float32 model with tensors of 1 MiB and more."""
    folder = tmp_path_factory.mktemp("wide") / "m"
    make_checkpoint(folder, WIDE)
    return folder


def open_weights(folder: Path, *, verify: bool = True) -> WeightsReader:
    return WeightsReader(open_source(locate(str(folder))), 1, verify)


def random_boxes(rng: np.random.Generator, shape: tuple[int, ...]) -> list[Box]:
    """Return up to three boxes, some of them empty, some of the whole leaf."""
    corners = [
        [sorted(rng.integers(0, n + 1, 2).tolist()) for n in shape]
        for _ in range(rng.integers(1, 3))
    ]
    boxes = [tuple((low, high) for low, high in corner) for corner in corners]
    return [*boxes, tuple((0, n) for n in shape)] if rng.integers(0, 4) == 0 else boxes


def part_arrays(boxes: list[Box], dtype: str) -> dict[Box, np.ndarray]:
    return {box: np.full([high - low for low, high in box], 7, dtype) for box in boxes}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_boxes_of_every_format_equal_slices_of_the_init(
    formats, kind: str, verify: bool, monkeypatch
):
    monkeypatch.setattr(weights_reader, "PIECE_NBYTES", 512)  # tensors of several pieces
    rng = np.random.default_rng(KINDS.index(kind))
    with open_reader(formats("init")) as init, open_weights(formats(kind), verify=verify) as reader:
        assert {*reader.leaves} == {*init.leaves}
        for name, leaf in init.leaves.items():
            whole = np.empty(leaf.shape, np.float32)
            init.read(name, {tuple((0, n) for n in leaf.shape): whole})
            parts = part_arrays(random_boxes(rng, leaf.shape), "float32")
            min_gap_nbytes = int(rng.choice([1, 64, 4096]))
            monkeypatch.setattr(weights_reader, "MIN_GAP_NBYTES", min_gap_nbytes)
            reader.read(name, parts)
            for box, part in parts.items():
                np.testing.assert_array_equal(
                    part, whole[tuple(slice(*span) for span in box)], err_msg=name
                )


def read_count(reader: WeightsReader, name: str, boxes: list[Box]) -> float:
    """Return the bytes read for some boxes, divided by their size."""
    before = reader.read_nbytes
    reader.read(name, part_arrays(boxes, "float32"))
    return (reader.read_nbytes - before) / sum(
        math.prod(high - low for low, high in box) * 4 for box in boxes
    )


def test_rows_and_whole_leaves_are_read_once(wide: Path):
    with open_weights(wide) as reader:
        _, mlp, embed = reader.leaves[UP].shape
        assert read_count(reader, UP, [((0, 2), (0, mlp // 2), (0, embed))]) == 1
        assert read_count(reader, UP, [((0, 2), (mlp // 4, mlp // 2), (0, embed))]) == 1
        assert (
            read_count(reader, UP, [((1, 2), (0, 8), (0, embed)), ((0, 1), (8, mlp), (0, embed))])
            == 1
        )
        for name, leaf in reader.leaves.items():
            assert read_count(reader, name, [tuple((0, n) for n in leaf.shape)]) == 1


def test_columns_are_read_without_other_bytes_if_all_or_long(
    wide: Path, monkeypatch: pytest.MonkeyPatch
):
    with open_weights(wide) as reader:
        _, mlp, embed = reader.leaves[UP].shape
        columns: list[Box] = [
            ((0, 2), (0, mlp), (low, low + embed // 4)) for low in range(0, embed, embed // 4)
        ]
        assert read_count(reader, UP, columns) == 1, "together they are the whole leaf"
        assert read_count(reader, UP, columns[:1]) == pytest.approx(4, abs=0.1), (
            "short runs are read with the gaps"
        )
        monkeypatch.setattr(weights_reader, "MIN_GAP_NBYTES", 64)
        assert read_count(reader, UP, columns[:1]) == 1
        assert read_count(reader, UP, [columns[0], columns[2]]) == 1


@pytest.mark.parametrize("kind", ["hf", "bin", "hf-flax", "easylm"])
def test_shard_with_long_runs_is_read_without_other_bytes(formats, kind: str):
    with open_weights(formats(kind), verify=False) as reader:
        layers, mlp, embed = reader.leaves[UP].shape
        is_transposed = kind in ("hf-flax", "easylm")  # stored as [embed, mlp]
        rows, columns = (
            ((0, mlp), (0, embed // 2)) if is_transposed else ((0, mlp // 2), (0, embed))
        )
        count = read_count(reader, UP, [((0, layers), rows, columns)])
        assert count == 0.5, "bfloat16 is read into float32"


def test_memory_of_a_read_does_not_depend_on_the_tensor(
    wide: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(weights_reader, "PIECE_NBYTES", 64 << 10)
    with open_weights(wide) as reader:
        _, mlp, embed = reader.leaves[UP].shape
        parts = part_arrays([((0, 1), (0, 8), (0, embed))], "float32")
        tracemalloc.start()
        reader.read(UP, parts)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 256 << 10 < embed * mlp * 4
    assert MAX_THREADS * box_reads.BUFFER_NBYTES <= 33 << 20


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_digest_of_a_whole_tensor_is_checked_for_a_part(formats, tmp_path: Path):
    folder = tmp_path / "exported"
    run_ok("export", str(formats("init")), "--out", str(folder))
    name = open_source(locate(str(folder))).tensors[-1].name
    with open_weights(folder) as reader:
        (leaf, shape) = next(
            (leaf, reader.leaves[leaf].shape)
            for leaf, t in reader._leaves.items()
            if name in t.tensors
        )
        box = tuple((n - 1, n) if axis == 0 else (0, 1) for axis, n in enumerate(shape))
        reader.read(leaf, part_arrays([box], "float32"))
        assert reader.read_nbytes == reader._leaves[leaf].tensors[name].nbytes
    flip_last_byte(next(folder.glob("*.safetensors")))
    with open_weights(folder) as reader, pytest.raises(DamagedError, match="is damaged"):
        reader.read(leaf, part_arrays([box], "float32"))
    with open_weights(folder, verify=False) as reader:
        reader.read(leaf, part_arrays([box], "float32"))
        assert reader.read_nbytes == 2, "one bfloat16 value"
