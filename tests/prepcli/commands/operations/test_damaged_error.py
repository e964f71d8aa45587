"""`DamagedError` for each kind of damage to the files of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import prepcli as prep
from tests.helpers.tiny_checkpoints import GPT_NEO, make_checkpoint

Damage = Callable[[Path], object]


def cut(path: Path, share: float = 0.5) -> None:
    """Keep this share of a file's first bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])


def flip(path: Path) -> None:
    """Invert the last byte of a file."""
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 0xFF]))


def largest(folder: Path) -> Path:
    return max(folder.iterdir(), key=lambda path: path.stat().st_size)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO, vocab_size=256)
    return tmp_path / "model"


@pytest.fixture
def init(model: Path, tmp_path: Path) -> Path:
    return prep.save_init(model, tmp_path / "init").path


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda model: cut(model / "model.safetensors.index.json"), id="index"),
        pytest.param(lambda model: cut(model / "config.json"), id="config"),
        pytest.param(lambda model: cut(min(model.glob("*.safetensors"))), id="data_cut"),
        pytest.param(lambda model: cut(min(model.glob("*.safetensors")), 0.001), id="header_cut"),
        pytest.param(lambda model: min(model.glob("*.safetensors")).unlink(), id="data_missing"),
    ],
)
def test_damaged_safetensors_folder_is_a_damaged_error(model: Path, tmp_path: Path, damage: Damage):
    damage(model)
    with pytest.raises(prep.DamagedError):
        prep.save_init(model, tmp_path / "init")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda init: cut(init / "prep-manifest.json"), id="manifest_cut"),
        pytest.param(lambda init: cut(init / "_METADATA"), id="tree_cut"),
        pytest.param(lambda init: cut(init / "manifest.ocdbt"), id="ocdbt_cut"),
        pytest.param(lambda init: flip(init / "manifest.ocdbt"), id="ocdbt_flipped"),
        pytest.param(lambda init: (init / "manifest.ocdbt").unlink(), id="ocdbt_missing"),
        pytest.param(lambda init: cut(largest(init / "d")), id="data_cut"),
    ],
)
def test_damaged_orbax_item_is_a_damaged_error(init: Path, tmp_path: Path, damage: Damage):
    damage(init)
    with pytest.raises(prep.DamagedError):
        prep.reshard(init, tmp_path / "again", mesh="1,2,1")


@pytest.mark.parametrize("damage", [cut, flip, lambda path: path.write_bytes(b"")])
def test_damaged_checksum_file_is_a_damaged_error(init: Path, damage: Damage):
    damage(init / "prep-checksums.bin")
    with pytest.raises(prep.DamagedError):
        prep.load_params(init)
    with pytest.raises(prep.DamagedError):
        prep.verify(init)


def test_damaged_zarr_metadata_is_a_damaged_error(tmp_path: Path):
    from prepcli.formats.zarr import parse_zarr_document
    from prepcli.planning.item_storage import ZARR2

    with pytest.raises(prep.DamagedError):
        parse_zarr_document("a", ZARR2, b'{"shape": [')


def test_data_cut_during_a_load_is_a_damaged_error(init: Path, monkeypatch: pytest.MonkeyPatch):
    from prepcli.restore import item_reader

    read_item = item_reader.read_item

    def cut_after_reading(folder: Path, **options: Any) -> object:
        item = read_item(folder, **options)
        cut(largest(init / "d"))
        return item

    monkeypatch.setattr(item_reader, "read_item", cut_after_reading)
    with pytest.raises(prep.DamagedError, match="cannot read"):
        prep.load_params(init)
