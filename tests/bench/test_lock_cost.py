"""The cost of a lock: both kinds of runs are measured, and the table compares them."""

from __future__ import annotations

from pathlib import Path

from bench.lock_cost import LOCKED, PLAIN, cost_text, measure_pairs
from bench.meter import CommandCost
from tests.helpers.tiny_checkpoints import LLAMA, make_checkpoint


def cost(wall_s: float, cpu_s: float) -> CommandCost:
    return CommandCost(0, wall_s, cpu_s, 64 << 20, 0, "", "")


def test_pairs_run_both_kinds_and_delete_the_outputs(tmp_path: Path):
    make_checkpoint(tmp_path / "model", LLAMA)
    # Left by an interrupted measurement: `save-init` would refuse to replace it.
    (tmp_path / "lock-out").mkdir()
    (tmp_path / "lock-out" / "file").touch()
    costs = measure_pairs(tmp_path / "model", tmp_path, pairs=1)
    assert [len(costs[name]) for name in (PLAIN, LOCKED)] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_cost_of_short_runs_is_not_rounded_before_the_ratio():
    costs = {PLAIN: [cost(0.004, 0.004)], LOCKED: [cost(0.006, 0.005)]}
    assert cost_text(costs).splitlines()[-1].split() == [
        *("cost", "+50.0", "%", "+50.0", "%", "+25.0", "%"),
    ]


def test_cost_is_the_part_that_a_lock_adds():
    costs = {
        PLAIN: [cost(10.0, 4.0), cost(12.0, 4.0), cost(11.0, 4.0)],
        LOCKED: [cost(10.5, 5.0), cost(22.0, 5.0), cost(15.0, 5.0)],
    }
    assert cost_text(costs).splitlines()[-1].split() == [
        *("cost", "+5.0", "%", "+36.4", "%", "+25.0", "%"),
    ]
