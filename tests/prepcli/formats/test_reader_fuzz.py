"""Mutated data files are errors or data: no reader ends its process, hangs, or raises an error of another type."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.reader_fuzz import (
    BUG,
    FORMATS,
    SIGNAL,
    Result,
    collect,
    fuzz_format,
    mutate,
    read_mutations,
)

MAX_PEAK_NBYTES = 1 << 30


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_files_are_errors_or_data(tmp_path: Path, name: str):
    outcomes = list(read_mutations(name, tmp_path, range(10)))
    assert len(outcomes) == 10
    assert BUG not in outcomes


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutated_files_end_no_process(name: str):
    result = fuzz_format(name, 500, seed=20_000)
    assert {*result.counts} <= {"errors", "equal", "other data"}
    assert result.peak_nbytes < MAX_PEAK_NBYTES


def test_mutations_depend_on_their_seed():
    data = bytes(range(256))
    assert mutate(data, random.Random("a 1")) == mutate(data, random.Random("a 1"))
    assert len({mutate(data, random.Random(f"a {seed}")) for seed in range(50)}) > 40


def test_signal_of_a_child_is_counted():
    code = f"import os; print('errors', flush=True); os.kill(os.getpid(), {signal.SIGSEGV:d})"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    result = Result()
    assert collect(child, result, "arrow", 5) == 2
    assert (result.counts["errors"], result.counts[SIGNAL]) == (1, 1)
    assert result.faults == ["arrow 6: signals SIGSEGV"]
