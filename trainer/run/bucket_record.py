"""The record of a training run in an object store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from prepcli.formats.run_steps import RECIPE_FILE, listed_step, listed_steps
from prepcli.stores.byte_ranges import RemoteFile
from prepcli.stores.object_store import Bucket
from prepcli.stores.paths import create_temporary_folder
from trainer.run.run_record import (
    RECORD_FILES,
    RunRecord,
    SavedStep,
    not_a_run_error,
    read_run,
)


def read_bucket_run(bucket: Bucket) -> RunRecord:
    """Read the record of a run. Its steps are listed, not read.

    Args:
        bucket: Client of the URL of the run.

    Raises:
        PrepError: No run is there, the store cannot be reached, or a file is damaged.
    """
    files = {file.path: file for file in bucket.list_files()}
    if RECIPE_FILE not in files:
        raise not_a_run_error(bucket.name, exists=bool(files))
    folder = create_temporary_folder()
    # The files of the steps are not downloaded. They may have terabytes, and their names suffice for the record.
    for name in files.keys() & RECORD_FILES:
        bucket.download(files[name], folder / name)
    record = read_run(folder)
    # `gs://b` has an empty path: the bucket is the run.
    title = bucket.url.path.rpartition("/")[2] or bucket.url.bucket
    return replace(record, name=bucket.name, title=title, checkpoints=_saved_steps(files.values()))


def _saved_steps(files: Iterable[RemoteFile]) -> tuple[SavedStep, ...]:
    """Return the complete steps among the files of a run, with their sizes."""
    # Key None collects the files outside of steps. Steps without a manifest are counted too, and left out
    # at the end: their upload was interrupted, or is in progress.
    paths = list[str]()
    nbytes = Counter[int | None]()
    for file in files:
        paths.append(file.path)
        nbytes[listed_step(file.path)] += file.size
    return tuple(SavedStep(step, nbytes[step]) for step in listed_steps(paths))
