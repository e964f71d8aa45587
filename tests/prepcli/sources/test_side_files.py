"""Side files of a model: what each format copies, what a conversion leaves out and names, and the rules for links."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.sources.side_files import resolve_small_file
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.prepcli.commands.operations.test_wrapped import write_native

FORMATS = ("safetensors", "mistral", "hf-flax", "easylm", "maxtext")


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_source(file_format: str) -> Path:
    """Write a model with code beside it, and return the folder of its side files."""
    if file_format == "mistral":
        write_native()
        folder = Path("w")
    else:
        make_checkpoint(Path("m"), LLAMA, files=1)
        folder = Path("m")
    if file_format not in ("safetensors", "mistral"):
        run_ok("save-init", "./m", "--out", "init")
        run_ok("export", "init", "--layout", file_format, "--out", "w")
        Path("w/prep-manifest.json").unlink()
        folder = Path("w")
    (folder / "modeling.py").write_text("code")
    (folder / "notes.rst").write_text("notes")
    return folder


@pytest.mark.parametrize("file_format", slow_except(FORMATS, ("mistral", "hf-flax")))
def test_copy_selects_side_files_of_each_format(
    file_format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_source(file_format)
    source = "./m" if file_format == "safetensors" else "./w"
    config = ("--config", "m") if file_format in ("easylm", "maxtext") else ()
    if config:
        for name in ("modeling.py", "notes.rst"):
            os.rename(folder / name, Path("m", name))
    options = ("--copy", "*.py", "--copy", "notes.*")
    run_ok("save-init", source, *config, *options, "--out", "copied")
    assert Path("copied/hf/modeling.py").read_text() == "code"
    assert Path("copied/hf/notes.rst").read_text() == "notes"
    error = run_failing(capsys, 2, "save-init", source, *config, "--copy", "x*", "--out", "x")
    assert f"`--copy 'x*'` matches no file of {source}" in error


def test_code_beside_native_files_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    make_source("mistral")
    assert main(["save-init", "./w", "--out", "init"]) == 0
    assert "not copied: modeling.py (`--copy GLOB` copies them)" in capsys.readouterr().err
    assert not Path("init/hf/modeling.py").exists()
    assert not Path("init/hf/params.json").exists()
    run_ok("save-init", "./w", "--copy", "params.json", "--out", "own")
    assert Path("own/hf/params.json").read_bytes() == Path("w/params.json").read_bytes()


def test_copy_from_a_format_without_side_files_fails(capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(Path("m"), LLAMA, files=1)
    run_ok("save-init", "./m", "--out", "init")
    # An item of another library, without a config.
    Path("init/prep-manifest.json").unlink()
    shutil.rmtree("init/hf")
    error = run_failing(
        capsys, 2, "save-init", "init", "--verbatim", "--copy", "*.json", "--out", "x"
    )
    assert "matches no file of init" in error
    assert not Path("x").exists()


def test_entries_that_cannot_be_copied_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    make_checkpoint(Path("m"), LLAMA, files=1)
    Path("m/sub").mkdir()
    Path("m/sub/kept.txt").write_text("kept")
    for name in ("tokenizer.json", "sub/vocab.txt", ".hidden"):
        Path("m", name).symlink_to("absent")
    for name in ("pipe.json", "sub/pipe.txt"):
        os.mkfifo(Path("m", name))
    Path("m/linked_pipe").symlink_to("pipe.json")
    for command in (["save-init", "./m", "--out", "init"], ["pad-vocab", "./m", "--out", "padded"]):
        assert main(command) == 0
        lines = capsys.readouterr().err.splitlines()
        (left,) = [line for line in lines if line.startswith("left out: ")]
        for name in ("tokenizer.json", "sub/vocab.txt"):
            assert f"{name} (a broken link)" in left
        for name in ("pipe.json", "sub/pipe.txt", "linked_pipe"):
            assert f"{name} (a pipe, a device or a socket)" in left
        assert ".hidden" not in left
    assert Path("init/hf/sub/kept.txt").read_text() == "kept"
    copied = {path.name for path in Path("init/hf").rglob("*")}
    assert copied.isdisjoint(
        {"tokenizer.json", "vocab.txt", "pipe.json", "pipe.txt", "linked_pipe"}
    )


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("key")
    return path


def test_link_out_of_the_folder_is_rejected(tmp_path: Path, secret: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "vocab.txt").symlink_to("../secret")
    with pytest.raises(PrepError, match=r"vocab\.txt is a link to \.\./secret") as caught:
        resolve_small_file(folder / "vocab.txt", folder)
    assert f"it leaves {folder}" in caught.value.why
    assert "replace the link by the file" in caught.value.hint


def test_link_within_the_folder_is_followed(tmp_path: Path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files/vocab.txt").write_text("a")
    (tmp_path / "vocab.txt").symlink_to("files/vocab.txt")
    assert (
        resolve_small_file(tmp_path / "vocab.txt", tmp_path)
        == (tmp_path / "files/vocab.txt").resolve()
    )


def test_linked_checkpoint_folder_is_resolved(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/vocab.txt").write_text("a")
    (tmp_path / "m").symlink_to("real")
    assert (
        resolve_small_file(tmp_path / "m/vocab.txt", tmp_path / "m")
        == (tmp_path / "real/vocab.txt").resolve()
    )


def test_linked_subfolder_is_rejected(tmp_path: Path, secret: Path):
    folder = tmp_path / "init"
    folder.mkdir()
    (folder / "hf").symlink_to("..")
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(folder / "hf/secret", folder)


def make_snapshot_link(cache: Path, model: str, target: str) -> Path:
    """Create a file in a snapshot of the Hugging Face cache as a link to `target`."""
    folder = cache / model / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (cache / model / "blobs").mkdir()
    (cache / model / "blobs/0123").write_text("a")
    (folder / "vocab.txt").symlink_to(target)
    return folder / "vocab.txt"


def test_link_into_the_blobs_of_the_model_is_followed(tmp_path: Path):
    path = make_snapshot_link(tmp_path, "models--o--m", "../../blobs/0123")
    assert resolve_small_file(path, path.parent).read_text() == "a"


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("models--o--m", "../../../secret"),
        ("models--o--m", "../../secret"),
        ("models--o--m", "../../../models--o--other/blobs/0123"),
        ("mine", "../../blobs/0123"),
    ],
)
def test_other_links_of_a_snapshot_are_rejected(
    tmp_path: Path, secret: Path, model: str, target: str
):
    make_snapshot_link(tmp_path, "models--o--other", "../../blobs/0123")
    (tmp_path / "models--o--m").mkdir(exist_ok=True)
    (tmp_path / "models--o--m/secret").write_text("key")
    path = make_snapshot_link(tmp_path, model, target)
    with pytest.raises(PrepError, match="is a link to"):
        resolve_small_file(path, path.parent)


def test_file_outside_the_root_resolves_in_its_own_folder(tmp_path: Path):
    (tmp_path / "item").mkdir()
    (tmp_path / "vocab.txt").write_text("a")
    assert (
        resolve_small_file(tmp_path / "vocab.txt", tmp_path / "item")
        == (tmp_path / "vocab.txt").resolve()
    )
