"""The folder of a run: the names in it, and the checks that a run may be written there by all processes."""

from __future__ import annotations

import socket
from pathlib import Path

from prepcli.commands.train_start import INIT_FOLDER
from prepcli.errors import PrepError, usage_error
from prepcli.execution.joint_work import joint_work
from prepcli.execution.run_folder import LOCK
from prepcli.execution.uploads import parse_out_url
from prepcli.formats.run_steps import saved_steps
from prepcli.inspection.run_record import RECIPE_FILE
from trainer.distributed.hosts import PROBE_PREFIX, sees_folder
from trainer.distributed.process_group import ProcessGroup

TOKENS_FOLDER = "data"  # the tokens of the datasets


def check_run_folder(folder: Path) -> None:
    """Check that a run may be written to a folder.

    The folder of a failed or killed start may contain only tokens or a lock, or an init of an earlier prep.

    Raises:
        PrepError: The path is a URL, a file, or a folder that is neither empty nor a run.
    """
    from trainer.data.store import LOCK_FILE as TOKENS_LOCK

    if url := parse_out_url(folder):
        hint = f"`--out FOLDER`, then `prep export FOLDER --out {url}`"
        raise usage_error(f"`--out {url}` is not supported for `prep train`", "a run is saved to a file system", hint)
    run_files = (RECIPE_FILE, LOCK, f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER)
    is_run = bool(saved_steps(folder)) or any((folder / name).exists() for name in run_files)
    if folder.is_dir() and any(folder.iterdir()) and not is_run and not any(folder.glob(f"{PROBE_PREFIX}*")):
        raise PrepError(f"{folder} already exists and is not a run", f"it has no {RECIPE_FILE}", "`--out NAME`")
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"{folder} already exists", "it is a file, and a run is a folder", "`--out NAME`")


def check_shared_folder(folder: Path, group: ProcessGroup) -> None:
    """Check that all processes see the folder of process 0, which creates it.

    Args:
        folder: The folder.
        group: The processes.

    Raises:
        PrepError: A process has another folder of this name, or process 0 cannot write to it.
    """
    is_shared = sees_folder(folder, group)
    with joint_work(group, "folder-seen"):
        if not is_shared:
            what = f"{socket.gethostname()} does not see the run's folder of process 0"
            why = f"{folder.absolute()} is another folder there"
            raise PrepError(what, why, "`--out FOLDER` on a file system that all hosts share")
