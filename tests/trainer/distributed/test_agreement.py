"""Comparison of facts between processes, which are threads here."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from prepcli.core.errors import PYTHON, TERMINAL, Option, PrepError
from prepcli.core.process_group import SingleProcess
from tests.helpers.thread_groups import ThreadGroup, run_together
from trainer.distributed import agreement
from trainer.distributed.agreement import check_agreement


def compare(
    facts: list[dict[str, str]],
    warnings: list[str] | None = None,
    options: Mapping[str, Option] | None = None,
) -> tuple[list[PrepError | None], list[str]]:
    """Compare the facts of threads; return the error of each, and the names that the first has gathered."""
    gathered = list[str]()

    def run(group: ThreadGroup) -> None:
        warn = None if warnings is None else warnings.append
        try:
            check_agreement(group, facts[group.index], hint="the hint", options=options, warn=warn)
        finally:
            if group.index == 0:
                gathered.extend(group.gathered)

    return run_together(len(facts), run), gathered


def test_equal_facts_are_compared_by_their_digests_only():
    errors, gathered = compare([{"jax": "1", "optimizer.lr": "0.1"}] * 3)
    assert errors == [None] * 3
    # A difference would make the processes gather the facts themselves next.
    assert gathered == ["agreement"]


def test_check_agreement_names_differences_in_every_process():
    lines = [
        {"jax": "1", "seed": "1"},
        {"jax": "1", "seed": "2"},
        {"jax": "1", "seed": "1"},
        {"jax": "2", "seed": "1"},
    ]
    errors, _ = compare(lines)
    for error in errors:
        assert error is not None
        assert error.what == "the processes differ in `jax`, `seed`"
        assert error.hint == "the hint"
        assert "jax: 1 in processes 0-2 (host " in error.why
        assert "; 2 in process 1 (host " in error.why
    assert len({str(error) for error in errors}) == 1


def test_check_agreement_names_missing_and_few_facts():
    errors, _ = compare([{str(i): "x" for i in range(7)}, {}])
    assert errors[0] is not None
    assert errors[0].what.endswith("and 2 more")
    assert "0: x in process 0" in errors[0].why
    assert "not set in process 1" in errors[0].why


def test_check_agreement_warns_of_clocks(monkeypatch: pytest.MonkeyPatch):
    clocks: dict[str, float] = {}

    def thread_time() -> float:
        return clocks.setdefault(threading.current_thread().name, len(clocks) * 60.0)

    monkeypatch.setattr(agreement.time, "time", thread_time)
    warnings: list[str] = []
    errors, _ = compare([{}, {}], warnings)
    assert errors == [None, None]
    assert len(warnings) == 1
    assert "60 s ahead of the clock of process" in warnings[0]


def test_check_agreement_of_one_process_is_silent():
    check_agreement(SingleProcess(), {"jax": "1"}, hint="", warn=pytest.fail)


def test_check_agreement_names_the_option_of_a_fact():
    options = {"no_verify": Option("verify", False)}
    errors, _ = compare([{"no_verify": "True"}, {"no_verify": "False"}], options=options)
    for error in errors:
        assert error is not None
        assert error.rendered(TERMINAL).what == "the processes differ in `--no-verify`"
        assert error.rendered(PYTHON).what == "the processes differ in `verify=False`"
