"""Existing outputs: `--overwrite` replaces outputs of prep only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import PrepError
from prepcli.execution import folder_run
from tests.helpers.killing import read_files
from tests.helpers.run_cli import run_failing_unchanged, run_ok
from tests.helpers.tiny_checkpoints import make_checkpoint


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_output_of_another_request_is_not_replaced(capsys):
    make_checkpoint(Path("m"))
    Path("m-init").mkdir()
    Path("m-init/thesis.txt").write_text("years of work")
    assert run_failing_unchanged(capsys, "save-init", "./m") == (
        1,
        [
            "error: m-init exists and is something else",
            "  why: it has no prep-manifest.json: prep only replaces its own outputs",
            " hint: choose another `--out`, or remove it",
        ],
    )


def test_output_inside_the_source_is_refused(capsys, monkeypatch):
    make_checkpoint(Path("m"))
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", "m")[1][0]
        == "error: the output m is the source"
    )
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", "m/x")[1][0]
        == "error: the output m/x is inside the source"
    )
    assert (
        run_failing_unchanged(capsys, "save-init", "./m", "--out", ".", "--overwrite")[1][0]
        == "error: the source is inside the output ."
    )
    monkeypatch.chdir("m")
    assert (
        run_failing_unchanged(capsys, "save-init", ".")[1][0]
        == "error: the output m-init is inside the source"
    )


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_foreign_output_is_never_replaced(capsys, tmp_path: Path, kind: str):
    make_checkpoint(Path("m"))
    theirs = tmp_path / ("thesis.tex" if kind == "file" else "theirs/thesis.tex")
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("years of work")
    out = {"folder": "theirs", "file": "thesis.tex", "link": "link"}[kind]
    if kind == "link":
        Path(out).symlink_to("theirs")
    before = sorted(tmp_path.rglob("*"))
    code, lines = run_failing_unchanged(capsys, "save-init", "./m", "--out", out, "--overwrite")
    assert (code, lines[0]) == (1, f"error: {out} exists and is something else")
    assert theirs.read_text() == "years of work"
    assert sorted(tmp_path.rglob("*")) == before


def test_foreign_output_created_late_is_not_replaced(capsys, monkeypatch):
    make_checkpoint(Path("m"))
    assert main(["save-init", "./m", "--out", "whole", "-q"]) == 0
    original = folder_run.finalize_folder

    def finalize_and_create_output(*args: Any, **options: Any) -> None:
        original(*args, **options)
        Path("out").mkdir()
        Path("out/thesis.tex").write_text("years of work")

    with monkeypatch.context() as patched:
        patched.setattr(folder_run, "finalize_folder", finalize_and_create_output)
        assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 1
    assert "error: out exists and is something else" in capsys.readouterr().err
    assert read_files(Path("out")) == {"thesis.tex": b"years of work"}
    Path("out").rename("theirs")
    assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 0
    assert read_files(Path("out")) == read_files(Path("whole"))


def test_empty_folder_is_replaced_by_overwrite(capsys):
    make_checkpoint(Path("m"))
    Path("out").mkdir()
    assert run_failing_unchanged(capsys, "save-init", "./m", "--out", "out")[0] == 1
    assert main(["save-init", "./m", "--out", "out", "--overwrite", "-q"]) == 0
    assert main(["verify", "out", "-q"]) == 0


def test_current_and_home_folders_are_never_replaced(capsys, monkeypatch, tmp_path: Path):
    make_checkpoint(tmp_path / "m")
    for folder in ("work/deep", "homes/me"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir("work/deep")
    monkeypatch.setenv("HOME", str(tmp_path / "homes/me"))
    for out in (tmp_path / "work", tmp_path / "homes", tmp_path / "homes/me", Path("../deep")):
        code, lines = run_failing_unchanged(
            capsys, "save-init", str(tmp_path / "m"), "--out", str(out), "--overwrite"
        )
        assert (code, lines[0]) == (
            2,
            f"error: the output {out} would replace the current folder or your home folder",
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["homes", "m", "work"]


def test_loser_of_a_race_leaves_no_unfinished_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(Path("m"))
    winner = ("save-init", "./m", "--mesh", "1,2,1", "--out", "out")
    check_free_space = folder_run.check_free_space
    commands = [winner]

    def publish_other(*arguments: Any) -> None:
        # Another command for the same output ends between the check of the output and the staging folder.
        check_free_space(*arguments)
        if commands:
            run_ok(*commands.pop())

    monkeypatch.setattr(folder_run, "check_free_space", publish_other)
    assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    assert "out exists and is something else" in capsys.readouterr().err
    assert sorted(path.name for path in Path().iterdir()) == ["m", "out"]
    run_ok("save-init", "./m", "--no-scan", "--out", "out", "--overwrite")


def test_unfinished_output_stays_when_another_command_publishes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    make_checkpoint(Path("m"))
    with monkeypatch.context() as patches:
        patches.setattr(folder_run, "finalize_folder", fail)
        assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    kept = read_files(Path("out.partial"))
    make_checkpoint(Path("other"))
    is_done = folder_run.FolderRun.is_done
    calls: list[object] = []

    def find_other(self: Any) -> bool:
        calls.append(self)
        if len(calls) == 2:
            run_ok("save-init", "./other", "--out", "elsewhere")
            Path("elsewhere").rename("out")
        return is_done(self)

    monkeypatch.setattr(folder_run.FolderRun, "is_done", find_other)
    assert main(["save-init", "./m", "--out", "out", "-q"]) == 1
    assert read_files(Path("out.partial")).keys() == kept.keys()


def fail(*arguments: object, **options: object) -> None:
    raise PrepError("the power is gone")
