"""The place of a run that `--out` names: a folder, or a URL of an object store."""

from __future__ import annotations

import os
from pathlib import Path

from prepcli.console.ui import Ui
from prepcli.execution.bucket_run import BucketRun
from prepcli.execution.local_run import LocalRun
from prepcli.execution.run_place import TOKENS_FOLDER, RunPlace
from prepcli.execution.uploads import parse_out_url
from prepcli.remote.retries import retry_policy_from_env

RUNS_FOLDER = Path("runs")
INIT_FOLDER = "init"  # in the folder of a run that an earlier prep began: a converted model


def run_place(out: Path | None, name: str, ui: Ui) -> RunPlace:
    """Return the place of a run, without reading or writing there.

    Args:
        out: The value of `--out`.
        name: Name of the recipe, for the default folder.
        ui: Receives notes about retried requests.

    Raises:
        UsageError: A URL has another scheme, or is invalid.
    """
    from trainer.data.store import LOCK_FILE as TOKENS_LOCK

    url = parse_out_url(out)
    if url is None:
        return LocalRun(out or RUNS_FOLDER / name, (f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER))
    local_folder = RUNS_FOLDER / url.scheme / url.bucket / url.path
    return BucketRun(url, local_folder, retry_policy_from_env(os.environ, ui.note))
