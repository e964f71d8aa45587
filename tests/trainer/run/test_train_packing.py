"""`prep train` on packed documents: the same loss as transformers on each document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from prepcli.commands.cli.main import main
from prepcli.core.errors import OK
from tests.helpers.run_cli import run_ok
from tests.helpers.train_runs import read_losses, set_keys
from tests.helpers.training_folder import WORDS, make_training_folder

END = 0  # the model's end-of-sequence token
PACKED = ("type=json", "path=train.jsonl", "eval_path=eval.jsonl", "holdout=0", "packing=documents")


def write_documents(path: Path, seed: int, count: int) -> list[list[int]]:
    """Write documents of 1 to 24 words that count up by 0, 1 or 2, and return their ids."""
    random = np.random.default_rng(seed)
    documents = [
        (random.integers(100) + np.cumsum(random.integers(0, 3, length))) % len(WORDS)
        for length in random.integers(1, 25, count)
    ]
    texts = [" ".join(WORDS[number] for number in numbers) for numbers in documents]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return [[*numbers.tolist(), END] for numbers in documents]


def transformers_loss(documents: Sequence[list[int]], seq_length: int) -> float:
    """Return the mean loss of a token of documents, each cut into pieces of `seq_length`."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained("learned", dtype=torch.float32).eval()
    pieces = [
        ids[low : low + seq_length] for ids in documents for low in range(0, len(ids), seq_length)
    ]
    batches = [torch.tensor([piece]) for piece in pieces if len(piece) > 1]
    with torch.no_grad():
        total = sum(float(model(ids, labels=ids).loss) * (ids.shape[1] - 1) for ids in batches)
    return total / sum(ids.shape[1] - 1 for ids in batches)


def test_loss_of_packed_documents_equals_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    write_documents(Path("train.jsonl"), 0, 200)
    documents = write_documents(Path("eval.jsonl"), 1, 30)
    capsys.readouterr()
    code = main(
        [
            "train",
            "recipe.toml",
            "--json",
            *set_keys(*(f"data.{key}" for key in PACKED)),
        ]
    )
    captured = capsys.readouterr()
    assert code == OK, captured.out
    report = json.loads(captured.out)
    assert report["loss"] < read_losses("runs/recipe")[0] - 0.1
    assert "sequences of 16" in captured.err
    run_ok("export", "runs/recipe", "--out", "learned")
    assert report["eval_loss"] == pytest.approx(transformers_loss(documents, 16), rel=1e-5)
