"""Tests of the memory report of a whole training step."""

from __future__ import annotations

import re

import pytest

from bench import compiled_step
from bench.model_configs import MODEL_CONFIGS


@pytest.mark.slow  # compiles a training step
def test_main_prints_memory_and_collectives(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODEL_CONFIGS, "small", MODEL_CONFIGS["small"] | {"hidden_size": 64})
    compiled_step.main(["--tokens", "64", "--mesh", "1,2,2", "--ffn-chunk", "32"])
    header, *lines, footer = capsys.readouterr().out.splitlines()
    assert header == "small, bfloat16, 2 x 64 tokens, mesh 1,2,2; of one device:"
    sizes = {
        match[1]: int(match[2].replace(",", ""))
        for line in lines
        if (match := re.match(r"(.*?)  +([\d,]+) MiB", line))
    }
    assert (
        abs(
            sizes["in all"]
            - sizes["temporary"]
            - sizes["state and batch"]
            - sizes["outputs not in place"]
        )
        <= 2
    )
    assert {"all-gather", "estimated"} <= {*sizes}
    assert re.fullmatch(
        r"compiled for 4 CPU devices in \d+ s with [\d,]+ MiB of host memory", footer
    )
