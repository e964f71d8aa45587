"""Exceptions of signals anywhere in the main thread: the pipeline ends, and resumes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.algebra.row_text import parse_row
from prepcli.core.observer import NullProgress
from prepcli.engine.budget import Budget
from prepcli.engine.files import Files
from prepcli.engine.journal import Journal
from prepcli.engine.pipeline import Pipeline
from tests.helpers.interruptions import SimulatedSignal, run_interrupted
from tests.helpers.plans import SavePlan, make_save_plan
from tests.helpers.slow_cases import slow_except

NUM_POINTS = 100  # interrupted points, of about 6,000 calls and returns


def convert(save_plan: SavePlan, folder: Path) -> None:
    """Run a plan, or resume it, in slabs of 1,200 bytes and with four buffers."""
    journal = Journal(folder / "journal", "run")
    source, paths = folder.parent / "source", save_plan.data_files(folder)
    try:
        with Files([source]) as reader, Files(paths, save_plan.layout.file_sizes) as sink:
            budget = Budget(4000, 1200, 4)  # a sync every 2,000 bytes
            streams = save_plan.plan.streams
            Pipeline(
                streams, reader, sink=sink, budget=budget, progress=NullProgress(), journal=journal
            ).run()
    finally:
        journal.close()


# The warning is about errors in callbacks of weak references.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("part", slow_except(range(30), (0,)))
def test_run_interrupted_anywhere_ends_and_resumes(tmp_path: Path, part: int):
    row = bind_row(parse_row("mlp embed <- {n}: embed mlp"), {"mlp": 30, "embed": 50, "n": 3})
    save_plan = make_save_plan([row], [row.leaf_shape])
    save_plan.write_source(tmp_path)
    folders = (tmp_path / str(number) for number in range(1, NUM_POINTS + 3))
    (whole := next(folders)).mkdir()
    num_events = run_interrupted(lambda: convert(save_plan, whole), None).num_events
    expected = save_plan.read_leaf(save_plan.data_files(whole))
    for at in random.Random(part).sample(range(num_events), NUM_POINTS):
        (folder := next(folders)).mkdir()
        ended = run_interrupted(lambda folder=folder: convert(save_plan, folder), at)
        assert ended.error is None or isinstance(ended.error, SimulatedSignal), repr(ended.error)
        convert(save_plan, folder)
        assert np.array_equal(save_plan.read_leaf(save_plan.data_files(folder)), expected)
