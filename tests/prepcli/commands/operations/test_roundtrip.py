"""`prep roundtrip` certifies that every way there and back keeps every bit. safetensors and xxhash are the judges."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import xxhash

import prepcli as prep
from prepcli.commands.operations import roundtrip as module
from prepcli.core.errors import (
    FAILED,
    USAGE,
    DamagedError,
    OutputExistsError,
    PrepError,
    UsageError,
)
from prepcli.formats.manifest import record_file
from tests.helpers.manifests import changed_manifest
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import GPT_NEO, LLAMA, make_checkpoint, same_bits
from tests.helpers.tiny_configs import T5
from tests.helpers.towers import write_model
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint
from tests.helpers.training_folder import write_tokenizer


@pytest.fixture
def model() -> Path:
    """Write a model `m` with a tokenizer to the working folder."""
    make_checkpoint(Path("m"), LLAMA)
    write_tokenizer(Path("m"))
    return Path("m")


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


def wrap_export(monkeypatch: MonkeyPatch, after: Callable[[Path], None]) -> None:
    """Call `after` with the folder of each finished export in the layout of Hugging Face."""

    def export(checkpoint: str, out: Path, **options: Any) -> prep.Conversion:
        result = prep.export(checkpoint, out, **options)
        if not {"layout", "format"} & options.keys():
            after(out)
        return result

    monkeypatch.setitem(module.CONVERSIONS, "export", export)


@pytest.mark.slow
def test_every_way_ends_in_the_tensors_of_the_model(model: Path, monkeypatch: MonkeyPatch):
    ends: list[dict[str, np.ndarray]] = []
    wrap_export(monkeypatch, lambda folder: ends.append(read_folder(folder)))
    certificate = prep.roundtrip("m")
    assert certificate
    assert {way.status for way in certificate.ways} == {"equal"}
    expected = read_folder(model)
    assert len(ends) == len(certificate.ways) == len(module.WAYS)
    for tensors in ends:
        assert tensors.keys() == expected.keys()
        assert all(same_bits(tensors[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_training_state_beside_a_model_is_no_difference(tmp_path: Path):
    make_trainer_checkpoint(tmp_path / "checkpoint-400", 400)
    init = tmp_path / "init"
    prep.save_init(tmp_path / "checkpoint-400", init, training_state=True)
    exported = tmp_path / "exported"
    prep.export(init, exported, training_state=True)
    assert (exported / "scheduler.pt").exists()
    for source in (tmp_path / "checkpoint-400", exported):
        certificate = prep.roundtrip(source, tmp_path / f"{source.name}.json", layout=["easylm"])
        assert [way.status for way in certificate.ways] == ["equal"]


def test_certificate_has_counts_and_digests_of_the_model(model: Path):
    prep.roundtrip("m", layout=["init", "easylm"])
    content = json.loads(Path("m.roundtrip.json").read_text())
    tensors = read_folder(model)
    state = xxhash.xxh3_128()
    for name, array in sorted(tensors.items()):
        digest = xxhash.xxh3_128_hexdigest(array.tobytes())
        record = {"dtype": str(array.dtype), "shape": list(array.shape)}
        record["digests"] = [[0, len(array), digest]]
        line = json.dumps([name, record], sort_keys=True, separators=(",", ":"))
        state.update(f"{line}\n".encode())
    assert content["versions"]["prep"] == prep.__version__
    for way in content["ways"]:
        assert way["tensors"] == len(tensors)
        assert way["nbytes"] == sum(array.nbytes for array in tensors.values())
        assert way["digest"] == state.hexdigest()
    assert content["ways"][1]["commands"] == ["export --layout easylm", "save-init", "export"]


@pytest.mark.parametrize("base", slow_except([GPT_NEO, T5], [GPT_NEO]), ids=["gpt_neo", "t5"])
def test_other_families_come_back_in_half_precision(base: dict[str, Any]):
    make_checkpoint(Path("m"), base, dtype="bfloat16")
    certificate = prep.roundtrip("m", layout=["init", "no-scan", "pad", "hf-flax"])
    assert certificate
    assert [way.status for way in certificate.ways][:3] == ["equal"] * 3


def write_rounding_scale() -> str:
    # MaxText divides queries by the square root of the 8 elements of a head.
    make_checkpoint(Path("m"), LLAMA, num_attention_heads=4, num_key_value_heads=2)
    return "m"


def write_gpt_neo() -> str:
    make_checkpoint(Path("m"), GPT_NEO)
    return "m"


def write_torchtitan() -> str:
    make_checkpoint(Path("m"), LLAMA)
    prep.export("m", "out", layout="torchtitan")
    return "out"


@pytest.mark.parametrize(
    ("write", "ways", "reason"),
    slow_except(
        [
            (
                write_rounding_scale,
                ["maxtext", "maxtext-unscanned"],
                "the scale of the layout changes",
            ),
            (write_gpt_neo, ["easylm"], "easylm"),
            (write_torchtitan, ["verbatim"], "names of another library"),
        ],
        [
            (
                write_rounding_scale,
                ["maxtext", "maxtext-unscanned"],
                "the scale of the layout changes",
            )
        ],
    ),
)
def test_way_that_a_model_does_not_have_is_not_available(
    write: Callable[[], str], ways: list[Any], reason: str
):
    certificate = prep.roundtrip(write(), layout=["init", *ways])
    assert certificate
    assert [way.status for way in certificate.ways] == ["equal", *["not available"] * len(ways)]
    assert reason in certificate.ways[1].reason


@pytest.mark.slow
def test_no_temporary_file_remains(model: Path, monkeypatch: MonkeyPatch):
    prep.roundtrip("m", "out.json", layout=["mesh"])
    assert sorted(path.name for path in Path().iterdir()) == ["m", "out.json"]
    Path("out.json").unlink()

    def fail(folder: Path) -> None:
        raise PrepError("the disk is full")

    wrap_export(monkeypatch, fail)
    with pytest.raises(PrepError, match="the disk is full"):
        prep.roundtrip("m", layout=["init"])
    assert [path.name for path in Path().iterdir()] == ["m"]


@pytest.mark.slow
def test_runs_with_one_certificate_do_not_share_their_work(model: Path, monkeypatch: MonkeyPatch):
    ways = iter(["mesh", "init"])

    def start_another(folder: Path) -> None:
        if (way := next(ways, None)) == "mesh":
            prep.roundtrip("m", "out.json", layout=[way])

    wrap_export(monkeypatch, start_another)
    assert prep.roundtrip("m", "out.json", layout=["init"], overwrite=True)
    assert sorted(path.name for path in Path().iterdir()) == ["m", "out.json"]


def test_unwritable_folder_of_the_certificate_is_named(model: Path, monkeypatch: MonkeyPatch):
    def fail(*words: Any, **options: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", fail)
    with pytest.raises(PrepError, match=r"out\.json"):
        prep.roundtrip("m", "out.json", layout=["init"])


def test_changed_bit_is_a_difference(model: Path, monkeypatch: MonkeyPatch, capsys: Capture):
    def flip_bit(folder: Path) -> None:
        path = next(folder.glob("*.safetensors"))
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    wrap_export(monkeypatch, flip_bit)
    certificate = prep.roundtrip("m", layout=["init"])
    assert not certificate
    (way,) = certificate.ways
    assert way.status == "different"
    assert " of " in way.reason
    message = run_failing(capsys, FAILED, "roundtrip", "m", "--layout", "init")
    assert "m is not the same after the way init" in message


def test_changed_config_is_a_difference(model: Path, monkeypatch: MonkeyPatch):
    def change_config(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1.0}))
        prep.verify(folder, accept=["config.json"])

    wrap_export(monkeypatch, change_config)
    (way,) = prep.roundtrip("m", layout=["init"]).ways
    assert way.status == "different"
    assert way.reason == "another config `rms_norm_eps`"


def test_lost_and_added_files_are_differences(model: Path, monkeypatch: MonkeyPatch):
    def change_files(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        added = folder / "chat_template.jinja"
        added.write_text("{{ messages }}")
        with changed_manifest(folder) as manifest:
            del manifest["files"]["tokenizer.json"]
            manifest["files"][added.name] = record_file(added)

    wrap_export(monkeypatch, change_files)
    (way,) = prep.roundtrip("m", layout=["init"]).ways
    assert way.status == "different"
    assert "another tokenizer.json" in way.reason
    assert "another chat_template.jinja" in way.reason


@pytest.mark.parametrize("is_damaged", slow_except([True, False], [False]))
def test_model_that_cannot_be_read_is_an_error(
    model: Path, monkeypatch: MonkeyPatch, is_damaged: bool
):
    def fail(checkpoint: str, out: Path, **options: Any) -> prep.Conversion:
        if is_damaged:
            raise DamagedError("m is damaged")
        raise PrepError("m cannot be read") from OSError("input/output error")

    monkeypatch.setitem(module.CONVERSIONS, "pad-vocab", fail)
    with pytest.raises(PrepError, match=r"^m "):
        prep.roundtrip("m", layout=["init", "pad"])
    assert not Path("m.roundtrip.json").exists()


def test_folder_in_place_of_the_certificate_is_refused_early(model: Path, monkeypatch: MonkeyPatch):
    Path("certificates").mkdir()
    monkeypatch.setattr(module, "CONVERSIONS", {})
    with pytest.raises(PrepError, match="certificates is not a file"):
        prep.roundtrip("m", "certificates", overwrite=True)


@pytest.mark.slow
def test_multimodal_model_returns_from_verbatim():
    write_model("gemma3")
    certificate = prep.roundtrip("m", layout=["verbatim"])
    assert [way.reason for way in certificate.ways] == [""]
    assert certificate


def test_model_without_any_way_is_an_error():
    make_checkpoint(Path("m"), GPT_NEO)
    with pytest.raises(PrepError, match="m has no way back"):
        prep.roundtrip("m", layout=["easylm"])
    assert not Path("m.roundtrip.json").exists()


def test_equal_certificate_is_left_and_another_one_needs_overwrite(model: Path):
    prep.roundtrip("m", layout=["init"])
    before = Path("m.roundtrip.json").read_bytes()
    prep.roundtrip("m", layout=["init"])
    with pytest.raises(OutputExistsError, match="already exists"):
        prep.roundtrip("m", layout=["no-scan"])
    assert Path("m.roundtrip.json").read_bytes() == before
    prep.roundtrip("m", layout=["no-scan"], overwrite=True)
    assert Path("m.roundtrip.json").read_bytes() != before


@pytest.mark.slow
def test_init_is_resharded_and_exported(model: Path):
    prep.save_init("m", mesh="1,2,2", pad_vocab=4, scan=False)
    certificate = prep.roundtrip("m-init", layout=["mesh"])
    assert certificate
    assert certificate.ways[0].commands[0] == "reshard --mesh 1,2,2"


def test_command_prints_a_table_and_json(model: Path, capsys: Capture):
    report = run_json(capsys, "roundtrip", "m", "--layout", "init", "--layout", "compress")
    assert [way["status"] for way in report["ways"]] == ["equal", "equal"]
    assert report["path"] == "m.roundtrip.json"
    message = run_failing(capsys, USAGE, "roundtrip", "m", "--layout", "easylmm")
    assert "did you mean `easylm`?" in message


def test_damaged_model_is_refused(model: Path):
    shutil.rmtree("m")
    with pytest.raises(UsageError):
        prep.roundtrip("m")


def test_quantised_model_has_no_way_back():
    make_quantized(Path("q"), "fp8")
    with pytest.raises(PrepError, match="quanti"):
        prep.roundtrip("q")


@pytest.mark.slow
def test_decoded_weights_come_back_as_values():
    make_quantized(Path("q"), "fp8")
    prep.save_init("q", "init", quantized="dequantize")
    certificate = prep.roundtrip("init", layout=["init", "hf-flax"])
    assert certificate
    assert {way.status for way in certificate.ways} == {"equal"}
    assert all("export --quantized dequantize" in way.commands[-1] for way in certificate.ways)
