"""A training run in a local folder: `STEP/state/` with `STEP/prep-manifest.json`.

A step is staged as `STEP.partial` and renamed once it is durable. An old step is renamed to `STEP.removed.partial`
before it is deleted, so a folder called STEP is always complete.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from prepcli.engine.files import io_error
from prepcli.errors import PrepError
from prepcli.execution.locks import acquire_lock
from prepcli.execution.paths import is_same_file, remove_path
from prepcli.execution.run_place import StepSave
from prepcli.execution.staging import remove_work_folder
from prepcli.execution.step_writer import StepWriter
from prepcli.formats.manifest import STATE_ITEM
from prepcli.formats.run_steps import RECIPE_FILE, saved_steps, step_folder
from prepcli.restore.digest_checks import RECREATE_HINT
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.source import HF_FOLDER
from trainer.distributed.process_group import ProcessGroup
from trainer.files.writing import fsync_path
from trainer.models.chunk_shapes import MIN_SPLIT_NBYTES

LOCK = ".lock"
MAX_LOCK_TRIES = 100  # starts that fail may remove the folder meanwhile
NO_LOCK_ERRORS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
LEFTOVER_NAME = re.compile(r"(0|[1-9][0-9]*)(\.removed)?\.partial")


class LocalRun:
    """RunPlace in a folder, which all processes of a run see."""

    is_on_disk = True

    def __init__(self, folder: Path, start_files: Sequence[str] = ()) -> None:
        """Set the folder, which need not exist.

        Args:
            folder: The folder.
            start_files: Glob patterns of which one matches in the folder of a start that failed early.
        """
        self.local_folder, self._start_files = folder, start_files
        self._lock, self._is_acquired, self._is_writing = -1, False, False
        self._new_folders: list[Path] = []  # created by `acquire`, innermost first

    @property
    def name(self) -> str:
        """Path of the folder."""
        return str(self.local_folder)

    def min_split_nbytes(self, group: ProcessGroup) -> int:
        """Return the default: processes write parts of the same chunk."""
        return MIN_SPLIT_NBYTES

    def check(self, num_processes: int) -> None:
        """Check that a run may be written to the folder.

        Raises:
            PrepError: The path is a file, or a folder that is neither empty nor a run.
        """
        folder = self.local_folder
        run_files = (RECIPE_FILE, LOCK, *self._start_files)
        is_run = bool(self.steps()) or any(any(folder.glob(name)) for name in run_files)
        if folder.is_dir() and any(folder.iterdir()) and not is_run:
            raise PrepError(f"{folder} already exists and is not a run", f"it has no {RECIPE_FILE}", "`--out NAME`")
        if folder.exists() and not folder.is_dir():
            raise PrepError(f"{folder} already exists", "it is a file, and a run is a folder", "`--out NAME`")

    def contains(self, checkpoint: str) -> bool:
        """Return whether a path is in a step of the run."""
        own_steps = {step_folder(self.local_folder, step).resolve() for step in self.steps()}
        return not own_steps.isdisjoint(Path(checkpoint).resolve().parents)

    def steps(self) -> list[int]:
        """Return the steps with complete checkpoints, ascending."""
        return saved_steps(self.local_folder)

    def known_steps(self) -> list[int]:
        """Return the same as `steps`."""
        return self.steps()

    def has_step(self, step: int) -> bool:
        """Return whether something has the name of a step."""
        return os.path.lexists(step_folder(self.local_folder, step))

    def step_name(self, step: int) -> str:
        """Return the path of a step."""
        return str(step_folder(self.local_folder, step))

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step; see `open_reader`."""
        return open_reader(step_folder(self.local_folder, step), verify, hint)

    def model_files_folder(self, step: int) -> Path | None:
        """Return the folder of the step's small files."""
        return step_folder(self.local_folder, step) / STATE_ITEM / HF_FOLDER

    def acquire(self, note: Callable[[str], None]) -> None:
        """Create and lock the folder, and remove files that killed processes left there.

        If this process has acquired it already, the call has no effect. On a file system without locks, `note` gets
        a warning.

        Raises:
            PrepError: Another process holds the run.
        """
        if self._is_acquired:
            return
        folder = self.local_folder
        try:
            self._lock = self._lock_folder()
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise io_error(folder, error) from error
            note(f"{folder} cannot be locked ({error.strerror}): start no second run there meanwhile")
        self._is_acquired = True
        self._remove_leftovers()

    def _lock_folder(self) -> int:
        """Create and lock the folder, and return the descriptor of the lock.

        Another start that fails may remove the folder after this process has opened the lock file.
        """
        folder = self.local_folder
        for tries_left in reversed(range(MAX_LOCK_TRIES)):
            self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
            try:
                folder.mkdir(parents=True, exist_ok=True)
                fsync_path(folder.parent)
                fd = acquire_lock(folder / LOCK, folder)
            except FileNotFoundError:
                if not tries_left:
                    raise
                continue
            if is_same_file(os.fstat(fd), folder / LOCK):
                return fd
            os.close(fd)
        raise PrepError(f"{folder} cannot be locked", "other starts remove it again and again", "end them")

    def _remove_leftovers(self) -> None:
        try:
            for path in self.local_folder.iterdir():
                if LEFTOVER_NAME.fullmatch(path.name):
                    remove_path(path)
            for step in self.steps():
                remove_work_folder(step_folder(self.local_folder, step))
        except OSError as error:
            self.release()
            raise io_error(self.local_folder, error) from error

    def release(self) -> None:
        """Release the lock."""
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self._is_acquired = -1, False

    def leave(self) -> None:
        """Release the lock after an error, unless a step is still being written. Remove the files of an unbegun run.

        Other processes may still write their shares of that step. The lock then ends with this process.
        """
        try:
            self._remove_unbegun()
        finally:
            if not self._is_writing:
                self.release()

    def _remove_unbegun(self) -> None:
        """Remove the lock file of a run without a recipe and steps, and the folders that `acquire` created."""
        if not self._is_acquired or self.steps() or os.path.lexists(self.recipe_file()):
            return
        with contextlib.suppress(OSError):  # tokens may be there
            (self.local_folder / LOCK).unlink(missing_ok=True)
            for folder in self._new_folders:
                folder.rmdir()

    def write_step(self, save: StepSave) -> None:
        """Write a step; a failed one is removed.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        out = step_folder(self.local_folder, save.step)
        writer = StepWriter(save.plan, out, save.leaves)
        self._is_writing = True
        try:
            if save.group.count > 1:
                writer.write_together(save.group, save.name)
            else:
                writer.write()
        except BaseException:
            if save.group.index == 0:
                shutil.rmtree(out.with_name(f"{out.name}.partial"), ignore_errors=True)
            raise
        finally:
            self._is_writing = False

    def remove_step(self, step: int) -> None:
        """Rename a step, then delete its files."""
        folder = step_folder(self.local_folder, step)
        removed_folder = folder.with_name(f"{folder.name}.removed.partial")
        try:
            folder.rename(removed_folder)
            fsync_path(self.local_folder)
            shutil.rmtree(removed_folder)
        except OSError as error:
            raise io_error(folder, error) from error

    def recipe_file(self) -> Path:
        """Return the recipe in the folder."""
        return self.local_folder / RECIPE_FILE

    def restore_file(self, name: str) -> None:
        """Do nothing: the file in the folder is that of the run."""

    def store_file(self, name: str) -> None:
        """Do nothing: the file is in the folder of the run."""
