"""Conflicts between the keys of span corruption and other keys of `[data]`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.recipe.test_errors import GOOD, error_of
from trainer.recipe import load_recipe

SPANS = 'objective = "span_corruption"\n'
KEYS = f"{SPANS}source_length = 512\n"


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def recipe_text(keys: str, seq_length: int = 114) -> str:
    """Return a recipe with more keys of its data."""
    lines = GOOD.replace("[data]", f"[data]\n{keys}").splitlines()
    return "\n".join(
        f"seq_length = {seq_length}" if line.startswith("seq_length") else line for line in lines
    )


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        (SPANS, "`data.source_length` is missing - sources have at most that number of tokens"),
        (
            f"{SPANS}source_length = 2\n",
            "`data.source_length` 2 is too short for span corruption - `noise_density` 0.15",
        ),
        (
            f"{KEYS}noise_density = 0.9\n",
            "`data.source_length` 512 is too short for span corruption",
        ),
        (
            f'{KEYS}packing = "documents"\n',
            '`data.packing` is "documents" - span corruption takes blocks',
        ),
        (
            f"{KEYS}always_start_with_bos = true\n",
            "`data.always_start_with_bos` is true - span corruption takes",
        ),
        (
            f'{KEYS}source_prefix = "x"\n',
            '`data.source_prefix` is "x" - `data.fields` has no source in brackets',
        ),
        ("noise_density = 0.3\n", "`data.noise_density` is 0.3 - `data.objective` is next_token"),
        (
            "mean_noise_span_length = 2.0\n",
            "`data.mean_noise_span_length` is 2.0 - `data.objective` is next_token",
        ),
    ],
)
def test_conflicts_with_span_corruption_are_rejected(keys: str, error: str):
    assert error in str(error_of(recipe_text(keys)))


def test_targets_longer_than_seq_length_are_rejected():
    assert (
        "`data.seq_length` is 113 - targets of sources of 512 tokens have 114 - `--set data.seq_length=114`"
        in error_of(recipe_text(KEYS, seq_length=113)).message
    )
    Path("x.toml").write_text(recipe_text(KEYS))
    assert load_recipe(Path("x.toml"), ()).recipe.data.objective == "span_corruption"


def test_huge_source_length_is_refused_at_once():
    """The block was searched token by token, for hours."""
    error = error_of(recipe_text(f"{SPANS}source_length = {10**12}\n"))
    assert "`data.source_length` is 1000000000000 - out of range" in str(error)
