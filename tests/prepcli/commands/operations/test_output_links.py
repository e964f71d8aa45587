"""Symbolic links inside an output's folder are not followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.commands.cli.main import main

FILES = (
    ".prep/lock",
    ".prep/door",
    ".prep/run.json",
    ".prep/session",
    ".prep/source.json",
    ".prep/claims/0",
    ".prep/done/0",
    ".prep/part/0",
    "d/67b5a8e8f4d0ee6fb0c2e1d57e0b2b2e",
    "_METADATA",
    "manifest.ocdbt",
    "prep-manifest.json",
    "hf/config.json",
)


pytestmark = pytest.mark.usefixtures("sources")


def save_init_refuses_link(capsys: pytest.CaptureFixture[str]) -> bool:
    capsys.readouterr()
    code = main(["save-init", "./model", "--out", "out", "-q"])
    err = capsys.readouterr().err
    return code == 1 and "is a symbolic link" in err and "Traceback" not in err


@pytest.mark.parametrize("file", FILES)
def test_save_init_rejects_file_links_in_partial_output(capsys, file: str):
    target, link = Path("target"), Path("out.partial", file)
    target.write_text("mine")
    Path("out.partial/.prep").mkdir(parents=True)
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target.absolute())
    assert save_init_refuses_link(capsys)
    assert target.read_text() == "mine"
    link.unlink()
    assert main(["save-init", "./model", "--out", "out", "-q"]) == 0


@pytest.mark.parametrize(
    "folder",
    [
        "out.partial",
        "out.partial/.prep",
        "out.partial/.prep/done",
        "out.partial/d",
        "out.partial/hf",
    ],
)
def test_save_init_rejects_folder_links_in_partial_output(capsys, folder: str):
    target = Path("elsewhere")
    target.mkdir()
    if folder != "out.partial":
        Path("out.partial/.prep").mkdir(parents=True)
    if folder == "out.partial/.prep":
        Path(folder).rmdir()
    Path(folder).symlink_to(target.absolute())
    assert save_init_refuses_link(capsys)
    assert not list(target.iterdir())


def test_train_rejects_linked_lock(tmp_path: Path):
    from prepcli.core.errors import PrepError
    from prepcli.execution.checkpoint_manager import CheckpointManager

    Path("run").mkdir()
    Path("target").write_text("mine")
    Path("run/.lock").symlink_to(tmp_path / "target")
    with pytest.raises(PrepError, match="is a symbolic link"):
        CheckpointManager(Path("run"), Path("init"), name="name")
    assert Path("target").read_text() == "mine"
