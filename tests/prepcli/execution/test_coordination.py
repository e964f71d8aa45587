"""Coordination of processes: waiting until all streams are durable, a process failed, or one is missing."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import os
from pathlib import Path

import pytest

from prepcli.core.errors import STOPPED, PrepError
from prepcli.execution import coordination
from prepcli.execution.coordination import Team
from prepcli.execution.failure_notes import FailureAge, FailureNotes
from prepcli.execution.locks import acquire_lock
from prepcli.execution.signals import Stopped
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan, Stream
from prepcli.planning.shares import Share, divide_streams
from tests.helpers.plans import flat

LOCATION = (flat("float32", (4,)),)
PLAN = Plan(
    "save-init", "prep save-init m", "m", (),
    tuple(Stream(f"t{i}", "float32", (4,), (0, 4), LOCATION, LOCATION) for i in range(4)), (),
)  # fmt: skip
RUN: dict[str, object] = {"request": "prep x", "source": "a", "plan": "b", "prep": "1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordination, "LOOK_EVERY_S", 0.001)


def joined(out: Path, share: Share, restart: bool = False) -> Team:
    stage = Staging(out)
    stage.open(RUN, restart, share=share)
    return team_of(PLAN, stage)


def team_of(plan: Plan, stage: Staging) -> Team:
    own_indices = range(stage.share.index, stage.share.index + 1)
    return Team(plan, stage, str(RUN["plan"]), own_indices=own_indices)


def journal_of(team: Team) -> Path:
    return team.stage.journal_path(team.stage.share.index)


def finish(team: Team) -> None:
    index = team.stage.share.index
    with team.open_journal(index) as journal:
        streams = team.share_plan(index).streams
        journal.record(
            sum(s.nbytes for s in streams),
            {index: f"of {s.name}" for index, s in enumerate(streams)},
        )


def wait(team: Team, patience_s: float = 60.0, alarm=lambda: None) -> dict[int, str]:
    team.patience_s = patience_s
    team.check_workers = alarm
    team.wait()
    return team.all_digests()


ALL_DIGESTS = {number: f"of t{number}" for number in range(4)}


def test_wait_returns_at_once_for_a_single_process(tmp_path: Path):
    team = joined(tmp_path / "out", Share())
    finish(team)
    assert wait(team) == ALL_DIGESTS


def test_wait_returns_the_digests_of_all_processes(tmp_path: Path):
    teams = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    finish(teams[0])

    def other_one() -> None:
        if not journal_of(teams[1]).exists():
            finish(teams[1])

    assert wait(teams[0], alarm=other_one) == ALL_DIGESTS
    assert wait(teams[1]) == ALL_DIGESTS


def test_wait_ends_when_another_process_published(tmp_path: Path):
    teams = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    finish(teams[0])
    wait(
        teams[0], alarm=lambda: None if teams[1].stage.is_published() else teams[1].stage.publish()
    )
    assert teams[0].stage.is_published()
    with teams[0].stage.holding_publish_lock() as is_needed:
        assert not is_needed


def test_publish_lock_lets_one_process_publish(tmp_path: Path):
    teams = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    for team in teams:
        finish(team)
    published = []
    for team in teams:
        with team.stage.holding_publish_lock() as is_needed:
            published.append(is_needed)
            if is_needed:
                team.stage.publish()
    assert published == [True, False]


def test_wait_names_the_shares_it_waits_for(tmp_path: Path):
    teams = [joined(tmp_path / "out", Share(3, index)) for index in range(3)]
    notes: list[str] = []
    finish(teams[1])

    def end_waiting() -> None:
        raise KeyboardInterrupt

    teams[1].note = notes.append
    with pytest.raises(KeyboardInterrupt):
        wait(teams[1], alarm=end_waiting)
    assert notes == ["share 1 of 3 is done; waiting for shares 0, 2"]


def test_wait_reports_a_missing_process(tmp_path: Path):
    team = joined(tmp_path / "out", Share(3, 1))
    finish(team)
    with pytest.raises(PrepError, match="process 0, 2 of 3 is not running") as caught:
        wait(team, patience_s=0.01)
    assert caught.value.code == STOPPED
    assert "--processes 3/0" in caught.value.hint


def test_wait_is_patient_with_a_running_process(tmp_path: Path):
    team = joined(tmp_path / "out", Share(2, 0))
    finish(team)
    lock_fd = acquire_lock(team.stage.work / "lock.1", Path("x"))
    remaining_polls = iter(range(20))

    def count() -> None:
        if next(remaining_polls, None) is None:
            os.close(lock_fd)

    with pytest.raises((PrepError, OSError)) as caught:
        wait(team, patience_s=0.0, alarm=count)
    assert isinstance(caught.value, PrepError)
    assert next(remaining_polls, None) is None


def fail(team: Team, error: Exception) -> None:
    """End a process by an error."""
    with pytest.raises(type(error)), team.stage.failures.recording_errors():
        raise error
    team.stage.leave()


def pair(out: Path) -> list[Team]:
    return [joined(out, Share(2, index)) for index in range(2)]


def test_failure_ends_a_waiting_process(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    finish(team)
    fail(peer, PrepError("t1 is damaged", "why", "hint"))
    with pytest.raises(PrepError, match="process 1 failed: t1 is damaged") as caught:
        wait(team)
    assert (caught.value.why, caught.value.hint) == ("why", "hint")
    joined(tmp_path / "out", Share(2, 1))
    assert team.stage.failures.find(1) is None


def test_process_that_joins_late_gets_earlier_failure(tmp_path: Path):
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


def test_failed_process_has_time_to_return(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(2, 0)), PrepError("t1 is damaged"))
    late = joined(tmp_path / "out", Share(2, 1))
    finish(late)
    looks = iter(range(3))

    def come_back() -> None:
        if next(looks, None) == 2:
            finish(joined(tmp_path / "out", Share(2, 0)))

    assert wait(late, alarm=come_back) == ALL_DIGESTS


def test_failure_is_reported_to_each_process_once(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    finish(team)
    fail(peer, PrepError("the disk is full", "why", "hint"))
    team.stage.leave()
    again = joined(tmp_path / "out", Share(2, 0))  # the other process is about to be restarted, too
    with pytest.raises(PrepError, match="process 1 of 2 is not running") as caught:
        wait(again, patience_s=0.01)
    assert "the disk is full" in caught.value.why
    assert caught.value.code == STOPPED


def test_failure_of_another_plan_or_division_is_ignored(tmp_path: Path):
    fail(joined(tmp_path / "out", Share(3, 1)), PrepError("the disk is full"))
    team = joined(tmp_path / "out", Share(2, 0))
    assert team.stage.failures.find(1) is None
    assert FailureNotes(team.stage.work, "another plan", share=Share(3, 0)).find(1) is None


def test_failure_by_a_bug_is_reported(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    finish(team)
    fail(peer, ZeroDivisionError("division by zero"))
    with pytest.raises(PrepError, match="process 1 failed: ZeroDivisionError: division by zero"):
        wait(team)


def test_failure_of_a_worker_is_reported_by_its_parent(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    finish(team)
    with pytest.raises(PrepError, match="killed"):
        wait(team, alarm=_raising(PrepError("a worker was killed by SIGKILL")))
    team.stage.leave()
    failure = peer.stage.failures.find(0)
    assert failure is not None
    assert (failure.error.what, failure.age) == (
        "process 0 failed: a worker was killed by SIGKILL",
        FailureAge.NEW,
    )


def run_durable_share(team: Team, alarm=lambda: None) -> bool:
    """Wait for the peers with a durable share, and return whether this process published."""
    team.check_workers = alarm
    finish(team)
    team.stage.mark_moved()
    with team.publishing() as is_needed:
        if is_needed:
            assert team.all_digests() == ALL_DIGESTS
    return is_needed


def test_publish_waits_until_peer_has_moved_its_files(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    # The journal of the peer is complete from before its restart, but its files are not moved yet.
    finish(peer)
    checks = itertools.count(1)

    def move_at_third_check() -> None:
        if next(checks) == 3:
            peer.stage.mark_moved()

    assert run_durable_share(team, move_at_third_check)
    assert next(checks) > 3


def test_failure_after_a_durable_share_prevents_publishing(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    finish(peer)
    with pytest.raises(PrepError, match="process 1 failed: the source changed"):
        run_durable_share(team, alarm=lambda: fail(peer, PrepError("the source changed")))


def test_earlier_failure_is_ignored_once_all_is_durable(tmp_path: Path):
    peer = joined(tmp_path / "out", Share(2, 1))
    finish(peer)
    fail(peer, PrepError("the disk is full"))
    assert run_durable_share(joined(tmp_path / "out", Share(2, 0)))


def _raising(error: Exception):
    def alarm() -> None:
        raise error

    return alarm


def test_stopped_process_leaves_no_failure(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    with pytest.raises(Stopped), peer.stage.failures.recording_errors():
        raise Stopped("SIGTERM")
    peer.stage.leave()
    assert team.stage.failures.find(1) is None


def test_failure_is_reported_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    team, peer = pair(tmp_path / "out")

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("json.dump", full)
        fail(peer, PrepError("the disk is full"))
    failure = team.stage.failures.find(1)
    assert failure is not None
    assert failure.error.what == "process 1 failed"


@pytest.mark.parametrize("note", [b"", b"{", b"[]"])
def test_damaged_failure_note_is_a_failure(tmp_path: Path, note: bytes):
    team = joined(tmp_path / "out", Share(2, 0))
    (team.stage.work / "failed.1").write_bytes(note)
    failure = team.stage.failures.find(1)
    assert failure is not None
    assert failure.error.what == "process 1 failed"


def test_failure_note_is_not_written_through_a_link(tmp_path: Path):
    team, peer = pair(tmp_path / "out")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("failed.1", "new.failed.1"):
        (peer.stage.work / name).symlink_to(precious)
    fail(peer, PrepError("t1 is damaged"))
    assert precious.read_text() == "mine"
    assert team.stage.failures.find(1) is not None


def test_new_number_of_processes_reuses_complete_streams(tmp_path: Path):
    first = joined(tmp_path / "out", Share(3, 0))
    finish(first)
    done_digests = {n: f"of t{n}" for n in first.shares[0]}
    first.stage.close()
    teams = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    assert [dict(team.stage.durable_digests) for team in teams] == [done_digests, done_digests]
    assert sorted(n for share in teams[0].shares for n in share) == [0, 1, 2, 3]
    for team in teams:
        finish(team)
    assert wait(teams[0]) == ALL_DIGESTS
    for team in teams:
        team.stage.close()
    alone = joined(tmp_path / "out", Share())
    assert alone.shares == ((0, 1, 2, 3),)
    assert alone.durable_part(0, alone.read_journal_state(0)).digests == ALL_DIGESTS
    assert wait(alone) == ALL_DIGESTS


def test_durable_streams_survive_a_crash_before_journal_removal(tmp_path: Path, monkeypatch):
    first = joined(tmp_path / "out", Share(2, 0))
    finish(first)
    before = journal_of(first).read_bytes()
    first.stage.close()
    second = joined(tmp_path / "out", Share(3, 0))
    second.stage.close()
    journal_of(second).write_bytes(before)  # as if it had not been removed
    again = joined(tmp_path / "out", Share(3, 0))
    assert dict(again.stage.durable_digests) == {n: f"of t{n}" for n in first.shares[0]}
    with again.open_journal(0) as journal:
        assert (journal.done_nbytes, journal.digests) == (0, {})


def test_restart_keeps_the_work_of_running_processes(tmp_path: Path):
    first = joined(tmp_path / "out", Share(2, 0))
    finish(first)
    peer = joined(tmp_path / "out", Share(2, 1), restart=True)
    assert journal_of(first).exists()
    first.stage.close()
    peer.stage.close()
    joined(tmp_path / "out", Share(2, 1), restart=True)
    assert not journal_of(first).exists()


def test_lock_excludes_other_process_counts(tmp_path: Path):
    teams = [joined(tmp_path / "out", Share(2, index)) for index in range(2)]
    teams[0].stage.close()
    for share in (Share(), Share(2, 1), Share(4, 0)):
        with pytest.raises(PrepError, match="locked"):
            joined(tmp_path / "out", share)
    teams[1].stage.close()
    joined(tmp_path / "out", Share(4, 0)).stage.close()
    alone = joined(tmp_path / "out", Share())
    with pytest.raises(PrepError, match="locked"):
        joined(tmp_path / "out", Share(4, 0))
    alone.stage.close()


def test_team_shares_are_the_divided_streams(tmp_path: Path):
    team = joined(tmp_path / "out", Share(2, 1))
    assert team.shares == divide_streams(PLAN, 2)
    assert [s.name for s in team.share_plan(1).streams] == [f"t{n}" for n in team.shares[1]]
    assert team.durable_and_total_nbytes() == (0, sum(s.nbytes for s in team.share_plan(1).streams))


def test_empty_share_is_complete_from_the_start(tmp_path: Path):
    team = joined(tmp_path / "out", Share(8, 0))
    assert [team.is_complete(index, team.read_journal_state(index)) for index in range(8)] == [
        not share for share in team.shares
    ]
    empty = Stream(
        name="empty",
        dtype="float32",
        shape=(0,),
        rows=(0, 0),
        reads=(flat("float32", (0,)),),
        writes=(flat("float32", (0,)),),
    )
    alone = team_of(dataclasses.replace(PLAN, streams=(empty,)), team.stage)
    assert alone.is_complete(0, alone.read_journal_state(0))
