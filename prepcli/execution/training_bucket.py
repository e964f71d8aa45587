"""A training run in an object store: `URL/STEP/state/…` with `URL/STEP/prep-manifest.json`.

An object store has no rename. A step exists if its manifest does: the manifest is uploaded last, and deleted first. The
recipe and the metrics are written to a local folder and uploaded from there. Process 0 holds the lock of the URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from prepcli.core.errors import Option, PrepError, text
from prepcli.execution.bucket_step import BucketStep
from prepcli.execution.output_paths import RETRIES
from prepcli.execution.step_writer import write_step
from prepcli.execution.training_storage import StepSave, exchange_boxes, joint_work
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    RECIPE_FILE,
    RECREATE_HINT,
    listed_step,
    listed_steps,
)
from prepcli.planning.object_files import (
    ProcessFiles,
    plan_process_files,
)
from prepcli.planning.plan import OutputLeaf
from prepcli.restore.item_reader import ItemReader, open_reader
from prepcli.sources.locate import Access, locate
from prepcli.sources.opening import open_source
from prepcli.stores.addresses import ObjectStoreUrl
from prepcli.stores.bucket_lock import BucketLock
from prepcli.stores.byte_ranges import RemoteFile, RetryPolicy
from prepcli.stores.files import io_error, open_regular_file
from prepcli.stores.object_store import Bucket

STORED_PIECE_NBYTES = 8 << 20  # bytes of a file read at a time for its upload


class BucketStorage:
    """RunStorage below a URL of an object store."""

    is_on_disk = False

    def __init__(
        self, url: ObjectStoreUrl, local_folder: Path, retry_policy: RetryPolicy, recipe_digest: str
    ) -> None:
        """Set the URL.

        Args:
            url: URL of the run.
            local_folder: Folder of the recipe, the metrics and the tokens. Each host may have a
                different one.
            retry_policy: Time-out of requests, and the receiver of notes about retries.
            recipe_digest: Digest of the recipe. A run with another digest cannot take the lock over.
        """
        self.local_folder = local_folder
        self._url = url
        self._retry_policy = retry_policy
        self._bucket = self._open_bucket(url)
        self._recipe_digest = recipe_digest
        self._lock: BucketLock | None = None
        self._known_steps: list[int] | None = None
        # The data files of the last plan, with the leaves that they were planned for
        self._files: tuple[tuple[OutputLeaf, ...], ProcessFiles] | None = None
        self._stored: list[str] = []  # files of the run that this process uploads with each step

    def _open_bucket(self, url: ObjectStoreUrl) -> Bucket:
        return Bucket(url, RETRIES, self._retry_policy)

    @property
    def name(self) -> str:
        """The URL."""
        return str(self._url)

    def check(self) -> None:
        """Check the objects below the URL before a run writes there.

        Raises:
            PrepError: Other objects are there, or the store cannot be reached.
        """
        paths = [file.path for file in self._list_files()]
        if paths and RECIPE_FILE not in paths and not self._known_steps:
            raise PrepError(
                f"{self.name} already exists and is not a run",
                f"it has no {RECIPE_FILE}",
                text("{}", Option("out", "URL")),
            )

    def _list_files(self) -> tuple[RemoteFile, ...]:
        """List all objects, and remember the steps."""
        files = self._bucket.list_files()
        self._known_steps = listed_steps(file.path for file in files)
        return files

    def steps(self, *, refresh: bool = True) -> list[int]:
        """Return the steps with a manifest, ascending. See `RunStorage.steps`."""
        if refresh:
            self._list_files()
        return list(self._known_steps or [])

    def step_name(self, step: int) -> str:
        """Return the URL of a step."""
        return str(self._step_url(step))

    def _step_url(self, step: int) -> ObjectStoreUrl:
        return replace(self._url, path=self._url.key(str(step)))

    def open_step(self, step: int, verify: bool = True, hint: str = RECREATE_HINT) -> ItemReader:
        """Open a step to read its tensors from the store. See `open_reader`."""
        name = self.step_name(step)
        located = locate(name, access=Access(allow_urls=True, retry_policy=self._retry_policy))
        # This checks the recorded files.
        open_source(located)
        return open_reader(located.files.path, verify, hint)

    def acquire(self, note: Callable[[str], None]) -> None:
        """Lock the URL, then delete the objects of steps without a manifest. Killed processes left them.

        If this process holds the lock already, the call has no effect.

        Raises:
            PrepError: A run with another recipe writes there, or the store does not answer.
        """
        if self._lock is not None:
            return
        lock = BucketLock(self._bucket, self._recipe_digest, note=note)
        lock.acquire()
        try:
            files = self._list_files()
            complete = {None, *self.steps(refresh=False)}  # None: not in the folder of a step
            leftovers = [file.path for file in files if listed_step(file.path) not in complete]
            self._bucket.delete_files(leftovers)
        except BaseException:
            lock.release()
            raise
        self._lock = lock

    def release(self, *, after_error: bool = False) -> None:
        """Release the lock. Objects of an incomplete step are left to the next start."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def _check_lock(self) -> None:
        # The same recipe takes the lock over at once, and deletes the objects of a step without a manifest.
        if self._lock is not None:
            self._lock.confirm()

    def write_step(self, save: StepSave) -> None:
        """Write a step.

        After an error, its objects stay invisible, and the next start deletes them.

        Raises:
            PrepError: One of the processes cannot write its part.
        """
        files = self._plan_files(save)
        bucket = self._open_bucket(self._step_url(save.step))
        write_step(save, BucketStep(save, files, bucket, self._store_files, self._check_lock))
        self._known_steps = [*self.steps(refresh=False), save.step]

    def _plan_files(self, save: StepSave) -> ProcessFiles:
        """Return the data files of all processes, planned once for all steps."""
        if self._files is not None and self._files[0] is save.plan.leaves:
            files = self._files[1]
            planned = files.plan
            plan = replace(
                save.plan, streams=planned.streams, files=planned.files, leaves=planned.leaves
            )
            return replace(files, plan=plan)
        boxes = exchange_boxes(save.group, save.name, save.leaves)
        with joint_work(save.group, f"{save.name}-planned"):
            files = plan_process_files(save.plan, [*save.leaves], boxes)
        self._files = save.plan.leaves, files
        return files

    def remove_step(self, step: int) -> None:
        """Delete the manifest of a step, then its other objects."""
        self._check_lock()
        bucket = self._open_bucket(self._step_url(step))
        # From here on the step does not exist. A kill leaves objects without a manifest, which the next `acquire`
        # deletes.
        bucket.delete(MANIFEST_FILE)
        self._known_steps = [known for known in self.steps(refresh=False) if known != step]
        bucket.delete_files([file.path for file in bucket.list_files()])

    def fetch_file(self, name: str, folder: Path) -> Path:
        """Download a file of the run to a folder, or remove it there if the run has none."""
        path = folder / name
        for file in self._bucket.list_files():
            if file.path == name:
                self._bucket.download(file, path)
                return path
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise io_error(path, error) from error
        return path

    def store_file(self, name: str) -> None:
        """Upload a file of the local folder now, and again with each step."""
        if name not in self._stored:
            self._stored.append(name)
        self._check_lock()
        path = self.local_folder / name
        try:
            with open_regular_file(path) as file:
                # The file may grow meanwhile.
                nbytes = os.fstat(file.fileno()).st_size
                self._bucket.write_pieces(name, _read_pieces(file, nbytes), size=nbytes)
        except FileNotFoundError:
            return
        except OSError as error:
            raise io_error(path, error) from error

    def _store_files(self) -> None:
        for name in self._stored:
            self.store_file(name)


def _read_pieces(file: BinaryIO, nbytes: int) -> Iterator[bytes]:
    """Yield the first bytes of a file in pieces."""
    while nbytes and (piece := file.read(min(nbytes, STORED_PIECE_NBYTES))):
        nbytes -= len(piece)
        yield piece
