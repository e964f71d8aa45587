"""What the converting commands do alike, where no single command shows it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from prepcli.commands.conversion import source_line
from prepcli.reading.sources import SourceTensor
from tests.commands.running import done
from tests.models import GPT_NEO, make


class Looked(tuple[SourceTensor, ...]):
    """Tensors that count how often somebody goes through them."""

    times = 0

    def __iter__(self) -> Any:
        Looked.times += 1
        return super().__iter__()


def test_the_line_of_a_source_names_the_dtypes_of_its_weights_and_looks_at_each_tensor_a_few_times():
    biases = [SourceTensor(f"bias{i}", "float32", (1,), ()) for i in range(50)]
    weights = [SourceTensor(f"w{i}", dtype, (8, 8), ()) for i, dtype in enumerate(("bfloat16", "float16"))]
    source: Any = SimpleNamespace(
        name="o/m", family=SimpleNamespace(name="llama"), tensors=Looked([*weights, *biases]), files=("a", "b"),
        state=(), beside=(),
    )  # fmt: skip
    assert source_line(source) == "o/m  llama  52 tensors  456 bytes bfloat16, float16  2 files"
    assert Looked.times < 10


@pytest.mark.parametrize("year", [1901, 1960])
def test_sources_older_than_1970_are_converted(year: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m", GPT_NEO)
    seconds = datetime(year, 1, 1, tzinfo=UTC).timestamp()
    for path in (tmp_path / "m").iterdir():
        os.utime(path, (seconds, seconds))
    done("save-init", "./m", "--out", "init")
    done("verify", "init", "./m")
