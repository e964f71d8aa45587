"""Steps of a run: in a listing of its files, and the best one by the losses of manifests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prepcli.formats.manifest import listed_step, listed_steps
from prepcli.formats.step_scores import best_step

MANIFEST = {"format": 1, "kind": "hf", "request": "", "plan": "", "config": {}, "tensors": {}}
MANIFEST |= {"prefixed": False, "tied": False}


def write_run(run: Path, fields_by_step: dict[int, dict[str, Any]]) -> None:
    for step, fields in fields_by_step.items():
        (run / str(step) / "state").mkdir(parents=True)
        (run / str(step) / "state/_METADATA").touch()
        (run / str(step) / "prep-manifest.json").write_text(json.dumps(MANIFEST | fields))


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ({1: (2.0, 4), 2: (1.0, 4), 3: (1.0, 4)}, 2),
        ({1: (1.0, 4), 2: (2.0, 9), 3: (1.5, 9)}, 3),  # resumed with another `eval.limit`
        ({1: (1.0, 4), 2: (2.0, 9), 3: (None, 9)}, 2),
        ({1: (1.0, None), 2: (2.0, None)}, 1),
        ({1: (None, 4)}, None),
    ],
)
def test_best_step_compares_equal_evaluations(
    tmp_path: Path, evaluations: dict[int, tuple[float | None, int | None]], best: int | None
):
    keys = ("eval_loss", "eval_sequences")
    write_run(
        tmp_path,
        {step: dict(zip(keys, values, strict=True)) for step, values in evaluations.items()},
    )
    assert best_step(tmp_path) == best


@pytest.mark.parametrize(
    ("recipe", "best"), [('best = "eval_loss"', 2), ('best = "accuracy"', None)]
)
def test_best_step_has_its_only_evaluations_in_the_log(
    tmp_path: Path, recipe: str, best: int | None
):
    """A signal stopped each evaluation, and the next start repeated it."""
    fields = {"eval_sequences": 4, "recipe": f"[checkpoint]\n{recipe}\n"}
    write_run(tmp_path, {1: fields, 2: fields})
    lines = [
        {"step": 1, "eval_loss": 2.0},
        {"step": 2, "eval_loss": 1.0},
        {"step": [], "eval_loss": 0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert best_step(tmp_path) == best


def test_listed_steps_have_a_manifest():
    paths = ["recipe.toml", "10/prep-manifest.json", "9/prep-manifest.json", "11/state/_METADATA"]
    assert listed_steps(
        [*paths, "012/prep-manifest.json", "a/prep-manifest.json", "8/state/prep-manifest.json"]
    ) == [
        9,
        10,
    ]


@pytest.mark.parametrize(
    ("path", "step"),
    [("12/state/d/x", 12), ("0/x", 0), ("12", None), ("012/x", None), ("metrics.jsonl", None)],
)
def test_listed_step_comes_from_the_first_folder(path: str, step: int | None):
    assert listed_step(path) == step
