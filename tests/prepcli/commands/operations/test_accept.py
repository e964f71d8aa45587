"""`prep verify OUTPUT --accept FILE` records a file that the user changed, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.commands.operations.verify_sources import accept_files
from prepcli.core.errors import FAILED, OK, USAGE, DamagedError
from prepcli.formats.manifest import NO_MANIFEST, read_manifest
from tests.helpers.manifests import changed_manifest, remove_file_records
from tests.helpers.run_cli import run_failing, run_ok

pytestmark = pytest.mark.usefixtures("sources")


def change_config(path: Path) -> None:
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"layer_norm_epsilon": 2e-5, "note": "mine"})
    )


@pytest.mark.parametrize("name", ["hf/config.json", "config.json", "init/hf/config.json"])
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


def test_accept_returns_old_and_new_digest(capsys):
    old = (read_manifest(Path("init")) or NO_MANIFEST).files["hf/generation_config.json"]
    Path("init/hf/generation_config.json").write_text("{}")
    assert main(["verify", "init", "--accept", "generation_config.json", "--json"]) == OK
    (accepted,) = json.loads(capsys.readouterr().out)["accepted"]
    new = (read_manifest(Path("init")) or NO_MANIFEST).files["hf/generation_config.json"]
    assert accepted["file"] == "hf/generation_config.json"
    assert accepted["bytes"] == {"old": old["bytes"], "new": 2}
    assert accepted["xxh3"] == {"old": old.get("xxh3"), "new": new.get("xxh3")}


def test_accept_deletes_the_record_of_a_removed_file():
    Path("init/hf/generation_config.json").unlink()
    with pytest.raises(DamagedError, match="does not exist"):
        prep.verify("init")
    assert prep.verify("init", accept=["generation_config.json"])
    assert "hf/generation_config.json" not in (read_manifest(Path("init")) or NO_MANIFEST).files


def test_accept_records_changed_manifest(capsys):
    path = Path("init/prep-manifest.json")
    path.write_text(path.read_text().replace('"name": "model"', '"name": "mine"'))
    assert "prep-manifest.json is damaged" in run_failing(capsys, FAILED, "verify", "init")
    run_ok("verify", "init", "--accept", "prep-manifest.json")
    run_ok("export", "init")
    assert Path("mine-hf").is_dir()


def test_accept_of_one_file_still_reports_other_damage(capsys):
    change_config(Path("init/hf/config.json"))
    Path("init/hf/generation_config.json").write_text("{}")
    err = run_failing(capsys, FAILED, "verify", "init", "--accept", "config.json")
    assert "init/hf/generation_config.json is damaged" in err


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


@pytest.mark.parametrize(
    ("checkpoint", "file", "text"),
    [
        ("init", "README.md", "init records no file `README.md`"),
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


def test_accept_of_an_ambiguous_name_lists_the_files():
    record_copies("other")
    with pytest.raises(prep.UsageError) as caught:
        prep.verify("init", accept=["config.json"])
    assert caught.value.what == "`config.json` is the name of several files of init"
    assert caught.value.why == "they are hf/config.json, other/config.json"
    assert caught.value.hint == "`accept` with one of these names"


def test_accept_of_a_whole_name_is_not_ambiguous():
    record_copies(".", "other")
    accepted = accept_files("init", ["config.json"])
    assert [change["file"] for change in accepted.changes] == ["config.json"]


def test_accept_refuses_files_with_tensors(capsys):
    run_ok("export", "init", "--out", "hf")
    err = run_failing(capsys, USAGE, "verify", "hf", "--accept", "model.safetensors")
    assert "hf records no file `model.safetensors`" in err


def test_accept_refuses_outputs_without_record(capsys):
    remove_file_records(Path("init"))
    err = run_failing(capsys, USAGE, "verify", "init", "--accept", "config.json")
    assert "written by an earlier version of prep" in err
    shutil.rmtree("init/hf")
    run_ok("verify", "init")


@pytest.mark.parametrize("command", ["verify", "export"])
def test_output_without_record_is_read_with_a_note(capsys, command: str):
    remove_file_records(Path("init"))
    assert main([command, "init"]) == OK
    note = "init was written by an earlier prep: its settings and tokenizer files are not checked"
    assert capsys.readouterr().err.count(note) == 1
