"""Symbolic links in a checkpoint's folder: only targets inside the checkpoint are copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.core.observer import NullProgress
from prepcli.execution.checkpoint_manager import CheckpointManager
from prepcli.execution.hub_push import PushTarget, push_folder
from tests.helpers.run_cli import exported_tensors, run_failing, run_ok
from tests.helpers.tiny_checkpoints import assert_same, make_checkpoint, read_tensors


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_checkpoint(Path("m"))
    Path("secret").write_text("key")


@pytest.mark.parametrize("command", [["pad-vocab", "--multiple", "8"], ["save-init"]])
def test_command_rejects_small_file_linked_outside(
    command: list[str], capsys: pytest.CaptureFixture[str]
):
    Path("m/vocab.txt").symlink_to("../secret")
    for more in ([], ["--dry-run"]):
        err = run_failing(capsys, 1, command[0], "./m", *command[1:], "--out", "out", *more)
        assert "vocab.txt is a link to ../secret" in err
        assert "hint:" in err
    assert not Path("out").exists()
    assert not Path("out.partial").exists()
    assert main(["inspect", "./m", "-q"]) == 0  # inspect copies no files


@pytest.mark.parametrize("link", ["hf/vocab.txt", "hf"])
def test_export_rejects_links_in_init(link: str, capsys: pytest.CaptureFixture[str]):
    run_ok("save-init", "./m", "--out", "init")
    if link == "hf":
        shutil.move("init/hf", "elsewhere")
    Path("init", link).symlink_to("../../secret" if link != "hf" else "../elsewhere")
    assert "is a link to" in run_failing(capsys, 1, "export", "init", "--out", "out")
    assert "is a link to" in run_failing(
        capsys, 1, "reshard", "init", "--mesh", "1,2,1", "--out", "out"
    )


def test_run_rejects_links_before_first_step():
    run_ok("save-init", "./m", "--out", "init")
    Path("init/hf/vocab.txt").symlink_to("../../secret")
    with pytest.raises(PrepError, match="is a link to"):
        CheckpointManager(Path("run"), Path("init"), name="run")


def test_weight_files_may_be_links():
    tensors = read_tensors(Path("m"))
    Path("elsewhere").mkdir()
    for path in Path("m").glob("*.safetensors*"):
        shutil.move(path, "elsewhere")
        path.symlink_to(f"../elsewhere/{path.name}")
    run_ok("save-init", "./m", "--out", "init")
    run_ok("verify", "init", "./m")
    assert_same(exported_tensors("init"), tensors)


def test_hub_cache_converts_with_its_links():
    home, blobs = Path("cache/models--o--m/snapshots/c0ffee"), Path("cache/models--o--m/blobs")
    home.mkdir(parents=True)
    blobs.mkdir()
    for path in Path("m").iterdir():
        shutil.copy(path, blobs)
        (home / path.name).symlink_to(f"../../blobs/{path.name}")
    run_ok("pad-vocab", f"./{home}", "--multiple", "8", "--out", "padded")
    assert (
        Path("padded/tokenizer_config.json").read_bytes()
        == Path("m/tokenizer_config.json").read_bytes()
    )
    assert not Path("padded/tokenizer_config.json").is_symlink()
    assert read_tensors(Path("padded"))


def test_link_created_after_planning_is_rejected(monkeypatch: pytest.MonkeyPatch, capsys):
    from prepcli.execution import folder_run

    original = folder_run.finalize_folder

    def replace_file_by_link(*args: Any, **options: Any) -> None:
        Path("m/tokenizer_config.json").unlink()
        Path("m/tokenizer_config.json").symlink_to("../secret")
        original(*args, **options)

    monkeypatch.setattr(folder_run, "finalize_folder", replace_file_by_link)
    err = run_failing(capsys, 1, "pad-vocab", "./m", "--multiple", "8", "--out", "out")
    assert "tokenizer_config.json" in err
    assert not Path("out").exists()


def test_push_rejects_links_to_outside():
    folder = Path("m")
    (folder / "notes.txt").symlink_to("../secret")
    with pytest.raises(PrepError, match=r"notes\.txt is a link to \.\./secret"):
        push_folder(folder, PushTarget("owner/name"), progress=NullProgress())
