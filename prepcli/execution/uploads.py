"""Outputs in an object store: created in a local folder, then uploaded file by file, completion markers last.

Object stores have neither renames nor writes at an offset. The output is created in `NAME.upload` in the current folder
like any other output, resumable, and uploaded from there; `NAME.upload/uploaded.jsonl` records the URL and the uploaded
files. Readers of Orbax look for `commit_success.txt`, and prep for its manifest: both are uploaded last, and deleted
first when an output is replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from prepcli.console.progress import Progress
from prepcli.console.ui import Report, Ui
from prepcli.engine.digest import digest
from prepcli.engine.files import io_error
from prepcli.engine.no_follow import open_no_follow, read_no_follow
from prepcli.errors import DamagedError, PrepError, usage_error
from prepcli.execution.paths import remove_path
from prepcli.execution.staging import WORK_FOLDER
from prepcli.formats.manifest import (
    FILES_KEY,
    MANIFEST_FILE,
    SIZE_KEY,
    XXH3_KEY,
    decode_manifest,
    foreign_output_error,
)
from prepcli.remote.bucket_lock import BucketLock, check_lock, lock_owner
from prepcli.remote.object_store import Bucket, ObjectStoreUrl, is_url, parse_url
from prepcli.remote.placeholders import SMALL_NBYTES, read_all
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.symlinks import resolve_small_file
from trainer.files.json_values import load_json

UPLOAD_SUFFIX = ".upload"
MARKS_FILE = "uploaded.jsonl"
COMMIT_MARKER = "commit_success.txt"  # of Orbax
RETRIES = 10


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """URL of an output in an object store, and the options for existing outputs."""

    url: ObjectStoreUrl
    dry_run: bool
    overwrite: bool
    restart: bool

    @property
    def local_folder(self) -> Path:
        """Folder in which the output is created before it is uploaded."""
        name = (self.url.path or self.url.bucket).rpartition("/")[2]
        return Path(name + UPLOAD_SUFFIX, name)

    @property
    def marks_path(self) -> Path:
        """File that records the uploaded files."""
        return self.local_folder.parent / MARKS_FILE


def parse_out_url(path: Path | None) -> ObjectStoreUrl | None:
    """Return the URL given as a path, such as `--out`; None for a local path.

    `Path` collapses the `//` of a URL to `/`; this function restores it.

    Raises:
        UsageError: The scheme is not supported, or the bucket or path is invalid.
    """
    scheme, colon, rest = path.as_posix().partition(":/") if path is not None else ("", "", "")
    text = f"{scheme}://{rest}"
    return parse_url(text) if colon and is_url(text) else None


def make_and_upload(
    request: UploadRequest, has_other_processes: bool, *, ui: Ui, make_output: Callable[[Path, bool], Report]
) -> Report:
    """Create an output and upload it. An existing output of the same request is kept.

    Args:
        request: URL and options.
        has_other_processes: Whether several processes write the output (not supported).
        ui: Prints notes and progress.
        make_output: Called with the folder and whether it is a dry run; creates the output and returns its report.

    Returns:
        The report, with the URL in place of the local folder.

    Raises:
        PrepError: The URL holds something else, or the upload failed; the output then stays in the local folder.
    """
    if request.dry_run:
        return _with_url(make_output(request.local_folder, True), request)
    if has_other_processes:
        hint = "write to a shared folder, then copy it"
        raise usage_error(
            f"`--out {request.url}` is not supported with several processes", "one process uploads the output", hint
        )
    bucket = Bucket(request.url, RETRIES, retry_policy_from_env(os.environ, ui.note))
    remote_files = bucket.list_files()
    if remote_files and not _is_replaceable(request, remote_files):
        raise foreign_output_error(bucket.name)
    if (
        remote_files
        and not request.overwrite
        and (report := _report_if_uploaded(request, bucket, remote_files, ui, make_output))
    ):
        return report
    if lock_owner(bucket) is not None:  # before the work; the plan of a request is known after a dry run only
        check_lock(bucket, str(make_output(request.local_folder, True).fields["plan_digest"]))
    if request.restart:
        _remove_local_files(request)
    report = make_output(request.local_folder, False)
    plan_digest = str(report.fields["plan_digest"])
    with BucketLock(bucket, plan_digest, note=ui.note) as lock:
        remote_files = bucket.list_files()  # others may have written there since the first listing
        if not _is_uploaded_meanwhile(request, bucket, remote_files, plan_digest):
            _upload_folder(request, plan_digest, bucket, remote_files, lock=lock, progress=ui.progress())
    _remove_local_files(request)
    return _with_url(report, request)


def _is_uploaded_meanwhile(
    request: UploadRequest, bucket: Bucket, remote_files: Sequence[RemoteFile], plan_digest: str
) -> bool:
    """Return whether a process with the same plan has completed the output while this one created it locally.

    Raises:
        PrepError: Another output is there now.
    """
    if remote_files and not _is_replaceable(request, remote_files):
        raise foreign_output_error(bucket.name)
    stored_plan = None if request.overwrite else _stored_plan(bucket, remote_files)
    if stored_plan is not None and stored_plan != plan_digest:
        why = "another request wrote it while this one ran"
        raise PrepError(f"{bucket.name} already exists", why, "`--out` another address, or `--overwrite`")
    return stored_plan is not None


def _report_if_uploaded(
    request: UploadRequest,
    bucket: Bucket,
    remote_files: Sequence[RemoteFile],
    ui: Ui,
    make_output: Callable[[Path, bool], Report],
) -> Report | None:
    """Return the report of a complete output, None without a manifest. PrepError for another output."""
    manifest = _stored_manifest(bucket, remote_files)
    if manifest is None:
        return None
    report = make_output(request.local_folder, True)
    is_same_plan = manifest.get("plan") == report.fields["plan_digest"]
    is_complete = is_same_plan and _has_intact_files(bucket, remote_files, manifest)
    if not is_complete or request.restart:
        why = "it was made by another request, or of another source"
        if is_same_plan:
            why = "this command created it" + (" earlier" if is_complete else ", but its files are damaged")
        raise PrepError(f"{bucket.name} already exists", why, "`--out` another address, or `--overwrite`")
    ui.note(f"already done: {request.url} was made by the same request from the same source")
    _remove_local_files(request)
    fields = {key: value for key, value in report.fields.items() if key != "dry_run"}
    return _with_url(replace(report, text=str(request.local_folder), fields={**fields, "already": True}), request)


def _stored_plan(bucket: Bucket, remote_files: Sequence[RemoteFile]) -> str | None:
    """Return the plan's digest in the manifest of an output; None without a manifest, empty for a damaged one."""
    manifest = _stored_manifest(bucket, remote_files)
    return None if manifest is None else str(manifest.get("plan", ""))


def _stored_manifest(bucket: Bucket, remote_files: Sequence[RemoteFile]) -> Mapping[str, Any] | None:
    """Return the manifest of an output; None without a manifest, empty for a damaged one."""
    file = next((file for file in remote_files if file.path == MANIFEST_FILE), None)
    if file is None:
        return None
    try:
        return decode_manifest(Path(MANIFEST_FILE), read_all(bucket, file))
    except DamagedError:
        return {}


def _has_intact_files(bucket: Bucket, remote_files: Sequence[RemoteFile], manifest: Mapping[str, Any]) -> bool:
    """Return whether the listed files of an output exist, and those that are fetched whole equal their records."""
    files = {file.path: file for file in remote_files}
    for name, record in manifest.get(FILES_KEY, {}).items():
        file = files.get(name)
        if file is None or file.size != record[SIZE_KEY]:
            return False
        is_fetched = XXH3_KEY in record and file.size <= SMALL_NBYTES
        if is_fetched and digest(read_all(bucket, file)) != record[XXH3_KEY]:
            return False
    return True


def _remove_local_files(request: UploadRequest) -> None:
    """Remove the local output and its marks, but no other files next to it."""
    local_folder = request.local_folder
    try:
        for path in (request.marks_path, local_folder, local_folder.with_name(f"{local_folder.name}.partial")):
            remove_path(path)
    except OSError as error:
        raise io_error(local_folder.parent, error) from error
    with contextlib.suppress(OSError):  # not empty, or missing
        local_folder.parent.rmdir()


def _with_url(report: Report, request: UploadRequest) -> Report:
    """Return the report with the URL in place of the local folder."""
    local_folder, url = str(request.local_folder), str(request.url)
    return replace(
        report,
        text=report.text.replace(local_folder, url),
        fields={**report.fields, "output": url},
        next_command=report.next_command.replace(local_folder, url),
    )


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
    folder = request.local_folder
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != WORK_FOLDER
    ]
    names = {path.relative_to(folder).as_posix(): resolve_small_file(path, folder) for path in paths}
    last_names = [name for name in (COMMIT_MARKER, MANIFEST_FILE) if name in names]
    uploaded = (
        _uploaded_names(request.marks_path, plan_digest, remote_files)
        if _has_begun(request)
        else _create_marks(request)
    )

    def write(name: str) -> RemoteFile:
        lock.check()
        return bucket.write(name, names[name], on_written=progress.advance)

    for file in remote_files:
        if file.path in (COMMIT_MARKER, MANIFEST_FILE):
            bucket.delete(file.path)
    progress.begin("upload", sum(path.stat().st_size for path in paths))
    try:
        with open(open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as marks:
            for name in sorted(names.keys() - {*last_names}):
                if name in uploaded:
                    progress.advance(names[name].stat().st_size)
                else:
                    _write_mark(marks, plan_digest, write(name))
            for file in remote_files:
                if file.path not in names:
                    bucket.delete(file.path)
            for name in last_names:
                write(name)
    finally:
        progress.end()


def _is_replaceable(request: UploadRequest, remote_files: Sequence[RemoteFile]) -> bool:
    """Return whether the remote files are an output of prep, or an upload that began here."""
    return any(file.path == MANIFEST_FILE for file in remote_files) or _has_begun(request)


def _has_begun(request: UploadRequest) -> bool:
    """Return whether an upload to this URL began here."""
    marks = request.marks_path
    return marks.exists() and read_no_follow(marks).startswith(_marks_header(request).encode())


def _create_marks(request: UploadRequest) -> set[str]:
    """Create the marks file of a new upload; return the empty set of uploaded names."""
    with open(open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as marks:
        marks.write(_marks_header(request))
        marks.flush()
        os.fsync(marks.fileno())
    return set()


def _marks_header(request: UploadRequest) -> str:
    """Return the first line of the marks file: the URL."""
    return json.dumps([str(request.url)]) + "\n"


def _write_mark(marks: TextIO, plan_digest: str, file: RemoteFile) -> None:
    """Record an uploaded file durably."""
    marks.write(json.dumps([plan_digest, file.path, file.size, file.digest]) + "\n")
    marks.flush()
    os.fsync(marks.fileno())


def _uploaded_names(marks_path: Path, plan_digest: str, remote_files: Sequence[RemoteFile]) -> set[str]:
    """Return the unchanged files uploaded by an earlier run of the same plan."""
    if not marks_path.exists():
        return set()
    names, known_files = set[str](), {*remote_files}
    for line in read_no_follow(marks_path).splitlines():
        try:
            mark_plan_digest, path, size, file_digest = load_json(line)
        except (ValueError, TypeError):  # the header, or a line that was cut short by a kill
            continue
        if mark_plan_digest == plan_digest and RemoteFile(path, size, file_digest) in known_files:
            names.add(path)
    return names
