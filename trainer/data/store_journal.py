"""The journal of an incomplete token store, from which a later run continues it.

Each line of `journal.jsonl` is a `SavedState`: the sizes and digests of the files at a moment, and the examples that
they hold. A line is written after the bytes that it names are on disk.
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

from trainer.data.read_position import ReadPosition
from trainer.data.store import DIGEST_READ_NBYTES, StoreMeta, file_sizes
from trainer.files.json_values import load_json
from trainer.files.reading import read_regular_file
from trainer.models.errors import PrepError

JOURNAL_FILE = "journal.jsonl"
INTERVAL_S = 1.0  # between two lines; a kill loses this time and that of syncing


@dataclass(frozen=True, slots=True)
class SavedState:
    """An incomplete store whose bytes are on disk.

    Attributes:
        meta: Counts and digests of the store.
        position: Its examples.
    """

    meta: StoreMeta
    position: ReadPosition


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """The state at which files were cut off, and the running digest of each file by name."""

    state: SavedState
    digests: Mapping[str, xxhash.xxh3_128]


def read_journal(folder: Path) -> list[SavedState]:
    """Return the states in the journal of a store, oldest first; a line that was cut off ends them."""
    try:
        lines = read_regular_file(folder / JOURNAL_FILE).split(b"\n")
    except (OSError, PrepError):
        return []
    return list(_parse_lines(lines[:-1]))


def _parse_lines(lines: Iterable[bytes]) -> Iterator[SavedState]:
    for line in lines:
        try:
            values = load_json(line)
            yield SavedState(StoreMeta(**values["meta"]), ReadPosition.from_json(values["position"]))
        except (ValueError, TypeError, KeyError):
            return


def restore_files(files: Mapping[str, BinaryIO], states: Iterable[SavedState], empty: SavedState) -> RestoredFiles:
    """Cut files off at the last state of a journal up to which their bytes have the recorded digests.

    Args:
        files: The files by name, open for reading and writing, at their start.
        states: States of the journal, oldest first.
        empty: State of the store without any token. States of another store or dtype are invalid.

    Returns:
        The state and the running digests; the files are at their new end.
    """
    running = {name: xxhash.xxh3_128() for name in files}
    restored = RestoredFiles(empty, {name: state.copy() for name, state in running.items()})
    for state in states:
        if not _is_same_store(state.meta, empty.meta) or not _matches(files, running, state.meta):
            break
        restored = RestoredFiles(state, {name: state.copy() for name, state in running.items()})
    sizes = file_sizes(restored.state.meta)
    for name, file in files.items():
        file.seek(sizes[name])
        file.truncate()
    return restored


def _is_same_store(meta: StoreMeta, other: StoreMeta) -> bool:
    return (meta.identity, meta.dtype, {*meta.digests}) == (other.identity, other.dtype, {*other.digests})


def _matches(files: Mapping[str, BinaryIO], running: Mapping[str, xxhash.xxh3_128], meta: StoreMeta) -> bool:
    """Read files on to the sizes of a state; return whether their digests are those of the state."""
    sizes = file_sizes(meta)
    for name, file in files.items():
        while (missing := sizes[name] - file.tell()) > 0 and (data := file.read(min(missing, DIGEST_READ_NBYTES))):
            running[name].update(data)
    return all(
        file.tell() == sizes[name] and running[name].hexdigest() == meta.digests[name] for name, file in files.items()
    )


class StoreJournal:
    """Writer of the journal of an incomplete store. Files are synced in a thread, so that tokenizing goes on."""

    def __init__(
        self,
        folder: Path,
        files: Iterable[BinaryIO],
        state: SavedState,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a journal in place of that of an earlier run.

        Args:
            folder: The store.
            files: Its files.
            state: State of the files.
            clock: Returns the time in seconds.
        """
        self._files, self._clock = tuple(files), clock
        self._journal = _replace_journal(folder / JOURNAL_FILE, state)
        self._executor = ThreadPoolExecutor(1, "journal")
        self._pending: Future[None] | None = None
        self._saved_at_s = clock()

    def is_due(self) -> bool:
        """Return whether a state should be saved now: the last one is INTERVAL_S old, and is on disk."""
        is_idle = self._pending is None or self._pending.done()
        return is_idle and self._clock() - self._saved_at_s >= INTERVAL_S

    def save(self, state: SavedState) -> None:
        """Begin to save a state of the files; raise OSError if the last one could not be saved."""
        self._wait()
        for file in self._files:
            file.flush()
        self._saved_at_s = self._clock()
        self._pending = self._executor.submit(self._write, state)

    def _write(self, state: SavedState) -> None:
        for file in self._files:
            os.fdatasync(file.fileno())
        _write_line(self._journal, state)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """Wait for the last state and close the journal; raise OSError if it could not be saved."""
        try:
            self._wait()
        finally:
            self._executor.shutdown()
            self._journal.close()


def _replace_journal(path: Path, state: SavedState) -> BinaryIO:
    """Replace a journal, whose end may be cut off, by one with a single state; return the open file."""
    new = path.with_suffix(".new")
    journal = new.open("wb")
    _write_line(journal, state)
    new.replace(path)
    return journal


def _write_line(journal: BinaryIO, state: SavedState) -> None:
    """Append a state to a journal and sync it."""
    journal.write(json.dumps(asdict(state)).encode() + b"\n")
    journal.flush()
    os.fdatasync(journal.fileno())
