"""Tests of planning every published size with few layers; converting them needs a large disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.models import tensor_entries, write_model
from bench.published import PUBLISHED, published_config
from bench.sizes import SizeRow, largest_aliases, sizes_text
from prepcli.commands.cli.main import main
from prepcli.models.registry import family_of
from prepcli.sources.aliases import ALIAS_FAMILIES
from tests.helpers.slow_cases import slow_except

LAYERS = 2  # layers of each model; widths are as published


@pytest.mark.parametrize("name", slow_except(PUBLISHED, list(PUBLISHED)[::9]))
def test_every_alias_is_planned(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = published_config(name, layers=LAYERS)
    nbytes = write_model(tmp_path / "m", config, sparse=True)
    assert main(["save-init", str(tmp_path / "m"), "--pad-vocab", "8", "--dry-run", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["accounting"]["tensors"]
        == result["accounting"]["used"]
        == len(tensor_entries(config))
    )
    assert result["source"]["bytes"] >= nbytes
    assert family_of(config).arch_config(config).sliding_windows


def test_largest_aliases_cover_every_family_with_aliases() -> None:
    published = {published_config(name)["model_type"] for name in largest_aliases()}
    assert published == {*ALIAS_FAMILIES}
    assert "llama-3.1-405b" in largest_aliases()


def test_sizes_text_has_a_line_per_model() -> None:
    line = sizes_text(
        [SizeRow("mistral-7b", 14_483_464_192, 291, 12, 4000, 1.26, 3 << 20)]
    ).splitlines()[-1]
    assert line.split() == [
        "mistral-7b",
        "mistral",
        "7,241,732,096",
        "14.5",
        "291",
        "12",
        "4,000",
        "1.3",
        "3",
    ]
