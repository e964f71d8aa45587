"""Watchdogs of several processes, as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tests.helpers.waiting import MAX_S
from trainer.distributed.processes import ConnectionBrokenError
from trainer.distributed.watchdog import INTERVAL_S, JobEnd, Watchdog, WatchSettings

pytestmark = pytest.mark.waits

# Time limit of a job with a lost process.
TIMEOUT_S = 1.0
# Time limit of a job with two live processes beside a lost one.
LIVE_TIMEOUT_S = 5.0
# Time between two heartbeats.
BEAT_S = 0.02


@dataclass
class Texts:
    """Texts of a simulated coordination service; `is_up` is shared by all processes."""

    index: int
    texts: dict[str, str]
    is_up: threading.Event
    count: int = 3

    def publish(self, key: str, text: str) -> None:
        self._require_up(key)
        self.texts[key] = text

    def read(self, key: str) -> str | None:
        self._require_up(key)
        return self.texts.get(key)

    def read_by_index(self, key: str) -> dict[int, str]:
        self._require_up(key)
        return {
            int(name.split("/")[1]): text
            for name, text in [*self.texts.items()]
            if name.startswith(f"{key}/")
        }

    def _require_up(self, key: str) -> None:
        """Raise ConnectionBrokenError if the network is down."""
        if not self.is_up.is_set():
            raise ConnectionBrokenError(f"no answer for {key}")


@dataclass
class Job:
    """Watchdogs of a job, and the ends that they report."""

    is_up: threading.Event = field(default_factory=threading.Event)
    ends: dict[int, JobEnd] = field(default_factory=dict[int, JobEnd])
    reported: dict[int, threading.Event] = field(default_factory=dict[int, threading.Event])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    dogs: list[Watchdog] = field(default_factory=list[Watchdog])

    def close(self) -> None:
        for dog in self.dogs:
            dog.close()


def start_job(
    num_started: int = 3, is_broken: Callable[[], bool] = lambda: False, *, timeout_s: float = MAX_S
) -> Job:
    """Start watchdogs for the processes of a job. Return them with what they report."""
    job = Job()
    job.is_up.set()
    for index in range(num_started):
        job.reported[index] = threading.Event()

        def on_end(end: JobEnd, index: int = index) -> None:
            job.ends[index] = end
            job.reported[index].set()

        settings = WatchSettings(
            timeout_s, 0.0, {index: f"host-{index}"}, beat_s=BEAT_S, grace_s=BEAT_S
        )
        job.dogs.append(
            Watchdog(
                Texts(index, job.texts, job.is_up), settings, is_broken=is_broken, on_end=on_end
            )
        )
    for dog in job.dogs:
        dog.start()
    return job


def test_watchdogs_of_all_processes_name_the_lost_one():
    # Process 2 never starts.
    job = start_job(num_started=2, timeout_s=LIVE_TIMEOUT_S)
    assert all(job.reported[index].wait(MAX_S) for index in (0, 1))
    job.close()
    assert {end.what for end in job.ends.values()} == {"process 2 is lost"}


def test_watchdogs_quote_the_error_of_a_failed_process():
    job = start_job()
    job.dogs[1].end_job(JobEnd("failed", 1, "process 1 (host-1) failed", "no space left"))
    assert all(job.reported[index].wait(MAX_S) for index in (0, 2))
    job.close()
    assert {index: end.why for index, end in job.ends.items()} == {
        0: "no space left",
        2: "no space left",
    }


def test_process_0_fails_after_the_others_have_read_it():
    job = start_job()
    job.dogs[0].end_job(JobEnd("failed", 0, "process 0 (host-0) failed", "no space left"))
    assert {"seen/1", "seen/2"} <= set(job.texts)
    assert all(job.reported[index].wait(MAX_S) for index in (1, 2))
    job.close()


def test_watchdogs_name_process_0_if_it_does_not_answer():
    job = start_job(timeout_s=TIMEOUT_S)
    job.is_up.clear()
    assert all(job.reported[index].wait(MAX_S) for index in (1, 2))
    job.close()
    assert {end.what.partition(" (")[0] for end in job.ends.values()} == {"process 0"}


def test_watchdog_names_a_process_0_that_never_decided():
    ends, reported = list[JobEnd](), threading.Event()

    def on_end(end: JobEnd) -> None:
        ends.append(end)
        reported.set()

    settings = WatchSettings(TIMEOUT_S, 0.0, {0: "node0, pid 7", 1: "node1, pid 8"})
    dog = Watchdog(
        Texts(1, {}, threading.Event()), settings, is_broken=lambda: False, on_end=on_end
    )
    dog.start()
    assert reported.wait(MAX_S)
    dog.close()
    assert [end.what for end in ends] == ["process 0 (node0, pid 7) is lost"]


class SilentTexts(Texts):
    """Texts of a process. Their service stops, and never answers, when the process publishes the end of the job."""

    def publish(self, key: str, text: str) -> None:
        if key.startswith("ended/"):
            self.is_up.clear()
            threading.Event().wait()
        super().publish(key, text)


def test_failed_process_ends_if_the_service_does_not_answer():
    ends, is_up = list[JobEnd](), threading.Event()
    is_up.set()
    texts = SilentTexts(1, {}, is_up)
    settings = WatchSettings(TIMEOUT_S, 0.0, {1: "node1, pid 8"})
    dog = Watchdog(texts, settings, is_broken=lambda: not is_up.is_set(), on_end=ends.append)
    dog.start()
    main = threading.Thread(
        target=dog.end_job, args=(JobEnd("failed", 1, "process 1 failed", "disk"),), daemon=True
    )
    main.start()
    main.join(MAX_S)
    assert not main.is_alive(), "the main thread can report the error"
    assert ends == [], "the watchdog does not report another one"


def test_watchdogs_stay_silent_after_close():
    job = start_job(timeout_s=TIMEOUT_S)
    job.close()
    job.is_up.clear()
    assert not job.reported[0].wait(2 * TIMEOUT_S)
    assert not job.ends


def test_interval_fits_the_timeout_and_the_number_of_processes():
    assert WatchSettings(60.0, 0.0, {}).interval_s(4) == INTERVAL_S
    assert WatchSettings(5.0, 0.0, {}).interval_s(4) == 1.0
    assert WatchSettings(60.0, 0.0, {}).interval_s(4096) > 8
