"""The journal of an incomplete token store, for a later run to continue it.

Each line of `journal.jsonl` is a `SavedState`: the sizes and digests of the files at a moment, and
the examples in them. A line is written once its bytes are on disk.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from prepcli.core.errors import PrepError
from prepcli.core.json_values import load_json
from prepcli.stores.files import read_regular_file
from trainer.data.examples import ReadPosition
from trainer.data.store import DIGEST_READ_NBYTES, StoreMeta, file_sizes

JOURNAL_FILE = "journal.jsonl"
# Seconds between two lines. A kill loses the tokens of this time and of one sync.
INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state of an incomplete store, with all its bytes on disk.

    Attributes:
        meta: Counts and digests of the store.
        position: Read position after the examples of the store.
    """

    meta: StoreMeta
    position: ReadPosition


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """The last valid state of a journal and the running digest of each file by name. The files end at the state."""

    state: SavedState
    digests: Mapping[str, xxhash.xxh3_128]


def read_journal(folder: Path) -> list[SavedState]:
    """Return the states in the journal of a store, oldest first.

    Reading stops at the first malformed line, e.g. a line cut off by a kill.
    """
    try:
        lines = read_regular_file(folder / JOURNAL_FILE).split(b"\n")
    except (OSError, PrepError):
        return []
    return list(_parse_lines(lines[:-1]))


def _parse_lines(lines: Iterable[bytes]) -> Iterator[SavedState]:
    """Yield the states in lines, up to the first malformed line."""
    for line in lines:
        try:
            values = load_json(line)
            yield SavedState(
                StoreMeta(**values["meta"]), ReadPosition.from_json(values["position"])
            )
        except (ValueError, TypeError, KeyError):
            return


def restore_files(
    files: Mapping[str, BinaryIO], states: Iterable[SavedState], empty: SavedState
) -> RestoredFiles:
    """Cut files off at the last journal state with the digests of their bytes.

    Args:
        files: The files by name, open for reading and writing, at their start.
        states: States of the journal, oldest first.
        empty: State of the store without any token. States of another store or dtype are invalid.

    Returns:
        The state and the running digests. The files are at their new end.
    """
    # One pass over the files checks all states: the running digests are compared at the sizes of
    # each state, and copied where they match. After the last match, a copy is the digest of the cut
    # file.
    running = {name: xxhash.xxh3_128() for name in files}
    restored = RestoredFiles(empty, {name: state.copy() for name, state in running.items()})
    for state in states:
        if not _is_same_store(state.meta, empty.meta) or not _files_match_state(
            files, running, state.meta
        ):
            break
        restored = RestoredFiles(state, {name: state.copy() for name, state in running.items()})
    sizes = file_sizes(restored.state.meta)
    for name, file in files.items():
        file.seek(sizes[name])
        file.truncate()
    return restored


def _is_same_store(meta: StoreMeta, other: StoreMeta) -> bool:
    """Return whether two states belong to stores of the same data, dtype and files."""
    return (meta.identity, meta.dtype, {*meta.digests}) == (
        other.identity,
        other.dtype,
        {*other.digests},
    )


def _files_match_state(
    files: Mapping[str, BinaryIO], running: Mapping[str, xxhash.xxh3_128], meta: StoreMeta
) -> bool:
    """Read files up to the sizes of a state, and return whether the digests match."""
    sizes = file_sizes(meta)
    for name, file in files.items():
        while (missing := sizes[name] - file.tell()) > 0 and (
            data := file.read(min(missing, DIGEST_READ_NBYTES))
        ):
            running[name].update(data)
    return all(
        file.tell() == sizes[name] and running[name].hexdigest() == meta.digests[name]
        for name, file in files.items()
    )


class StoreJournal:
    """Writer of the journal of an incomplete store.

    Files are synced in a thread, in parallel with tokenizing.
    """

    def __init__(
        self,
        folder: Path,
        files: Iterable[BinaryIO],
        state: SavedState,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a journal, and replace the one of an earlier run.

        Args:
            folder: The store.
            files: Its files.
            state: State of the files.
            clock: Returns the time in seconds.
        """
        self._files = tuple(files)
        self._clock = clock
        self._journal = _replace_journal(folder / JOURNAL_FILE, state)
        self._executor = ThreadPoolExecutor(1, "journal")
        self._pending: Future[None] | None = None
        self._saved_at_s = clock()

    def is_due(self) -> bool:
        """Return whether the last saved state is on disk and at least INTERVAL_S old."""
        is_idle = self._pending is None or self._pending.done()
        return is_idle and self._clock() - self._saved_at_s >= INTERVAL_S

    def save(self, state: SavedState) -> None:
        """Start to save a state. Raise OSError if the previous one could not be saved."""
        self._wait_for_write()
        # The buffers belong to the calling thread, which goes on writing. They are flushed here, so
        # that the bytes of the state are in the page cache before the thread syncs them.
        for file in self._files:
            file.flush()
        self._saved_at_s = self._clock()
        self._pending = self._executor.submit(self._write_state, state)

    def _write_state(self, state: SavedState) -> None:
        """Append the line of a state. The files are synced first."""
        # First the bytes, then the line that records them. A kill in between leaves bytes after the
        # last recorded size, which the next run cuts off.
        for file in self._files:
            os.fdatasync(file.fileno())
        _write_line(self._journal, state)

    def _wait_for_write(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Wait for the last state and close the journal. Raise OSError if it could not be saved."""
        try:
            self._wait_for_write()
        finally:
            self._executor.shutdown()
            self._journal.close()


def _replace_journal(path: Path, state: SavedState) -> BinaryIO:
    """Replace a journal by one with a single state, and return the open file.

    The last line of the old journal may be cut off. A line appended to it could not be read.
    """
    # A kill before the rename leaves the old journal. A file with the suffix .new is overwritten.
    new = path.with_suffix(".new")
    journal = new.open("wb")
    _write_line(journal, state)
    # The folder is not synced. A power failure may undo the rename, and the old journal is valid too:
    # each of its states is compared with the digests of the files.
    new.replace(path)
    return journal


def _write_line(journal: BinaryIO, state: SavedState) -> None:
    """Append a state to a journal and sync it."""
    journal.write(json.dumps(asdict(state)).encode() + b"\n")
    journal.flush()
    os.fdatasync(journal.fileno())
