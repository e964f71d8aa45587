"""Comparison of facts between processes, which are threads here."""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from tests.helpers.waiting import MAX_S
from trainer.distributed import agreement
from trainer.distributed.agreement import check_agreement
from trainer.distributed.process_group import SingleProcess
from trainer.models.errors import PYTHON, TERMINAL, Option, PrepError


@dataclass
class Shared:
    """Memory of a job whose processes are threads."""

    count: int
    texts: dict[tuple[str, str, int], queue.Queue[str]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def place(self, kind: str, name: str, index: int) -> queue.Queue[str]:
        """Return the place of a text."""
        with self.lock:
            return self.texts.setdefault((kind, name, index), queue.Queue())


@dataclass
class ThreadGroup:
    """ProcessGroup of threads. Each name is used once."""

    index: int
    shared: Shared
    barriers: threading.Barrier
    gathered: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of threads."""
        return self.shared.count

    def barrier(self, name: str) -> None:
        """Wait for all threads."""
        self.barriers.wait(60)

    def gather(self, name: str, text: str) -> list[str]:
        """Return the texts of all threads on the first."""
        self.gathered.append(name)
        self.shared.place("gather", name, self.index).put(text)
        indices = range(self.count) if self.index == 0 else ()
        return [self.shared.place("gather", name, index).get(timeout=MAX_S) for index in indices]

    def broadcast(self, name: str, text: str) -> str:
        """Return the text of the first thread."""
        if self.index == 0:
            for index in range(self.count):
                self.shared.place("broadcast", name, index).put(text)
        return self.shared.place("broadcast", name, self.index).get(timeout=MAX_S)


def compare(
    facts: list[dict[str, str]],
    warnings: list[str] | None = None,
    options: Mapping[str, Option] | None = None,
) -> tuple[list[PrepError | None], list[str]]:
    """Compare the facts of threads; return the error of each, and the names that the first has gathered."""
    shared, barriers = Shared(len(facts)), threading.Barrier(len(facts))
    groups = [ThreadGroup(index, shared, barriers) for index in range(len(facts))]

    def run(group: ThreadGroup) -> PrepError | None:
        try:
            warn = None if warnings is None else warnings.append
            check_agreement(group, facts[group.index], hint="the hint", options=options, warn=warn)
        except PrepError as error:
            return error
        return None

    with ThreadPoolExecutor(len(facts)) as pool:
        return list(pool.map(run, groups)), groups[0].gathered


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
