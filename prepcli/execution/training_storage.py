"""A training run in a folder or a bucket: its storage, and how its processes write a step together.

The files of a step in `RUN/STEP`, in the order in which they are written:

    .prep/written-I             digests and checksums of process I, for process 0. Not in a complete step
    state/d/...                 data files: the chunks of the leaves
    state/manifest.ocdbt        root of the index of the chunks. Its nodes are in one more file `state/d/...`
    state/_METADATA             leaves of the Orbax item. With `_CHECKPOINT_METADATA` there and in the step
    state/hf/...                config, tokenizer and other small files of the model
    prep-checksums.bin          checksum of each block of the data files
    state/commit_success.txt    marks the item as complete for Orbax
    prep-manifest.json          digest of each tensor, and record of each other file

A step is complete when `STEP` has a manifest. In a folder, all files are written to `STEP.partial`, synced and renamed.
A bucket has no rename: the manifest is the last object. An incomplete step is removed by the next start.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np

from prepcli.core.errors import RERUN_HINT, Option, PrepError, text
from prepcli.core.observer import NullProgress
from prepcli.core.process_group import ProcessGroup
from prepcli.engine.blobs import HostLeaf
from prepcli.engine.budget import make_budget
from prepcli.engine.checksum_recorder import ChecksumRecorder, compute_unknown
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import RunReader
from prepcli.execution.data_checks import StreamReader
from prepcli.execution.finalize import write_last_files
from prepcli.execution.output import WORK_FOLDER, UnitNote, digest_plan, make_identity
from prepcli.formats.manifest import RECREATE_HINT, encode_manifest
from prepcli.planning.chunk_placement import chunk_extents
from prepcli.planning.plan import Plan
from prepcli.planning.work_units import divide_streams, subplan
from prepcli.restore.item_reader import ItemReader

MEMORY_NBYTES = 256 << 20  # budget of a save, without the leaf or shard that is fetched


@dataclass(frozen=True, slots=True)
class StepSave:
    """A step to be written by all processes of a run.

    Attributes:
        step: Number of the step.
        plan: The plan of the step.
        leaves: The leaves, with the shards of this process.
        group: Processes of the run.
    """

    step: int
    plan: Plan
    leaves: Mapping[str, HostLeaf]
    group: ProcessGroup

    @property
    def name(self) -> str:
        """Name for the messages between the processes about this save, e.g. `save-100`."""
        # Each step is saved once, so the number makes the name unique in a run. The exchange of a later save cannot
        # read values of an earlier one.
        return f"save-{self.step}"


class RunStorage(Protocol):
    """The folder or the bucket of a training run: its lock, its steps and its other files.

    A step is complete or not there: `write_step` makes it visible last, and `remove_step` hides it first.
    Only process 0 locks the run, removes steps and stores the files that all processes share.

    Attributes:
        is_saving: Whether a step is being saved. After an error, the lock then ends with the process.
    """

    is_saving: bool

    @property
    def name(self) -> str:
        """Path or URL of the run, for messages and commands."""
        ...

    @property
    def local_folder(self) -> Path:
        """Folder of the recipe, the metrics and the tokens on this machine."""
        ...

    @property
    def is_on_disk(self) -> bool:
        """Whether steps are saved to `local_folder`, which all processes of the run see."""
        ...

    def check(self) -> None:
        """Check that a run may be written here.

        Raises:
            PrepError: Other files are here, or the storage cannot be reached.
        """
        ...

    def acquire(self, say: Callable[[str], None]) -> None:
        """Lock the run if possible, and remove leftovers of killed processes.

        A second call has no effect if the first one got a lock.

        Args:
            say: Receives a warning if the storage has no locks.

        Raises:
            PrepError: Another process holds the run.
        """
        ...

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock.

        Args:
            after_error: Also remove what `acquire` created for a run without a recipe and steps.
        """
        ...

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with complete checkpoints, ascending.

        Args:
            refresh: Allow a request that may take long or fail. Without it, a bucket returns the steps of its last
                listing and the later changes by this process.
        """
        ...

    def step_name(self, step: int) -> str:
        """Return the path or URL of a step."""
        ...

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step. See `open_reader`."""
        ...

    def step_output(self, save: StepSave) -> AbstractContextManager[StepOutput]:
        """Yield where `write_step` writes a step. After an error no reader sees it, and the next start removes it."""
        ...

    def remove_step(self, step: int) -> None:
        """Remove a step.

        The first change makes it invisible, so that a kill leaves no partial step. Raise PrepError if removal fails.
        """
        ...

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Return a local path of a file of the run. No file exists at the path if the run has none.

        Args:
            name: Name of the file, such as `metrics.jsonl`.
            folder: Folder to which a bucket downloads the file, replacing an older one.
        """
        ...

    def store_file(self, name: str) -> None:
        """Store a file of `local_folder` durably, if it exists."""
        ...


class StepOutput(Protocol):
    """Where a step is written: `STEP.partial`, or the objects below the URL of the step."""

    num_threads: ClassVar[int]  # Number of concurrent calls of `put`

    @property
    def save(self) -> StepSave:
        """The step, with the shards of this process, and with the data files of all processes in its plan."""
        ...

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, StreamDigest]:
        """Write the shards of this process durably. Return the digests of its whole tensors."""
        ...

    def shared_streams(self) -> Sequence[int]:
        """Return the streams without a digest after `write_own`, equal in all processes."""
        ...

    def open_written(self) -> AbstractContextManager[RunReader]:
        """Open the data files of all processes to read them."""
        ...

    def put(self, path: str, content: bytes) -> object:
        """Write a file of the step, given its path in the step."""
        ...

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Check that nobody else has changed the step. Return the notes of processes, which are no longer needed."""
        ...

    def complete(self, manifest: bytes) -> None:
        """Write the manifest, and make the step visible. All other files are written."""
        ...


@contextlib.contextmanager
def joint_work(group: ProcessGroup, name: str) -> Iterator[None]:
    """Wait at the end of a `with` block for all processes. Raise in each one if the block failed in any of them.

    Args:
        group: The processes.
        name: Name of the block, the same in all processes and unique among the threads of a process.

    Raises:
        PrepError: The block raised in another process.
    """
    # Two exchanges: process 0 has all failures only after the gather, and each process must learn of the
    # first one. A process that failed takes part too, or the others would wait for it.
    own_error: Exception | None = None
    own_failure = ""
    try:
        yield
    except Exception as error:
        own_error = error
        failed = error
        if not isinstance(failed, PrepError):
            why = f"{type(error).__name__}: {error}"
            failed = PrepError("the work failed", why, RERUN_HINT)
        own_failure = json.dumps(
            {**failed.fields(), "what": f"process {group.index}: {failed.what}"}
        )
    failures = group.gather(name, own_failure)
    failure = group.broadcast(f"{name}-outcome", next(filter(None, failures), ""))
    if own_error is not None:
        raise own_error
    if failure:
        raise PrepError(**json.loads(failure))


def step_reader(plan: Plan) -> StreamReader:
    """Return the reader of a step's streams, within the memory budget of a save."""
    return StreamReader(plan.streams, make_budget(MEMORY_NBYTES), NullProgress())


def write_step(output: StepOutput) -> None:
    """Write a step together with the other processes. All of them call this.

    Each process writes its own shards, and several processes may have shards of one tensor. The tensors without a
    digest are divided among the processes, which read them back. Process 0 collects all digests and checksums, and
    publishes the step.

    Args:
        output: The step's folder or URL.

    Raises:
        PrepError: One of the processes cannot write its part.
    """
    # Each part begins when all processes have ended the one before: all bytes are durable before they are
    # read back, and process 0 has all notes before it publishes. A kill leaves an invisible step, which
    # the next start removes.
    save = output.save
    plan = save.plan
    group = save.group
    extents = chunk_extents(plan.leaves)
    checksums = ChecksumRecorder(extents)
    sums = checksums.sums
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
            blocks = np.flatnonzero(sums).astype(np.uint64)
            note = UnitNote(digests, blocks, sums[blocks.astype(np.int64)])
            output.put(note_path(group.index), note.encode(save.name))
    with joint_work(group, f"{save.name}-published"):
        if group.index == 0:
            indices = range(1, group.count)
            for index, content in zip(indices, output.take_notes(indices)):
                other = UnitNote.decode(content, save.name)
                if other is None:
                    hint = "set {} to a folder on a file system that all hosts share"
                    raise PrepError(
                        f"the note of process {index} is missing or damaged",
                        "the process may have written it to a folder of the same name on another disk",
                        text(hint, Option("out")),
                    )
                digests |= other.digests
                sums[other.blocks.astype(np.int64)] = other.sums
            if not sums.all():
                # Parts of these blocks are from several processes.
                with output.open_written() as written:
                    compute_unknown(sums, extents, written)
            # The small files are copied from the step before, so that their paths differ after each save.
            plan_digest = digest_plan(replace(plan, small_files=()))
            manifest = write_last_files(
                plan,
                make_identity(plan, plan_digest),
                digests=digests,
                sums=sums,
                put=output.put,
                num_threads=output.num_threads,
            )
            output.complete(encode_manifest(manifest))


def note_path(index: int) -> str:
    """Return the path in an incomplete step of the note of a process: its digests and checksums."""
    return f"{WORK_FOLDER}/written-{index}"
