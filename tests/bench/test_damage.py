"""Flipped bits in any file of an output: every command refuses it, or computes the same."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from bench.damage import REFUSED, Subject, damage_folder, flip_all, make_subjects

NUM_FLIPS = 6


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Subject]]:
    """Make the outputs of `bench.damage`, and stay in their folder."""
    with damage_folder(tmp_path_factory.mktemp("damage") / "work") as store:
        yield make_subjects(store)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["init", "step", "hf", "flax", "easylm", "adapter", "bucket"])
def test_no_command_accepts_a_flipped_bit(subjects: dict[str, Subject], name: str):
    wrong: list[str] = []
    verdicts = flip_all(subjects[name], NUM_FLIPS, random.Random(1), wrong.append)
    assert not wrong
    assert all(counts[REFUSED] for counts in verdicts.values())
