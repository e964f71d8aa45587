"""Settings of an evaluation: sources by name, and the recipe keys that have an effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.commands.cli.main import main
from prepcli.commands.operations.compute_options import EFFECTIVE_KEYS, KEYS_TEXT, EvaluateOptions
from prepcli.commands.operations.evaluate import data_sources, evaluation_recipe
from prepcli.core.errors import UsageError
from prepcli.core.option_spec import option_specs
from trainer.recipe import Recipe
from trainer.recipe.tables import KEY_SCHEMAS


def make_recipe(override: str) -> Recipe:
    options: EvaluateOptions = {"overrides": override}
    return evaluation_recipe(
        options, ["a.txt"], checkpoint="tiny", dtype="float32", max_positions=64
    )


@pytest.mark.parametrize(
    "key",
    [
        "model.rope_theta",
        "model.overrides",
        "model.rope_scaling.factor",
        "data.holdout",
        "data.path",
        "train.steps",
    ],
)
def test_keys_without_effect_are_not_supported(key: str):
    with pytest.raises(UsageError) as raised:
        make_recipe(f"{key}=1")
    assert raised.value.what == f"`--set {key}=1` is not supported"


def test_misspelled_key_gets_a_suggestion():
    with pytest.raises(UsageError) as raised:
        make_recipe("data.source_lenght=1")
    assert "`data.source_length`" in raised.value.hint


def test_effective_keys_exist_and_change_the_recipe():
    assert not EFFECTIVE_KEYS - {*KEY_SCHEMAS}
    assert make_recipe("model.attention_kernel=reference").model.attention_kernel == "reference"


def test_help_and_reference_name_all_effective_keys(capsys: pytest.CaptureFixture[str]):
    assert main(["eval", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert all(key.partition(".")[2] in KEYS_TEXT for key in EFFECTIVE_KEYS)
    assert KEYS_TEXT in help_text
    assert KEYS_TEXT in option_specs(EvaluateOptions)["overrides"].help


@pytest.mark.parametrize(
    ("text", "name", "path"),
    [
        ("wiki=a.txt", "wiki", "a.txt"),
        ("wiki=data/*.txt", "wiki", "data/*.txt"),
        ("wiki=s3://bucket/lang=en", "wiki", "s3://bucket/lang=en"),
        ("s3://bucket/lang=en/a.txt", "s3://bucket/lang=en/a.txt", "s3://bucket/lang=en/a.txt"),
        ("data/lang=en/new.txt", "data/lang=en/new.txt", "data/lang=en/new.txt"),
        ("lang=en", "lang=en", "lang=en"),  # exists
        ("lang=*", "lang=*", "lang=*"),  # a glob that matches
    ],
)
def test_sources_split_names_from_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, name: str, path: str
):
    monkeypatch.chdir(tmp_path)
    Path("lang=en").mkdir()
    assert data_sources([text]) == {name: [path]}


@pytest.mark.parametrize("text", ["", "=a.txt", "wiki="])
def test_sources_reject_empty_names_and_paths(text: str):
    with pytest.raises(UsageError):
        data_sources([text])
