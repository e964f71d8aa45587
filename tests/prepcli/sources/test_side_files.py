"""Side files of a model: what each format copies on request, and what a conversion leaves out and names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.prepcli.commands.operations.test_mistral_sources import write_native

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
