"""Steps in a listing of a run's files."""

from __future__ import annotations

import pytest

from prepcli.formats.run_steps import listed_step, listed_steps


def test_listed_steps_have_a_manifest():
    paths = ["recipe.toml", "10/prep-manifest.json", "9/prep-manifest.json", "11/state/_METADATA"]
    assert listed_steps([*paths, "012/prep-manifest.json", "a/prep-manifest.json", "8/state/prep-manifest.json"]) == [
        9,
        10,
    ]


@pytest.mark.parametrize(
    ("path", "step"), [("12/state/d/x", 12), ("0/x", 0), ("12", None), ("012/x", None), ("metrics.jsonl", None)]
)
def test_listed_step_is_that_of_the_first_folder(path: str, step: int | None):
    assert listed_step(path) == step
