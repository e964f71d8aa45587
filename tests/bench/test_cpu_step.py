"""Tests of the comparison of training steps with transformers and torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench import cpu_step
from bench.cpu_step import WARMUP_STEPS, StepCost, make_parser, print_report
from bench.cpu_step_systems import make_recipe

TINY = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def make_costs(loss: float, *seconds: float) -> list[StepCost]:
    """Return slow warm-up steps, and a step for each of the seconds."""
    return [StepCost(loss, 60.0, 60.0)] * WARMUP_STEPS + [
        StepCost(loss, second, 2 * second) for second in seconds
    ]


def test_print_report_states_speed_without_warmup(capsys: pytest.CaptureFixture[str]):
    print_report(
        1, {"prep": make_costs(5.0, 0.5, 2.0, 1.0), "torch": make_costs(5.0, 3.0, 1.0, 4.0)}
    )
    prep, torch, speed, losses = (line.split() for line in capsys.readouterr().out.splitlines())
    assert prep == ["1", "prep", "0.500", "1.000", "1.000", "2.000"]
    assert torch == ["1", "torch", "1.000", "3.000", "2.000", "6.000"]
    assert speed == ["1", "speed", "2.00x", "3.00x", "2.00x", "3.00x"]
    assert losses[2] == str(WARMUP_STEPS + 3)


@pytest.mark.parametrize("loss", [5.001, float("nan")])
def test_print_report_fails_if_losses_differ(loss: float):
    with pytest.raises(SystemExit, match="losses differ"):
        print_report(1, {"prep": make_costs(loss, 1.0), "torch": make_costs(5.0, 1.0)})


def test_recipe_leaves_the_sizes_to_the_devices():
    options = make_parser().parse_args([])
    options.model = Path("model")
    model = make_recipe(options).model
    assert model.attention_kernel == "auto"
    assert (model.q_chunk_size, model.k_chunk_size, model.head_chunk_size) == (None, None, None)


@pytest.mark.slow
def test_main_measures_both_systems(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.setattr(cpu_step, "CONFIG", cpu_step.CONFIG | TINY)
    cpu_step.main(
        ["--rows", "2", "--tokens", "8", "--threads", "1", "--repeats", "1", "--head-chunk", "3"]
    )
    _, _, *rows, losses = capsys.readouterr().out.splitlines()
    assert [row.split()[:2] for row in rows] == [["1", "prep"], ["1", "torch"], ["1", "speed"]]
    assert re.fullmatch(r" +losses of 3 steps differ by at most [\d.]+e-\d+ of their value", losses)
