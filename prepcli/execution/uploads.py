"""Outputs in an object store: created in a local folder, then uploaded file by file, completion markers last.

Object stores have neither renames nor writes at an offset. The output is created in `NAME.upload` in the current folder
like any other output, resumable, and uploaded from there. `NAME.upload/uploaded.jsonl` records the URL and the
uploaded files. Readers of Orbax look for `commit_success.txt`, and prep for its manifest: both are uploaded last, and
deleted first when an output is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO, TypeVar

from prepcli.console.observer import Observer
from prepcli.console.progress import Progress
from prepcli.engine.files import io_error
from prepcli.engine.no_follow import open_no_follow, read_no_follow
from prepcli.errors import Option, PrepError, text, usage_error
from prepcli.execution.paths import remove_path
from prepcli.execution.staging import WORK_FOLDER
from prepcli.execution.stored_outputs import (
    OTHER_ADDRESS_HINT,
    check_stored_output,
    stored_manifest,
)
from prepcli.formats.manifest import (
    MANIFEST_FILE,
    foreign_output_error,
)
from prepcli.formats.orbax_write import COMMIT_MARKER
from prepcli.remote.bucket_lock import BucketLock, check_lock, is_locked_by, lock_owner
from prepcli.remote.conditional_objects import publish_file
from prepcli.remote.object_store import Bucket, ObjectStoreUrl, is_url, parse_url
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.symlinks import resolve_small_file
from trainer.files.json_values import load_json

UPLOAD_SUFFIX = ".upload"
MARKS_FILE = "uploaded.jsonl"
RETRIES = 10


class Planned(Protocol):
    """A result with the digest of its plan. Equal plans make equal outputs."""

    @property
    def plan_digest(self) -> str:
        """The digest."""
        ...


PlannedT = TypeVar("PlannedT", bound=Planned)


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """URL of an output in an object store, and the options for existing outputs."""

    url: ObjectStoreUrl
    dry_run: bool
    overwrite: bool
    restart: bool

    @property
    def local_folder(self) -> Path:
        """Folder of the output before the upload."""
        name = (self.url.path or self.url.bucket).rpartition("/")[2]
        return Path(name + UPLOAD_SUFFIX, name)

    @property
    def marks_path(self) -> Path:
        """Record of the uploaded files."""
        return self.local_folder.parent / MARKS_FILE


def parse_out_url(path: Path | None) -> ObjectStoreUrl | None:
    """Return the URL given as a path, such as `--out`, or None for a local path.

    `Path` collapses the `//` of a URL to `/`. This function restores it.

    Raises:
        UsageError: The scheme is not supported, or the bucket or path is invalid.
    """
    if path is None:
        return None
    scheme, colon, rest = path.as_posix().partition(":/")
    url = f"{scheme}://{rest}"
    if not colon or not is_url(url):
        return None
    return parse_url(url)


def check_local_path(path: Path | None) -> None:
    """Raise UsageError if the path of tokens, a page or another small output is a URL."""
    url = parse_out_url(path)
    if url is not None:
        why = "only checkpoints and training runs are written to buckets"
        raise usage_error(f"cannot write {url}", why, "name a local path, then copy the result")


def make_and_upload(
    request: UploadRequest,
    has_other_processes: bool,
    *,
    observer: Observer,
    make_output: Callable[[Path, bool], PlannedT],
) -> tuple[PlannedT, bool]:
    """Create an output and upload it. An existing output of the same request is kept.

    Args:
        request: URL and options.
        has_other_processes: Whether several processes write the output (not supported).
        observer: Receives notes and progress.
        make_output: Called with the folder and whether this is a dry run. Creates the output and returns its result.

    Returns:
        The result of `make_output`, and whether the output was uploaded by an earlier call. The result is one of a dry
        run then.

    Raises:
        PrepError: The URL holds something else, or the upload failed. The output then stays in the local folder.
    """
    if request.dry_run:
        return make_output(request.local_folder, True), False
    if has_other_processes:
        raise usage_error(
            text("{} is not supported with several processes", Option("out", str(request.url))),
            "one process uploads the output",
            "write to a shared folder, then copy it",
        )
    bucket = Bucket(request.url, RETRIES, retry_policy_from_env(os.environ, observer.note))
    remote_files = bucket.list_files()
    if remote_files and not _is_replaceable(request, remote_files):
        raise foreign_output_error(bucket.name)
    if remote_files and not request.overwrite:
        manifest = stored_manifest(bucket, remote_files)
        if manifest is not None:
            planned = make_output(request.local_folder, True)
            check_stored_output(
                bucket, remote_files, manifest, planned.plan_digest, restart=request.restart
            )
            observer.note(
                f"already done: {request.url} was made by the same request from the same source"
            )
            if is_locked_by(bucket, planned.plan_digest):
                # A kill after the publication left the lock.
                with BucketLock(bucket, planned.plan_digest, note=observer.note):
                    pass
            _remove_local_files(request)
            return planned, True
    if lock_owner(bucket) is not None:
        # This check comes before the work. Only a dry run returns the plan of a request.
        check_lock(bucket, make_output(request.local_folder, True).plan_digest)
    if request.restart:
        _remove_local_files(request)
    output = make_output(request.local_folder, False)
    plan_digest = output.plan_digest
    with BucketLock(bucket, plan_digest, note=observer.note) as lock:
        # Another process may have written files since the first listing.
        remote_files = bucket.list_files()
        if not _is_uploaded_meanwhile(request, bucket, remote_files, plan_digest):
            _upload_folder(
                request, plan_digest, bucket, remote_files, lock=lock, progress=observer.progress()
            )
    _remove_local_files(request)
    return output, False


def _is_uploaded_meanwhile(
    request: UploadRequest, bucket: Bucket, remote_files: Sequence[RemoteFile], plan_digest: str
) -> bool:
    """Return whether a process with the same plan has completed the output meanwhile. False with `overwrite`.

    Raises:
        PrepError: Another output is there now.
    """
    if remote_files and not _is_replaceable(request, remote_files):
        raise foreign_output_error(bucket.name)
    # With `--overwrite` the newer output wins, also over one that another process has just completed.
    stored_plan: str | None = None
    if not request.overwrite:
        stored_plan = _stored_plan(bucket, remote_files)
    if stored_plan is not None and stored_plan != plan_digest:
        why = "another request wrote it while this one ran"
        raise PrepError(f"{bucket.name} already exists", why, OTHER_ADDRESS_HINT)
    return stored_plan is not None


def _stored_plan(bucket: Bucket, remote_files: Sequence[RemoteFile]) -> str | None:
    """Return the plan's digest in the manifest of an output. None if it has no manifest, empty if it is damaged."""
    manifest = stored_manifest(bucket, remote_files)
    return None if manifest is None else manifest.plan


def _remove_local_files(request: UploadRequest) -> None:
    """Remove the local output and its marks, but no other files next to it."""
    local_folder = request.local_folder
    try:
        for path in (
            request.marks_path,
            local_folder,
            local_folder.with_name(f"{local_folder.name}.partial"),
        ):
            remove_path(path)
    except OSError as error:
        raise io_error(local_folder.parent, error) from error
    with contextlib.suppress(OSError):  # not empty, or missing
        local_folder.parent.rmdir()


def _upload_folder(
    request: UploadRequest,
    plan_digest: str,
    bucket: Bucket,
    remote_files: Sequence[RemoteFile],
    *,
    lock: BucketLock,
    progress: Progress,
) -> None:
    """Upload the remaining files: data first, completion markers last."""
    # The order of requests, and what a kill leaves behind:
    #   1. delete the old markers   the address holds no complete output from here on
    #   2. upload data files        each has a mark once it is stored; a later run skips marked files
    #   3. delete older files       of a replaced output, which the new one does not have
    #   4. upload the markers       the manifest is last: prep does not read an output without it
    folder = request.local_folder
    names: dict[str, Path] = {}
    total_nbytes = 0
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] != WORK_FOLDER:
            names[name.as_posix()] = resolve_small_file(path, folder)
            total_nbytes += path.stat().st_size
    if _has_begun(request):
        uploaded = _uploaded_names(request.marks_path, plan_digest, remote_files)
    else:
        uploaded = _create_marks(request)

    def write(name: str) -> RemoteFile:
        lock.check()
        return bucket.write(name, names[name], on_written=progress.advance)

    for file in remote_files:
        if file.path in (COMMIT_MARKER, MANIFEST_FILE):
            bucket.delete(file.path)
    progress.begin("upload", total_nbytes)
    try:
        with open(
            open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a"
        ) as marks:
            for name in sorted(names.keys() - {COMMIT_MARKER, MANIFEST_FILE}):
                if name in uploaded:
                    progress.advance(names[name].stat().st_size)
                else:
                    _write_mark(marks, plan_digest, write(name))
            for file in remote_files:
                if file.path not in names:
                    bucket.delete(file.path)
            if COMMIT_MARKER in names:
                write(COMMIT_MARKER)
            lock.confirm()
            publish_file(bucket, MANIFEST_FILE, names[MANIFEST_FILE])
            progress.advance(names[MANIFEST_FILE].stat().st_size)
    finally:
        progress.end()


def _is_replaceable(request: UploadRequest, remote_files: Sequence[RemoteFile]) -> bool:
    """Return whether the remote files are an output of prep, or an unfinished upload of this machine."""
    return any(file.path == MANIFEST_FILE for file in remote_files) or _has_begun(request)


def _has_begun(request: UploadRequest) -> bool:
    """Return whether this machine has the marks file of an earlier upload to the same URL."""
    marks = request.marks_path
    return marks.exists() and read_no_follow(marks).startswith(_marks_header(request).encode())


def _create_marks(request: UploadRequest) -> set[str]:
    """Create the marks file of a new upload. Return the empty set of uploaded names."""
    with open(
        open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w"
    ) as marks:
        marks.write(_marks_header(request))
        marks.flush()
        os.fsync(marks.fileno())
    return set()


def _marks_header(request: UploadRequest) -> str:
    """Return the first line of the marks file: the URL."""
    return json.dumps([str(request.url)]) + "\n"


def _write_mark(marks: TextIO, plan_digest: str, file: RemoteFile) -> None:
    """Record an uploaded file durably."""
    # After the object is stored: a kill between the two uploads the file once more. The other order
    # would leave a mark of an object that does not exist.
    marks.write(json.dumps([plan_digest, file.path, file.size, file.digest]) + "\n")
    marks.flush()
    os.fsync(marks.fileno())


def _uploaded_names(
    marks_path: Path, plan_digest: str, remote_files: Sequence[RemoteFile]
) -> set[str]:
    """Return the unchanged files uploaded by an earlier run of the same plan."""
    if not marks_path.exists():
        return set()
    # A mark counts only if the object is still there with the same size and digest: another program
    # may have replaced it.
    names: set[str] = set()
    known_files = set(remote_files)
    for line in read_no_follow(marks_path).splitlines():
        try:
            mark_plan_digest, path, size, file_digest = load_json(line)
        except (ValueError, TypeError):  # the header, or a line that was cut short by a kill
            continue
        if mark_plan_digest == plan_digest and RemoteFile(path, size, file_digest) in known_files:
            names.add(path)
    return names
