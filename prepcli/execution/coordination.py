"""Processes that write one output together: whose what is, what is durable, and how to wait for each other."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from prepcli.console.formatting import seconds_text
from prepcli.engine.files import io_error
from prepcli.engine.journal import Journal, Marked, read_journal
from prepcli.engine.pipeline import NO_BYTES, Outcome
from prepcli.errors import STOPPED, PrepError
from prepcli.execution.failure_notes import Age
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan
from prepcli.planning.shares import Division, divided, part_of

PATIENCE_S = 600.0
RETURN_S = 20.0  # within which processes that are started together have joined
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Task:
    """A plan that is carried out in a staging folder, its streams divided among processes."""

    plan: Plan
    run: dict[str, object]
    stage: Staging
    division: Division
    team: range = range(1)  # the processes, this one first, whose progress is shown as one

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the streams of each process."""
        return divided(self.plan, self.division)

    @cached_property
    def mine(self) -> Plan:
        """The part of the plan that is this process's."""
        return self.part(self.stage.share.index)

    def part(self, index: int) -> Plan:
        """The part of the plan that is the share of process `index`."""
        return part_of(self.plan, set(self.shares[index]))

    @property
    def empty(self) -> dict[int, str]:
        """The digests of the streams that have no bytes."""
        return {number: NO_BYTES for number, stream in enumerate(self.plan.streams) if not stream.nbytes}

    @contextlib.contextmanager
    def journal(self, index: int | None = None, kept: Marked | None = None) -> Iterator[Journal]:
        """The journal of process `index` (this one by default), which begins with what is `kept` (all by default)."""
        index = self.stage.share.index if index is None else index
        identity, division, numbers = str(self.run["plan"]), self.division.name, self.shares[index]
        path = self.stage.journal_of(index)
        journal = Journal(path, identity, division, numbers, session=self.stage.session, kept=kept)
        try:
            yield journal
        finally:
            journal.close()

    def marked(self, index: int) -> Marked:
        """What is durable of the share of process `index`."""
        path = self.stage.journal_of(index)
        try:
            return read_journal(path, str(self.run["plan"]), self.division.name)
        except OSError as error:
            raise io_error(path, error) from error

    def promised(self, index: int, marked: Marked) -> Marked:
        """What is durable of the share of process `index`, by its journal and by the division."""
        known = {**self.division.done, **marked.digests}
        digests = {number: known[number] for number in self.shares[index] if number in known}
        nbytes = sum(self.plan.streams[number].nbytes for number in digests)
        prefix = marked.prefix if marked.prefix and marked.prefix.number not in digests else None
        return Marked(nbytes + (prefix.nbytes if prefix else 0), digests, prefix, marked.session)

    def is_whole(self, index: int, marked: Marked) -> bool:
        """Whether the share of process `index` is done."""
        digests = self.promised(index, marked).digests
        return all(number in digests or not self.plan.streams[number].nbytes for number in self.shares[index])

    def is_checked(self, index: int, marked: Marked) -> bool:
        """Whether all that is durable of a share was written, or read back, by the processes that are at work now."""
        return marked.session == self.stage.session or not self.promised(index, marked).nbytes

    def unchecked(self) -> list[int]:
        """The processes whose shares are still to be read back."""
        return [i for i in range(self.division.count) if not self.is_checked(i, self.marked(i))]

    def digests(self) -> dict[int, str]:
        """The digests of all streams that are durable."""
        found = dict(self.division.done)
        for index in range(self.division.count):
            found |= self.marked(index).digests
        return found

    def team_nbytes(self) -> tuple[int, int]:
        """Bytes that are durable, and all bytes, of the shares of the team."""
        numbers = [number for index in self.team for number in self.shares[index]]
        total = sum(self.plan.streams[number].nbytes for number in numbers)
        return sum(self.marked(index).nbytes for index in self.team), total


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait for other processes: for how long without a sign of life, what raises when a worker has failed, and
    who shows lines."""

    patience_s: float = PATIENCE_S
    alarm: Callable[[], None] = lambda: None
    note: Callable[[str], None] = lambda text: None


def work_together(
    task: Task, move: Callable[[], Outcome], finish: Callable[[Outcome], None], waiting: Waiting
) -> Outcome:
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
    with task.stage.failures.telling():
        outcome = move()
    task.stage.moved()
    others = _Others(task, waiting)
    while True:
        digests = others.wait()
        with task.stage.publishing() as is_needed:
            if not is_needed:
                return outcome
            if task.stage.is_moved():
                others.check_new()
                finish(dataclasses.replace(outcome, digests=task.empty | digests))
                return outcome
        others.pause([])


def wait_for_all(task: Task, waiting: Waiting) -> dict[int, str]:
    """The digests of all streams that have bytes, once each is durable; fewer if the output was published meanwhile.

    PrepError: another process failed, or gives no sign of life for too long; whatever `alarm` raises.
    """
    return _Others(task, waiting).wait()


@dataclass(slots=True)
class _Others:
    """What is known of each process."""

    task: Task
    waiting: Waiting
    marked: dict[int, Marked] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    seen_s: dict[int, float] = field(default_factory=dict)  # when they gave a sign of life

    def wait(self) -> dict[int, str]:
        """As `wait_for_all`."""
        task, behind = self.task, self.look()
        if set(behind) - set(task.team):
            missing = f"{_called(behind)} of {task.division.count}"
            self.waiting.note(f"share {task.stage.share} is done; waiting for {missing}")
        while behind and not task.stage.published():
            self.pause(behind)
            behind = self.look()
        found = dict(task.division.done)
        for marked in self.marked.values():
            found |= marked.digests
        return found

    def pause(self, behind: Collection[int]) -> None:
        """Wait a moment. PrepError if one of these will not come to its end, or any other process failed."""
        with self.task.stage.failures.telling():
            self.waiting.alarm()
        self.check(behind)
        time.sleep(LOOK_EVERY_S)

    def check_new(self) -> None:
        """Raise the failure of a process that failed when its share was durable already."""
        for index in range(self.task.division.count):
            failure = self.task.stage.failures.of(index)
            if failure is not None and failure.age is Age.NEW:
                raise failure.error

    def look(self) -> list[int]:
        """Read the journals of those who were not done; who still is not."""
        now = time.monotonic()
        for index in range(self.task.division.count):
            if index not in self.whole:
                marked = self.task.marked(index)
                if marked != self.marked.get(index):
                    self.seen_s[index] = now
                self.marked[index] = marked
                if self.task.is_whole(index, marked):
                    self.whole.add(index)
        return [index for index in range(self.task.division.count) if index not in self.whole]

    def check(self, behind: Collection[int]) -> None:
        """PrepError if one of these will not come to its end."""
        stage, now, patience_s = self.task.stage, time.monotonic(), self.waiting.patience_s
        if stage.share.index in behind and not stage.published():
            why = "the journal of what was written is not there any more"
            raise PrepError(f"{stage.folder} was changed by somebody else", why, "remove it, and run again")
        for index in range(self.task.division.count):
            if index not in self.task.team:  # whose workers `alarm` tells of
                self._check_one(index, now, is_over=not behind)
        gone = [index for index in behind if now - self.seen_s[index] > patience_s]
        if gone and not stage.published():
            raise self._gone(gone)

    def _check_one(self, index: int, now: float, *, is_over: bool) -> None:
        """Raise the failure of a process. One that failed before this process joined has a moment to come back, and is
        not needed where all shares are durable."""
        stage = self.task.stage
        if stage.is_at_work(index):
            self.seen_s[index] = now
            return
        failure = stage.failures.of(index)
        if failure is None or failure.age is Age.OLD:
            return
        has_had_time = not is_over and now - stage.failures.joined_s > min(RETURN_S, self.waiting.patience_s)
        if (failure.age is Age.NEW or has_had_time) and not stage.published():
            raise failure.error

    def _gone(self, gone: Sequence[int]) -> PrepError:
        share, count = self.task.stage.share, self.task.division.count
        failures = filter(None, map(self.task.stage.failures.of, gone))
        why = f"no sign of it for {seconds_text(self.waiting.patience_s)}; share {share} is done and kept"
        why += "".join(f"; before, {failure.error.what}" for failure in failures)
        hint = f"run it again with `--processes {count}/{gone[0]}`, and this one to see it end"
        return PrepError(f"process {_called(gone)} of {count} is not at work", why, hint, STOPPED)


def _called(indices: Collection[int]) -> str:
    return ", ".join(map(str, indices))
