"""Opened sources: a config of the user, the manifest of an output, and files of another source after their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.grids import (
    ChunkIndex,
    Chunks,
    ChunkTable,
    FilePosition,
    StridedChunks,
    run_parts,
)
from prepcli.algebra.rows import parse_row
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import open_blobs
from prepcli.formats import manifest
from prepcli.planning.arrays import Array, Location, MappedArray, parted_array, whole_array
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.source import SourceTensor, append_files, shift_file_numbers
from tests.helpers.plans import flat
from tests.helpers.stored_arrays import tensor_bytes
from tests.helpers.tiny_checkpoints import make_checkpoint

AXIS_MAP = bind_row(parse_row("a b <- w: a b"), {"a": 2, "b": 3})


def chunked(chunks: Chunks) -> MappedArray:
    return MappedArray(AXIS_MAP, (), Array("w", "float32", (2, 3), (1, 3), chunks))


def in_table(places: dict[ChunkIndex, FilePosition]) -> MappedArray:
    return chunked(ChunkTable.from_positions((0, 0), (2, 1), places))


def in_runs(file: int) -> MappedArray:
    parts = run_parts((2, 3), 4, [(8, 8), (21, 16)], file)
    return MappedArray(AXIS_MAP, (), parted_array("w", "float32", (2, 3), parts))


LOCATIONS: dict[str, tuple[Location, Location]] = {
    "contiguous": (flat("float32", (2, 3), 8, 1), flat("float32", (2, 3), 8, 4)),
    "strided": (
        whole_array("w", "float32", (2, 3), (0, 8), (4, 8)),
        whole_array("w", "float32", (2, 3), (3, 8), (4, 8)),
    ),
    "regular chunks": (
        chunked(StridedChunks(0, 8, (0, 0), (12, 12))),
        chunked(StridedChunks(3, 8, (0, 0), (12, 12))),
    ),
    "chunks in several files": (
        in_table({(0, 0): (0, 8), (1, 0): (2, 16)}),
        in_table({(0, 0): (3, 8), (1, 0): (5, 16)}),
    ),
    "runs": (in_runs(0), in_runs(3)),
}


@pytest.mark.parametrize("kind", LOCATIONS)
def test_shift_file_numbers_keeps_the_offsets(kind: str):
    location, shifted = LOCATIONS[kind]
    tensor = SourceTensor("w", "float32", (2, 3), (location,))
    assert shift_file_numbers(tensor, 3) == replace(tensor, placement=(shifted,))


@pytest.mark.parametrize("with_blobs", ["", "a", "b"])
def test_appended_files_have_the_bytes_of_both_sources(tmp_path: Path, with_blobs: str):
    # Each model has several files. A tensor of one has other bytes than the tensor of the same name in the other.
    values_a = make_checkpoint(tmp_path / "a", dtype="float32")
    values_b = make_checkpoint(tmp_path / "b", dtype="float16")
    a = open_source(locate(str(tmp_path / "a")))
    b = open_source(locate(str(tmp_path / "b")))
    if with_blobs == "a":
        a = replace(a, blobs=a.files)
    elif with_blobs == "b":
        b = replace(b, blobs=b.files)
    combined = append_files(a, b)
    assert combined.file_stamps == (*a.file_stamps, *b.file_stamps)
    assert combined.tensors == a.tensors
    with open_blobs(combined.byte_sources) as files:
        for tensor in a.tensors:
            values = values_a[a.file_name(tensor)]
            assert tensor_bytes(files, tensor) == values.tobytes()
        for tensor in b.tensors:
            shifted = shift_file_numbers(tensor, len(a.files))
            values = values_b[b.file_name(tensor)]
            assert tensor_bytes(files, shifted) == values.tobytes()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    return tmp_path / "m"


def test_open_source_uses_the_config_of_the_user(model: Path, tmp_path: Path):
    expected = open_source(locate(str(model)))
    config = (model / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(PrepError, match=r"has no config\.json"):
        open_source(locate(str(model)))
    for config_path in (config, tmp_path):
        source = open_source(locate(str(model)), config_path)
        assert (source.config, source.tensors) == (expected.config, expected.tensors)


def test_config_of_the_user_overrides_the_folder(model: Path, tmp_path: Path):
    text = (model / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"model_type"', '"extra": 1, "model_type"'))
    assert open_source(locate(str(model)), tmp_path).config["extra"] == 1


def test_missing_config_of_the_user_is_named(model: Path, tmp_path: Path):
    path = tmp_path / "typo"
    with pytest.raises(PrepError, match=f'^`config="{path}"` does not exist - .* config.json'):
        open_source(locate(str(model)), path)


@pytest.mark.parametrize("operation", [prep.save_init, prep.pad_vocab])
def test_manifest_of_an_output_is_read_once(
    operation: Callable[..., prep.Conversion],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    output = operation(model, tmp_path / "output").path
    read: list[Path] = []
    parse_manifest = manifest.parse_manifest

    def count_reads(path: Path, data: bytes) -> manifest.Manifest:
        read.append(path)
        return parse_manifest(path, data)

    monkeypatch.setattr(manifest, "parse_manifest", count_reads)
    source = open_source(locate(str(output)))
    assert source.manifest is not None
    assert read == [output / "prep-manifest.json"]
