"""The place of a run that `--out` names, and the check that all processes see its folder."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from prepcli.console.ui import Ui
from prepcli.engine.digest import digest
from prepcli.errors import PrepError
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
