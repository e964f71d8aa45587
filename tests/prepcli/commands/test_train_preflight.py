"""Checks of `prep train` before it converts a model or tokenizes a text, and the report of a dry run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.cli.main import main
from prepcli.commands import train_checks
from prepcli.errors import FAILED, OK, USAGE
from prepcli.execution import run_folder
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint
from tests.prepcli.commands.test_train import RECIPE, WORDS, train_error, train_json, write_tokenizer
from trainer.data import tokenize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a recipe, a text, a Hugging Face model and its init."""
    root = tmp_path_factory.mktemp("preflight")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_checkpoint(Path("tiny"), LLAMA)
        write_tokenizer(Path("tiny"))
        assert main(["save-init", "tiny", "--pad-vocab", "8", "--mesh", "1,2,4", "-q"]) == OK
        Path("text.txt").write_text(" ".join(WORDS * 20))
        Path("recipe.toml").write_text(RECIPE)
    return root


@pytest.fixture(autouse=True)
def _work_dir(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Link the shared inputs into a new working folder."""
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def _reads_nothing(monkeypatch: pytest.MonkeyPatch):
    """Fail if a text is read or a model is converted."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("data or weights were read")

    monkeypatch.setattr(tokenize, "hash_file", refuse)
    monkeypatch.setattr(tokenize, "read_text_chunks", refuse)
    monkeypatch.setattr("prepcli.commands.train_start.save_init", refuse)


@pytest.mark.usefixtures("_reads_nothing")
@pytest.mark.parametrize("model", ["tiny-init", "tiny"])
@pytest.mark.parametrize(
    ("sets", "code", "what"),
    [
        ("batch.accumulate=3", USAGE, "`batch.size` 8 is not a whole number of micro-batches"),
        ("data.path=nowhere.txt", FAILED, "no data in `nowhere.txt`"),
        ("data.tokenizer=nowhere", FAILED, "no tokenizer at nowhere"),
        ("model.rope_theta=0.5", USAGE, "`model.rope_theta` cannot be applied to this llama model"),
    ],
)
def test_invalid_recipe_is_found_before_work(
    model: str, sets: str, code: int, what: str, capsys: pytest.CaptureFixture[str]
):
    assert train_error(capsys, "--set", sets, "--set", f"model.path={model}")[:2] == (code, what)
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_reads_nothing")
def test_invalid_eval_path_is_found_before_work(capsys: pytest.CaptureFixture[str]):
    Path("other.toml").write_text(RECIPE.replace("holdout = 0.1", 'eval_path = "empty.txt"'))
    Path("empty.txt").touch()
    capsys.readouterr()
    assert main(["train", "other.toml", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["error"]["what"] == "empty.txt is empty"
    assert not Path("runs").exists()


@pytest.mark.usefixtures("_reads_nothing")
def test_full_disk_is_found_before_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(train_checks.shutil, "disk_usage", lambda _: usage)
    code, what, *_ = train_error(capsys)
    assert (code, what) == (FAILED, "not enough room for a checkpoint in runs/recipe")


def test_eval_data_is_checked_before_training_data(capsys: pytest.CaptureFixture[str]):
    Path("other.toml").write_text(RECIPE.replace("holdout = 0.1", 'eval_path = "latin.txt"'))
    Path("latin.txt").write_bytes(b"w1 \xe9 w2")
    capsys.readouterr()
    assert main(["train", "other.toml"]) == FAILED
    stderr = capsys.readouterr().err
    assert "latin.txt is not UTF-8" in stderr
    assert "blocks of 16" not in stderr, "the training text was not tokenised"


def dry_run(capsys: pytest.CaptureFixture[str], *sets: str) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    words = [word for key_value in sets for word in ("--set", key_value)]
    code = main(["train", "recipe.toml", "--dry-run", "--json", *words])
    out, err = capsys.readouterr()
    assert code == OK, out
    return json.loads(out), err


def test_dry_run_estimates_device_memory(capsys: pytest.CaptureFixture[str]):
    report, err = dry_run(capsys)
    memory = report["memory"]
    assert memory["scores"] == 4 * 2 * 16 * 16 * 4, "batch 4 x 2 heads x 16 x 16, float32"
    assert memory["peak"] == sum(memory[name] for name in ("parameters", "moments", "gradients", "saved")) + max(
        memory["layer"], memory["head"]
    )
    assert memory["fits"] is True
    assert "of it scores [4, 2, 16, 16]" in err
    assert report["warnings"] == []
    assert not Path("runs").exists()


def test_dry_run_warns_about_low_memory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prepcli.commands.train_checks.host_memory", lambda: {"available": 8 * (64 << 10)})
    report, _ = dry_run(capsys)
    assert report["memory"]["fits"] is False
    assert [text.partition(":")[0] for text in report["warnings"]] == [
        "a step needs about 316 KiB on each device, 64.0 KiB are available"
    ]


def test_state_larger_than_memory_is_rejected(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("prepcli.commands.train_checks.host_memory", lambda: {"available": 8 * (16 << 10)})
    code, what, why, _ = train_error(capsys)
    assert (code, what) == (FAILED, "parameters and moments need 47.8 KiB on each device")
    assert why == "16.0 KiB are available"


def test_dry_run_warns_about_lengths_and_epochs(capsys: pytest.CaptureFixture[str]):
    report, _ = dry_run(capsys, "data.seq_length=128", "batch.size=64", "train.steps=10000")
    context, batch, epochs = report["warnings"]
    assert context == "`data.seq_length` is 128, and the model was made for 64 positions"
    assert batch == "a batch of 64 takes sequences more than once: the data has 18"
    assert epochs == "10,000 steps are 35,556 epochs of 18 sequences"


def test_start_warns_like_dry_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """The start is stopped before it creates the run's folder."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prepcli.commands.train._load_train_state", stop)
    capsys.readouterr()
    code, report = train_json(capsys, "--set", "checkpoint.every=500")
    assert (code, report["error"]["what"]) == (130, "interrupted")
    assert report["error"]["why"] == "kept in runs/recipe: the tokens"
    assert main(["train", "recipe.toml", "--set", "checkpoint.every=500"]) == 130
    assert "`checkpoint.every` is 500, but the run has 12 steps" in capsys.readouterr().err
    assert not run_folder.saved_steps(Path("runs/recipe"))
