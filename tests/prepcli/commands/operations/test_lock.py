"""`prep lock` and `prep verify --accept` approve bytes of a checkpoint. `--lock` refuses all others."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import xxhash

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import (
    FAILED,
    OK,
    USAGE,
    DamagedError,
    OutputExistsError,
    PrepError,
    UsageError,
)
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from prepcli.sources import recorded_sources
from tests.helpers.adapters import make_adapter
from tests.helpers.damage import tensor_place
from tests.helpers.manifests import changed_manifest, remove_file_records
from tests.helpers.quantized_folders import make_quantized
from tests.helpers.run_cli import Capture, MonkeyPatch, run_failing, run_json, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint, read_tensors

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def model() -> Path:
    """Write `m`, a model with an untied head and a padded vocabulary, to the working folder, and lock it."""
    make_checkpoint(Path("m"), LLAMA, vocab_size=136)
    prep.lock("m")
    return Path("m")


def change_byte(path: Path, index: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[index] ^= 1
    path.write_bytes(data)


def change_last_value(folder: Path, name: str) -> None:
    """Change the last byte of a tensor."""
    path, _, high = tensor_place(folder, name)
    change_byte(path, high - 1)


def test_lock_digests_equal_hashlib_and_xxhash(model: Path):
    locked = json.loads(Path("m.lock.json").read_bytes())
    assert locked["source"] == "m"
    assert locked["revision"] is None
    assert sorted(locked["files"]) == sorted(
        path.name for path in model.iterdir() if path.name != "model.safetensors.index.json"
    )
    for name, entry in locked["files"].items():
        data = (model / name).read_bytes()
        assert entry == {"bytes": len(data), "digest": hashlib.sha256(data).hexdigest()}
    tensors = read_tensors(model)
    assert locked["tensors"].keys() == tensors.keys()
    for name, array in tensors.items():
        digest = xxhash.xxh3_128_hexdigest(array.tobytes())
        assert locked["tensors"][name]["digests"] == [[0, array.shape[0], digest]]


def test_page_lists_files_and_dtypes(model: Path, capsys: Capture):
    assert main(["lock", "m", "--html", "page.html"]) == OK
    assert "wrote page.html" in capsys.readouterr().err
    page = Path("page.html").read_text()
    for path in json.loads(Path("m.lock.json").read_text())["files"]:
        data = (model / path).read_bytes()
        assert f"<td>{path}</td>" in page
        assert hashlib.sha256(data).hexdigest() in page
        assert f"{len(data):,}" in page
    tensors = read_tensors(model)
    nbytes = sum(array.nbytes for array in tensors.values())
    row = f'<td>float32</td><td class="n">{len(tensors)}</td><td class="n">{nbytes:,}</td>'
    assert row in page
    assert hashlib.sha256(Path("m.lock.json").read_bytes()).hexdigest() in page


def test_page_does_not_replace_another_file(model: Path):
    with pytest.raises(PrepError, match=r"config\.json is not overwritten"):
        prep.lock("m", "other.json", html="m/config.json")
    assert not Path("other.json").exists()


def test_equal_lock_is_left_and_another_one_needs_overwrite(model: Path):
    before = Path("m.lock.json").stat().st_mtime_ns
    assert prep.lock(model).already_done
    assert Path("m.lock.json").stat().st_mtime_ns == before
    change_last_value(model, EMBEDDING)
    with pytest.raises(OutputExistsError, match="already exists"):
        prep.lock(model)
    assert Path("m.lock.json").stat().st_mtime_ns == before
    assert not prep.lock(model, overwrite=True).already_done
    prep.save_init(model, lock="m.lock.json")


def test_lock_does_not_depend_on_the_spelling_of_the_path(model: Path, tmp_path: Path):
    before = Path("m.lock.json").read_bytes()
    for spelled in ("./m/", tmp_path / "m"):
        assert prep.lock(spelled).already_done
    assert Path("m.lock.json").read_bytes() == before


CONVERSIONS = [prep.pad_vocab, prep.save_init, prep.verify, prep.load_params]


@pytest.mark.parametrize("convert", CONVERSIONS)
def test_changed_weight_is_refused_while_it_is_read(model: Path, convert: Callable[..., Any]):
    assert convert(model, lock="m.lock.json")
    for folder in ("m-init", "m-padded"):
        shutil.rmtree(folder, ignore_errors=True)
    change_last_value(model, EMBEDDING)
    if convert is prep.verify:
        (difference,) = prep.verify(model, lock="m.lock.json").differences
        assert difference["what"] == "rows 0:136 do not match their recorded digest"
        return
    with pytest.raises(DamagedError, match="is damaged"):
        convert(model, lock="m.lock.json")
    assert not [path for path in Path().iterdir() if path.name in ("m-init", "m-padded")]


def test_changed_settings_are_refused_before_the_weights(model: Path):
    path = model / "config.json"
    path.write_bytes(path.read_bytes().replace(b"{", b"{ ", 1))
    Path("m/tokenizer.json").write_text("{}")
    Path("m/generation_config.json").unlink()
    with pytest.raises(PrepError, match=r"m differs from m\.lock\.json") as caught:
        prep.save_init(model, lock="m.lock.json")
    assert not Path("m-init").exists()
    assert "`config.json` has " in caught.value.why
    assert "`tokenizer.json` is not in the lock" in caught.value.why
    assert "`generation_config.json` is missing" in caught.value.why


def test_renamed_tensor_is_named(model: Path):
    path = next(model.glob("*.safetensors"))
    tensors = safetensors.numpy.load_file(path)
    first = sorted(tensors)[0]
    tensors["model.renamed"] = tensors.pop(first)
    safetensors.numpy.save_file(tensors, path)
    index = model / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(first, "model.renamed"))
    with pytest.raises(PrepError) as caught:
        prep.save_init(model, lock="m.lock.json", drop="*renamed")
    assert f"tensor `{first}` is missing" in caught.value.why
    assert "tensor `model.renamed` is not in the lock" in caught.value.why


def test_lock_checks_rows_left_out_by_a_conversion(model: Path, capsys):
    """The true rows of a padded vocabulary have no digest of their own: the whole tensor is read once more."""
    run_ok("pad-vocab", "m", "--true-vocab", "131", "--size", "144", "--lock", "m.lock.json")
    change_last_value(model, EMBEDDING)  # in a padding row, which the output does not have
    words = ("pad-vocab", "m", "--true-vocab", "131", "--size", "144", "--out", "again")
    assert "is damaged" in run_failing(capsys, FAILED, *words, "--lock", "m.lock.json")


def test_lock_of_an_output_covers_its_manifest(model: Path):
    init = prep.save_init(model, mesh="1,1,2").path
    prep.lock(init)
    lock = f"{init}.lock.json"
    prep.reshard(init, "wide", mesh="1,2,1", lock=lock)
    prep.load_params(init, lock=lock)
    manifest = init / "prep-manifest.json"
    other = prep.save_init(model, "other", mesh="1,1,2", pad_vocab="16").path
    shutil.rmtree(init)
    shutil.copytree(other, init)
    assert manifest.exists()
    with pytest.raises(PrepError, match="differs from") as caught:
        prep.load_params(init, lock=lock)
    assert "prep-manifest.json" in caught.value.why


def test_option_without_effect_is_refused(model: Path):
    with pytest.raises(UsageError, match=r"`lock` has no effect"):
        prep.load_params(model, lock="m.lock.json", verify=False)
    with pytest.raises(UsageError, match=r"`lock` has no effect"):
        prep.inspect(model, lock="m.lock.json")


def test_damaged_output_is_not_locked(model: Path):
    padded = prep.pad_vocab(model).path
    change_last_value(padded, EMBEDDING)
    with pytest.raises(DamagedError, match="is damaged"):
        prep.lock(padded)
    assert not Path("m-padded.lock.json").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_source_that_changes_while_it_is_locked_is_refused(
    model: Path, monkeypatch: MonkeyPatch, name: str
):
    path = model / name if name == "config.json" else next(model.glob("*.safetensors"))

    def change() -> None:
        """Change the file, and set the times that it had."""
        before = path.stat()
        change_byte(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    change_during_lock(monkeypatch, change)
    with pytest.raises(PrepError, match=f"{path.name} changed while it was read") as error:
        prep.lock("m", "new.lock.json")
    assert "restart" not in str(error.value)
    assert not Path("new.lock.json").exists()


def test_source_that_is_only_touched_is_locked(model: Path, monkeypatch: MonkeyPatch):
    weights = next(model.glob("*.safetensors"))

    def copy_with_times() -> None:
        shutil.copy2(weights, "copy")
        os.replace("copy", weights)
        (model / "config.json").chmod(0o600)

    change_during_lock(monkeypatch, copy_with_times)
    prep.lock("m", "new.lock.json")
    assert Path("new.lock.json").read_bytes() == Path("m.lock.json").read_bytes()


def change_during_lock(monkeypatch: MonkeyPatch, change: Callable[[], None]) -> None:
    """Change the source once, after the digest of its first file."""
    read_digest = recorded_sources.sha256_of_file
    changes = [change]

    def read_and_change(path: Path) -> str:
        digest = read_digest(path)
        if changes:
            changes.pop()()
        return digest

    monkeypatch.setattr(recorded_sources, "sha256_of_file", read_and_change)


def test_command_prints_the_path_and_json(model: Path, capsys):
    report = run_json(capsys, "lock", "m", "--out", "new.json")
    assert (report["path"], report["already"], report["revision"]) == ("new.json", False, None)
    assert report["tensors"] == len(read_tensors(model))
    assert "--lock" in run_failing(capsys, USAGE, "lock", "m", "--lock", "new.json")


def test_broken_lock_file_is_rejected(model: Path, capsys):
    Path("broken.json").write_text("{}")
    err = run_failing(capsys, FAILED, "save-init", "m", "--lock", "broken.json")
    assert "broken.json is not a lock file of this prep" in err
    assert "`prep lock MODEL`" in err


def test_signature_beside_a_lock_is_ignored(model: Path):
    path = prep.lock(model).path
    signature = path.with_name(f"{path.name}.sig")
    signature.write_bytes(b"signed by another tool")
    assert prep.verify(model, lock=path)
    assert prep.lock(model).already_done
    assert signature.read_bytes() == b"signed by another tool"


def test_decoded_weights_without_a_published_digest_are_refused(monkeypatch: MonkeyPatch):
    """A bucket publishes no SHA-256, and the lock has digests of codes and scales."""
    make_quantized(Path("q"), "fp8")
    prep.lock("q")
    lock = json.loads(Path("q.lock.json").read_text())
    names = [name for name in lock["files"] if name.endswith(".safetensors")]
    for name in names:
        del lock["files"][name]["digest"]
    Path("q.lock.json").write_text(json.dumps(lock))
    monkeypatch.setattr(recorded_sources, "_published_digests", lambda source: dict.fromkeys(names))
    with pytest.raises(PrepError, match="has no SHA-256 to compare"):
        prep.save_init("q", "init", quantized="dequantize", lock="q.lock.json")


def test_locking_a_quantised_model_names_no_option_of_save_init(capsys):
    make_quantized(Path("q"), "fp8")
    assert main(["lock", "q"]) == OK
    assert "--quantized" not in capsys.readouterr().err


def test_merge_checks_the_lock_of_its_base(model: Path, monkeypatch):
    change_last_value(model, EMBEDDING)
    make_adapter(Path("adapter"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    with pytest.raises(DamagedError, match="is damaged"):
        prep.merge("adapter", model, lock="m.lock.json", verify=False)


# `prep verify OUTPUT --accept FILE` records a file that the user changed, and nothing else


def change_config(path: Path) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 2e-5, "note": "mine"})
    )


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    "name", slow_except(["hf/config.json", "init/hf/config.json"], ["hf/config.json"])
)
def test_accept_records_changed_config(capsys, name: str):
    change_config(Path("init/hf/config.json"))
    err = run_failing(capsys, FAILED, "verify", "init")
    assert "init/hf/config.json is damaged" in err
    assert "prep verify init --accept hf/config.json" in err
    assert main(["verify", "init", "--accept", name]) == OK
    err = capsys.readouterr().err
    assert "accepted hf/config.json: " in err
    assert "changed: layer_norm_epsilon, note" in err
    run_ok("verify", "init")
    run_ok("export", "init", "--out", "hf")
    assert json.loads(Path("hf/config.json").read_text())["note"] == "mine"


@pytest.mark.usefixtures("sources")
def test_accept_returns_old_and_new_digest(capsys):
    path = Path("init/hf/generation_config.json")
    old = (read_manifest(Path("init")) or NO_MANIFEST).files["hf/generation_config.json"]
    path.write_text("{}")
    assert main(["verify", "init", "--accept", "generation_config.json", "--json"]) == OK
    (accepted,) = json.loads(capsys.readouterr().out)["accepted"]
    new = (read_manifest(Path("init")) or NO_MANIFEST).files["hf/generation_config.json"]
    assert accepted["file"] == "hf/generation_config.json"
    assert accepted["bytes"] == {"old": old["bytes"], "new": 2}
    assert accepted["xxh3"] == {"old": old.get("xxh3"), "new": new.get("xxh3")}
    path.unlink()
    with pytest.raises(DamagedError, match="does not exist"):
        prep.verify("init")
    assert prep.verify("init", accept=["generation_config.json"])
    assert "hf/generation_config.json" not in (read_manifest(Path("init")) or NO_MANIFEST).files


@pytest.mark.usefixtures("sources")
def test_accept_records_changed_manifest(capsys):
    path = Path("init/prep-manifest.json")
    path.write_text(path.read_text().replace('"name": "model"', '"name": "mine"'))
    assert "prep-manifest.json is damaged" in run_failing(capsys, FAILED, "verify", "init")
    run_ok("verify", "init", "--accept", "prep-manifest.json")
    run_ok("export", "init")
    assert Path("mine-hf").is_dir()


@pytest.mark.usefixtures("sources")
def test_accept_records_nothing_if_tensors_differ(capsys):
    manifest = Path("init/prep-manifest.json").read_bytes()
    change_config(Path("init/hf/config.json"))
    data_file = max(Path("init/d").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(data_file.read_bytes())
    # The gaps between chunks are zeros.
    position = next(index for index in range(len(data) // 2, len(data)) if data[index])
    data[position] ^= 1
    data_file.write_bytes(data)
    err = run_failing(capsys, FAILED, "verify", "init", "--accept", "config.json")
    assert "accepted" not in err
    assert Path("init/prep-manifest.json").read_bytes() == manifest
    Path("init/hf/generation_config.json").write_text("{}")
    err = run_failing(capsys, FAILED, "verify", "init", "--accept", "config.json")
    assert "init/hf/generation_config.json is damaged" in err


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("checkpoint", "file", "text"),
    [
        ("init", "README.md", "init records no file `README.md`"),
        ("init", "d/0", "init records no file `d/0`"),
        ("model", "config.json", "it has no prep-manifest.json"),
        ("gs://bucket/init", "config.json", "`--accept` needs a local output"),
    ],
)
def test_accept_refuses_files_that_are_not_recorded(capsys, checkpoint: str, file: str, text: str):
    assert text in run_failing(capsys, USAGE, "verify", checkpoint, "--accept", file)


def record_copies(*folders: str) -> None:
    """Copy the config of the output `init` into folders of it, and record the copies in its manifest."""
    with changed_manifest(Path("init")) as manifest:
        for folder in folders:
            Path("init", folder).mkdir(exist_ok=True)
            shutil.copy("init/hf/config.json", Path("init", folder, "config.json"))
            name = (Path(folder) / "config.json").as_posix()
            manifest["files"][name] = manifest["files"]["hf/config.json"]


@pytest.mark.usefixtures("sources")
def test_accept_of_an_ambiguous_name_lists_the_files():
    record_copies("other")
    with pytest.raises(prep.UsageError) as caught:
        prep.verify("init", accept=["config.json"])
    assert caught.value.what == "`config.json` is the name of several files of init"
    assert caught.value.why == "they are hf/config.json, other/config.json"
    assert caught.value.hint == "`accept` with one of these names"


@pytest.mark.usefixtures("sources")
def test_accept_of_a_whole_name_is_not_ambiguous():
    record_copies(".", "other")
    with Path("init/config.json").open("a") as file:
        file.write("\n")
    assert prep.verify("init", accept=["config.json"])


@pytest.mark.usefixtures("sources")
def test_accept_refuses_outputs_without_record(capsys):
    remove_file_records(Path("init"))
    err = run_failing(capsys, USAGE, "verify", "init", "--accept", "config.json")
    assert "written by an earlier version of prep" in err
    shutil.rmtree("init/hf")
    run_ok("verify", "init")


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize("command", ["verify", "export"])
def test_output_without_record_is_read_with_a_note(capsys, command: str):
    remove_file_records(Path("init"))
    assert main([command, "init"]) == OK
    note = "init was written by an earlier prep: its settings and tokenizer files are not checked"
    assert capsys.readouterr().err.count(note) == 1
