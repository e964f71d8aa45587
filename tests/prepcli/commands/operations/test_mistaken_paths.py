"""Paths and names that users mistake: each ends in one error with the path to use, before any work."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import FAILED, OK, USAGE
from tests.helpers.adapters import make_adapter
from tests.helpers.run_cli import run_failing, run_ok
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.helpers.trainer_checkpoints import make_trainer_checkpoint


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model `m`, a copy `hub/m` and `models/init` made from it. Tests only copy it."""
    folder = tmp_path_factory.mktemp("models")
    make_checkpoint(folder / "m", LLAMA)
    shutil.copytree(folder / "m", folder / "hub" / "m")
    run_ok("save-init", str(folder / "m"), "--out", str(folder / "models" / "init"))
    return folder


@pytest.fixture(autouse=True)
def _work_dir(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)


MISTAKES = [  # code, command, parts of the error
    (FAILED, "export hub/", ("`hub` holds no checkpoint", "name `hub/m`")),
    (
        FAILED,
        "inspect models/init --source-layout tunixx",
        ("`--source-layout tunixx` is unknown", "did you mean `tunix`?"),
    ),
    (
        FAILED,
        "save-init m --config models/init",
        ("models/init has no config.json", "`--config models/init/hf`"),
    ),
    (USAGE, "save-init m --out /", ("the source is inside the output /", "it would be deleted")),
    (
        USAGE,
        "roundtrip m --layout init --out m/proof.json",
        ("the output m/proof.json is inside the source", "`--out ../proof.json`"),
    ),
    (
        FAILED,
        "roundtrip m --layout init --out proofs/m.json",
        ("cannot read or write proofs/m.json", "create the folder proofs"),
    ),
    (
        FAILED,
        "map suggest m models/init --out maps/m.map",
        ("cannot read or write maps/m.map", "create the folder maps"),
    ),
    (
        FAILED,
        "lock m --out m/config.json/lock.json",
        ("cannot read or write", "another folder than m/config.json, which is a file"),
    ),
    # The lock file is not written either.
    (
        FAILED,
        "lock m --html pages/m.html",
        ("cannot read or write pages/m.html", "create the folder pages"),
    ),
    (FAILED, "report runs/typo", ("runs/typo does not exist",)),
    (FAILED, "roundtrip m --layout init --out models", ("models is not a file", "it is a folder")),
    (FAILED, "save-init m --map models", ("models is not a file", "name a file")),
    (
        USAGE,
        "verify models/init --chain --search archive",
        ("`--search archive` is not a folder",),
    ),
    (
        FAILED,
        "launch slurm --out jobs/a.sh -- inspect m",
        ("cannot read or write jobs/a.sh", "create the folder jobs"),
    ),
    (
        FAILED,
        "launch slurm --out m/config.json/a.sh -- inspect m",
        ("cannot read or write", "another folder than m/config.json, which is a file"),
    ),
]


@pytest.mark.parametrize(("code", "command", "parts"), MISTAKES, ids=lambda value: str(value))
def test_mistaken_path_is_one_error_with_a_hint(
    code: int, command: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
):
    before = sorted(Path().rglob("*"))
    error = " ".join(run_failing(capsys, code, *command.split()).split())
    for part in parts:
        assert part in error
    assert sorted(Path().rglob("*")) == before


def test_run_without_a_step_is_not_read_from_its_subfolder(capsys: pytest.CaptureFixture[str]):
    """The user trains on, instead of reading a checkpoint that happens to be there."""
    for name in ("recipe.toml", "environment.json"):
        Path("hub", name).touch()
    error = run_failing(capsys, FAILED, "inspect", "hub")
    assert "no step of the run hub is saved yet" in error


def test_empty_state_of_an_optimizer_is_damaged(capsys: pytest.CaptureFixture[str]):
    make_trainer_checkpoint(Path("checkpoint-4"), 4)
    Path("checkpoint-4/optimizer.pt").write_bytes(b"")
    error = run_failing(capsys, FAILED, "save-init", "checkpoint-4", "--training-state")
    assert "optimizer.pt is damaged" in error
    assert "it is empty" in error


def test_home_folder_stands_for_a_tilde(monkeypatch: pytest.MonkeyPatch):
    """A shell leaves it in `--out=~/NAME`. A later `rm -r ~` would not remove the output alone."""
    monkeypatch.setenv("HOME", str(Path("home").absolute()))
    Path("m").rename("home")
    assert main(["save-init", "~", "--out=~/../first", "-q"]) == OK
    assert main(["lock", "home", "--out=~/../home.json", "-q"]) == OK
    prep.reshard("first", out=Path("~/../second"), mesh="1,1,1")
    make_adapter(Path("home/adapter"), {"model.layers.0.self_attn.q_proj": (32, 32)})
    prep.merge("~/adapter", "~", out="~/../third")
    assert Path("home.json").exists()
    assert Path("third/prep-manifest.json").exists()
    assert Path("second/prep-manifest.json").exists()
    assert not Path("~").exists()


def test_next_command_quotes_a_path_with_spaces(capsys: pytest.CaptureFixture[str]):
    """Each shown command is run as a shell would split it."""
    Path("m").rename("my model")
    assert main(["save-init", "my model", "--out", "an init"]) == OK
    assert "next: prep reshard 'an init' --mesh" in capsys.readouterr().err
    assert main(["export", "an init", "--out", "my export"]) == OK
    command = capsys.readouterr().err.rpartition("next: ")[2].strip()
    assert command == "prep verify 'my export' 'an init'"
    assert main(shlex.split(command)[1:]) == OK
