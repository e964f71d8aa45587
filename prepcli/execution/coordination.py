"""Processes that write one output together: whose what is, what is durable, and how to wait for each other."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from prepcli.console.formatting import format_duration
from prepcli.engine.files import io_error
from prepcli.engine.journal import Journal, JournalState, read_journal
from prepcli.engine.pipeline import EMPTY_DIGEST, PipelineResult
from prepcli.errors import STOPPED, PrepError
from prepcli.execution.failure_notes import FailureAge
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan
from prepcli.planning.shares import Division, divide_streams, subplan

PATIENCE_S = 600.0
REJOIN_S = 20.0  # within which processes that are started together have joined
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class ConversionTask:
    """A plan that is carried out in a staging folder, its streams divided among processes."""

    plan: Plan
    run_identity: dict[str, object]
    stage: Staging
    division: Division
    team: range = range(1)  # the processes, this one first, whose progress is shown as one

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the streams of each process."""
        return divide_streams(self.plan, self.division)

    @cached_property
    def own_plan(self) -> Plan:
        """The part of the plan that is this process's."""
        return self.share_plan(self.stage.share.index)

    def share_plan(self, index: int) -> Plan:
        """The part of the plan that is the share of process `index`."""
        return subplan(self.plan, set(self.shares[index]))

    @property
    def empty_digests(self) -> dict[int, str]:
        """The digests of the streams that have no bytes."""
        return {number: EMPTY_DIGEST for number, stream in enumerate(self.plan.streams) if not stream.nbytes}

    @contextlib.contextmanager
    def open_journal(self, index: int | None = None, kept: JournalState | None = None) -> Iterator[Journal]:
        """The journal of process `index` (this one by default), which begins with what is `kept` (all by default)."""
        index = self.stage.share.index if index is None else index
        identity, division, numbers = str(self.run_identity["plan"]), self.division.label, self.shares[index]
        path = self.stage.journal_path_of(index)
        journal = Journal(path, identity, division, numbers, session=self.stage.session, state=kept)
        try:
            yield journal
        finally:
            journal.close()

    def read_marked(self, index: int) -> JournalState:
        """What is durable of the share of process `index`."""
        path = self.stage.journal_path_of(index)
        try:
            return read_journal(path, str(self.run_identity["plan"]), self.division.label)
        except OSError as error:
            raise io_error(path, error) from error

    def durable_part(self, index: int, marked: JournalState) -> JournalState:
        """What is durable of the share of process `index`, by its journal and by the division."""
        known = {**self.division.durable_digests, **marked.digests}
        digests = {number: known[number] for number in self.shares[index] if number in known}
        nbytes = sum(self.plan.streams[number].nbytes for number in digests)
        prefix = marked.prefix if marked.prefix and marked.prefix.stream_number not in digests else None
        return JournalState(nbytes + (prefix.nbytes if prefix else 0), digests, prefix, marked.session)

    def is_complete(self, index: int, marked: JournalState) -> bool:
        """Whether the share of process `index` is done."""
        digests = self.durable_part(index, marked).digests
        return all(number in digests or not self.plan.streams[number].nbytes for number in self.shares[index])

    def is_verified(self, index: int, marked: JournalState) -> bool:
        """Whether all that is durable of a share was written, or read back, by the processes that are at work now."""
        return marked.session == self.stage.session or not self.durable_part(index, marked).durable_nbytes

    def unverified_shares(self) -> list[int]:
        """The processes whose shares are still to be read back."""
        return [i for i in range(self.division.count) if not self.is_verified(i, self.read_marked(i))]

    def durable_digests(self) -> dict[int, str]:
        """The digests of all streams that are durable."""
        found = dict(self.division.durable_digests)
        for index in range(self.division.count):
            found |= self.read_marked(index).digests
        return found

    def team_nbytes(self) -> tuple[int, int]:
        """Bytes that are durable, and all bytes, of the shares of the team."""
        numbers = [number for index in self.team for number in self.shares[index]]
        total = sum(self.plan.streams[number].nbytes for number in numbers)
        return sum(self.read_marked(index).durable_nbytes for index in self.team), total


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """How to wait for other processes: for how long without a sign of life, what raises when a worker has failed, and
    who shows lines."""

    patience_s: float = PATIENCE_S
    check_workers: Callable[[], None] = lambda: None
    note: Callable[[str], None] = lambda text: None


def work_together(
    task: ConversionTask,
    move_share: Callable[[], PipelineResult],
    publish: Callable[[PipelineResult], None],
    wait_options: WaitOptions,
) -> PipelineResult:
    """Move this process's share, wait for the others, and finish the output unless another process has done so.

    Args:
        task: The plan and this process's share of it.
        move: Moves the share. The other processes are told if it raises.
        finish: Publishes the output, given the digests of all streams. One process at a time calls it.
        waiting: How to wait for the other processes.

    Returns:
        What `move` returned.

    Raises:
        PrepError: Another process failed, or gave no sign of life for too long; whatever the callables raise.
    """
    with task.stage.failures.recording_errors():
        outcome = move_share()
    task.stage.mark_moved()
    others = _Peers(task, wait_options)
    while True:
        digests = others.wait()
        with task.stage.holding_publish_lock() as is_needed:
            if not is_needed:
                return outcome
            if task.stage.all_moved():
                others.check_new()
                publish(dataclasses.replace(outcome, digests=task.empty_digests | digests))
                return outcome
        others.pause([])


def wait_for_all(task: ConversionTask, wait_options: WaitOptions) -> dict[int, str]:
    """The digests of all streams that have bytes, once each is durable; fewer if the output was published meanwhile.

    PrepError: another process failed, or gives no sign of life for too long; whatever `alarm` raises.
    """
    return _Peers(task, wait_options).wait()


@dataclass(slots=True)
class _Peers:
    """What is known of each process."""

    task: ConversionTask
    wait_options: WaitOptions
    marked: dict[int, JournalState] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    last_seen_s: dict[int, float] = field(default_factory=dict)  # when they gave a sign of life

    def wait(self) -> dict[int, str]:
        """As `wait_for_all`."""
        task, behind = self.task, self.poll()
        if set(behind) - set(task.team):
            missing = f"{_join_numbers(behind)} of {task.division.count}"
            self.wait_options.note(f"share {task.stage.share} is done; waiting for {missing}")
        while behind and not task.stage.is_published():
            self.pause(behind)
            behind = self.poll()
        found = dict(task.division.durable_digests)
        for marked in self.marked.values():
            found |= marked.digests
        return found

    def pause(self, behind: Collection[int]) -> None:
        """Wait a moment. PrepError if one of these will not come to its end, or any other process failed."""
        with self.task.stage.failures.recording_errors():
            self.wait_options.check_workers()
        self.check(behind)
        time.sleep(LOOK_EVERY_S)

    def check_new(self) -> None:
        """Raise the failure of a process that failed when its share was durable already."""
        for index in range(self.task.division.count):
            failure = self.task.stage.failures.find(index)
            if failure is not None and failure.age is FailureAge.NEW:
                raise failure.error

    def poll(self) -> list[int]:
        """Read the journals of those who were not done; who still is not."""
        now = time.monotonic()
        for index in range(self.task.division.count):
            if index not in self.complete:
                marked = self.task.read_marked(index)
                if marked != self.marked.get(index):
                    self.last_seen_s[index] = now
                self.marked[index] = marked
                if self.task.is_complete(index, marked):
                    self.complete.add(index)
        return [index for index in range(self.task.division.count) if index not in self.complete]

    def check(self, behind: Collection[int]) -> None:
        """PrepError if one of these will not come to its end."""
        stage, now, patience_s = self.task.stage, time.monotonic(), self.wait_options.patience_s
        if stage.share.index in behind and not stage.is_published():
            why = "the journal of what was written is not there any more"
            raise PrepError(f"{stage.folder} was changed by somebody else", why, "remove it, and run again")
        for index in range(self.task.division.count):
            if index not in self.task.team:  # whose workers `alarm` tells of
                self._check_one(index, now, is_over=not behind)
        gone = [index for index in behind if now - self.last_seen_s[index] > patience_s]
        if gone and not stage.is_published():
            raise self._missing_error(gone)

    def _check_one(self, index: int, now: float, *, is_over: bool) -> None:
        """Raise the failure of a process. One that failed before this process joined has a moment to come back, and is
        not needed where all shares are durable."""
        stage = self.task.stage
        if stage.is_running(index):
            self.last_seen_s[index] = now
            return
        failure = stage.failures.find(index)
        if failure is None or failure.age is FailureAge.OLD:
            return
        has_had_time = not is_over and now - stage.failures.joined_at_s > min(REJOIN_S, self.wait_options.patience_s)
        if (failure.age is FailureAge.NEW or has_had_time) and not stage.is_published():
            raise failure.error

    def _missing_error(self, gone: Sequence[int]) -> PrepError:
        share, count = self.task.stage.share, self.task.division.count
        failures = filter(None, map(self.task.stage.failures.find, gone))
        why = f"no sign of it for {format_duration(self.wait_options.patience_s)}; share {share} is done and kept"
        why += "".join(f"; before, {failure.error.what}" for failure in failures)
        hint = f"run it again with `--processes {count}/{gone[0]}`, and this one to see it end"
        return PrepError(f"process {_join_numbers(gone)} of {count} is not at work", why, hint, STOPPED)


def _join_numbers(indices: Collection[int]) -> str:
    return ", ".join(map(str, indices))
