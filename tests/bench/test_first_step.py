"""The benchmark of the first step, on a model of two layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.first_step import PARTS, prepare, start
from tests.helpers.tiny_configs import LLAMA


@pytest.mark.slow
def test_parts_sum_up_to_the_time_of_the_command(tmp_path: Path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA))
    folder = tmp_path / "work"
    prepare(folder, str(config), length=16, batch=8)
    seconds = start(folder, "run")
    assert seconds.keys() == {"imports", *PARTS, "all"}
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) <= 2 * seconds["all"]
    assert list(folder.glob("caches/prep/compiled/*/*-cache"))
