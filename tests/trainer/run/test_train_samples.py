"""`prep train` with `log.samples`: its file, the resumed run, the report, and runs without a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.run_cli import run_failing, run_json, run_ok
from trainer.run.run_record import SAMPLES_FILE, read_run

# The mesh and the number of steps are those of the recipe, so that other tests compile the step too.
SETTINGS = (
    *("--set", 'log.samples=["w1 w2 w3", "w50"]'),
    *("--set", "log.sample_every=5"),
    *("--set", "log.sample_tokens=4"),
)


def read_lines(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, SAMPLES_FILE).read_text().splitlines()]


def test_resumed_run_has_the_samples_of_a_whole_one(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    fields = run_json(capsys, "train", "recipe.toml", "--out", "whole", *SETTINGS)
    lines = read_lines("whole")
    assert [line["step"] for line in lines] == [0, 0, 5, 5, 10, 10, 12, 12]
    assert fields["samples"] == lines[-2:]
    generated = run_json(
        capsys,
        "generate",
        "whole",
        "--prompt",
        "w1 w2 w3",
        "--prompt",
        "w50",
        "--max-new-tokens",
        "4",
    )
    assert generated["texts"] == [line["text"] for line in lines[-2:]]

    run_failing(capsys, 75, "train", "recipe.toml", "--out", "cut", *SETTINGS, "--stop-after", "7")
    with Path("cut", SAMPLES_FILE).open("a") as file:
        file.write(
            json.dumps({"step": 8, "prompt": "w50", "text": "of a step that was not saved"}) + "\n"
        )
    run_ok("train", "recipe.toml", "--out", "cut", *SETTINGS)
    assert read_lines("cut") == lines
    assert [(sample.step, sample.text) for sample in read_run(Path("cut")).samples] == [
        (line["step"], line["text"]) for line in lines
    ]

    run_ok("report", "whole", "cut")
    page = Path("whole", "report.html").read_text()
    assert page.count('<h3 class="sample">w1 w2 w3</h3>') == 1
    assert page.count(f'<span class="sample">{lines[-1]["text"]}</span>') >= 4, (
        "last and all texts of both runs"
    )
    restart = ("train", "recipe.toml", "--out", "cut", "--restart", "--stop-after", "1")
    run_failing(capsys, 75, *restart)
    assert not read_run(Path("cut")).samples


def test_run_resumed_without_prompts_keeps_earlier_samples(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    run_failing(capsys, 75, "train", "recipe.toml", "--out", "run", *SETTINGS, "--stop-after", "1")
    lines = read_lines("run")
    with Path("run", SAMPLES_FILE).open("a") as file:
        file.write(
            json.dumps({"step": 5, "prompt": "w50", "text": "of a step that was not saved"}) + "\n"
        )
    run_ok("train", "recipe.toml", "--out", "run")
    assert read_lines("run") == lines


def test_samples_without_a_tokenizer_are_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    for path in work_dir.rglob("tokenizer.json"):
        path.unlink()
    error = run_failing(capsys, 1, "train", "recipe.toml", *SETTINGS, "--no-verify")
    assert "`log.samples` needs a tokenizer" in error


def test_sample_keys_without_prompts_are_refused(
    work_dir: Path, capsys: pytest.CaptureFixture[str]
):
    error = run_failing(capsys, 2, "train", "recipe.toml", "--set", "log.sample_every=5")
    assert "there are no prompts: `log.samples` is not set" in error
