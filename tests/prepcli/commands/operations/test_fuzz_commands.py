"""Mutated configs, manifests, recipes and option values end in a result or in one short error."""

from __future__ import annotations

import pytest

from tests.helpers.fuzz_commands import run_samples


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def check(numbers: range, seed: int) -> None:
    _, failures = run_samples(numbers, seed)
    assert failures == []


def test_mutated_inputs_end_in_one_short_message() -> None:
    check(range(30), seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
def test_many_mutated_inputs_end_in_one_short_message(seed: int) -> None:
    check(range(1000), seed)
