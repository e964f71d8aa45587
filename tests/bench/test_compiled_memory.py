"""What a compiled step would need is printed for each length and policy."""

from __future__ import annotations

import re

import pytest

from bench import compiled_memory
from trainer.models.errors import PrepError


def test_a_line_for_each_length_and_policy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """On as many devices as all tests have, since jax counts them once."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setitem(
        compiled_memory.MODEL_SIZES, "small", compiled_memory.MODEL_SIZES["small"] | {"hidden_size": 64}
    )
    compiled_memory.main(["--tokens", "64,512", "--mesh", "1,2,4", "--remat", "nothing_saveable"])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert head == "small, float32, mesh 1,2,4, 2 sequences a step; of one device:"
    found = [re.fullmatch(r" +(\d+) +nothing_saveable +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+", line) for line in lines]
    assert [each and each[1] for each in found] == ["64", "512"]
    assert [each and each[4] for each in found] == ["2", "2"]
    temps = [int(each[2].replace(",", "")) for each in found if each]
    assert temps[0] < temps[1]


def test_a_mesh_has_to_make_sense():
    with pytest.raises(PrepError):
        compiled_memory.main(["--mesh", "1,2"])
