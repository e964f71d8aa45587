"""Training of a model with added tokens, its export, and the removal of the tokens with their trained rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.cli.main import main
from prepcli.core.errors import USAGE
from tests.helpers.run_cli import run_failing_unchanged, run_ok
from tests.helpers.tiny_checkpoints import read_tensors
from tests.helpers.training_folder import WORDS, make_training_folder

EMBEDDING = "params.embed.tokens"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
SHORT = ["train.steps=3", "checkpoint.every=3", "data.holdout=0"]


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_training_folder()
    Path("tokens.txt").write_text("<tool>\n")
    text = Path("text.txt").read_text()
    Path("text.txt").write_text(text.replace(" w7 ", " <tool> "))


@pytest.mark.parametrize("is_init", [False, True])
def test_removal_after_training_names_lost_rows(
    capsys: pytest.CaptureFixture[str], *, is_init: bool
):
    prep.add_tokens("./tiny", "added", tokens="tokens.txt")
    start = "./added"
    if is_init:
        prep.save_init("./added", "start", pad_vocab="8", mesh="1,2,4")
        start = "start"
    prep.train("recipe.toml", overrides=[*SHORT, f'model.path="{start}"'])
    prep.export("runs/recipe", "exported")
    before = read_tensors(Path("added"))
    trained = read_tensors(Path("exported"))
    for name in TABLES:
        assert trained[name].shape == before[name].shape
        assert (trained[name][len(WORDS)] != before[name][len(WORDS)]).any()

    capsys.readouterr()
    assert main(["remove-tokens", "./exported", "--out", "removed"]) == 0
    messages = capsys.readouterr().err
    assert "1 token removed: id 131" in messages
    assert "their rows are dropped, also where training changed them" in messages
    removed = read_tensors(Path("removed"))
    assert removed.keys() == trained.keys()
    for name, array in trained.items():
        kept = array[: len(WORDS)] if name in TABLES else array
        assert np.array_equal(removed[name], kept), name
    tokenizer = Path("removed/tokenizer.json").read_bytes()
    assert tokenizer == Path("tiny/tokenizer.json").read_bytes()
    assert json.loads(Path("removed/config.json").read_text())["vocab_size"] == len(WORDS)


def restore(folder: Path) -> dict[str, np.ndarray]:
    """Restore a training step with Orbax, by the dotted name of each leaf."""
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree: Mapping[str, Any] = checkpointer.restore((folder / "state").absolute())
    return dict(_iter_leaves(tree, ""))


def _iter_leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _iter_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", np.asarray(value)


def test_training_step_gets_rows_without_moments():
    Path("tokens.txt").write_text("w3_w5\n<tool>\n")
    settings = json.loads(Path("tiny/tokenizer.json").read_text())
    settings["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"[_\s]"},
        "behavior": "Removed",
        "invert": False,
    }
    Path("tiny/tokenizer.json").write_text(json.dumps(settings))
    prep.save_init("tiny", "start", pad_vocab="8", mesh="1,2,4")
    overrides = [*SHORT, 'model.path="start"', "optimizer.ema=0.9", 'mesh="1,2,4"']
    prep.train("recipe.toml", overrides=overrides)
    run_ok("add-tokens", "runs/recipe", "--tokens", "tokens.txt", "--out", "added")
    before = restore(Path("runs/recipe/3"))
    added = restore(Path("added"))
    assert added.keys() == before.keys()
    size = len(WORDS)
    changed: set[str] = set()
    for name, old in before.items():
        new = added[name]
        if not name.endswith(("embed.tokens", "head.weight")):
            assert new.tobytes() == old.tobytes()
            continue
        changed.add(name)
        assert np.array_equal(new[:size], old[:size]), name
        assert not new[size + 2 :].any()
        if name.startswith("params.") or ".ema." in name:
            mean = old[[3, 5]].astype(np.float64).mean(axis=0).astype(np.float32)
            assert np.array_equal(new[size], mean), name
        else:
            assert not new[size:].any(), name
    assert len(changed) == 8
    assert changed >= {EMBEDDING, "opt_state.ema.head.weight"}
    run_ok("verify", "added", "--chain")

    run_ok("remove-tokens", "added", "--out", "removed")
    removed = restore(Path("removed"))
    for name, leaf in before.items():
        assert removed[name].tobytes() == leaf.tobytes(), name
    run_ok("verify", "removed", "--chain")


def test_factored_moments_are_refused(capsys: pytest.CaptureFixture[str]):
    prep.save_init("tiny", "start", pad_vocab="8", mesh="1,2,4")
    factored = ["optimizer.type=adafactor", "optimizer.min_factored_size=8"]
    prep.train("recipe.toml", overrides=[*SHORT, 'model.path="start"', *factored])
    code, lines = run_failing_unchanged(
        capsys, "add-tokens", "runs/recipe", "--tokens", "tokens.txt"
    )
    assert code == USAGE
    assert "the optimizer state of runs/recipe" in lines[0]
    assert "prep reshard runs/recipe --params-only" in " ".join(lines)
