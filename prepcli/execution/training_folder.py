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

from prepcli.core.errors import Option, PrepError, text
from prepcli.execution.folder_store import acquire_lock, lock_in_folder, remove_work_folder
from prepcli.execution.output_paths import remove_path
from prepcli.execution.step_writer import FolderStep, write_step
from prepcli.execution.training_storage import StepSave
from prepcli.formats.manifest import RECIPE_FILE, RECREATE_HINT, saved_steps, step_folder
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.stores.files import fsync_path, io_error

LOCK = ".lock"
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
        self._is_writing = False
        self._new_folders: list[Path] = []  # created by `acquire`, innermost first

    @property
    def name(self) -> str:
        """Path of the folder."""
        return str(self.local_folder)

    def check(self) -> None:
        """Check that a run may be written to the folder.

        Raises:
            PrepError: The path is a file, or a folder that is neither empty nor a run.
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
        if folder.exists() and not folder.is_dir():
            why = "it is a file, and a run is a folder"
            raise PrepError(f"{folder} already exists", why, text("{}", Option("out", "NAME")))

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with complete checkpoints, ascending. Listing a folder is always fast."""
        return saved_steps(self.local_folder)

    def step_name(self, step: int) -> str:
        """Return the path of a step."""
        return str(step_folder(self.local_folder, step))

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step. See `open_reader`."""
        return open_reader(step_folder(self.local_folder, step), verify, hint)

    def acquire(self, note: Callable[[str], None]) -> None:
        """Create and lock the folder, and remove the files of killed processes.

        If this process has acquired it already, the call has no effect. On a file system without locks, `note` gets
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
            note(
                f"{folder} cannot be locked ({error.strerror}): start no second run there meanwhile"
            )
        self._is_acquired = True
        self._remove_leftovers()

    def _make_folder(self) -> None:
        folder = self.local_folder
        self._new_folders = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        fsync_path(folder.parent)

    def _remove_leftovers(self) -> None:
        try:
            for path in self.local_folder.iterdir():
                if LEFTOVER_NAME.fullmatch(path.name):
                    remove_path(path)
            for step in self.steps():
                remove_work_folder(step_folder(self.local_folder, step))
        except OSError as error:
            self._unlock()
            raise io_error(self.local_folder, error) from error

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock.

        After an error, files of a run that has not begun are removed. The lock stays while a step is still being
        written: other processes may write their shares of it. It then ends with this process.

        Args:
            after_error: Whether the run ended by an error.
        """
        if after_error:
            self._release_after_error()
        else:
            self._unlock()

    def _release_after_error(self) -> None:
        try:
            self._remove_unbegun()
        finally:
            if not self._is_writing:
                self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1
        self._is_acquired = False

    def _remove_unbegun(self) -> None:
        """Remove the lock file of a run without a recipe and steps, and the folders that `acquire` created."""
        if (
            not self._is_acquired
            or self.steps()
            or os.path.lexists(self.local_folder / RECIPE_FILE)
        ):
            return
        with contextlib.suppress(OSError):  # tokens may be there
            (self.local_folder / LOCK).unlink(missing_ok=True)
            # `rmdir` removes empty folders only: files of other programs stay.
            for folder in self._new_folders:
                folder.rmdir()

    def write_step(self, save: StepSave) -> None:
        """Write a step. Remove it if an error occurs.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        out = step_folder(self.local_folder, save.step)
        self._is_writing = True
        try:
            write_step(save, FolderStep(save, out))
        except BaseException:
            if save.group.index == 0:
                shutil.rmtree(out.with_name(f"{out.name}.partial"), ignore_errors=True)
            raise
        finally:
            self._is_writing = False

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
