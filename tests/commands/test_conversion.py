"""What the converting commands do alike, where no single command shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from prepcli.commands.conversion import source_line
from prepcli.reading.sources import SourceTensor


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
