"""Exceptions of signals anywhere in the main thread: the pipeline ends, and resumes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.rows import parse_row
from prepcli.core.observer import NullProgress
from prepcli.engine.budget import Budget
from prepcli.engine.files import Files
from prepcli.engine.pipeline import Pipeline
from tests.helpers.durable_units import DurableUnit
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.plans import SavePlan, make_save_plan
from tests.helpers.slow_cases import slow_except

NUM_POINTS = 100  # interrupted points, of about 6,000 calls and returns


def convert(save_plan: SavePlan, folder: Path, durable: DurableUnit) -> None:
    """Run a plan, or resume it, in slabs of 1,200 bytes and with four buffers."""
    source, paths = folder.parent / "source", save_plan.data_files(folder)
    with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
        budget = Budget(4000, 1200, 4)  # a sync every 2,000 bytes
        Pipeline(
            save_plan.plan.streams,
            reader,
            sink=sink,
            budget=budget,
            progress=NullProgress(),
            units=durable.resumed(),
            observer=durable,
        ).run()


# The warning is about errors in callbacks of weak references.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", slow_except(range(30), (0,)))
def test_run_interrupted_anywhere_ends_and_resumes(tmp_path: Path, part: int):
    row = bind_row(parse_row("mlp embed <- {n}: embed mlp"), {"mlp": 30, "embed": 50, "n": 3})
    save_plan = make_save_plan([row], [row.leaf_shape])
    save_plan.write_source(tmp_path)
    folders = (tmp_path / str(number) for number in range(1, NUM_POINTS + 3))
    (whole := next(folders)).mkdir()
    durable = DurableUnit(save_plan.plan.streams)
    num_events = run_interrupted(lambda: convert(save_plan, whole, durable), None).num_events
    expected = save_plan.read_leaf(save_plan.data_files(whole))
    for at in random.Random(part).sample(range(num_events), NUM_POINTS):
        (folder := next(folders)).mkdir()
        durable = DurableUnit(save_plan.plan.streams)

        def call(folder: Path = folder, durable: DurableUnit = durable) -> None:
            convert(save_plan, folder, durable)

        ended = run_interrupted(call, at)
        assert ended.error is None or isinstance(ended.error, SimulatedSignal), repr(ended.error)
        if not durable.is_complete:
            convert(save_plan, folder, durable)
        assert np.array_equal(save_plan.read_leaf(save_plan.data_files(folder)), expected)
