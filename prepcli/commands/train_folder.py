"""The place of a run that `--out` names, and the check that all processes see its folder."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.console.ui import Ui
from prepcli.engine.digest import digest
from prepcli.errors import FAILED, STOPPED, PrepError
from prepcli.execution.bucket_run import BucketRun
from prepcli.execution.joint_work import joint_work
from prepcli.execution.local_run import LocalRun
from prepcli.execution.run_place import TOKENS_FOLDER, RunPlace
from prepcli.execution.uploads import parse_out_url
from prepcli.remote.retries import retry_policy_from_env
from trainer.recipe import Recipe

if TYPE_CHECKING:
    from trainer.distributed.process_group import ProcessGroup

RUNS_FOLDER = Path("runs")
NOT_WRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)
INIT_FOLDER = "init"  # in the folder of a run that an earlier prep began: a converted model


def run_place(out: Path | None, recipe: Recipe, ui: Ui) -> RunPlace:
    """Return the place of a run, without reading or writing there.

    Args:
        out: The value of `--out`.
        recipe: The recipe, for the name of the default folder and the lock of a bucket.
        ui: Receives notes about retried requests.

    Raises:
        UsageError: A URL has another scheme, or is invalid.
    """
    from trainer.data.store_writer import LOCK_FILE as TOKENS_LOCK
    from trainer.distributed.hosts import PROBE_PREFIX

    url = parse_out_url(out)
    if url is None:
        start_files = (f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER, f"{PROBE_PREFIX}*")
        return LocalRun(out or RUNS_FOLDER / recipe.name, start_files)
    local_folder = RUNS_FOLDER / url.scheme / url.bucket / url.path
    return BucketRun(url, local_folder, retry_policy_from_env(os.environ, ui.note), _recipe_digest(recipe))


def _recipe_digest(recipe: Recipe) -> str:
    """Return the digest of a recipe without the keys that say which process this is."""
    return digest(json.dumps(recipe.model_dump(mode="json", exclude={"cluster"}), sort_keys=True).encode())


@contextmanager
def hold_run(place: RunPlace, group: ProcessGroup, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a run in process 0, from before its steps are listed until it ends.

    A file system or an object store may have no locks. Therefore `check_last_step` is called before the first change of
    the run.

    Args:
        place: Place of the run.
        group: Processes of the run.
        note: Prints a warning if the file system has no locks.

    Raises:
        PrepError: Another process holds the run.
    """
    if group.index > 0:
        yield
        return
    try:
        place.acquire(note)
    except PrepError as error:
        cause = error.__cause__
        if not (isinstance(cause, OSError) and cause.errno in NOT_WRITABLE):
            raise
        # A finished run prints its result without a lock; another one takes the lock before it writes, and fails then.
    try:
        yield
    except BaseException:
        place.leave()
        raise
    place.release()


def check_last_step(place: RunPlace, step: int) -> None:
    """Check that the last saved step of a run has not changed since it was read, before the first write to the run.

    Args:
        place: Place of the run, acquired.
        step: Step to resume from; 0 for a new run.

    Raises:
        PrepError: Another process has saved or removed steps meanwhile.
    """
    # A new listing: without a lock, or after a takeover of the lock, the known steps may be out of date.
    last_step = max(place.steps(), default=0)
    if last_step != step:
        raise _overtaken_error(place, step, last_step)


def _overtaken_error(place: RunPlace, step: int, last_step: int) -> PrepError:
    """Return the error for a run with another last step than the one read at the start."""
    what = f"{place.name} is at step {last_step}, and this process has read step {step}"
    why = "another process has trained the run meanwhile; nothing was changed"
    code = STOPPED if last_step else FAILED
    return PrepError(what, why, "start again once it has ended: the run resumes from its last step", code)


@contextmanager
def explain_removed_step(place: RunPlace, step: int) -> Iterator[None]:
    """Raise the error of `check_last_step` instead of an error of the block if another process removed the step."""
    try:
        yield
    except PrepError as error:
        steps = place.steps() if step else []
        if step and step not in steps:
            raise _overtaken_error(place, step, max(steps, default=0)) from error
        raise


def check_shared_folder(folder: Path, group: ProcessGroup) -> None:
    """Check that all processes see the folder of process 0, which creates it.

    Args:
        folder: The folder.
        group: The processes.

    Raises:
        PrepError: A process has another folder of this name, or process 0 cannot write to it.
    """
    from trainer.distributed.hosts import sees_folder

    is_shared = sees_folder(folder, group)
    with joint_work(group, "folder-seen"):
        if not is_shared:
            what = f"{socket.gethostname()} does not see the run's folder of process 0"
            why = f"{folder.absolute()} is another folder there"
            raise PrepError(what, why, "`--out FOLDER` on a file system that all hosts share")
