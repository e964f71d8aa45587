"""The folder of a run: the names in it, and the check that a run may be written there."""

from __future__ import annotations

from pathlib import Path

from prepcli.commands.train_start import INIT_FOLDER
from prepcli.errors import PrepError, usage_error
from prepcli.execution.run_folder import LOCK
from prepcli.execution.shared_folder import TOKEN_PREFIX
from prepcli.execution.uploads import parse_out_url
from prepcli.formats.run_steps import saved_steps

RECIPE_FILE = "recipe.toml"
TOKENS_FOLDER = "data"  # the tokens of the datasets


def check_run_folder(folder: Path) -> None:
    """Check that a run may be written to a folder.

    The folder of a failed or killed start may contain only tokens or a lock, or an init of an earlier prep.

    Raises:
        PrepError: The path is a URL, a file, or a folder that is neither empty nor a run.
    """
    from trainer.data.store_writer import LOCK_FILE as TOKENS_LOCK

    if url := parse_out_url(folder):
        hint = f"`--out FOLDER`, then `prep export FOLDER --out {url}`"
        raise usage_error(f"`--out {url}` is not supported for `prep train`", "a run is saved to a file system", hint)
    run_files = (RECIPE_FILE, LOCK, f"{TOKENS_FOLDER}/{TOKENS_LOCK}", INIT_FOLDER)
    is_run = bool(saved_steps(folder)) or any((folder / name).exists() for name in run_files)
    if folder.is_dir() and any(folder.iterdir()) and not is_run and not any(folder.glob(f"{TOKEN_PREFIX}*")):
        raise PrepError(f"{folder} already exists and is not a run", f"it has no {RECIPE_FILE}", "`--out NAME`")
    if folder.exists() and not folder.is_dir():
        raise PrepError(f"{folder} already exists", "it is a file, and a run is a folder", "`--out NAME`")
