"""Digests by another algorithm, and checksums of written blocks: both match the files."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.algebra.axis_map import AxisMap
from prepcli.algebra.grids import ChunkGrid, StridedChunks
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.commands.cli.main import main
from prepcli.engine import checksum_recorder
from prepcli.engine import digest as digests
from prepcli.engine.checksum_recorder import ChecksumRecorder, compute_unknown
from prepcli.engine.digest import (
    CastCounts,
    StreamDigest,
    TensorDigest,
    algorithm_of,
    block_checksum,
)
from prepcli.engine.files import Files
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.planning import arrays as stored_arrays
from prepcli.planning.arrays import BLOCK_NBYTES
from prepcli.planning.chunk_placement import ChunkExtent, chunk_extents
from prepcli.planning.plan import OutputLeaf, PlacedChunks
from tests.helpers.manifests import changed_manifest
from tests.helpers.plans import SavePlan, dividing_chunks, make_save_plan
from tests.helpers.run_cli import run_ok
from tests.helpers.strategies import complete_tables
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.prepcli.engine.test_pipeline import QUIET, save

EMBEDDING = "model.embed_tokens.weight"
Tensors = dict[str, np.ndarray]


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tensors:
    """Return the tensors of an output `first` with digests of SHA-256. Its source is `model`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(digests.ALGORITHMS, "sha256", hashlib.sha256)
    tensors = make_checkpoint(tmp_path / "model", LLAMA)
    run_ok("save-init", "./model", "--pad-vocab", "8", "--out", "first")
    record_sha256("first", tensors)
    return tensors


def sha256_of_rows(tensor: np.ndarray, first: int, stop: int) -> str:
    """Return the digest of rows of a tensor. Rows after the last one are zeros."""
    new_rows = np.zeros((8, *tensor.shape[1:]), tensor.dtype)
    rows = np.concatenate([tensor, new_rows])[first:stop]
    return f"sha256:{hashlib.sha256(rows.tobytes()).hexdigest()}"


def record_sha256(folder: str, tensors: Tensors) -> None:
    """Replace the digests in the manifest of an output."""
    with changed_manifest(Path(folder)) as manifest:
        manifest["tensor_digest"] = "sha256"
        for name, tensor in tensors.items():
            for digest in manifest["tensors"][name]["digests"]:
                digest[2] = sha256_of_rows(tensor, digest[0], digest[1])


def read_manifest(folder: str) -> dict[str, Any]:
    return json.loads(Path(folder, MANIFEST_FILE).read_text())


def damage(folder: str, tensor: np.ndarray) -> None:
    """Change one bit of a tensor."""
    path = max(Path(folder).rglob("*"), key=lambda file: file.stat().st_size)
    data = bytearray(path.read_bytes())
    data[data.index(tensor.tobytes())] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "words",
    [
        ("export", "first"),
        ("export", "first", "--dtype", "bfloat16"),
        ("reshard", "first", "--mesh", "1,2,1"),
        ("reshard", "first", "--compress", "zstd"),
        ("reshard", "first", "--no-scan", "--storage", "zarr3"),
    ],
)
def test_output_has_the_algorithm_of_its_source(tensors: Tensors, words: tuple[str, ...]):
    run_ok(*words, "--out", "second")
    manifest = read_manifest("second")
    assert manifest["tensor_digest"] == "sha256"
    dtype = ml_dtypes.bfloat16 if "bfloat16" in words else np.float32
    for name, tensor in tensors.items():
        for first, stop, recorded in manifest["tensors"][name]["digests"]:
            assert recorded == sha256_of_rows(tensor.astype(dtype), first, stop)
    run_ok("verify", "second")
    run_ok("verify", "second", "--chain")


@pytest.mark.parametrize("folder", ["first", "second"])
def test_verify_and_conversions_find_damage(
    tensors: Tensors, folder: str, capsys: pytest.CaptureFixture[str]
):
    run_ok("export", "first", "--out", "second")
    run_ok("verify", "second", "first")
    damage(folder, tensors[EMBEDDING])
    for words in (("verify", folder), ("export", folder, "--dtype", "float16", "--out", "third")):
        capsys.readouterr()
        assert main([*words]) == 1
        assert EMBEDDING.removeprefix("model.") in "".join(capsys.readouterr())


def test_chain_compares_digests_of_two_algorithms(tensors: Tensors):
    run_ok("save-init", "./model", "--out", "a")
    run_ok("export", "a", "--out", "b")
    record_sha256("b", tensors)
    run_ok("verify", "b", "--chain")
    run_ok("verify", "b", "a")
    with changed_manifest(Path("b")) as manifest:
        manifest["tensors"][EMBEDDING]["digests"][0][2] = sha256_of_rows(np.zeros(1), 0, 1)
    assert main(["verify", "b", "--chain"]) == 1


def test_lock_has_the_algorithm_of_the_manifest(tensors: Tensors):
    # The form of a lock follows from the table at its import.
    script = """
import hashlib
from prepcli.engine import digest
digest.ALGORITHMS["sha256"] = hashlib.sha256
from prepcli.commands.cli.main import main
assert main(["lock", "first", "--out", "lock.json"]) == 0
assert main(["export", "first", "--lock", "lock.json", "--out", "second"]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    lock = json.loads(Path("lock.json").read_text())
    assert lock["algorithms"] == {"files": "sha256", "tensors": "sha256"}
    recorded = read_manifest("first")["tensors"]
    for name in tensors:
        assert lock["tensors"][name]["digests"] == recorded[name]["digests"]


def test_unknown_algorithm_in_a_digest_is_damage(
    tensors: Tensors, capsys: pytest.CaptureFixture[str]
):
    with changed_manifest(Path("first")) as manifest:
        manifest["tensors"][EMBEDDING]["digests"][0][2] = "md5:00"
    assert main(["verify", "first"]) == 1
    assert EMBEDDING in "".join(capsys.readouterr())
    assert main(["export", "first", "--out", "second"]) == 1


def test_digest_text_names_its_algorithm(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(digests.ALGORITHMS, "sha256", hashlib.sha256)
    text = TensorDigest(b"ab", "sha256").text()
    assert text == f"sha256:{hashlib.sha256(b'ab').hexdigest()}"
    assert algorithm_of(text) == "sha256"
    assert {algorithm_of(other) for other in ("", "9f", "sha512:9f")} == {"xxh3-128"}
    for digest in (
        StreamDigest(text, text),
        StreamDigest(text, f"sha256:{'cd' * 32}", CastCounts(9, 8, 7, 6, 5, 0.1)),
        StreamDigest(text, text, CastCounts(), text, 3),
    ):
        assert StreamDigest.decode(digest.encode()) == digest
    for damaged in ("a:b", "a:b:1:1:1:1:1", "a:b:1:1:1:1:1:0x1p-3:c", "a:b:x:1:1:1:1:0x1p-3"):
        with pytest.raises(ValueError, match=r"digest|literal|unpack"):
            StreamDigest.decode(damaged)


def plan_extents(save_plan: SavePlan) -> list[ChunkExtent]:
    return chunk_extents(save_plan.plan.leaves)


def file_checksums(extents: list[ChunkExtent], paths: list[Path]) -> np.ndarray:
    """Return the checksum of every block, computed from the files."""
    checksums_of_files = np.zeros(max(extent.blocks.stop_number for extent in extents), np.uint64)
    data = [np.frombuffer(path.read_bytes(), np.uint8) for path in paths]
    for extent in extents:
        for position in range(extent.chunk_count):
            start = extent.offset + position * extent.stride_nbytes
            for block in extent.blocks.per_chunk.overlapping(
                0, extent.blocks.per_chunk.chunk_nbytes
            ):
                number = extent.first_block(position) + block.number
                checksums_of_files[number] = block_checksum(
                    data[extent.file][start + block.start : start + block.stop].data
                )
    return checksums_of_files


@QUIET
@given(rows=complete_tables(), data=st.data())
def test_recorder_matches_the_files(
    tmp_path_factory: pytest.TempPathFactory, rows: tuple[AxisMap, ...], data: Any
):
    folder = tmp_path_factory.mktemp("plan")
    save_plan = make_save_plan(rows, [data.draw(dividing_chunks(row.leaf_shape)) for row in rows])
    limit, block_nbytes = (
        data.draw(st.sampled_from([4, 20, 64, 4096])),
        data.draw(st.sampled_from([8, 24, 1 << 20])),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_arrays, "BLOCK_NBYTES", block_nbytes)
        patch.setattr(checksum_recorder, "MIN_RUN_NBYTES", 0)
        extents, paths = plan_extents(save_plan), save_plan.data_files(folder)
        recorder = ChecksumRecorder(extents)
        save(save_plan, folder, limit, checksums=recorder)
    expected, is_known = file_checksums(extents, paths), recorder.sums != 0
    assert (recorder.sums[is_known] == expected[is_known]).all()
    with Files(paths) as written:
        compute_unknown(recorder.sums, extents, written)
    assert (recorder.sums == expected).all()


DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK_NBYTES, np.uint8)
NUMBERS = np.array([block_checksum(block.data) for block in DATA.reshape(3, -1)], np.uint64)


@pytest.fixture
def recorder() -> ChecksumRecorder:
    """Return a recorder of a leaf of three blocks that starts at byte 4096 of its file."""
    shape = (DATA.size,)
    box = PlacedChunks((0,), (1,), StridedChunks(0, 4096, (0,), (DATA.size,)))
    leaves = [OutputLeaf(("x",), "int8", ChunkGrid(shape, shape), (box,))]
    return ChecksumRecorder(chunk_extents(leaves))


def record_runs(recorder: ChecksumRecorder, *edges: int) -> None:
    """Record the bytes between neighbouring edges, each as one run."""
    for low, high in itertools.pairwise(edges):
        recorder.record([StridedCopy(0, 0, 4096 + low, high - low)], DATA[low:high])


def test_recorder_hashes_pieces_in_order(recorder: ChecksumRecorder):
    record_runs(recorder, 0, 5000, BLOCK_NBYTES + 7, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert (recorder.sums == NUMBERS).all()


def test_recorder_leaves_unordered_pieces_unknown(recorder: ChecksumRecorder):
    record_runs(recorder, 5000, 2 * BLOCK_NBYTES)
    record_runs(recorder, 0, 5000)
    record_runs(recorder, 2 * BLOCK_NBYTES + 1, DATA.size)
    assert recorder.sums.tolist() == [0, NUMBERS[1], 0]


def test_recorder_does_not_compute_checksums_of_short_runs(recorder: ChecksumRecorder):
    columns = StridedCopy(0, 0, 4096, 64, ((DATA.size // 128, 64, 128),))
    recorder.record([columns], DATA[: columns.nbytes])
    assert not recorder.sums.any()


def test_recorder_names_each_recorded_block_once(recorder: ChecksumRecorder):
    record_runs(recorder, 0, BLOCK_NBYTES, BLOCK_NBYTES + 7)
    assert recorder.take_new().tolist() == [0]
    record_runs(recorder, BLOCK_NBYTES + 7, DATA.size)
    assert recorder.take_new().tolist() == [1, 2]
