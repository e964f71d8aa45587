"""Flipped bits in small files, and in tensors that are read through a transform."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.core.errors import DamagedError
from prepcli.engine.digest import TensorDigest
from prepcli.engine.pipeline import PipelineUnit
from prepcli.execution.bucket_converter import BucketConverter
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.manifest import NO_MANIFEST, encode_manifest, read_manifest, record_file
from prepcli.formats.safetensors import read_safetensors_header
from prepcli.planning import object_files
from prepcli.restore import digest_checks
from prepcli.restore.item_reader import open_reader
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket
from tests.helpers.adapters import make_adapter
from tests.helpers.damage import flip_bit, tensor_byte_ranges, tensor_place
from tests.helpers.foreign_names import STACKED_MAP
from tests.helpers.fork_server import start_prep
from tests.helpers.killing import read_files
from tests.helpers.object_server import use_objects
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors
from tests.helpers.training_folder import make_training_folder
from tests.helpers.training_states import host_leaves, make_state, open_manager, read_params
from tests.helpers.waiting import MAX_S
from tests.prepcli.commands.operations.test_damage import damage_parameter

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
        with open_manager(Path("run"), Path("init")) as run:
            run.save(5, host_leaves(make_state(read_params(Path("init")), 5)), {})
        shutil.move("run/5", "step")
    return folder


@pytest.fixture
def outputs(made: Path, tmp_path: Path) -> None:
    for kind in KINDS:
        shutil.copytree(made / kind, tmp_path / kind)


def listed_files(kind: str) -> Sequence[str]:
    manifest = read_manifest(Path(kind))
    assert manifest is not None
    return sorted(manifest.files)


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("kind", KINDS)
def test_manifest_lists_every_file(kind: str):
    files = {str(path.relative_to(kind)) for path in Path(kind).rglob("*") if path.is_file()}
    unlisted = files - {*listed_files(kind)}
    data_files = {name for name in unlisted if "d/" in name}
    assert unlisted - data_files == {"prep-manifest.json"} | {CHECKSUMS_FILE} & files


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("kind", slow_except(["init", "step", "maxtext"], ["init"]))
def test_flipped_checksum_is_found(kind: str, capsys: Capture):
    if kind == "maxtext":
        run_ok("export", "init", "--layout", kind, "--out", kind)
    (file,) = Path(kind).rglob(CHECKSUMS_FILE)
    flip_bit(file, 100)
    for words in (
        (kind,),
        (kind, "--chain"),
        (kind, "hf"),
        ("hf", kind),
        ("hf", kind, "--quick"),
        ("hf", kind, "--tolerance", "1"),
    ):
        assert f"{file} is damaged" in run_failing(capsys, 1, "verify", *words)


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("kind", slow_except(KINDS, ["step"]))
def test_flipped_bit_in_any_listed_file_is_refused(kind: str, capsys: Capture):
    draw, records = random.Random(kind), (read_manifest(Path(kind)) or NO_MANIFEST).files
    for name in listed_files(kind):
        path = Path(kind, name)
        before = path.read_bytes()
        position = draw.randrange(8 * len(before))
        flip_bit(path, position // 8, position % 8)
        has_tensors = "header" in records[name]
        for words in (("verify", kind), ("export", kind, "--out", "out", "--dtype", "bfloat16")):
            error = run_failing(capsys, 1, *words)
            # a header is parsed first: the error may name the tensor that it no longer describes
            assert has_tensors or f"{path.name} is damaged" in error
            assert "bug in prep" not in error
        path.write_bytes(before)
        assert not Path("out").exists()
    run_ok("verify", kind)


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("kind", slow_except(KINDS, ["hf"]))
def test_missing_file_is_refused_and_an_added_one_ignored(kind: str, capsys: Capture):
    Path(kind, "README.md").write_text("mine")
    assert run_json(capsys, "verify", kind)["tensors"] > 0
    name = next(name for name in listed_files(kind) if name.endswith("tokenizer.json"))
    Path(kind, name).unlink()
    assert f"{kind}/{name} does not exist" in run_failing(capsys, 1, "verify", kind)


@pytest.mark.usefixtures("outputs")
def test_reader_refuses_changed_tokenizer():
    flip_bit(Path("step/state/hf/tokenizer.json"), 100)
    with pytest.raises(DamagedError, match=r"step/state/hf/tokenizer\.json is damaged"):
        open_reader(Path("step"))


@pytest.mark.usefixtures("outputs")
def test_run_does_not_copy_changed_tokenizer_to_next_step():
    state = host_leaves(make_state(read_params(Path("init")), 5))
    with open_manager(Path("run"), Path("init")) as run:
        run.save(5, state, {})
        flip_bit(Path("run/5/state/hf/tokenizer.json"), 100)
        with pytest.raises(DamagedError, match=r"tokenizer\.json is damaged"):
            run.save(6, state, {})
        assert run.steps() == [5]


@pytest.mark.usefixtures("outputs")
def test_run_refuses_start_with_changed_tokenizer():
    flip_bit(Path("init/hf/tokenizer.json"), 100)
    with (
        pytest.raises(DamagedError, match=r"init/hf/tokenizer\.json is damaged"),
        open_manager(Path("run"), Path("init")),
    ):
        pass


@pytest.mark.usefixtures("outputs")
def test_inspect_refuses_changed_config(capsys: Capture):
    path = Path("hf/config.json")
    path.write_bytes(path.read_bytes().replace(b"4", b"5", 1))
    assert "hf/config.json is damaged" in run_failing(capsys, 1, "inspect", "hf")


@pytest.mark.usefixtures("outputs")
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_merge_refuses_changed_adapter_files(name: str, capsys: Capture):
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


# Flipped bits in outputs that are read through a transform: decoded, mapped, in part, or under other names


DEQUANTIZE = ("--quantized", "dequantize")
MAP = Path("stacked.map")
Q_PROJ = "model.layers.1.self_attn.q_proj"
SETTINGS = ("weight_format", "quant_state.bitsandbytes__nf4")


@pytest.fixture(autouse=True)
def _stacked_map() -> None:
    MAP.write_text(STACKED_MAP)


def export_quantized(name: str) -> Path:
    """Write a quantised model, and return an export of it with digests of the codes and scales."""
    make_quantized(Path("source"), name)
    run_ok("save-init", "source", *DEQUANTIZE, "--out", "init")
    run_ok("export", "init", "--quantized-source", "source", "--out", "made")
    return Path("made")


def export_dense(*words: str) -> Path:
    """Write a LLaMA, and return an export of its init."""
    make_checkpoint(Path("model"), LLAMA)
    run_ok("save-init", "model", "--out", "init")
    run_ok("export", "init", *words, "--out", "made")
    return Path("made")


def flip_tensor(folder: Path, name: str) -> None:
    """Flip a bit of a safetensors tensor, near its end."""
    path, low, high = tensor_place(folder, name)
    flip_bit(path, high - 1 - (high - low) // 8)


def stored_names(folder: Path, prefix: str) -> list[str]:
    (path,) = folder.glob("*.safetensors")
    return [name for name, _, _ in tensor_byte_ranges(path) if name.startswith(prefix)]


@pytest.mark.parametrize("name", slow_except(["fp8", "gptq", "awq", "int8", "nf4"], ["gptq"]))
def test_decoding_refuses_a_flip_in_each_stored_tensor(name: str, capsys: Capture):
    made = export_quantized(name)
    for tensor in stored_names(made, Q_PROJ):
        flip_tensor(made, tensor)
        error = run_failing(capsys, 1, "save-init", "made", *DEQUANTIZE, "--out", "out")
        # Settings such as the shape of NF4 are parsed before any digest is compared.
        assert tensor in error
        assert "is damaged" in error or tensor.endswith(SETTINGS)
        assert not Path("out").exists()
        flip_tensor(made, tensor)
    run_ok("save-init", "made", *DEQUANTIZE, "--out", "out")
    run_ok("verify", "out", "init")


@pytest.mark.slow
def test_chain_does_not_show_decoded_values():
    make_quantized(Path("q"), "fp8")
    prep.save_init("q", "q-init", quantized="dequantize")
    prep.export("q-init", "q-hf")
    export, init = prep.verify_chain("q-hf").links
    assert (export.status, export.not_shown) == ("holds", "decoded or encoded")
    # Only the scales and the weights without codes have equal digests, and the model has no recorded commit.
    assert (init.status, init.not_shown) == ("not proven", "decoded or encoded")
    assert init.proof.startswith("30 tensors, ")
    run_ok(*init.check.removeprefix("prep ").split())
    flip_tensor(Path("q"), f"{Q_PROJ}.weight")
    assert not prep.verify_chain("q-hf")


def test_decoding_the_first_layers_ignores_the_others(capsys: Capture):
    flip_tensor(export_quantized("fp8"), "model.layers.2.mlp.up_proj.weight")
    run_ok("save-init", "made", *DEQUANTIZE, "--layers", "2", "--out", "out")
    error = run_failing(capsys, 1, "save-init", "made", *DEQUANTIZE, "--out", "all")
    assert "model.layers.2.mlp.up_proj.weight in made is damaged" in error.replace(")", "")


def test_mapping_refuses_a_flipped_bit(capsys: Capture):
    flip_tensor(export_dense(), f"{Q_PROJ}.weight")
    error = run_failing(capsys, 1, "save-init", "made", "--map", str(MAP), "--out", "out")
    assert f"{Q_PROJ}.weight in made is damaged" in error
    assert not Path("out").exists()


JOINT_LAUNCHES = {
    "workers": [("--workers", "2")],
    "processes": [("--processes", "2/0"), ("--processes", "2/1")],
}


@pytest.mark.parametrize(
    ("launch", "out"),
    slow_except([("processes", "out"), ("workers", "gs://bucket/out")], [("processes", "out")]),
)
def test_refused_source_does_not_block_its_repair(
    launch: str, out: str, tmp_path: Path, monkeypatch: MonkeyPatch
):
    made = export_dense()
    words = ("save-init", "made", "--map", str(MAP), "--out")
    run_ok(*words, "whole")
    # Every process finds a damaged tensor in its share.
    damaged = stored_names(made, "model.layers")
    for tensor in damaged:
        flip_tensor(made, tensor)

    def run_all(code: int) -> str:
        processes = [
            start_prep(*words, out, *options, cwd=tmp_path) for options in JOINT_LAUNCHES[launch]
        ]
        errors = ""
        for process in processes:
            errors += process.communicate(timeout=MAX_S)[1].decode()
            assert process.returncode == code, errors
        return errors

    with use_objects(monkeypatch) as store:
        assert run_all(1).count("in made is damaged") == len(JOINT_LAUNCHES[launch])
        for tensor in damaged:
            flip_tensor(made, tensor)
        run_all(0)
        run_ok("verify", out, "whole")
        assert not [key for key in store.objects if "/.prep" in key]
    assert not Path("out.partial").exists()


def test_checked_units_are_claimed_one_by_one(monkeypatch: MonkeyPatch):
    monkeypatch.setattr(object_files, "OBJECT_NBYTES", 1 << 10)
    export_dense()
    list_files, prepare = Bucket.list_files, BucketConverter.prepare_unit
    listed: list[str] = []
    claimed: list[int] = []

    def list_and_count(bucket: Bucket) -> tuple[RemoteFile, ...]:
        listed.append(bucket.name)
        return list_files(bucket)

    def prepare_and_count(run: BucketConverter, number: int) -> PipelineUnit:
        claims = set(store.objects_below("bucket/out/.prep/claims/"))
        claimed.append(len(claims - set(store.objects_below("bucket/out/.prep/done/"))))
        return prepare(run, number)

    monkeypatch.setattr(Bucket, "list_files", list_and_count)
    monkeypatch.setattr(BucketConverter, "prepare_unit", prepare_and_count)
    with use_objects(monkeypatch) as store:
        out = "gs://bucket/out"
        run_ok("save-init", "made", "--map", str(MAP), "--out", out, "--processes", "2/0")
    assert len(claimed) > 8
    assert max(claimed) == 1
    assert listed.count(out) < 8


def test_refused_source_keeps_the_replaced_bucket_output(monkeypatch: MonkeyPatch, capsys: Capture):
    made = export_dense()
    words = ("save-init", "made", "--map", str(MAP), "--out", "gs://bucket/out", "--overwrite")
    with use_objects(monkeypatch) as store:
        run_ok(*words)
        before = dict(store.objects)
        flip_tensor(made, f"{Q_PROJ}.weight")
        assert f"{Q_PROJ}.weight in made is damaged" in run_failing(capsys, 1, *words)
        assert store.objects == before


def test_mapping_decoded_weights_refuses_a_flipped_bit(capsys: Capture):
    made = export_quantized("fp8")
    words = ("save-init", "made", *DEQUANTIZE, "--map", str(MAP), "--out")
    run_ok(*words, "whole")
    flip_tensor(made, f"{Q_PROJ}.weight")
    assert f"{Q_PROJ}.weight in made is damaged" in run_failing(capsys, 1, *words, "out")


def flip_norm(folder: Path) -> Path:
    """Flip a bit of the final norm, which has the same bytes in every layout."""
    values = read_tensors(Path("model"))["model.norm.weight"].tobytes()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        position = path.read_bytes().find(values)
        if position >= 0:
            return flip_bit(path, position + 9)
    raise AssertionError("no file has the norm")


@pytest.mark.parametrize(
    "layout", slow_except(["easylm", "hf-flax", "torchtitan", "maxtext", "levanter"], ["easylm"])
)
def test_verbatim_names_do_not_hide_a_flipped_bit(layout: str, capsys: Capture):
    made = export_dense("--layout", layout)
    words = ("save-init", "made", "--verbatim", "--out")
    run_ok(*words, "whole")
    prep.load_params("./made", verbatim=True)
    flip_norm(made)
    assert "in made is damaged" in run_failing(capsys, 1, *words, "out")
    with pytest.raises(DamagedError, match=r"in \./made is damaged"):
        prep.load_params("./made", verbatim=True)


def test_equal_damage_on_both_sides_is_found(capsys: Capture):
    made = export_dense()
    run_ok("verify", "made", "model", "--tolerance", "1e30")
    shutil.copytree(made, "copy")
    for folder in (made, Path("copy")):
        flip_tensor(folder, f"{Q_PROJ}.weight")
    for words in (("copy",), ("copy", "--tolerance", "1e30"), ("model", "--tolerance", "1e30")):
        error = run_failing(capsys, 1, "verify", "made", *words)
        assert f"({Q_PROJ}.weight) in made is damaged" in error


def test_statistics_refuse_a_flipped_code(capsys: Capture):
    made = export_quantized("fp8")
    run_ok("inspect", "made", "--stats")
    flip_tensor(made, f"{Q_PROJ}.weight")
    assert "in made is damaged" in run_failing(capsys, 1, "inspect", "made", "--stats")


def test_statistics_of_a_selection_check_only_its_tensors(capsys: Capture):
    made = export_dense()
    flip_tensor(made, f"{Q_PROJ}.weight")
    run_ok("inspect", "made", "*norm*", "--stats")
    assert "in made is damaged" in run_failing(capsys, 1, "inspect", "made", "*q_proj*", "--stats")
    damage_parameter(Path("init"))
    assert "in init is damaged" in run_failing(capsys, 1, "inspect", "init", "--stats")


@pytest.mark.parametrize("name", slow_except(["dense", "fp8", "init", "compressed"], ["init"]))
def test_statistics_of_a_bucket_refuse_a_flipped_bit(
    name: str, monkeypatch: MonkeyPatch, capsys: Capture
):
    made = export_quantized(name) if name == "fp8" else export_dense()
    if name in ("init", "compressed"):
        made = Path("out")
        options = ("--compress", "zstd") if name == "compressed" else ()
        run_ok("save-init", "model", "--storage", "files", *options, "--out", str(made))
    objects = {f"bucket/out/{path}": data for path, data in read_files(made).items()}
    with use_objects(monkeypatch, objects) as store:
        command = ("inspect", "gs://bucket/out", "--stats")
        run_ok(*command)
        parts = ("params.layers.attn.q.weight/1.", "model.safetensors")
        (key,) = [key for key in objects if any(part in key for part in parts)]
        data = bytearray(objects[key])
        data[-100] ^= 1
        store.store(key, bytes(data))
        error = run_failing(capsys, 1, *command)
        assert "damaged" in error or "broken" in error
        if name != "compressed":
            assert "differ from their recorded digest" in error


def test_inspect_refuses_changed_metadata(capsys: Capture):
    made = export_dense()
    path = made / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"layers.1.self_attn.q", b"layers.1.self_attn.z", 1))
    assert "made/model.safetensors is damaged" in run_failing(capsys, 1, "inspect", "made")
    run_ok("save-init", "model", "--storage", "files", "--out", "files")
    path = Path("files/params.head.weight/.zarray")
    path.write_text(path.read_text().replace("131", "130"))
    assert f"{path} is damaged" in run_failing(capsys, 1, "inspect", "files")


def test_check_stays_within_the_memory_of_a_run(monkeypatch: MonkeyPatch):
    export_quantized("fp8")
    limits: list[int] = []
    check = digest_checks.check_before_reading

    def record(source, streams, memory_nbytes, progress):
        limits.append(memory_nbytes)
        check(source, streams, memory_nbytes, progress)

    monkeypatch.setattr("prepcli.execution.converter.check_before_reading", record)
    run_ok("save-init", "made", *DEQUANTIZE, "--memory", "32MiB", "--out", "out")
    assert limits == [32 << 20]
