"""Waiting for each other: until all is there, somebody failed, or nobody moves any more."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path

import pytest

from prepcli.engine.pipeline import PipelineResult
from prepcli.errors import STOPPED, PrepError
from prepcli.execution import coordination
from prepcli.execution.coordination import ConversionTask, WaitOptions, wait_for_all, work_together
from prepcli.execution.failure_notes import FailureAge, FailureNotes
from prepcli.execution.locks import acquire_lock
from prepcli.execution.signals import Stopped
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Contiguous, Plan, Stream
from prepcli.planning.shares import Division, Share, divide_streams

PLAN = Plan(
    "save-init", "prep save-init m", "m", (),
    tuple(Stream(f"t{i}", "float32", (4,), (0, 4), (Contiguous(0, 0),), (Contiguous(0, 0),)) for i in range(4)), (),
)  # fmt: skip
RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "LOOK_EVERY_S", 0.001)


def joined(out: Path, share: Share, restart: bool = False) -> ConversionTask:
    stage = Staging(out)
    return ConversionTask(PLAN, RUN, stage, stage.open(RUN, restart, share), range(share.index, share.index + 1))


def finish(task: ConversionTask) -> None:
    with task.open_journal() as journal:
        streams = task.own_plan.streams
        journal.record(sum(s.nbytes for s in streams), {at: f"of {s.name}" for at, s in enumerate(streams)})


def wait(task: ConversionTask, patience_s: float = 60.0, alarm=lambda: None) -> dict[int, str]:
    return wait_for_all(task, WaitOptions(patience_s, alarm))


EVERY = {number: f"of t{number}" for number in range(4)}


def test_one_alone_waits_for_nobody(tmp_path: Path):
    task = joined(tmp_path / "out", Share())
    finish(task)
    assert wait(task) == EVERY


def test_the_last_one_has_what_all_have_done(tmp_path: Path):
    tasks = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    finish(tasks[0])

    def other_one() -> None:
        if not tasks[1].stage.journal_path.exists():
            finish(tasks[1])

    assert wait(tasks[0], alarm=other_one) == EVERY
    assert wait(tasks[1]) == EVERY


def test_whoever_waits_sees_that_another_published(tmp_path: Path):
    tasks = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    finish(tasks[0])
    wait(tasks[0], alarm=lambda: None if tasks[1].stage.is_published() else tasks[1].stage.publish())
    assert tasks[0].stage.is_published()
    with tasks[0].stage.holding_publish_lock() as is_needed:
        assert not is_needed


def test_only_one_publishes(tmp_path: Path):
    tasks = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    for task in tasks:
        finish(task)
    found = []
    for task in tasks:
        with task.stage.holding_publish_lock() as is_needed:
            found.append(is_needed)
            if is_needed:
                task.stage.publish()
    assert found == [True, False]


def test_one_that_is_gone_is_not_waited_for_forever(tmp_path: Path):
    task = joined(tmp_path / "out", Share(3, 1))
    finish(task)
    with pytest.raises(PrepError, match="process 0, 2 of 3 is not running") as caught:
        wait(task, patience_s=0.01)
    assert caught.value.code == STOPPED
    assert "--processes 3/0" in caught.value.hint


def test_one_that_is_at_work_may_take_its_time(tmp_path: Path):
    task = joined(tmp_path / "out", Share(2, 0))
    finish(task)
    held = acquire_lock(task.stage.work / "lock.1", Path("x"))
    looks = iter(range(20))

    def count() -> None:
        if next(looks, None) is None:
            os.close(held)

    with pytest.raises((PrepError, OSError)) as caught:
        wait(task, patience_s=0.0, alarm=count)
    assert isinstance(caught.value, PrepError)
    assert next(looks, None) is None


def fail(task: ConversionTask, error: Exception) -> None:
    """End a process by an error."""
    with pytest.raises(type(error)), task.stage.failures.recording_errors():
        raise error
    task.stage.leave()


def pair(out: Path) -> list[ConversionTask]:
    return [joined(out, Share(2, index)) for index in range(2)]


def test_failure_ends_a_process_that_waits(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(task)
    fail(other, PrepError("t1 is damaged", "why", "hint"))
    with pytest.raises(PrepError, match="process 1 failed: t1 is damaged") as caught:
        wait(task)
    assert (caught.value.why, caught.value.hint) == ("why", "hint")
    joined(tmp_path / "out", Share(2, 1))
    assert task.stage.failures.find(1) is None


def test_failure_before_another_joins_reaches_it(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(2, 0)), PrepError("t1 is damaged"))
    late = joined(tmp_path / "out", Share(2, 1))
    finish(late)
    with pytest.raises(PrepError, match="process 0 failed: t1 is damaged"):
        wait(late, patience_s=0.01)


def test_failure_with_restart_reaches_a_late_process(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(2, 0), restart=True), PrepError("t1 is damaged"))
    late = joined(tmp_path / "out", Share(2, 1), restart=True)
    finish(late)
    with pytest.raises(PrepError, match="process 0 failed: t1 is damaged"):
        wait(late, patience_s=0.01)


def test_failed_process_has_time_to_come_back(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(2, 0)), PrepError("t1 is damaged"))
    late = joined(tmp_path / "out", Share(2, 1))
    finish(late)
    looks = iter(range(3))

    def come_back() -> None:
        if next(looks, None) == 2:
            finish(joined(tmp_path / "out", Share(2, 0)))

    assert wait(late, alarm=come_back) == EVERY


def test_failure_is_reported_to_each_process_once(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(task)
    fail(other, PrepError("the disk is full", "why", "hint"))
    task.stage.leave()
    again = joined(tmp_path / "out", Share(2, 0))  # the other process is about to be started again, too
    with pytest.raises(PrepError, match="process 1 of 2 is not running") as caught:
        wait(again, patience_s=0.01)
    assert "the disk is full" in caught.value.why
    assert caught.value.code == STOPPED


def test_failure_of_another_plan_or_division_is_ignored(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(3, 1)), PrepError("the disk is full"))
    task = joined(tmp_path / "out", Share(2, 0))
    assert task.stage.failures.find(1) is None
    assert FailureNotes(task.stage.work, "another plan", Share(3, 0)).find(1) is None


def test_failure_that_is_a_bug_is_told_too(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(task)
    fail(other, ZeroDivisionError("division by zero"))
    with pytest.raises(PrepError, match="process 1 failed: ZeroDivisionError: division by zero"):
        wait(task)


def test_failure_of_a_worker_is_told_by_its_parent(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(task)
    with pytest.raises(PrepError, match="killed"):
        wait(task, alarm=_raising(PrepError("a worker was killed by SIGKILL")))
    task.stage.leave()
    failure = other.stage.failures.find(0)
    assert failure is not None
    assert (failure.error.what, failure.age) == ("process 0 failed: a worker was killed by SIGKILL", FailureAge.NEW)


def carried_out(task: ConversionTask, alarm=lambda: None) -> bool:
    """Wait for the others with a share that is durable; whether it was this process that finished."""
    finished = []

    def move() -> PipelineResult:
        finish(task)
        return PipelineResult()

    work_together(task, move, finished.append, WaitOptions(60.0, alarm))
    return bool(finished)


def test_publishing_waits_for_a_process_that_still_moves(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(other)  # as it was when it joined again
    looks = iter(range(3))

    def come_to_the_end() -> None:
        if next(looks, None) == 2:
            other.stage.mark_moved()

    assert carried_out(task, come_to_the_end)
    assert next(looks, None) is None


def test_failure_after_a_share_is_durable_is_not_published(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    finish(other)
    with pytest.raises(PrepError, match="process 1 failed: the source changed"):
        carried_out(task, alarm=lambda: fail(other, PrepError("the source changed")))


def test_earlier_failure_is_over_once_all_is_durable(tmp_path: Path):
    other = joined(tmp_path / "out", Share(2, 1))
    finish(other)
    fail(other, PrepError("the disk is full"))
    assert carried_out(joined(tmp_path / "out", Share(2, 0)))


def _raising(error: Exception):
    def alarm() -> None:
        raise error

    return alarm


def test_stopped_process_leaves_no_failure(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    with pytest.raises(Stopped), other.stage.failures.recording_errors():
        raise Stopped("SIGTERM")
    other.stage.leave()
    assert task.stage.failures.find(1) is None


def test_failure_is_told_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    task, other = pair(tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("json.dump", full)
        fail(other, PrepError("the disk is full"))
    failure = task.stage.failures.find(1)
    assert failure is not None
    assert failure.error.what == "process 1 failed"


@pytest.mark.parametrize("note", [b"", b"{", b"[]"])
def test_damaged_failure_note_is_a_failure(tmp_path: Path, note: bytes):
    task = joined(tmp_path / "out", Share(2, 0))
    (task.stage.work / "failed.1").write_bytes(note)
    failure = task.stage.failures.find(1)
    assert failure is not None
    assert failure.error.what == "process 1 failed"


def test_failure_note_is_not_written_through_a_link(tmp_path: Path):
    task, other = pair(tmp_path / "out")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("failed.1", "new.failed.1"):
        (other.stage.work / name).symlink_to(precious)
    fail(other, PrepError("t1 is damaged"))
    assert precious.read_text() == "mine"
    assert task.stage.failures.find(1) is not None


def test_another_number_of_processes_takes_over_what_is_whole(tmp_path: Path):
    first = joined(tmp_path / "out", Share(3, 0))
    finish(first)
    done = {n: f"of t{n}" for n in first.shares[0]}
    first.stage.close()
    tasks = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    assert [dict(task.division.durable_digests) for task in tasks] == [done, done]
    assert sorted(n for share in tasks[0].shares for n in share) == [0, 1, 2, 3]
    for task in tasks:
        finish(task)
    assert wait(tasks[0]) == EVERY
    for task in tasks:
        task.stage.close()
    alone = joined(tmp_path / "out", Share())
    assert alone.shares == ((0, 1, 2, 3),)
    assert alone.durable_part(0, alone.read_marked(0)).digests == EVERY
    assert wait(alone) == EVERY


def test_a_crash_between_the_division_and_the_removal_of_journals_does_no_harm(tmp_path: Path, monkeypatch):
    first = joined(tmp_path / "out", Share(2, 0))
    finish(first)
    before = first.stage.journal_path.read_bytes()
    first.stage.close()
    second = joined(tmp_path / "out", Share(3, 0))
    second.stage.close()
    second.stage.journal_path.write_bytes(before)  # as if it had not been removed
    again = joined(tmp_path / "out", Share(3, 0))
    assert dict(again.division.durable_digests) == {n: f"of t{n}" for n in first.shares[0]}
    with again.open_journal() as journal:
        assert (journal.done_nbytes, journal.digests) == (0, {})


def test_a_restart_drops_what_was_done_unless_others_are_at_work(tmp_path: Path):
    first = joined(tmp_path / "out", Share(2, 0))
    finish(first)
    other = joined(tmp_path / "out", Share(2, 1), restart=True)
    assert first.stage.journal_path.exists()
    first.stage.close()
    other.stage.close()
    joined(tmp_path / "out", Share(2, 1), restart=True)
    assert not first.stage.journal_path.exists()


def test_one_alone_waits_until_all_who_share_are_gone(tmp_path: Path):
    tasks = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    tasks[0].stage.close()
    for share in (Share(), Share(2, 1), Share(4, 0)):
        with pytest.raises(PrepError, match="locked"):
            joined(tmp_path / "out", share)
    tasks[1].stage.close()
    joined(tmp_path / "out", Share(4, 0)).stage.close()
    alone = joined(tmp_path / "out", Share())
    with pytest.raises(PrepError, match="locked"):
        joined(tmp_path / "out", Share(4, 0))
    alone.stage.close()


def test_the_shares_are_those_of_the_division(tmp_path: Path):
    task = joined(tmp_path / "out", Share(2, 1))
    assert task.shares == divide_streams(PLAN, task.division)
    assert [s.name for s in task.own_plan.streams] == [f"t{n}" for n in task.shares[1]]
    assert task.team_nbytes() == (0, sum(s.nbytes for s in task.own_plan.streams))


def test_a_share_without_bytes_is_whole_from_the_beginning(tmp_path: Path):
    task = joined(tmp_path / "out", Share(8, 0))
    assert [task.is_complete(index, task.read_marked(index)) for index in range(8)] == [
        not share for share in task.shares
    ]
    empty = Stream("empty", "float32", (0,), (0, 0), (Contiguous(0, 0),), (Contiguous(0, 0),))
    alone = ConversionTask(dataclasses.replace(PLAN, streams=(empty,)), RUN, task.stage, Division())
    assert alone.is_complete(0, alone.read_marked(0))
