"""Write a training step, alone or together with the other processes of the run.

Each process writes the shards that it owns into the data files that process 0 has created, at the offsets of the plan.
The files therefore do not depend on the number of processes. Several processes may have shards of one tensor. After all
bytes are durable, the tensors are divided among the processes, which read them back for their digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.process_group import ProcessGroup
from prepcli.core.progress import NullProgress
from prepcli.engine.budget import make_budget
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder
from prepcli.engine.files import io_error
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.engine.pipeline import Pipeline
from prepcli.engine.shard_writer import write_shards
from prepcli.execution.finalize import data_folder, finalize_folder
from prepcli.execution.folder_run import check_free_space, open_sink
from prepcli.execution.folder_store import FolderStore
from prepcli.execution.joint_work import joint_work
from prepcli.execution.paths import remove_path
from prepcli.execution.request import make_run_identity, plan_digest
from prepcli.execution.resume import StreamReader
from prepcli.execution.unit_notes import UnitNote, all_checksums, all_digests
from prepcli.planning.chunk_extents import chunk_extents
from prepcli.planning.plan import Plan
from prepcli.planning.shares import divide_streams

MEMORY_NBYTES = 256 << 20  # budget of a save, without the leaf or shard that is fetched
NOTE_STEM = "written"  # `.prep/written-I` of an incomplete step is the note of process I


@dataclass(frozen=True)
class StepWriter:
    """Writes a step. The caller holds the lock of the run.

    Attributes:
        plan: The plan of the step.
        out: Folder of the step.
        leaves: The leaves, with the shards of this process.
    """

    plan: Plan
    out: Path
    leaves: Mapping[str, HostLeaf]

    def write(self) -> None:
        """Write the step from the leaves of this process alone. Raise PrepError if this fails."""
        store = self._create_staging()
        checksums = ChecksumRecorder(chunk_extents(self.plan.leaves))
        with open_sink(self.plan, store.folder) as sink:
            outcome = Pipeline(
                self.plan.streams,
                HostLeafReader(list(self.leaves.values())),
                sink=sink,
                budget=make_budget(MEMORY_NBYTES),
                progress=NullProgress(),
                checksums=checksums,
            ).run()
        self._publish(store, outcome.digests, checksums.sums)

    def write_together(self, group: ProcessGroup, name: str) -> None:
        """Write the step together with the other processes. All of them call this.

        Args:
            group: The processes of the run.
            name: Name of the save, for the exchanges of the processes.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        # Each of the four parts begins when all processes have ended the one before: files exist before
        # shards are written, all bytes are durable before they are read back, and process 0 has all notes
        # before it publishes. A kill leaves a staging folder, which the next start removes.
        store = FolderStore(self.out)
        checksums = ChecksumRecorder(chunk_extents(self.plan.leaves))
        with joint_work(group, f"{name}-created"):
            if group.index == 0:
                open_sink(self.plan, self._create_staging().folder).close()
        with joint_work(group, f"{name}-written"):
            leaves = [(leaf, self.leaves[leaf.name]) for leaf in self.plan.leaves]
            with open_sink(self.plan, store.folder) as sink:
                write_shards(leaves, sink, checksums=checksums)
        with joint_work(group, f"{name}-digested"):
            self._note_own_part(store, group, checksums)
        with joint_work(group, f"{name}-published"):
            if group.index == 0:
                notes = [self._read_note(store, index) for index in range(group.count)]
                digests = all_digests(self.plan, notes)
                self._publish(store, digests, all_checksums(self.plan, notes))

    def _create_staging(self) -> FolderStore:
        """Create the staging folder. Remove an older one first."""
        store = FolderStore(self.out)
        try:
            remove_path(store.folder)
            store.work.mkdir(parents=True)
        except OSError as error:
            raise io_error(store.folder, error) from error
        check_free_space(self.plan, store.folder)
        return store

    def _note_own_part(
        self, store: FolderStore, group: ProcessGroup, checksums: ChecksumRecorder
    ) -> None:
        """Read this process's part of the tensors back, and note their digests and the checksums of its shards."""
        numbers = divide_streams(self.plan, group.count)[group.index]
        files = [data_folder(self.plan, store.folder) / file.path for file in self.plan.files]
        reader = StreamReader(self.plan.streams, make_budget(MEMORY_NBYTES), NullProgress())
        digests = reader.digest_written_streams(numbers, files)
        blocks = checksums.take_new()
        note = UnitNote(digests, blocks, checksums.sums[blocks.astype(np.int64)])
        store.write(f"{NOTE_STEM}-{group.index}", note.encode(self.plan.request))

    def _publish(self, store: FolderStore, digests: Mapping[int, str], sums: ChecksumArray) -> None:
        # The small files are copied from the step before, so that their paths differ after each save.
        run_id = plan_digest(replace(self.plan, small_files=()))
        run_identity = make_run_identity(self.plan, run_id)
        finalize_folder(
            self.plan, store.folder, run_identity=run_identity, digests=digests, sums=sums
        )
        store.publish()

    def _read_note(self, store: FolderStore, index: int) -> UnitNote:
        """Return the note of a process."""
        name = f"{NOTE_STEM}-{index}"
        note = UnitNote.decode(store.read(name), self.plan.request)
        if note is None:
            raise PrepError(
                f"{store.work / name} does not exist",
                f"process {index} wrote it to a folder of the same name on another disk",
                text("set {} to a folder on a file system that all hosts share", Option("out")),
            )
        return note
