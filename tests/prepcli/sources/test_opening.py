"""What is opened by the reader of its format, and what a user says of it besides."""

from __future__ import annotations

from pathlib import Path

import pytest

from prepcli.errors import PrepError
from prepcli.sources.opening import open_source
from prepcli.sources.source_hints import SourceHints
from tests.helpers.tiny_checkpoints import make_checkpoint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "m")
    return tmp_path / "m"


def test_a_folder_without_config_is_of_the_model_that_the_user_says(model: Path, tmp_path: Path):
    expected = open_source(model, "m")
    config = (model / "config.json").rename(tmp_path / "config.json")
    with pytest.raises(PrepError, match=r"has no config\.json"):
        open_source(model, "m")
    for said in (config, tmp_path):
        found = open_source(model, "m", SourceHints(said))
        assert (found.config, found.tensors) == (expected.config, expected.tensors)


def test_what_the_user_says_counts_more_than_what_is_there(model: Path, tmp_path: Path):
    text = (model / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"model_type"', '"said": 1, "model_type"'))
    assert open_source(model, "m", SourceHints(tmp_path)).config["said"] == 1
