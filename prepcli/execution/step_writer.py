"""Write a training step, alone or together with the other processes of the run.

Each process writes its own shards, and several processes may have shards of one tensor. After all bytes are durable,
the tensors without a digest are divided among the processes, which read them back. Each process notes its digests and
checksums, and process 0 publishes the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.observer import NullProgress
from prepcli.engine.budget import make_budget
from prepcli.engine.checksum_recorder import ChecksumArray, ChecksumRecorder
from prepcli.engine.files import Files, RunReader
from prepcli.engine.host_leaves import HostLeafReader, write_shards
from prepcli.engine.pipeline import Pipeline
from prepcli.execution.data_checks import StreamReader
from prepcli.execution.finalize import finalize_folder
from prepcli.execution.folder_run import check_free_space, missing_nbytes, open_sink
from prepcli.execution.folder_store import FolderStore
from prepcli.execution.output_paths import remove_path
from prepcli.execution.run import make_run_identity, plan_digest
from prepcli.execution.run_store import UnitNote
from prepcli.execution.training_storage import StepSave, joint_work
from prepcli.planning.chunk_placement import chunk_extents
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import divide_streams, subplan
from prepcli.stores.files import io_error

MEMORY_NBYTES = 256 << 20  # budget of a save, without the leaf or shard that is fetched
NOTE_STEM = "written"  # `.prep/written-I` of an incomplete step is the note of process I


class StepOutput(Protocol):
    """Where a step is written."""

    @property
    def plan(self) -> Plan:
        """The plan of the step, with its data files."""
        ...

    def shared_streams(self) -> Sequence[int]:
        """Return the streams without a digest after `write_own`, equal in all processes."""
        ...

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, str]:
        """Write the shards of this process durably. Return the digests of its whole tensors."""
        ...

    def open_written(self) -> AbstractContextManager[RunReader]:
        """Open the data files of all processes to read them."""
        ...

    def write_note(self, index: int, content: bytes) -> None:
        """Write the note of a process."""
        ...

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Return the notes of processes. They are no longer needed."""
        ...

    def publish(
        self, identity: dict[str, object], digests: Mapping[int, str], sums: ChecksumArray
    ) -> None:
        """Write all other files, and make the step visible."""
        ...


def step_reader(plan: Plan) -> StreamReader:
    """Return the reader of a step's streams, within the memory budget of a save."""
    return StreamReader(plan.streams, make_budget(MEMORY_NBYTES), NullProgress())


def write_step(save: StepSave, output: StepOutput) -> None:
    """Write a step together with the other processes. All of them call this.

    Args:
        save: The step, with the shards of this process.
        output: The step's folder or URL.

    Raises:
        PrepError: One of the processes cannot write its part.
    """
    # Each part begins when all processes have ended the one before: all bytes are durable before they are
    # read back, and process 0 has all notes before it publishes. A kill leaves an invisible step, which
    # the next start removes.
    group = save.group
    plan = output.plan
    checksums = ChecksumRecorder(chunk_extents(plan.leaves))
    with joint_work(group, f"{save.name}-written"):
        digests = dict(output.write_own(checksums))
    with joint_work(group, f"{save.name}-digested"):
        if shared := output.shared_streams():
            positions = divide_streams(subplan(plan, shared), group.count)[group.index]
            numbers = [shared[position] for position in positions]
            with output.open_written() as written:
                digests |= step_reader(plan).digest_written_streams(numbers, written)
        if group.index:
            # `sums` has an entry for every block of all files. A note of the known blocks alone is as small
            # as this process's part of the files.
            blocks = np.flatnonzero(checksums.sums).astype(np.uint64)
            note = UnitNote(digests, blocks, checksums.sums[blocks.astype(np.int64)])
            output.write_note(group.index, note.encode(save.name))
    with joint_work(group, f"{save.name}-published"):
        if group.index == 0:
            _add_notes(save, output, digests, checksums.sums)
            # The small files are copied from the step before, so that their paths differ after each save.
            run_id = plan_digest(replace(plan, small_files=()))
            output.publish(make_run_identity(plan, run_id), digests, checksums.sums)


def _add_notes(
    save: StepSave, output: StepOutput, digests: dict[int, str], sums: ChecksumArray
) -> None:
    """Add the digests and checksums of the other processes."""
    indices = range(1, save.group.count)
    for index, content in zip(indices, output.take_notes(indices)):
        note = UnitNote.decode(content, save.name)
        if note is None:
            raise PrepError(
                f"the note of process {index} is missing or damaged",
                "the process may have written it to a folder of the same name on another disk",
                text("set {} to a folder on a file system that all hosts share", Option("out")),
            )
        digests |= note.digests
        sums[note.blocks.astype(np.int64)] = note.sums


@dataclass(frozen=True)
class FolderStep:
    """A step in a folder shared by all processes. The caller holds the lock of the run.

    Process 0 creates the data files, and each process writes at the offsets of the plan. The files therefore do not
    depend on the number of processes.

    Attributes:
        save: The step, with the shards of this process.
        out: Folder of the step.
    """

    save: StepSave
    out: Path

    @property
    def plan(self) -> Plan:
        """The plan of the step."""
        return self.save.plan

    def shared_streams(self) -> Sequence[int]:
        """Return all streams, or none if one process writes the step."""
        return range(len(self.plan.streams)) if self.save.group.count > 1 else ()

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, str]:
        """Write the shards of this process. See `StepOutput.write_own`."""
        group = self.save.group
        with joint_work(group, f"{self.save.name}-created"):
            if group.index == 0:
                open_sink(self.plan, self._create_staging()).close()
        with open_sink(self.plan, self._store().folder) as sink:
            if group.count > 1:
                leaves = [(leaf, self.save.leaves[leaf.name]) for leaf in self.plan.leaves]
                write_shards(leaves, sink, checksums=checksums)
                return {}
            outcome = Pipeline(
                self.plan.streams,
                HostLeafReader(list(self.save.leaves.values())),
                sink=sink,
                budget=make_budget(MEMORY_NBYTES),
                progress=NullProgress(),
                checksums=checksums,
            ).run()
            return outcome.digests

    def _store(self) -> FolderStore:
        return FolderStore(self.out)

    def _create_staging(self) -> Path:
        """Create the staging folder. Remove an older one first."""
        store = self._store()
        try:
            remove_path(store.folder)
            store.work.mkdir(parents=True)
        except OSError as error:
            raise io_error(store.folder, error) from error
        check_free_space(store.folder, missing_nbytes(self.plan, store.folder))
        return store.folder

    def open_written(self) -> Files:
        """Open the data files to read them."""
        folder = self._store().folder / self.plan.item
        return Files([folder / file.path for file in self.plan.files])

    def write_note(self, index: int, content: bytes) -> None:
        """Write the note of a process."""
        self._store().write(f"{NOTE_STEM}-{index}", content)

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Return the notes of processes. They are deleted with the state."""
        return [self._store().read(f"{NOTE_STEM}-{index}") for index in indices]

    def publish(
        self, identity: dict[str, object], digests: Mapping[int, str], sums: ChecksumArray
    ) -> None:
        """Write all other files, and rename the folder."""
        store = self._store()
        finalize_folder(self.plan, store.folder, run_identity=identity, digests=digests, sums=sums)
        store.publish()
