"""Read units: boxes of whole units, read one by one, read each stored byte once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.boxes import Box
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.tensors import LeafSpec
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.restore.weights_reader import WeightsReader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from tests.helpers.run_cli import run_ok
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

UP = "params.layers.mlp.up.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint(folder, GPT_NEO, hidden_size=64)
    return folder


@pytest.fixture(autouse=True)
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


def read_boxes(reader: ItemReader | WeightsReader, name: str, boxes: Sequence[Box]) -> int:
    """Read boxes in one call each, and return the number of bytes read."""
    before = reader.read_nbytes
    for box in boxes:
        reader.read(
            name, {box: np.empty([high - low for low, high in box], reader.leaves[name].dtype)}
        )
    return reader.read_nbytes - before


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
            assert read_boxes(reader, name, unit_boxes(spec)) == nbytes, name
        if "--compress" not in options:
            assert any(len(unit_boxes(spec)) > spec.shape[0] for spec in reader.leaves.values())


def test_units_of_a_hugging_face_folder_are_rows(tmp_path: Path):
    # Each row is a read of its own.
    make_checkpoint(
        tmp_path / "m", GPT_NEO, vocab_size=29, max_position_embeddings=16, hidden_size=16
    )
    source = open_source(locate(str(tmp_path / "m")))
    with WeightsReader(source) as reader:
        assert not reader.is_remote
        read = sum(
            read_boxes(reader, name, unit_boxes(spec)) for name, spec in reader.leaves.items()
        )
        assert read == sum(tensor.nbytes for tensor in source.tensors)
        layers, *shape = reader.leaves[UP].shape
        assert len(unit_boxes(reader.leaves[UP])) == layers * max(shape)


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
