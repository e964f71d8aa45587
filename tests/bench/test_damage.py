"""Flipped bits in any file of an output: every command refuses it, or computes the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bench.damage import REFUSED, damage_folder, flip_all
from bench.damage_readers import (
    FOREIGN,
    QUANTIZED,
    STATE_LAYOUTS,
    Subject,
    make_subjects,
)

MAX_FILES = 12
INITS = ("init", "init-files", "init-zarr3-files", "init-zstd", "resharded")
STATES = tuple(f"state-{layout}" for layout in STATE_LAYOUTS)
OTHERS = ("hf", "padded", "step", "adapter", "bucket")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Make the outputs of `bench.damage`, and stay in their folder."""
    with damage_folder(tmp_path_factory.mktemp("damage") / "work") as store:
        yield make_subjects(store)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*INITS, *FOREIGN, *QUANTIZED, *STATES, *OTHERS])
def test_no_command_accepts_a_flipped_bit(subjects: dict[str, Subject], name: str):
    wrong: list[str] = []
    verdicts = flip_all(subjects[name], 1, random.Random(1), wrong.append, max_files=MAX_FILES)
    assert not wrong
    for command, counts in verdicts.items():
        # A list of tensors without their values depends on few files.
        assert counts[REFUSED] or command.startswith("inspect"), command


@pytest.mark.slow
def test_every_output_is_damaged(subjects: dict[str, Subject]):
    assert {*subjects} == {*INITS, *FOREIGN, *QUANTIZED, *STATES, *OTHERS}
