"""Coordination of processes that write one output: their shares, their durable bytes, and waiting for each other."""

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
from prepcli.errors import RERUN_HINT, STOPPED, PrepError
from prepcli.execution.failure_notes import FailureAge
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan
from prepcli.planning.shares import Division, divide_streams, subplan

PATIENCE_S = 600.0
REJOIN_S = 20.0  # time within which processes that are started together have joined
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class ConversionTask:
    """A plan and its staging folder, with the streams divided among processes.

    Attributes:
        plan: The plan of the whole output.
        run_identity: The identity that all processes of the run share.
        stage: The staging folder, opened by this process.
        division: How the streams are divided.
        team: Indices of the processes, beginning with this one, whose progress is shown as one.
    """

    plan: Plan
    run_identity: dict[str, object]
    stage: Staging
    division: Division
    team: range = range(1)

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Stream numbers of each process."""
        return divide_streams(self.plan, self.division)

    @cached_property
    def own_plan(self) -> Plan:
        """This process's part of the plan."""
        return self.share_plan(self.stage.share.index)

    def share_plan(self, index: int) -> Plan:
        """Return the part of the plan that process `index` executes."""
        return subplan(self.plan, set(self.shares[index]))

    @property
    def empty_digests(self) -> dict[int, str]:
        """Digests of the streams without bytes."""
        return {number: EMPTY_DIGEST for number, stream in enumerate(self.plan.streams) if not stream.nbytes}

    @contextlib.contextmanager
    def open_journal(self, index: int | None = None, state: JournalState | None = None) -> Iterator[Journal]:
        """Open the journal of process `index` (default: this process), which begins with `state`."""
        index = self.stage.share.index if index is None else index
        run_id, division, stream_numbers = str(self.run_identity["plan"]), self.division.label, self.shares[index]
        path = self.stage.journal_path_of(index)
        journal = Journal(
            path, run_id, division=division, stream_numbers=stream_numbers, session=self.stage.session, state=state
        )
        try:
            yield journal
        finally:
            journal.close()

    def read_journal_state(self, index: int) -> JournalState:
        """Return the durable state in the journal of process `index`."""
        path = self.stage.journal_path_of(index)
        try:
            return read_journal(path, str(self.run_identity["plan"]), division=self.division.label)
        except OSError as error:
            raise io_error(path, error) from error

    def durable_part(self, index: int, journal_state: JournalState) -> JournalState:
        """Return the durable part of the share of process `index`, from its journal and the division."""
        known = {**self.division.durable_digests, **journal_state.digests}
        digests = {number: known[number] for number in self.shares[index] if number in known}
        nbytes = sum(self.plan.streams[number].nbytes for number in digests)
        prefix = (
            journal_state.prefix if journal_state.prefix and journal_state.prefix.stream_number not in digests else None
        )
        return JournalState(nbytes + (prefix.nbytes if prefix else 0), digests, prefix, journal_state.session)

    def is_complete(self, index: int, journal_state: JournalState) -> bool:
        """Return whether all streams of the share of process `index` are durable."""
        digests = self.durable_part(index, journal_state).digests
        return all(number in digests or not self.plan.streams[number].nbytes for number in self.shares[index])

    def is_verified(self, index: int, journal_state: JournalState) -> bool:
        """Return whether the running processes wrote, or read back, all durable bytes of a share."""
        return journal_state.session == self.stage.session or not self.durable_part(index, journal_state).durable_nbytes

    def unverified_shares(self) -> list[int]:
        """Return the indices of shares not read back yet."""
        return [i for i in range(self.division.count) if not self.is_verified(i, self.read_journal_state(i))]

    def durable_digests(self) -> dict[int, str]:
        """Return the digests of all durable streams."""
        digests = dict(self.division.durable_digests)
        for index in range(self.division.count):
            digests |= self.read_journal_state(index).digests
        return digests

    def team_nbytes(self) -> tuple[int, int]:
        """Return the durable bytes and all bytes of the team's shares."""
        numbers = [number for index in self.team for number in self.shares[index]]
        total = sum(self.plan.streams[number].nbytes for number in numbers)
        return sum(self.read_journal_state(index).durable_nbytes for index in self.team), total


@dataclass(frozen=True, slots=True)
class WaitOptions:
    """Options of waiting for other processes.

    Attributes:
        patience_s: Seconds without a sign of life before a process counts as missing.
        check_workers: Raises an error if a worker has failed.
        note: Prints a line for the user.
    """

    patience_s: float = PATIENCE_S
    check_workers: Callable[[], None] = lambda: None
    note: Callable[[str], None] = lambda text: None


def work_together(
    task: ConversionTask,
    move_share: Callable[[], PipelineResult],
    *,
    publish: Callable[[PipelineResult], None],
    wait_options: WaitOptions,
) -> PipelineResult:
    """Move this process's share, wait for the other processes, and publish unless another process has done so.

    Args:
        task: The plan and this process's share of it.
        move_share: Moves the share. If it raises, a failure note informs the other processes.
        publish: Publishes the output, given the digests of all streams. One process at a time calls it.
        wait_options: How to wait for the other processes.

    Returns:
        The result of `move_share`.

    Raises:
        PrepError: Another process failed or is missing, or a callable raised.
    """
    with task.stage.failures.recording_errors():
        outcome = move_share()
    task.stage.mark_moved()
    peers = Peers(task, wait_options)
    while True:
        digests = peers.wait()
        with task.stage.holding_publish_lock() as is_needed:
            if not is_needed:
                return outcome
            if task.stage.all_moved():
                peers.check_new()
                publish(dataclasses.replace(outcome, digests=task.empty_digests | digests))
                return outcome
        peers.pause([])


@dataclass(slots=True)
class Peers:
    """State of each process, as read from its journal.

    Attributes:
        task: The plan and this process's share of it.
        wait_options: How to wait for the other processes.
        journal_states: The last state of each journal.
        complete: Processes with durable shares.
        last_seen_s: Time of the last sign of life of each process.
    """

    task: ConversionTask
    wait_options: WaitOptions
    journal_states: dict[int, JournalState] = field(default_factory=dict)
    complete: set[int] = field(default_factory=set)
    last_seen_s: dict[int, float] = field(default_factory=dict)

    def wait(self) -> dict[int, str]:
        """Wait until all streams are durable, or the output is published.

        Returns:
            Digests of all streams with bytes; fewer if the output was published meanwhile.

        Raises:
            PrepError: Another process failed or is missing, or `check_workers` raised.
        """
        task, unfinished = self.task, self.poll()
        if set(unfinished) - set(task.team):
            done = f"share {task.stage.share.index} of {task.division.count}"
            shares = "share" if len(unfinished) == 1 else "shares"
            self.wait_options.note(f"{done} is done; waiting for {shares} {_join_numbers(unfinished)}")
        while unfinished and not task.stage.is_published():
            self.pause(unfinished)
            unfinished = self.poll()
        digests = dict(task.division.durable_digests)
        for journal_state in self.journal_states.values():
            digests |= journal_state.digests
        return digests

    def pause(self, unfinished: Collection[int]) -> None:
        """Wait a moment. PrepError if one of the processes `unfinished` is missing, or any process failed."""
        with self.task.stage.failures.recording_errors():
            self.wait_options.check_workers()
        self.check(unfinished)
        time.sleep(LOOK_EVERY_S)

    def check_new(self) -> None:
        """Raise the failure of a process that failed after its share was durable."""
        for index in range(self.task.division.count):
            failure = self.task.stage.failures.find(index)
            if failure is not None and failure.age is FailureAge.NEW:
                raise failure.error

    def poll(self) -> list[int]:
        """Read the journals of unfinished processes; return the indices of processes still unfinished."""
        now = time.monotonic()
        for index in range(self.task.division.count):
            if index not in self.complete:
                journal_state = self.task.read_journal_state(index)
                if journal_state != self.journal_states.get(index):
                    self.last_seen_s[index] = now
                self.journal_states[index] = journal_state
                if self.task.is_complete(index, journal_state):
                    self.complete.add(index)
        return [index for index in range(self.task.division.count) if index not in self.complete]

    def check(self, unfinished: Collection[int]) -> None:
        """Raise PrepError if one of the processes `unfinished` will not finish."""
        stage, now, patience_s = self.task.stage, time.monotonic(), self.wait_options.patience_s
        if stage.share.index in unfinished and not stage.is_published():
            why = "the journal of the written bytes was removed"
            raise PrepError(f"{stage.folder} was changed by another program", why, f"remove it, then {RERUN_HINT}")
        for index in range(self.task.division.count):
            if index not in self.task.team:  # `check_workers` covers the team
                self._check_one(index, now, is_over=not unfinished)
        missing = [index for index in unfinished if now - self.last_seen_s[index] > patience_s]
        if missing and not stage.is_published():
            raise self._missing_error(missing)

    def _check_one(self, index: int, now: float, *, is_over: bool) -> None:
        """Raise the failure of a process.

        A process that failed before this process joined has REJOIN_S to return. It is not needed once all shares are
        durable.
        """
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

    def _missing_error(self, missing: Sequence[int]) -> PrepError:
        share, count = self.task.stage.share, self.task.division.count
        failures = filter(None, map(self.task.stage.failures.find, missing))
        done = f"share {share.index} of {count} is done and kept"
        why = f"no sign of life for {format_duration(self.wait_options.patience_s)}; {done}"
        why += "".join(f"; earlier, {failure.error.what}" for failure in failures)
        hint = f"run the missing process with `--processes {count}/{missing[0]}`, and this one again"
        return PrepError(f"process {_join_numbers(missing)} of {count} is not running", why, hint, STOPPED)


def _join_numbers(indices: Collection[int]) -> str:
    return ", ".join(map(str, indices))
