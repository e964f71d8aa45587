"""Write a training step, alone or together with the other processes of the run.

Each process writes the shards that it owns into the data files that process 0 has created, at the offsets of the plan.
The files therefore do not depend on the number of processes. Several processes may have shards of one tensor. After all
bytes are durable, the tensors are divided among the processes, which read them back for their digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text
from prepcli.core.observer import NullProgress
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.budget import make_budget
from prepcli.engine.checkpoint_store import HostLeaf
from prepcli.engine.host_leaves import HostLeafReader
from prepcli.engine.pipeline import Pipeline
from prepcli.engine.shard_writer import write_shards
from prepcli.execution.block_checksums import checksum_recorder
from prepcli.execution.execute import check_free_space, make_run_identity, open_sink, plan_digest
from prepcli.execution.finalize import data_folder, finalize_output
from prepcli.execution.joint_work import joint_work
from prepcli.execution.paths import remove_path
from prepcli.execution.resume import StreamReader
from prepcli.execution.run_notes import read_json_record, write_json_record
from prepcli.execution.staging import Staging
from prepcli.planning.plan import Plan
from prepcli.planning.shares import divide_streams
from prepcli.stores.reading import io_error

MEMORY_NBYTES = 256 << 20  # budget of a save, without the leaf or shard that is fetched
DIGESTS_STEM = "digests"  # `digests-I` in the work folder is written by process I


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
        stage = self._create_staging()
        with open_sink(self.plan, stage) as sink:
            checksums = checksum_recorder(self.plan, stage)
            outcome = Pipeline(
                self.plan.streams,
                HostLeafReader(list(self.leaves.values())),
                sink=sink,
                budget=make_budget(MEMORY_NBYTES),
                progress=NullProgress(),
                checksums=checksums,
            ).run()
        if checksums:
            checksums.save()
        self._publish(stage, outcome.digests)

    def write_together(self, group: ProcessGroup, name: str) -> None:
        """Write the step together with the other processes. All of them call this.

        Args:
            group: The processes of the run.
            name: Name of the save, for the exchanges of the processes.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        # Each of the four parts begins when all processes have ended the one before: files exist before
        # shards are written, all bytes are durable before they are read back, and process 0 has all digests
        # before it publishes. A kill leaves a staging folder, which the next start removes.
        stage = Staging(self.out)
        with joint_work(group, f"{name}-created"):
            if group.index == 0:
                with open_sink(self.plan, self._create_staging()):
                    pass
        with joint_work(group, f"{name}-written"):
            self._write_own_shards(stage, group.index)
        with joint_work(group, f"{name}-digested"):
            self._write_own_digests(stage, group)
        with joint_work(group, f"{name}-published"):
            if group.index == 0:
                self._publish(stage, _read_digests(stage, group.count))

    def _create_staging(self) -> Staging:
        """Create the staging folder. Remove an older one first."""
        stage = Staging(self.out)
        try:
            remove_path(stage.folder)
            stage.work.mkdir(parents=True)
        except OSError as error:
            raise io_error(stage.folder, error) from error
        check_free_space(self.plan, stage.folder)
        return stage

    def _write_own_shards(self, stage: Staging, index: int) -> None:
        checksums = checksum_recorder(self.plan, stage, index=index)
        with open_sink(self.plan, stage) as sink:
            write_shards(
                [(leaf, self.leaves[leaf.name]) for leaf in self.plan.leaves],
                sink,
                checksums=checksums,
            )
        if checksums:
            checksums.save()

    def _write_own_digests(self, stage: Staging, group: ProcessGroup) -> None:
        """Read this process's part of the tensors back, and write their digests to a file."""
        numbers = divide_streams(self.plan, group.count)[group.index]
        files = [data_folder(self.plan, stage.folder) / file.path for file in self.plan.files]
        reader = StreamReader(self.plan.streams, make_budget(MEMORY_NBYTES), NullProgress())
        digests = reader.digest_written_streams(numbers, files)
        path = stage.work / f"{DIGESTS_STEM}-{group.index}"
        try:
            write_json_record(path, {str(number): digest for number, digest in digests.items()})
        except OSError as error:
            raise io_error(path, error) from error

    def _publish(self, stage: Staging, digests: Mapping[int, str]) -> None:
        # The small files are copied from the step before, so that their paths differ after each save.
        run_id = plan_digest(replace(self.plan, small_files=()))
        run_identity = make_run_identity(self.plan, run_id)
        finalize_output(self.plan, stage, run_identity=run_identity, digests=digests)
        stage.publish()


def _read_digests(stage: Staging, count: int) -> dict[int, str]:
    """Return the digests of all processes."""
    digests: dict[int, str] = {}
    for index in range(count):
        path = stage.work / f"{DIGESTS_STEM}-{index}"
        note = read_json_record(path)
        if note is None:
            raise PrepError(
                f"{path} does not exist",
                f"process {index} wrote it to a folder of the same name on another disk",
                text("set {} to a folder on a file system that all hosts share", Option("out")),
            )
        for number, digest in note.items():
            digests[int(number)] = str(digest)
    return digests
