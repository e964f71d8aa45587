"""Every published size is planned, and covered to the last element; to convert them is for a large disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.models import tensor_entries, write_model
from bench.published import PUBLISHED, published_config
from bench.sizes import SizeRow, largest_aliases, sizes_text
from prepcli.cli.main import main
from trainer.models.registry import FAMILIES, family_of

LAYERS = 2  # of each model; its widths are real


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_alias_is_planned(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = published_config(name, layers=LAYERS)
    nbytes = write_model(tmp_path / "m", config, sparse=True)
    assert main(["save-init", str(tmp_path / "m"), "--pad-vocab", "8", "--dry-run", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["accounting"]["tensors"] == said["accounting"]["used"] == len(tensor_entries(config))
    assert said["source"]["bytes"] >= nbytes
    assert family_of(config).arch_config(config).sliding_windows


def test_each_family_has_a_largest_one() -> None:
    assert {published_config(name)["model_type"] for name in largest_aliases()} == {*FAMILIES}
    assert "llama-3.1-405b" in largest_aliases()


def test_a_line_for_each_model() -> None:
    found = sizes_text([SizeRow("mistral-7b", 14_483_464_192, 291, 12, 4000, 1.26, 3 << 20)]).splitlines()[-1]
    assert found.split() == ["mistral-7b", "mistral", "7,241,732,096", "14.5", "291", "12", "4,000", "1.3", "3"]
