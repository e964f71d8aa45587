"""Checked reads: no byte differs from its checksum, in any layout, and digests are equal in all formats."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from prepcli.algebra.boxes import full_box
from prepcli.algebra.grids import StoredRange
from prepcli.commands.cli.main import main
from prepcli.core.errors import OK, PrepError
from prepcli.engine.digest import block_checksum
from prepcli.formats.checksums import CHECKSUMS_FILE, BlockChecksums
from prepcli.formats.manifest import NO_MANIFEST
from prepcli.formats.orbax import OrbaxItem, read_item
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.arrays import assign_block_numbers, chunk_blocks
from prepcli.restore import item_reader
from prepcli.restore.digest_checks import sample_digest
from prepcli.restore.item_reader import DamagedLeafError, ItemReader, open_reader
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.stores.paths import local_copy
from tests.helpers.manifests import changed_manifest
from tests.helpers.orbax_items import write_item
from tests.helpers.run_cli import run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import (
    FAMILY_CONFIGS,
    GPT2,
    GPT_NEO,
    LLAMA,
    make_checkpoint,
    same_bits,
)
from tests.prepcli.restore.test_item_reader import (
    check_no_byte_read_twice,
    check_parts,
    leaf_and_boxes,
    read_boxes,
    record_reads,
)

UP = "params.layers.mlp.up.weight"
KINDS = {
    "meshed": ("--mesh", "1,2,4"),
    "plain": (),
    "packed": ("--mesh", "1,2,2", "--compress", "zstd"),
    "apart": ("--no-scan",),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "m"
    make_checkpoint(folder, GPT_NEO, hidden_size=64)
    return folder


@pytest.fixture(params=slow_except(KINDS, ["meshed", "packed"]))
def init(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Path:
    run_ok(
        "save-init",
        str(model),
        "--pad-vocab",
        "8",
        "--out",
        str(tmp_path / "init"),
        *KINDS[request.param],
    )
    return tmp_path / "init"


def read_all_leaves(reader: ItemReader) -> dict[str, np.ndarray]:
    return {
        name: read_boxes(reader, name, [full_box(leaf.shape)], leaf.dtype)[full_box(leaf.shape)]
        for name, leaf in leaves(reader)
    }


def leaves(reader: ItemReader):
    return list(reader.leaves.items())


def flip_bit(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


def chunk_locations(folder: Path) -> dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]]:
    """Return path, offset and bytes of each stored chunk of an item."""
    item = read_item(folder)
    return {
        (meta.name, index): (local_copy(item.files[stored.file]), stored.offset, stored.nbytes)
        for meta in item.arrays
        for index, stored in meta.stored_chunks()
        if isinstance(stored, StoredRange)
    }


def checksums_of(item: OrbaxItem) -> BlockChecksums:
    """Compute the checksums of the chunks in an item's files."""
    leaves = assign_block_numbers(
        (meta.name, meta.shape, meta.chunk_shape, meta.dtype) for meta in item.arrays
    )
    sums = np.zeros(max(leaf.stop_number for leaf in leaves.values()), np.uint64)
    for meta in item.arrays:
        leaf = leaves[meta.name]
        for index, stored in meta.stored_chunks():
            assert isinstance(stored, StoredRange)
            data = np.fromfile(
                local_copy(item.files[stored.file]), np.uint8, stored.nbytes, offset=stored.offset
            )
            for block in leaf.per_chunk.overlapping(0, data.size):
                sums[leaf.first_in_chunk(index) + block.number] = block_checksum(
                    data[block.start : block.stop].data
                )
    return BlockChecksums(leaves, sums)


@pytest.mark.parametrize(
    ("piece", "block"),
    slow_except([(1 << 22, 1 << 20), (64, 16), (24, 48), (4, 4)], [(24, 48)]),
)
@given(drawn=leaf_and_boxes(), gap=st.sampled_from([0, 3]))
def test_read_checks_any_boxes_of_any_leaf(
    tmp_path_factory, piece: int, block: int, drawn: Any, gap: int
):
    shape, chunk, boxes = drawn
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    write_item(
        folder := tmp_path_factory.mktemp("item") / "item",
        {unplaced_array(("x",), shape, "int32", chunk): array},
        gap,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(item_reader, "PIECE_NBYTES", piece)
        patch.setattr(stored_arrays, "BLOCK_NBYTES", block)
        item = read_item(folder)
        spans = record_reads(patch)
        with ItemReader(item, NO_MANIFEST, checksums_of(item)) as reader:
            check_parts(array, read_boxes(reader, "x", boxes, "int32"))
            assert reader.read_nbytes == sum(high - low for _, low, high in spans)
    check_no_byte_read_twice(spans)


def test_read_checks_a_whole_item_once(init: Path, monkeypatch: pytest.MonkeyPatch):
    with open_reader(init, verify=False) as reader:
        expected = read_all_leaves(reader)
        assert not reader.is_checked
    spans = record_reads(monkeypatch)
    with open_reader(init) as reader:
        assert reader.is_checked
        checked = read_all_leaves(reader)
    check_no_byte_read_twice(spans)
    assert all(same_bits(checked[name], values) for name, values in expected.items())


def test_read_detects_any_flipped_bit(init: Path):
    draw = random.Random(0)
    for (name, _), (path, offset, nbytes) in draw.sample(sorted(chunk_locations(init).items()), 12):
        damaged_offset = offset + draw.randrange(nbytes)
        flip_bit(path, damaged_offset)
        with open_reader(init, hint="the hint") as reader, pytest.raises(PrepError) as caught:
            read_all_leaves(reader)
        assert name in caught.value.what
        assert path.name in caught.value.why
        flip_bit(path, damaged_offset)
    with open_reader(init) as reader:
        read_all_leaves(reader)


def test_damage_error_names_leaf_bytes_file_and_hint(model: Path, tmp_path: Path):
    run_ok(
        "save-init",
        str(model),
        "--out",
        str(tmp_path / "init"),
        "--mesh",
        "1,2,1",
        "--pad-vocab",
        "8",
    )
    path, offset, nbytes = chunk_locations(tmp_path / "init")[UP, (1, 0, 0)]
    flip_bit(path, offset + 5)
    with (
        open_reader(tmp_path / "init", hint="the hint") as reader,
        pytest.raises(DamagedLeafError) as caught,
    ):
        read_all_leaves(reader)
    assert caught.value.what == f"{UP} of {tmp_path / 'init'} is damaged"
    span = f"bytes {offset:,} to {offset + nbytes:,} of {path}"
    assert (caught.value.why, caught.value.hint) == (
        f"{span} differ from their recorded checksum",
        "the hint",
    )
    with open_reader(tmp_path / "init", verify=False) as reader:
        read_all_leaves(reader)


def test_read_of_a_part_covers_whole_blocks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_ok("save-init", str(model), "--out", str(tmp_path / "init"))
    monkeypatch.setattr("prepcli.planning.arrays.BLOCK_NBYTES", 4096)
    monkeypatch.setattr("prepcli.formats.checksums.BLOCK_NBYTES", 4096)
    run_ok("reshard", str(tmp_path / "init"), "--out", str(tmp_path / "small"), "--mesh", "1,1,1")
    monkeypatch.setattr("prepcli.restore.item_reader.PIECE_NBYTES", 8192)
    with open_reader(tmp_path / "small") as reader:
        shape = reader.leaves[UP].shape
        assert chunk_blocks((1, *shape[1:]), "float32").rows == 16
        array = read_boxes(reader, UP, [full_box(shape)], "float32")[full_box(shape)]
    boxes = [((0, 2), (3, 21), (5, 9)), ((1, 2), (100, 101), (0, 64)), ((2, 2), (0, 1), (0, 1))]
    spans = record_reads(monkeypatch)
    with open_reader(tmp_path / "small") as reader:
        for box, part in read_boxes(reader, UP, boxes, "float32").items():
            assert same_bits(part, array[tuple(slice(*span) for span in box)])
        assert reader.read_nbytes == 5 * 4096 == sum(high - low for _, low, high in spans)
    check_no_byte_read_twice(spans)


def test_read_ignores_damage_outside_the_part(model: Path, tmp_path: Path):
    run_ok(
        "save-init",
        str(model),
        "--out",
        str(tmp_path / "init"),
        "--mesh",
        "1,2,1",
        "--pad-vocab",
        "8",
    )
    path, offset, _ = chunk_locations(tmp_path / "init")[UP, (1, 0, 0)]
    flip_bit(path, offset)
    with open_reader(tmp_path / "init") as reader:
        rows, columns = reader.leaves[UP].shape[1:]
        read_boxes(reader, UP, [((0, 1), (0, rows), (0, columns))], "float32")
        with pytest.raises(DamagedLeafError):
            read_boxes(reader, UP, [((1, 2), (0, 1), (0, 1))], "float32")


@pytest.mark.slow
def test_checksums_do_not_depend_on_file_layout(model: Path, tmp_path: Path):
    """Compression, memory budget and processes do not change checksums."""
    for name, options in {
        "raw": (),
        "packed": ("--compress", "zstd"),
        "tight": ("--memory", "32MiB"),
        "shared": ("--workers", "3", "--memory", "512MiB"),
    }.items():
        run_ok(
            "save-init",
            str(model),
            "--out",
            str(tmp_path / name),
            "--mesh",
            "1,2,4",
            "--pad-vocab",
            "8",
            *options,
        )
    files = [
        (tmp_path / name / CHECKSUMS_FILE).read_bytes()
        for name in ("raw", "packed", "tight", "shared")
    ]
    assert len(files[0]) % 8 == 0
    assert {*files} == {files[0]}


@pytest.mark.parametrize("key", ["file", "method", "block", "digest"])
def test_open_reader_rejects_unknown_checksum_fields(model: Path, tmp_path: Path, key: str):
    run_ok("save-init", str(model), "--out", str(tmp_path / "init"))
    with changed_manifest(tmp_path / "init") as manifest:
        manifest["checksums"][key] = "other"
    with pytest.raises(
        PrepError, match=rf"{CHECKSUMS_FILE} (has an unsupported format|is damaged).*`verify=False`"
    ):
        open_reader(tmp_path / "init")
    open_reader(tmp_path / "init", verify=False).close()


def test_open_reader_rejects_damaged_or_missing_checksums(model: Path, tmp_path: Path):
    run_ok("save-init", str(model), "--out", str(tmp_path / "init"))
    path = tmp_path / "init" / CHECKSUMS_FILE
    before = path.read_bytes()
    for data in (before[:-8], bytes([before[0] ^ 1]) + before[1:]):
        path.write_bytes(data)
        with pytest.raises(PrepError, match=rf"{CHECKSUMS_FILE} is damaged"):
            open_reader(tmp_path / "init")
    path.unlink()
    with pytest.raises(PrepError, match=CHECKSUMS_FILE):
        open_reader(tmp_path / "init")


def test_open_reader_accepts_an_item_without_checksums(model: Path, tmp_path: Path):
    run_ok("save-init", str(model), "--out", str(tmp_path / "init"))
    with changed_manifest(tmp_path / "init") as manifest:
        del manifest["checksums"]
    (tmp_path / "init" / CHECKSUMS_FILE).unlink()
    with open_reader(tmp_path / "init") as reader:
        assert not reader.is_checked
        assert {*read_all_leaves(reader)} == {*reader.leaves}


CONFIGS = {"gpt2": GPT2, "gpt-neo": GPT_NEO, "llama": LLAMA, **FAMILY_CONFIGS}


def digest_of(name: str) -> str:
    return sample_digest(open_source(locate(name)))


# A family of each kind of rows: transposed, split, tied, fused experts, and two stacks. The check `coverage` of
# tests/prepcli/commands/testing/test_checks.py covers the rows of all families.
FAST_FAMILIES = ("gpt2", "gpt-neo", "mixtral", "opt", "t5")


@pytest.mark.parametrize("family", slow_except(sorted(CONFIGS), FAST_FAMILIES))
def test_sample_digest_is_equal_in_all_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
):
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("hf"), CONFIGS[family])
    assert (
        main(["save-init", "hf", "--pad-vocab", "8", "--mesh", "1,2,1", "--out", "init", "-q"])
        == OK
    )
    assert main(["pad-vocab", "hf", "--multiple", "64", "--out", "padded", "-q"]) == OK
    assert {digest_of(name) for name in ("init", "padded")} == {digest_of("hf")}


def test_sample_digest_differs_for_other_values(tmp_path: Path):
    make_checkpoint(tmp_path / "hf", LLAMA)
    before = digest_of(str(tmp_path / "hf"))
    path = next((tmp_path / "hf").glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name][3] += 1
    save_file(tensors, path)
    assert digest_of(str(tmp_path / "hf")) != before
