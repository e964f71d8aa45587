"""The storage of a run: which folder or bucket it is, its lock, and checks that no other process has changed it."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.core.errors import (
    FAILED,
    STOPPED,
    Option,
    PrepError,
    text,
)
from prepcli.core.observer import Observer
from prepcli.engine.digest import record_digest
from prepcli.execution.training_bucket import BucketStorage
from prepcli.execution.training_folder import FolderStorage
from prepcli.execution.training_storage import RunStorage, joint_work
from prepcli.stores.addresses import parse_out_url
from prepcli.stores.byte_ranges import retry_policy_from_env
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from prepcli.core.process_group import ProcessGroup

RUNS_FOLDER = Path("runs")
TOKENS_FOLDER = "data"  # the tokens of the datasets, in the local folder of a run
# Errors of a read-only file system. A run there cannot be changed, so it needs no lock.
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
# A converted model, in the folder of a run that an earlier version of prep began
INIT_FOLDER = "init"


def open_run_storage(out: Path | None, recipe: Recipe, observer: Observer) -> RunStorage:
    """Return the storage of a run, without reading or writing there.

    Args:
        out: The value of `--out`.
        recipe: The recipe, for the name of the default folder and the lock of a bucket.
        observer: Receives notes about retried requests.

    Raises:
        UsageError: A URL has another scheme, or is invalid.
    """
    from trainer.data.files import OPENED_PREFIX
    from trainer.distributed.agreement import PROBE_PREFIX

    url = parse_out_url(out)
    if url is None:
        # Earlier versions left the file `lock`.
        tokens = (f"{TOKENS_FOLDER}/{OPENED_PREFIX}*", f"{TOKENS_FOLDER}/lock")
        start_files = (*tokens, INIT_FOLDER, f"{PROBE_PREFIX}*")
        return FolderStorage(out or RUNS_FOLDER / recipe.name, start_files)
    local_folder = RUNS_FOLDER / url.scheme / url.bucket / url.path
    return BucketStorage(
        url, local_folder, retry_policy_from_env(os.environ, observer.note), _recipe_digest(recipe)
    )


def _recipe_digest(recipe: Recipe) -> str:
    """Return the digest of a recipe without the keys that say which process this is."""
    # A restarted job takes the lock of its killed predecessor over at once, because both have the same
    # digest. Their hosts and addresses may differ.
    values = recipe.model_dump(mode="json", exclude={"cluster"})
    return record_digest(json.dumps(values, sort_keys=True).encode())


@contextmanager
def hold_run(
    storage: RunStorage, group: ProcessGroup, note: Callable[[str], None]
) -> Iterator[PrepError | None]:
    """Hold the lock of a run in process 0, from before its steps are listed until its last export and push.

    A file system or an object store may have no locks. Therefore `check_last_step` is called before the first change of
    the run.

    Args:
        storage: Storage of the run.
        group: Processes of the run.
        note: Prints a warning if the file system has no locks.

    Yields:
        The error of a storage that this process may only read, which leaves the run unlocked. None otherwise.

    Raises:
        PrepError: Another process holds the run.
    """
    if group.index > 0:
        yield None
        return
    lock_error: PrepError | None = None
    try:
        storage.acquire(note)
    except PrepError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in NOT_WRITABLE):
            raise
        # A finished run on a read-only file system prints its result without a lock.
        lock_error = error
    try:
        yield lock_error
    except BaseException:
        # BaseException includes signals and KeyboardInterrupt: the lock is released on every exit
        # but a kill.
        storage.release(after_error=True)
        raise
    storage.release()


def check_last_step(storage: RunStorage, step: int) -> None:
    """Check that the last saved step of a run has not changed since it was read, before the first write to the run.

    Args:
        storage: Storage of the run, acquired.
        step: Step to resume from. 0 means a new run.

    Raises:
        PrepError: Another process has saved or removed steps meanwhile.
    """
    # A new listing: without a lock, or after another process took the lock over, the known steps may be out of date.
    last_step = max(storage.steps(), default=0)
    if last_step != step:
        raise _trained_meanwhile_error(storage, step, last_step)


def _trained_meanwhile_error(storage: RunStorage, step: int, last_step: int) -> PrepError:
    """Return the error for a run that another process has trained since this one read its last step."""
    what = f"{storage.name} is at step {last_step}, and this process has read step {step}"
    why = "another process has trained the run meanwhile; nothing was changed"
    # 75 asks a launcher to start the job again. That helps only if there is a step to resume from.
    code = FAILED
    if last_step:
        code = STOPPED
    return PrepError(
        what, why, "start again once it has ended: the run resumes from its last step", code
    )


@contextmanager
def explain_removed_step(storage: RunStorage, step: int) -> Iterator[None]:
    """Replace an error in the `with` block by the error of `check_last_step`, if another process removed the step."""
    try:
        yield
    except PrepError as error:
        if not step:
            raise
        # Another process that trains the run removes old steps, also one that is being read here.
        steps = storage.steps()
        if step not in steps:
            raise _trained_meanwhile_error(storage, step, max(steps, default=0)) from error
        raise


def check_shared_folder(folder: Path, group: ProcessGroup) -> None:
    """Check that all processes see the folder of process 0, which creates it.

    Args:
        folder: The folder.
        group: The processes.

    Raises:
        PrepError: A process has another folder of this name, or process 0 cannot write to it.
    """
    from trainer.distributed.agreement import sees_folder

    is_shared = sees_folder(folder, group)
    with joint_work(group, "folder-seen"):
        if not is_shared:
            what = f"{socket.gethostname()} does not see the run's folder of process 0"
            why = f"{folder.absolute()} is another folder there"
            hint = text("set {} to a folder on a file system that all hosts share", Option("out"))
            raise PrepError(what, why, hint)
