"""`prep.plan`: typed options in, a typed plan out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import prepcli as prep
from tests.helpers.tiny_checkpoints import LLAMA


@pytest.fixture(autouse=True)
def _in_folder_with_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))


def test_plan_returns_the_estimates():
    step = prep.plan("model", config="config.json", mesh="1,2,1", devices="H100:2")
    assert step.mesh == "1,2,1"
    assert step.peak_bytes > 0
    assert [estimate.kind.name for estimate in step.kinds] == ["H100"]
    assert not step.is_too_large
    assert step.compiled is None


def test_plan_takes_overrides_as_one_text_or_several():
    config = Path("config.json")
    short = prep.plan("model", config=config, overrides="data.seq_length=16")
    several = ["data.seq_length=16", "batch.per_replica=2"]
    assert prep.plan("model", config=config, overrides=several).training_plan.tokens == (
        2 * short.training_plan.tokens
    )


def test_plan_errors_name_arguments():
    with pytest.raises(prep.UsageError) as caught:
        prep.plan("model", config="config.json", compile_timeout=5.0)
    assert str(caught.value).startswith("`compile_timeout` has no effect without `compile=True`")


def test_plan_checks_the_least_timeout():
    with pytest.raises(prep.UsageError, match=r"it must be at least 0\.01"):
        prep.plan("model", config="config.json", compile=True, compile_timeout=0.001)


def test_plan_error_of_a_mesh_names_the_argument():
    with pytest.raises(prep.UsageError) as caught:
        prep.plan("model", config="config.json", mesh="9")
    assert str(caught.value).startswith('`mesh="9"` has 1 axis')
