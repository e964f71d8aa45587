"""Tests of the memory report of compiled training steps."""

from __future__ import annotations

import re

import pytest

from bench import compiled_memory
from bench.model_configs import MODEL_SIZES
from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import RematPolicy


@pytest.mark.slow  # compiles training steps
def test_main_prints_a_line_per_length_and_policy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Use as many devices as all tests have, since JAX counts them once per process."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.setitem(MODEL_SIZES, "small", MODEL_SIZES["small"] | {"hidden_size": 64})
    compiled_memory.main(["--tokens", "64,512", "--mesh", "1,2,4", "--remat", "nothing_saveable"])
    header, _, *lines = capsys.readouterr().out.splitlines()
    assert header == "small, float32, mesh 1,2,4, 2 sequences a step; of one device:"
    matches = [
        re.fullmatch(r" +(\d+) +nothing_saveable +([\d,]+) +([\d,]+) +([\d,]+) +[\d.]+", line)
        for line in lines
    ]
    assert [match and match[1] for match in matches] == ["64", "512"]
    assert [match and match[4] for match in matches] == ["2", "2"]
    temps = [int(match[2].replace(",", "")) for match in matches if match]
    assert temps[0] < temps[1]


@pytest.mark.parametrize(
    ("text", "policy"),
    [("none", "none"), ("q", ("q",)), ("q+attention_output", ("q", "attention_output"))],
)
def test_parse_policy_reads_names_of_activations(text: str, policy: RematPolicy):
    assert compiled_memory.parse_policy(text) == policy


def test_main_rejects_an_invalid_mesh():
    with pytest.raises(PrepError):
        compiled_memory.main(["--mesh", "1,2"])
