"""`--source-layout`: the layout of a tree to read, named by the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.levanter_trees import TREES, write_levanter
from tests.helpers.run_cli import error_lines, exported_tensors, run_ok
from tests.helpers.tiny_checkpoints import (
    GROUPED_QUERY,
    assert_same,
    make_checkpoint,
    read_tensors,
)

LLAMA = GROUPED_QUERY | {"model_type": "llama"}


@pytest.fixture(autouse=True)
def work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensors = make_checkpoint(Path("model"), LLAMA)
    write_levanter(Path("step-3"), TREES["levanter"](tensors, LLAMA), 3)


LAYOUT = ("--source-layout", "levanter")
CONFIG = ("--config", "model")


@pytest.mark.parametrize("command", ["save-init", "reshard"])
def test_named_layout_is_read(command: str):
    options = ("--mesh", "1,1,1") if command == "reshard" else ()
    run_ok(command, "./step-3", *CONFIG, *LAYOUT, *options, "--out", "init")
    run_ok("verify", "init", "./model")
    assert_same(exported_tensors("init"), read_tensors(Path("model")))


def test_export_reads_one_layout_and_writes_another():
    run_ok("export", "./step-3", *CONFIG, *LAYOUT, "--layout", "easylm", "--out", "out")
    run_ok("export", "out", "--source-layout", "easylm", "--out", "back")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))


def test_verify_reads_the_first_checkpoint_in_the_layout():
    run_ok("verify", "./step-3", "./model", *CONFIG, *LAYOUT)


def test_inspect_shows_the_tensors_of_the_model(capsys: pytest.CaptureFixture[str]):
    run_ok("inspect", "./step-3", *CONFIG, *LAYOUT)
    assert "model.layers.2.self_attn.q_proj.weight" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["save-init", "reshard", "export", "verify", "inspect"])
def test_contradicting_layout_is_refused(command: str, capsys: pytest.CaptureFixture[str]):
    options = ("--mesh", "1,1,1") if command == "reshard" else ()
    words = (*CONFIG, "--source-layout", "tunix", *options)
    lines = error_lines(capsys, command, "./step-3", *words)
    assert lines[0] == "error: `--source-layout tunix` contradicts ./step-3"
    assert lines[-1].endswith("`--source-layout levanter`")


def test_unknown_layout_lists_those_of_the_family(capsys: pytest.CaptureFixture[str]):
    lines = error_lines(capsys, "save-init", "./step-3", *CONFIG, "--source-layout", "levnter")
    assert lines[0] == "error: `--source-layout levnter` is unknown for llama"
    text = " ".join(" ".join(lines).split())
    assert "its layouts are native, hf-flax, easylm, easylm-scanned, tunix, maxtext" in text
    assert "did you mean `levanter`?" in text


def test_layout_of_a_hugging_face_folder_is_refused(capsys: pytest.CaptureFixture[str]):
    lines = error_lines(capsys, "save-init", "./model", *LAYOUT, "--out", "init")
    assert lines[0] == "error: `--source-layout levanter` contradicts ./model"
    assert not Path("init").exists()


def test_recorded_layout_is_compared(capsys: pytest.CaptureFixture[str]):
    run_ok("export", "./model", "--layout", "tunix", "--out", "out")
    run_ok("save-init", "out", "--source-layout", "tunix", "--out", "init")
    capsys.readouterr()
    lines = error_lines(capsys, "save-init", "out", *LAYOUT, "--out", "other")
    assert lines[1].endswith("its manifest records the layout tunix")
    lines = error_lines(capsys, "export", "init", *LAYOUT, "--out", "other")
    assert lines[1].endswith("its manifest records the layout native")


def test_layout_without_a_config_is_refused(capsys: pytest.CaptureFixture[str]):
    lines = error_lines(capsys, "save-init", "./step-3", *LAYOUT, "--out", "init")
    assert lines[0] == "error: `--source-layout levanter` has no effect for ./step-3"
    assert "`--config FOLDER`" in lines[-1]
    assert not Path("init").exists()


@pytest.mark.parametrize("option", [("--verbatim",), ("--map", "names.map")])
def test_layout_of_own_names_is_refused(
    option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    Path("names.map").write_text("norm.weight: embed <- model.transformer.norm.weight: embed\n")
    words = ("./step-3", *CONFIG, *LAYOUT, *option, "--out", "init")
    lines = error_lines(capsys, "save-init", *words)
    assert lines[0] == "error: `--source-layout levanter` has no effect for ./step-3"
    assert lines[-1].endswith("remove `--source-layout`")


def test_layout_is_part_of_the_recorded_request():
    run_ok("save-init", "./step-3", *CONFIG, *LAYOUT, "--out", "init")
    assert "--source-layout levanter" in Path("init/prep-manifest.json").read_text()


def test_names_of_torchtitan_are_forced_or_excluded(capsys: pytest.CaptureFixture[str]):
    run_ok("export", "./model", "--layout", "torchtitan", "--out", "out")
    Path("out/prep-manifest.json").unlink()
    run_ok("export", "./out", "--source-layout", "torchtitan", "--out", "back")
    assert_same(read_tensors(Path("back")), read_tensors(Path("model")))
    capsys.readouterr()
    lines = error_lines(capsys, "export", "./out", "--source-layout", "hf", "--out", "other")
    assert "tok_embeddings.weight" in " ".join(lines)
    lines = error_lines(capsys, "export", "./out", *LAYOUT, "--out", "other")
    assert lines[0] == "error: `--source-layout levanter` is unknown for DCP"
