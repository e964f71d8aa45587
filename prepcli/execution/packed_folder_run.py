"""A run in a folder with compressed chunks. Each data file belongs to one unit, and is written once, in order."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import xxhash

from prepcli.engine.background_sync import SYNC_INTERVAL_S
from prepcli.engine.no_follow import check_no_symlinks, open_no_follow
from prepcli.engine.pipeline import MOST_UNSYNCED_NBYTES, PipelineUnit
from prepcli.engine.sync_files import sync_paths
from prepcli.execution.folder_run import FolderRun, check_free_space
from prepcli.execution.object_writer import ObjectBudget, ObjectWriter
from prepcli.execution.request import ExecutionRequest
from prepcli.execution.run_store import DONE_FOLDER
from prepcli.execution.unit_notes import UnitNote
from prepcli.execution.written_data import check_whole_file, is_intact_file
from prepcli.planning.work_units import find_work_units
from prepcli.stores.buffers import ByteArray
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.files import io_error


class PackedFolderRun(FolderRun):
    """Writes the compressed output of a plan to a folder. The data files of the plan are from `plan_object_files`."""

    def __init__(self, request: ExecutionRequest, out: Path) -> None:
        self._object_budget = ObjectBudget.of_plan(request.plan, request.pool.memory_nbytes)
        units = find_work_units(request.plan)
        super().__init__(request, out, units, self._object_budget.pipeline)
        # Notes of written units that are not synced yet. Several threads complete units.
        self._written: dict[int, UnitNote] = {}
        self._synced_s = time.monotonic()
        self._lock = threading.Lock()

    def check_room(self) -> None:
        """Raise PrepError if the disk has no room for the raw size of the remaining files. See `Run.check_room`."""
        noted = self.store.units_with(DONE_FOLDER)
        needed_nbytes = 0
        for number, unit in enumerate(self.units):
            if number not in noted:
                needed_nbytes += sum(self.plan.files[file].size for file in unit.files)
        check_free_space(self.folder_store.folder, needed_nbytes)

    def write_units(self, units: Iterator[PipelineUnit]) -> None:
        """Compress the chunks of units, and write their data files. See `Run.write_units`."""
        check_no_symlinks(self.folder_store.folder)
        sender = _FileWriter(self.folder_store.folder)
        ObjectWriter(self, sender, self._object_budget, on_done=self._add_written).write(units)
        self._note_durable()

    def _add_written(self, number: int, note: UnitNote) -> None:
        """Add the note of a written unit. Called in one of several threads."""
        with self._lock:
            self._written[number] = replace(note, session=self.session, writer=self.writer)
            nbytes = sum(file.size for unit in self._written.values() for file in unit.objects)
            is_late = time.monotonic() - self._synced_s >= SYNC_INTERVAL_S
            if is_late or nbytes >= MOST_UNSYNCED_NBYTES:
                self._note_durable()

    def _note_durable(self) -> None:
        """Sync the files of all written units, and note the units."""
        folder = self.folder_store.folder
        paths = [folder / file.path for note in self._written.values() for file in note.objects]
        try:
            sync_paths(paths)
        except OSError as error:
            raise io_error(Path(error.filename or folder), error) from error
        for number, note in self._written.items():
            self.result.written_nbytes += sum(file.size for file in note.objects)
            self.note_unit(number, note)
            self.release(number)
        self._written.clear()
        self._synced_s = time.monotonic()

    def find_damaged(self, batch: Mapping[int, UnitNote]) -> set[int]:
        """Return the streams of units with a damaged file. See `FolderRun.find_damaged`."""
        damaged: set[int] = set()
        for note in batch.values():
            for file in note.objects:
                if not is_intact_file(self.folder_store.folder / file.path, file):
                    damaged |= note.digests.keys()
        return damaged

    def keep_part(self, number: int, note: UnitNote) -> None:
        """Forget a damaged unit: a compressed file is written as a whole. See `FolderRun.keep_part`."""
        self.store.delete([f"{DONE_FOLDER}/{number}"])

    def check_data(self, digests: Mapping[int, str]) -> None:
        """Raise PrepError if another program has changed the data files. See `FolderRun.check_data`."""
        for note in self.notes.values():
            for file in note.objects:
                check_whole_file(self.folder_store.folder / file.path, file)


class _FileWriter:
    """Writes files from their pieces. The pieces of a file come in order, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._states: dict[str, xxhash.xxh3_128] = {}

    def send(
        self, path: str, data: ByteArray, *, start: int, size: int | None, max_nbytes: int = 0
    ) -> RemoteFile | None:
        """Write consecutive bytes of a file. Return the file with its digest after the last piece."""
        is_last = start + data.size == size
        file = self._folder / path
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            # The file is cut at its end only: another process that took this one for dead writes equal bytes.
            fd = open_no_follow(file, os.O_WRONLY | os.O_CREAT)
            try:
                written = 0
                while written < data.size:
                    written += os.pwrite(fd, data[written:].data, start + written)
                if is_last:
                    os.ftruncate(fd, start + data.size)
            finally:
                os.close(fd)
        except OSError as error:
            raise io_error(file, error) from error
        state = self._states.setdefault(path, xxhash.xxh3_128())
        state.update(data.data)
        if not is_last:
            return None
        del self._states[path]
        return RemoteFile(path, start + data.size, state.hexdigest())
