"""The processes of one output: their shares, their durable bytes, and waiting for each other.

They exchange no messages. Each appends to its journal in the staging folder, and the other processes read it. A process
is complete when its journal lists all streams of its share. Its lock shows that it still runs.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cached_property

from prepcli.core.errors import RERUN_HINT, STOPPED, Option, PrepError, text
from prepcli.core.formatting import format_duration
from prepcli.engine.journal import Journal, JournalState, read_journal
from prepcli.engine.pipeline import EMPTY_DIGEST
from prepcli.execution.failure_notes import FailureAge
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan
from prepcli.planning.shares import divide_streams, subplan
from prepcli.stores.files import io_error

# A lock may be invisible on another machine. A process there shows life only by new lines in its
# journal, and it writes none while it reads the bytes of an earlier run back.
PATIENCE_S = 600.0
# A failure noted before this process joined may be of an earlier attempt. The failed process has
# this time to join again, because launchers do not start all processes at once.
REJOIN_S = 20.0
LOOK_EVERY_S = 0.2
# Each look reads the journals of all other processes.
LOOK_S_PER_PROCESS = 0.005


class Team:
    """The processes of one output, as seen by one of them.

    Attributes:
        plan: The plan of the whole output.
        stage: The staging folder, opened by this process.
        run_id: Digest of the plan. It identifies the run in journals.
        own_indices: Indices of this process and its workers. Their progress is shown as one.
        check_workers: Raises the error of a failed worker.
        note: Prints a line for the user.
        patience_s: Seconds without a sign of life before a process counts as missing.
    """

    def __init__(
        self,
        plan: Plan,
        stage: Staging,
        run_id: str,
        *,
        own_indices: range,
        check_workers: Callable[[], None] = lambda: None,
        note: Callable[[str], None] = lambda text: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.plan = plan
        self.stage = stage
        self.run_id = run_id
        self.own_indices = own_indices
        self.check_workers = check_workers
        self.note = note
        self.patience_s = patience_s
        self._journal_states: dict[int, JournalState] = {}
        self._complete: set[int] = set()
        # Time of the last sign of life of each process: a changed journal, or a held lock.
        self._last_seen_s: dict[int, float] = {}

    @property
    def count(self) -> int:
        """Number of processes."""
        return self.stage.share.count

    @cached_property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """Stream numbers of each process."""
        return divide_streams(self.plan, self.count, durable=self.stage.durable_digests.keys())

    def share_plan(self, index: int) -> Plan:
        """Return the part of the plan of process `index`."""
        return subplan(self.plan, set(self.shares[index]))

    # Durable bytes

    @contextlib.contextmanager
    def open_journal(self, index: int, state: JournalState | None = None) -> Iterator[Journal]:
        """Open the journal of process `index`. It begins with `state`, or else with its existing content."""
        journal = Journal(
            self.stage.journal_path(index),
            self.run_id,
            division=self.stage.division_label,
            stream_numbers=self.shares[index],
            session=self.stage.session,
            state=state,
        )
        try:
            yield journal
        finally:
            journal.close()

    def read_journal_state(self, index: int) -> JournalState:
        """Return the durable state in the journal of process `index`."""
        path = self.stage.journal_path(index)
        try:
            return read_journal(path, self.run_id, division=self.stage.division_label)
        except OSError as error:
            raise io_error(path, error) from error

    def durable_part(self, index: int, journal_state: JournalState) -> JournalState:
        """Return the durable part of the share of process `index`.

        A share is the streams that one process writes. A stream is durable once its bytes are synced to the disk: the
        journal of the process lists it, or it was written before the streams were divided among the processes.

        Args:
            index: Number of the process.
            journal_state: State of its journal.
        """
        # A stream that is written again after damage has its newer digest in the journal.
        known_digests = {**self.stage.durable_digests, **journal_state.digests}
        digests: dict[int, str] = {}
        durable_nbytes = 0
        for number in self.shares[index]:
            if number in known_digests:
                digests[number] = known_digests[number]
                durable_nbytes += self.plan.streams[number].nbytes
        prefix = journal_state.prefix
        if prefix and prefix.stream_number in digests:
            prefix = None
        if prefix:
            durable_nbytes += prefix.nbytes
        return JournalState(durable_nbytes, digests, prefix, journal_state.session)

    def is_complete(self, index: int, journal_state: JournalState) -> bool:
        """Return whether all streams of the share of process `index` are durable."""
        digests = self.durable_part(index, journal_state).digests
        # Streams without bytes appear in no journal.
        return all(
            number in digests or not self.plan.streams[number].nbytes
            for number in self.shares[index]
        )

    def unverified_shares(self) -> list[int]:
        """Return the shares with durable bytes that no running process has written or read back."""
        unverified: list[int] = []
        for index in range(self.count):
            state = self.read_journal_state(index)
            is_from_this_session = state.session == self.stage.session
            if not is_from_this_session and self.durable_part(index, state).durable_nbytes:
                unverified.append(index)
        return unverified

    def all_digests(self) -> dict[int, str]:
        """Return the digests of all durable streams, and of streams without bytes."""
        digests: dict[int, str] = {}
        for number, stream in enumerate(self.plan.streams):
            if not stream.nbytes:
                digests[number] = EMPTY_DIGEST
        digests |= self.stage.durable_digests
        for index in range(self.count):
            digests |= self.read_journal_state(index).digests
        return digests

    def durable_and_total_nbytes(self) -> tuple[int, int]:
        """Return the durable bytes and all bytes of the shares of this process and its workers."""
        durable_nbytes = 0
        total_nbytes = 0
        for index in self.own_indices:
            durable_nbytes += self.read_journal_state(index).durable_nbytes
            total_nbytes += sum(self.plan.streams[number].nbytes for number in self.shares[index])
        return durable_nbytes, total_nbytes

    # Working together

    @contextlib.contextmanager
    def publishing(self) -> Iterator[bool]:
        """Wait until all shares are durable, and hold the publish lock inside the context.

        Yields:
            Whether this process must publish the output, because no other process has done so.

        Raises:
            PrepError: Another process failed or is missing.
        """
        # The order of one process: move, wait for all journals, take the publish lock, look again, publish.
        # A kill before the publication leaves the staging folder with all journals: the process that is
        # started again finds its share complete. A kill after it is found by `is_published`.
        while True:
            self.wait()
            with self.stage.holding_publish_lock() as is_needed:
                # A process that joined again has a complete journal from its earlier life, and may be rewriting
                # damaged streams of its share. No process can join while the publish lock is held.
                if not is_needed or self.stage.all_moved():
                    if is_needed:
                        self._check_new_failures()
                    yield is_needed
                    return
            self._pause_and_check([])

    def wait(self) -> None:
        """Wait until all streams are durable, or the output is published.

        Raises:
            PrepError: Another process failed or is missing, or `check_workers` raised.
        """
        unfinished = self._poll_journals()
        if set(unfinished) - set(self.own_indices):
            noun = "share" if len(unfinished) == 1 else "shares"
            self.note(
                f"share {self.stage.share.index} of {self.count} is done;"
                f" waiting for {noun} {_join_numbers(unfinished)}"
            )
        while unfinished and not self.stage.is_published():
            self._pause_and_check(unfinished)
            unfinished = self._poll_journals()

    def _pause_and_check(self, unfinished: Collection[int]) -> None:
        """Wait a moment. Raise PrepError if one of the processes `unfinished` is missing, or any process failed."""
        with self.stage.failures.recording_errors():
            self.check_workers()
        self._check_processes(unfinished)
        time.sleep(look_s(self.count))

    def _poll_journals(self) -> list[int]:
        """Read the journals of unfinished processes. Return the indices of processes still unfinished."""
        now_s = time.monotonic()
        unfinished: list[int] = []
        for index in range(self.count):
            if index in self._complete:
                continue
            journal_state = self.read_journal_state(index)
            if journal_state != self._journal_states.get(index):
                self._last_seen_s[index] = now_s
            self._journal_states[index] = journal_state
            if self.is_complete(index, journal_state):
                self._complete.add(index)
            else:
                unfinished.append(index)
        return unfinished

    def _check_new_failures(self) -> None:
        """Raise the failure of a process with a durable share."""
        for index in range(self.count):
            failure = self.stage.failures.find(index)
            if failure is not None and failure.age is FailureAge.NEW:
                raise failure.error

    def _check_processes(self, unfinished: Collection[int]) -> None:
        """Raise PrepError if one of the processes `unfinished` will not finish."""
        now_s = time.monotonic()
        if self.stage.share.index in unfinished and not self.stage.is_published():
            raise PrepError(
                f"{self.stage.folder} was changed by another program",
                "the journal of the written bytes was removed",
                f"remove the folder, then {RERUN_HINT}",
            )
        for index in range(self.count):
            # `check_workers` covers the workers
            if index not in self.own_indices:
                self._check_process(index, now_s, is_over=not unfinished)
        # Only now: `_check_process` above has updated the times of the last signs of life.
        missing: list[int] = []
        for index in unfinished:
            if now_s - self._last_seen_s[index] > self.patience_s:
                missing.append(index)
        if missing and not self.stage.is_published():
            raise self._missing_processes_error(missing)

    def _check_process(self, index: int, now_s: float, *, is_over: bool) -> None:
        """Raise the failure of a process.

        A process that failed before this process joined has REJOIN_S to return. It is not needed once all shares are
        durable.
        """
        if self.stage.is_running(index):
            self._last_seen_s[index] = now_s
            return
        failures = self.stage.failures
        failure = failures.find(index)
        if failure is None or failure.age is FailureAge.OLD:
            return
        waited_s = now_s - failures.joined_at_s
        has_had_time = not is_over and waited_s > min(REJOIN_S, self.patience_s)
        # The process may have published, and then ended. Its old failure note is then of no interest.
        if (failure.age is FailureAge.NEW or has_had_time) and not self.stage.is_published():
            raise failure.error

    def _missing_processes_error(self, missing: Sequence[int]) -> PrepError:
        why = (
            f"no sign of life for {format_duration(self.patience_s)};"
            f" share {self.stage.share.index} of {self.count} is done and kept"
        )
        for index in missing:
            failure = self.stage.failures.find(index)
            if failure is not None:
                why += f"; earlier, {failure.error.what}"
        return PrepError(
            f"process {_join_numbers(missing)} of {self.count} is not running",
            why,
            text(
                "run the missing process with {}, and this one again",
                Option("processes", f"{self.count}/{missing[0]}"),
            ),
            STOPPED,
        )


def look_s(count: int) -> float:
    """Return the seconds between two looks at the journals of `count` processes.

    >>> look_s(2), look_s(4096)
    (0.21, 20.68)
    """
    return round(LOOK_EVERY_S + LOOK_S_PER_PROCESS * count, 3)


def _join_numbers(indices: Collection[int]) -> str:
    return ", ".join(map(str, indices))
