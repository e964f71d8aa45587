"""Processes that write one output together: whose what is, what is durable, and how to wait for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from prepcli.engine.files import io_error
from prepcli.engine.journal import Journal, Marked, read_journal
from prepcli.errors import STOPPED, PrepError
from prepcli.planning.plan import Plan
from prepcli.planning.shares import Division, divided, part_of
from prepcli.units import seconds_text
from prepcli.writing.staging import Staging

PATIENCE_S = 600.0
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


def wait_for_all(
    task: Task, patience_s: float, alarm: Callable[[], None], note: Callable[[str], None]
) -> dict[int, str]:
    """The digests of all streams that have bytes, once each is durable; fewer if the output was published meanwhile.

    PrepError: another process failed, or gives no sign of life for so long; whatever `alarm` raises.
    """
    others = _Others(task)
    behind = others.look()
    if set(behind) - set(task.team):
        note(f"share {task.stage.share} is done; waiting for {_called(behind)} of {task.division.count}")
    while behind and not task.stage.published():
        alarm()
        others.check(behind, patience_s)
        time.sleep(LOOK_EVERY_S)
        behind = others.look()
    return task.digests()


@dataclass(slots=True)
class _Others:
    """What is known of each process."""

    task: Task
    marked: dict[int, Marked] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    seen_s: dict[int, float] = field(default_factory=dict)  # when they gave a sign of life

    def look(self) -> list[int]:
        """Read the journals of those who were not done; who still is not."""
        for index in range(self.task.division.count):
            if index not in self.whole:
                marked = self.task.marked(index)
                if marked != self.marked.get(index):
                    self.seen_s[index] = time.monotonic()
                self.marked[index] = marked
                if self.task.is_whole(index, marked) and not self._is_reading_back(index, marked):
                    self.whole.add(index)
        return [index for index in range(self.task.division.count) if index not in self.whole]

    def _is_reading_back(self, index: int, marked: Marked) -> bool:
        """Whether process `index` has just come back and has not yet read back what it has."""
        return not self.task.is_checked(index, marked) and self.task.stage.is_at_work(index)

    def check(self, behind: Collection[int], patience_s: float) -> None:
        """PrepError if one of these will not come to its end."""
        stage, now = self.task.stage, time.monotonic()
        if stage.share.index in behind and not stage.published():
            why = "the journal of what was written is not there any more"
            raise PrepError(f"{stage.folder} was changed by somebody else", why, "remove it, and run again")
        for index in behind:
            if stage.is_at_work(index):
                self.seen_s[index] = now
            elif failure := stage.failure_of(index):
                raise failure
        gone = [index for index in behind if now - self.seen_s[index] > patience_s]
        if gone and not stage.published():
            count = self.task.division.count
            why = f"no sign of it for {seconds_text(patience_s)}; share {stage.share} is done and kept"
            hint = f"run it again with `--processes {count}/{gone[0]}`, and this one to see it end"
            raise PrepError(f"process {_called(gone)} of {count} is not at work", why, hint, STOPPED)


def _called(indices: Collection[int]) -> str:
    return ", ".join(map(str, indices))
