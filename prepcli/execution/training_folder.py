"""A training run in a folder.

A step is written to `STEP.partial`, and renamed once it is durable. An old step is renamed to `STEP.removed.partial`
before it is deleted, so a folder called STEP is always complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from prepcli.algebra.boxes import slices
from prepcli.algebra.strided_copies import StridedCopy
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.observer import NullProgress
from prepcli.engine.blobs import HostLeaf, HostLeafReader, HostShard, fetch_shard
from prepcli.engine.budget import make_budget
from prepcli.engine.checksum_recorder import ChecksumRecorder
from prepcli.engine.digest import StreamDigest
from prepcli.engine.files import PAGE, Files, missing_nbytes, open_data_files
from prepcli.engine.pipeline import Pipeline
from prepcli.execution.folder_output import (
    FolderOutput,
    acquire_lock,
    check_free_space,
    lock_in_folder,
    remove_work_folder,
)
from prepcli.execution.output import WORK_FOLDER
from prepcli.execution.training_storage import (
    MEMORY_NBYTES,
    StepOutput,
    StepSave,
    joint_work,
    note_path,
)
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    RECIPE_FILE,
    RECREATE_HINT,
    saved_steps,
    step_folder,
)
from prepcli.planning.chunk_placement import shard_copies
from prepcli.planning.plan import OutputLeaf
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.stores.buffers import ByteArray, allocate_buffer
from prepcli.stores.files import check_no_symlinks, fsync_path, io_error, make_folder, remove_path

LOCK = ".lock"
# A sync between shards bounds the dirty pages in the page cache, which count as memory of the job.
MAX_UNSYNCED_NBYTES = 256 << 20
NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
LEFTOVER_NAME = re.compile(r"(0|[1-9][0-9]*)(\.removed)?\.partial")


class FolderStorage:
    """RunStorage in a folder shared by all processes of the run."""

    is_on_disk = True

    def __init__(self, folder: Path, start_files: Sequence[str] = ()) -> None:
        """Set the folder. It need not exist.

        Args:
            folder: The folder.
            start_files: Glob patterns of the files that a start leaves in its folder if it fails
                early.
        """
        self.local_folder = folder
        self._start_files = start_files
        self._lock = -1  # descriptor of the lock file
        self._is_acquired = False
        self.is_saving = False
        self._new_folders: list[Path] = []  # created by `acquire`, innermost first

    @property
    def name(self) -> str:
        """Path of the folder."""
        return str(self.local_folder)

    def check(self) -> None:
        """Check that a run may be written to the folder.

        Raises:
            PrepError: The path or one above it is a file, or it is a folder that is neither empty nor a run.
        """
        folder = self.local_folder
        run_files = (RECIPE_FILE, LOCK, *self._start_files)
        is_run = bool(self.steps()) or any(any(folder.glob(name)) for name in run_files)
        if folder.is_dir() and any(folder.iterdir()) and not is_run:
            raise PrepError(
                f"{folder} already exists and is not a run",
                f"it has no {RECIPE_FILE}",
                text("{}", Option("out", "NAME")),
            )
        nearest = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        if nearest.exists() and not nearest.is_dir():
            why = "it is a file, and a run is a folder"
            if nearest != folder:
                why = f"it is a file, and {folder} would be a folder in it"
            raise PrepError(f"{nearest} already exists", why, text("{}", Option("out", "NAME")))

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with complete checkpoints, ascending. Listing a folder is always fast."""
        return saved_steps(self.local_folder)

    def step_name(self, step: int) -> str:
        """Return the path of a step."""
        return str(step_folder(self.local_folder, step))

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step. See `open_reader`."""
        return open_reader(step_folder(self.local_folder, step), verify, hint)

    def acquire(self, say: Callable[[str], None]) -> None:
        """Create and lock the folder, and remove the files of killed processes.

        If this process has acquired it already, the call has no effect. On a file system without locks, `say` gets
        a warning.

        Raises:
            PrepError: Another process holds the run.
        """
        if self._is_acquired:
            return
        folder = self.local_folder
        try:
            self._lock = lock_in_folder(
                folder / LOCK, self._make_folder, lambda path: acquire_lock(path, folder)
            )
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise io_error(folder, error) from error
            say(
                f"{folder} cannot be locked ({error.strerror}): start no second run there meanwhile"
            )
        self._is_acquired = True
        try:
            for path in folder.iterdir():
                if LEFTOVER_NAME.fullmatch(path.name):
                    remove_path(path)
            for step in self.steps():
                remove_work_folder(step_folder(folder, step))
        except BaseException as error:
            self._unlock()
            if isinstance(error, OSError):
                raise io_error(folder, error) from error
            raise

    def _make_folder(self) -> None:
        folder = self.local_folder
        self._new_folders = make_folder(folder)
        fsync_path(folder.parent)

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock.

        After an error, the lock file of a run that has not begun is removed, with the folders that `acquire` created.
        The lock stays while a step is still being saved: other processes may write their shares of it. It then ends
        with this process.

        Args:
            after_error: Whether the run ended by an error.
        """
        try:
            if after_error and self._is_acquired and not self._has_begun():
                with contextlib.suppress(OSError):  # tokens may be there
                    (self.local_folder / LOCK).unlink(missing_ok=True)
                    # `rmdir` removes empty folders only: files of other programs stay.
                    for folder in self._new_folders:
                        folder.rmdir()
        finally:
            if not (after_error and self.is_saving):
                self._unlock()

    def _has_begun(self) -> bool:
        """Return whether the run has a recipe or a step."""
        return bool(self.steps()) or os.path.lexists(self.local_folder / RECIPE_FILE)

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        self._is_acquired = False

    @contextlib.contextmanager
    def step_output(self, save: StepSave) -> Iterator[StepOutput]:
        """Yield where a step is written. Remove it after an error. See `RunStorage.step_output`."""
        step = FolderStep(save, step_folder(self.local_folder, save.step))
        try:
            yield step
        except BaseException:
            if save.group.index == 0:
                shutil.rmtree(step.folder, ignore_errors=True)
            raise

    def remove_step(self, step: int) -> None:
        """Rename a step, then delete its files."""
        folder = step_folder(self.local_folder, step)
        # Deleting files takes several calls. A kill between them leaves `STEP.removed.partial`, which no reader opens
        # and which the next `acquire` removes. The rename is durable before the first file is gone.
        removed_folder = folder.with_name(f"{folder.name}.removed.partial")
        try:
            folder.rename(removed_folder)
            fsync_path(self.local_folder)
            shutil.rmtree(removed_folder)
        except OSError as error:
            raise io_error(folder, error) from error

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Return the path of a file in the folder of the run, without a copy."""
        return self.local_folder / name

    def store_file(self, name: str) -> None:
        """Do nothing: the file is in the folder of the run."""


class FolderStep(FolderOutput):
    """A step in a folder shared by all processes. The caller holds the lock of the run.

    Process 0 creates the data files, and each process writes at the offsets of the plan. The files therefore do not
    depend on the number of processes.

    Attributes:
        save: The step, with the shards of this process.
    """

    num_threads: ClassVar[int] = 1

    def __init__(self, save: StepSave, out: Path) -> None:
        super().__init__(out)
        self.save = save

    def shared_streams(self) -> Sequence[int]:
        """Return all streams, or none if one process writes the step."""
        return range(len(self.save.plan.streams)) if self.save.group.count > 1 else ()

    def write_own(self, checksums: ChecksumRecorder) -> Mapping[int, StreamDigest]:
        """Write the shards of this process. See `StepOutput.write_own`."""
        group = self.save.group
        plan = self.save.plan
        folder = self.folder
        with joint_work(group, f"{self.save.name}-created"):
            if group.index == 0:
                try:
                    remove_path(folder)
                    self.work.mkdir(parents=True)
                except OSError as error:
                    raise io_error(folder, error) from error
                check_free_space(folder, missing_nbytes(plan, folder))
                open_data_files(plan, folder).close()
        with open_data_files(plan, folder) as sink:
            if group.count > 1:
                leaves = [(leaf, self.save.leaves[leaf.name]) for leaf in plan.leaves]
                _write_shards(leaves, sink, checksums=checksums)
                return {}
            outcome = Pipeline(
                plan.streams,
                HostLeafReader(list(self.save.leaves.values())),
                sink=sink,
                budget=make_budget(MEMORY_NBYTES),
                progress=NullProgress(),
                checksums=checksums,
            ).run()
            return outcome.digests

    def open_written(self) -> Files:
        """Open the data files to read them."""
        plan = self.save.plan
        return Files([self.folder / plan.item / file.path for file in plan.files])

    def take_notes(self, indices: Sequence[int]) -> Sequence[bytes | None]:
        """Check the folder for links. Return the notes of processes. They are deleted with the work folder."""
        # Files are opened without following links, but another program could have replaced a folder by a link.
        check_no_symlinks(self.folder)
        names = [note_path(index).removeprefix(f"{WORK_FOLDER}/") for index in indices]
        return [self.read(name) for name in names]

    def complete(self, manifest: bytes) -> None:
        """Write the manifest, sync all files, and rename the folder."""
        self.put(MANIFEST_FILE, manifest)
        self.publish()


def _write_shards(
    leaves: Iterable[tuple[OutputLeaf, HostLeaf]],
    sink: Files,
    *,
    checksums: ChecksumRecorder,
) -> None:
    """Write the shards of leaves durably. Host memory holds one more shard and a copy of one chunk."""
    unsynced_nbytes = 0
    for output_leaf, leaf in leaves:
        for shard in leaf.shards:
            for copy, data in _chunk_data(output_leaf, shard):
                checksums.record((copy,), data)
                sink.write((copy,), data)
                unsynced_nbytes += data.size
                if unsynced_nbytes >= MAX_UNSYNCED_NBYTES:
                    sink.sync()
                    unsynced_nbytes = 0
    sink.sync()


def _chunk_data(leaf: OutputLeaf, shard: HostShard) -> Iterator[tuple[StridedCopy, ByteArray]]:
    """Yield the copy to each chunk and its bytes, with the page offset of the file as direct I/O needs it."""
    values = fetch_shard(leaf.name, leaf.dtype, shard)
    # A shard may cover parts of chunks, e.g. where shards are smaller than the least chunk. The copies
    # of two shards of one chunk then write disjoint bytes of it.
    buffer = allocate_buffer(min(values.nbytes, leaf.chunk_nbytes) + 2 * PAGE)
    for part, copy in shard_copies(leaf, shard.box):
        page_offset = copy.file_offset % PAGE
        data = buffer[page_offset : page_offset + copy.nbytes]
        piece = values[slices(part, shard.box)]
        data.view(values.dtype).reshape(piece.shape)[...] = piece
        yield copy, data
