"""The decision that a process of a job is lost or stuck."""

from __future__ import annotations

import dataclasses

import pytest

from trainer.distributed.watchdog import Heartbeat, HeartbeatMonitor, JobEnd, lost_process


def beat(count: int, phase: str = "step 3", num_phases: int = 5) -> Heartbeat:
    return Heartbeat(count, "host", phase, num_phases)


def monitor(step_timeout_s: float = 0.0) -> HeartbeatMonitor:
    return HeartbeatMonitor(2, timeout_s=10.0, step_timeout_s=step_timeout_s, start_s=0.0)


def test_monitor_accepts_regular_heartbeats():
    watched = monitor()
    assert all(watched.check({0: beat(s), 1: beat(s)}, float(s)) is None for s in range(100))


def test_monitor_names_the_silent_process_and_its_phase():
    watched = monitor()
    for second in range(11):
        assert watched.check({0: beat(second), 1: beat(1, "save 3")}, float(second)) is None
    end = watched.check({0: beat(11), 1: beat(1, "save 3")}, 11.0)
    assert end is not None
    assert (end.kind, end.process) == ("lost", 1)
    assert end.what == "process 1 (host) is lost"
    assert end.why == "no heartbeat for 11 s; its last phase was `save 3`"


def test_monitor_names_a_process_without_any_heartbeat():
    watched = monitor()
    ends = [watched.check({0: beat(second)}, float(second)) for second in range(12)]
    assert ends[:11] == [None] * 11
    assert ends[11] == JobEnd(
        "lost", 1, "process 1 is lost", "no heartbeat for 11 s; no heartbeat of it arrived"
    )


def test_monitor_knows_the_places_of_silent_processes():
    watched = HeartbeatMonitor(
        2, timeout_s=10.0, step_timeout_s=0.0, start_s=0.0, places={1: "node1, pid 7"}
    )
    ends = [watched.check({0: beat(second)}, float(second)) for second in range(12)]
    reason = "no heartbeat for 11 s; no heartbeat of it arrived"
    assert ends[11] == JobEnd("lost", 1, "process 1 (node1, pid 7) is lost", reason)


def test_monitor_ignores_the_time_of_its_own_suspension():
    watched = monitor()
    watched.check({0: beat(1), 1: beat(1)}, 1.0)
    assert watched.check({0: beat(2), 1: beat(1)}, 500.0) is None
    assert watched.check({0: beat(3), 1: beat(2)}, 504.0) is None


def test_monitor_names_the_process_behind_in_a_stuck_step():
    watched, end = monitor(step_timeout_s=20.0), None
    for second in range(22):
        beats = {0: beat(second, "step 5", num_phases=7), 1: beat(second, "step 3", num_phases=5)}
        end = watched.check(beats, float(second))
        assert end is None or second == 21
    assert end is not None
    assert (end.kind, end.process) == ("stuck", 1)
    assert "it is in `step 3`, others are in `step 5`" in end.why


def test_monitor_names_a_step_in_which_all_are_stuck():
    watched = monitor(step_timeout_s=20.0)
    ends = [
        watched.check({0: beat(second), 1: beat(second)}, float(second)) for second in range(22)
    ]
    assert ends[21] is not None
    assert ends[21].what == "`step 3` is stuck"


@pytest.mark.parametrize("phase", ["load", "compile", "evaluate 3", "save 3"])
def test_monitor_step_timeout_ignores_other_phases(phase: str):
    watched = monitor(step_timeout_s=20.0)
    assert all(
        watched.check({0: beat(s, phase), 1: beat(s, phase)}, float(s)) is None for s in range(60)
    )


def test_heartbeat_and_end_survive_json():
    end = lost_process(0, beat(4), 0.0)
    assert end.why == "its connection broke; its last phase was `step 3`"
    assert JobEnd.from_json(end.to_json()) == end
    assert Heartbeat.from_json(beat(4).to_json()) == dataclasses.replace(beat(4))
