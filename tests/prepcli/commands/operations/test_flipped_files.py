"""Flipped bits in files without tensors: every command that opens an output names the file and refuses it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from prepcli.core.errors import DamagedError
from prepcli.engine.digest import TensorDigest
from prepcli.execution.checkpoint_manager import CheckpointManager
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import NO_MANIFEST, encode_manifest, read_manifest, record_file
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.restore.item_reader import open_reader
from tests.helpers.adapters import make_adapter
from tests.helpers.run_cli import run_failing, run_json, run_ok
from tests.helpers.training_folder import make_training_folder
from tests.helpers.training_states import host_leaves, make_state, read_params

KINDS = ("init", "hf", "flax", "easylm", "step")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an output of each kind, from a model with a tokenizer."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_training_folder()
        shutil.move("tiny-init", "init")
        run_ok("export", "init", "--out", "hf", "--shard-size", "64kB")
        run_ok("export", "init", "--out", "flax", "--layout", "hf-flax")
        run_ok("export", "init", "--out", "easylm", "--layout", "easylm")
        with CheckpointManager(Path("run"), Path("init"), name="tiny") as run:
            run.save(5, host_leaves(make_state(read_params(Path("init")), 5)), {})
        shutil.move("run/5", "step")
    return folder


@pytest.fixture(autouse=True)
def _work_dir(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in KINDS:
        shutil.copytree(made / kind, tmp_path / kind)


def listed_files(kind: str) -> Sequence[str]:
    manifest = read_manifest(Path(kind))
    assert manifest is not None
    return sorted(manifest.files)


def flip_bit(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.mark.parametrize("kind", KINDS)
def test_manifest_lists_every_file(kind: str):
    files = {str(path.relative_to(kind)) for path in Path(kind).rglob("*") if path.is_file()}
    unlisted = files - {*listed_files(kind)}
    data_files = {name for name in unlisted if "d/" in name}
    assert unlisted - data_files == {"prep-manifest.json"} | {CHECKSUMS_FILE} & files


@pytest.mark.parametrize("layout", ["maxtext", "tunix", "levanter"])
def test_flipped_checksum_of_a_trainer_export_is_found(
    layout: str, capsys: pytest.CaptureFixture[str]
):
    run_ok("export", "init", "--layout", layout, "--out", "out")
    flip_bit(Path("out", CHECKSUMS_FILE), 100)
    for words in (("out",), ("out", "--quick"), ("out", "--chain"), ("out", "init")):
        error = run_failing(capsys, 1, "verify", *words)
        assert f"out/{CHECKSUMS_FILE} is damaged" in error


@pytest.mark.parametrize("kind", ["init", "step"])
def test_flipped_checksum_is_found_in_a_comparison(kind: str, capsys: pytest.CaptureFixture[str]):
    (file,) = Path(kind).rglob(CHECKSUMS_FILE)
    flip_bit(file, 100)
    for words in (
        (kind, "hf"),
        ("hf", kind),
        ("hf", kind, "--quick"),
        ("hf", kind, "--tolerance", "1"),
    ):
        assert f"{file} is damaged" in run_failing(capsys, 1, "verify", *words)


@pytest.mark.parametrize("kind", KINDS)
def test_flipped_bit_in_any_listed_file_is_refused(kind: str, capsys: pytest.CaptureFixture[str]):
    draw, records = random.Random(kind), (read_manifest(Path(kind)) or NO_MANIFEST).files
    for name in listed_files(kind):
        path = Path(kind, name)
        before = path.read_bytes()
        flip_bit(path, draw.randrange(8 * len(before)))
        has_tensors = "header" in records[name]
        for words in (("verify", kind), ("export", kind, "--out", "out", "--dtype", "bfloat16")):
            error = run_failing(capsys, 1, *words)
            # a header is parsed first: the error may name the tensor that it no longer describes
            assert has_tensors or f"{path.name} is damaged" in error
            assert "bug in prep" not in error
        path.write_bytes(before)
        assert not Path("out").exists()
    run_ok("verify", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_missing_listed_file_is_refused(kind: str, capsys: pytest.CaptureFixture[str]):
    name = next(name for name in listed_files(kind) if name.endswith("tokenizer.json"))
    Path(kind, name).unlink()
    assert f"{kind}/{name} does not exist" in run_failing(capsys, 1, "verify", kind)


@pytest.mark.parametrize("kind", KINDS)
def test_added_files_are_ignored(kind: str, capsys: pytest.CaptureFixture[str]):
    before = run_json(capsys, "verify", kind)
    Path(kind, "README.md").write_text("mine")
    after = run_json(capsys, "verify", kind)
    assert after["tensors"] == before["tensors"] > 0


def test_reader_refuses_changed_tokenizer():
    flip_bit(Path("step/state/hf/tokenizer.json"), 100)
    with pytest.raises(DamagedError, match=r"step/state/hf/tokenizer\.json is damaged"):
        open_reader(Path("step"))


def test_run_does_not_copy_changed_tokenizer_to_next_step():
    state = host_leaves(make_state(read_params(Path("init")), 5))
    with CheckpointManager(Path("run"), Path("init"), name="tiny") as run:
        run.save(5, state, {})
        flip_bit(Path("run/5/state/hf/tokenizer.json"), 100)
        with pytest.raises(DamagedError, match=r"tokenizer\.json is damaged"):
            run.save(6, state, {})
        assert run.steps() == [5]


def test_run_refuses_start_with_changed_tokenizer():
    flip_bit(Path("init/hf/tokenizer.json"), 100)
    with pytest.raises(DamagedError, match=r"init/hf/tokenizer\.json is damaged"):
        CheckpointManager(Path("run"), Path("init"), name="tiny")


def test_inspect_refuses_changed_config(capsys: pytest.CaptureFixture[str]):
    path = Path("hf/config.json")
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    assert "hf/config.json is damaged" in run_failing(capsys, 1, "inspect", "hf")


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_merge_refuses_changed_adapter_files(name: str, capsys: pytest.CaptureFixture[str]):
    matrices = make_adapter(Path("adapter"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    header = read_safetensors_header(Path("adapter/adapter_model.safetensors"), 0)
    records = {"adapter_config.json": record_file(Path("adapter/adapter_config.json"))}
    records["adapter_model.safetensors"] = {"bytes": header.size, "header": header.digest}
    manifest = {
        key: value
        for key, value in (read_manifest(Path("init")) or NO_MANIFEST).items()
        if key != "base"
    }
    tensors = {
        key: {
            "dtype": "float32",
            "shape": value.shape,
            "digests": [[0, len(value), TensorDigest(value.tobytes()).text()]],
        }
        for key, value in matrices.items()
    }
    content = manifest | {"kind": "adapter", "tensors": tensors, "files": records}
    Path("adapter/prep-manifest.json").write_bytes(encode_manifest(content))
    run_ok("merge", "adapter", "init", "--out", "merged")
    path = Path("adapter", name)
    path.write_bytes(path.read_bytes().replace(b'"r": 3', b'"r": 2').replace(b'"F32"', b'"I32"', 1))
    assert f"adapter/{name} is damaged" in run_failing(
        capsys, 1, "merge", "adapter", "init", "--out", "again"
    )
