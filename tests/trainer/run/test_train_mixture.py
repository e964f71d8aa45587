"""`prep train` on several sources: the mixture is the same after a stop, and a bucket may be one of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import FAILED, OK, STOPPED
from tests.helpers.object_server import use_objects
from tests.helpers.train_runs import train_json
from tests.helpers.training_folder import RECIPE, WORDS, make_training_folder
from trainer.training.metrics import METRICS_FILE, read_metrics

SOURCES = """
[[data.sources]]
name = "near"
path = "text.txt"
weight = 3
[[data.sources]]
name = "far"
path = "s3://bucket/data"
weight = 1
bad_lines = 1
"""


@pytest.fixture(autouse=True)
def _work_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    make_training_folder()
    data, rest = RECIPE.split("[batch]")
    data = data.replace('type = "text"\npath = "text.txt"\n', "")
    Path("recipe.toml").write_text(f"{data}{SOURCES}\n[batch]{rest}")


def test_stopped_mixture_resumes_with_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    numbers = np.random.default_rng(1).integers(0, len(WORDS), (50, 30))
    lines = [json.dumps({"text": " ".join(WORDS[number] for number in row)}) for row in numbers]
    content = gzip.compress("\n".join([*lines, "{"]).encode())
    with use_objects(monkeypatch, {"bucket/data/a.jsonl.gz": content}) as store:
        capsys.readouterr()
        assert train_json(capsys, "--out", "whole")[0] == OK
        assert train_json(capsys, "--out", "parts", "--stop-after", "5")[0] == STOPPED
        assert train_json(capsys, "--out", "parts")[0] == OK
        whole, parts = (read_metrics(Path(name) / METRICS_FILE) for name in ("whole", "parts"))
        store.objects["bucket/data/a.jsonl.gz"] = gzip.compress(b'{"text": "w1"}\n' * 99)
        assert train_json(capsys, "--out", "parts", "--set", "train.steps=14")[0] == FAILED
    steps = [line for line in whole if "loss" in line]
    assert [line["loss"] for line in steps] == [line["loss"] for line in parts if "loss" in line]
    assert [(line["tokens.near"], line["tokens.far"]) for line in steps] == [
        (96 * step, 32 * step) for step in range(1, 13)
    ]
