"""An output in an object store: made here first, then uploaded file by file, what says that it is whole last.

There a name cannot be given to what is made, and an object cannot be written in pieces in any order. So it is made in
`NAME.upload` in the current folder as any output is, resumable, and goes up from there; `NAME.upload/uploaded.jsonl`
names the address and what is up. Readers of Orbax look for `commit_success.txt`, those of prep for its manifest: they
come last, and where something is replaced they go first.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from prepcli.console.progress import Progress
from prepcli.console.ui import Report, Ui
from prepcli.engine.files import io_error
from prepcli.engine.no_follow import open_no_follow
from prepcli.errors import PrepError, usage_error
from prepcli.execution.staging import WORK_FOLDER, remove_path
from prepcli.formats.manifest import MANIFEST_FILE, foreign_output_error
from prepcli.remote.object_store import Bucket, ObjectStoreUrl, is_url, parse_url
from prepcli.remote.placeholders import read_all
from prepcli.remote.remote_files import RemoteFile
from prepcli.remote.retries import retry_policy_from_env
from prepcli.sources.symlinks import resolve_small_file

UPLOAD_SUFFIX = ".upload"
MARKS_FILE = "uploaded.jsonl"
COMMIT_MARKER = "commit_success.txt"  # of Orbax
PART_NBYTES = 8 << 20  # of an upload, of which two are in memory
MAX_PARTS = 9_000  # stores take 10,000
RETRIES = 10


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """Where it goes, and what the command line says of what is there."""

    url: ObjectStoreUrl
    dry_run: bool
    overwrite: bool
    restart: bool

    @property
    def local_folder(self) -> Path:
        """The folder in which the output is made before it is uploaded."""
        name = (self.url.path or self.url.bucket).rpartition("/")[2]
        return Path(name + UPLOAD_SUFFIX, name)

    @property
    def marks_path(self) -> Path:
        return self.local_folder.parent / MARKS_FILE


def parse_out_url(out: Path | None) -> ObjectStoreUrl | None:
    """The address that `--out` names: as a path it has lost one of its slashes. A usage PrepError for one that prep
    does not know."""
    scheme, colon, rest = out.as_posix().partition(":/") if out is not None else ("", "", "")
    text = f"{scheme}://{rest}"
    return parse_url(text) if colon and is_url(text) else None


def make_and_upload(
    request: UploadRequest, has_other_processes: bool, ui: Ui, make_output: Callable[[Path, bool], Report]
) -> Report:
    """Make an output, with `make(folder, dry run)`, and upload it; what is there already, and the same, is left.

    Raises PrepError as `make` does, for something else that has the address, and for an upload that failed: then what
    was made stays here.
    """
    if request.dry_run:
        return _with_url(make_output(request.local_folder, True), request)
    if has_other_processes:
        hint = "write to a folder that all see, then copy it"
        raise usage_error(f"`--out {request.url}` is for one process", "several write this output", hint)
    bucket = Bucket(request.url, RETRIES, retry_policy_from_env(os.environ, ui.note))
    there = bucket.list_files()
    if there and not _is_replaceable(request, there):
        raise foreign_output_error(bucket.name)
    if there and not request.overwrite and (already := _report_if_uploaded(request, bucket, there, ui, make_output)):
        return already
    if request.restart:
        _remove_local_files(request)
    report = make_output(request.local_folder, False)
    _upload_folder(request, str(report.fields["plan_digest"]), bucket, there, ui.progress())
    _remove_local_files(request)
    return _with_url(report, request)


def _report_if_uploaded(
    request: UploadRequest,
    bucket: Bucket,
    remote_files: Sequence[RemoteFile],
    ui: Ui,
    make_output: Callable[[Path, bool], Report],
) -> Report | None:
    """The report where the output is there; None where an upload of it goes on. PrepError for another output."""
    manifest = next((file for file in remote_files if file.path == MANIFEST_FILE), None)
    if manifest is None:
        return None
    report = make_output(request.local_folder, True)
    try:
        found = json.loads(read_all(bucket, manifest))
        same = isinstance(found, dict) and found.get("plan") == report.fields["plan_digest"]
    except ValueError:
        same = False
    if not same or request.restart:
        why = "it was made by this request" if same else "it was made by another request, or of another source"
        raise PrepError(f"{bucket.name} exists", why, "`--out` another address, or `--overwrite`")
    ui.note(f"already done: {request.url} was made by the same request from the same source")
    _remove_local_files(request)
    fields = {key: value for key, value in report.fields.items() if key != "dry_run"}
    return _with_url(replace(report, text=str(request.local_folder), fields={**fields, "already": True}), request)


def _remove_local_files(request: UploadRequest) -> None:
    """Remove what was made here, and nothing that lies beside it."""
    here = request.local_folder
    try:
        for path in (request.marks_path, here, here.with_name(f"{here.name}.partial")):
            remove_path(path)
    except OSError as error:
        raise io_error(here.parent, error) from error
    with contextlib.suppress(OSError):  # there is more in it, or it is not there
        here.parent.rmdir()


def _with_url(report: Report, request: UploadRequest) -> Report:
    """The report with the address in place of the folder here."""
    here, url = str(request.local_folder), str(request.url)
    return replace(
        report,
        text=report.text.replace(here, url),
        fields={**report.fields, "output": url},
        next_command=report.next_command.replace(here, url),
    )


def _upload_folder(
    request: UploadRequest, plan_digest: str, bucket: Bucket, remote_files: Sequence[RemoteFile], progress: Progress
) -> None:
    """Bring everything up that is not; data first, what says that it is whole last."""
    folder = request.local_folder
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.relative_to(folder).parts[0] != WORK_FOLDER
    ]
    names = {path.relative_to(folder).as_posix(): resolve_small_file(path, folder) for path in paths}
    last = [name for name in (COMMIT_MARKER, MANIFEST_FILE) if name in names]
    up = (
        _uploaded_names(request.marks_path, plan_digest, remote_files)
        if _has_begun(request)
        else _create_marks(request)
    )
    for file in remote_files:
        if file.path in (COMMIT_MARKER, MANIFEST_FILE):
            bucket.delete(file.path)
    progress.begin("upload", sum(path.stat().st_size for path in paths))
    try:
        with open(open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as marks:
            for name in sorted(names.keys() - {*last}):
                if name in up:
                    progress.advance(names[name].stat().st_size)
                else:
                    _write_mark(
                        marks, plan_digest, bucket.write(name, names[name], PART_NBYTES, MAX_PARTS, progress.advance)
                    )
            for file in remote_files:
                if file.path not in names:
                    bucket.delete(file.path)
            for name in last:
                bucket.write(name, names[name], PART_NBYTES, MAX_PARTS, progress.advance)
    finally:
        progress.end()


def _is_replaceable(request: UploadRequest, remote_files: Sequence[RemoteFile]) -> bool:
    """Whether what is there is an output of prep, or one that is on its way up from here."""
    return any(file.path == MANIFEST_FILE for file in remote_files) or _has_begun(request)


def _has_begun(request: UploadRequest) -> bool:
    """Whether an upload to this address was begun here."""
    return request.marks_path.exists() and request.marks_path.read_text().startswith(_marks_header(request))


def _create_marks(request: UploadRequest) -> set[str]:
    """Begin an upload: nothing is up."""
    with open(open_no_follow(request.marks_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as marks:
        marks.write(_marks_header(request))
        marks.flush()
        os.fsync(marks.fileno())
    return set()


def _marks_header(request: UploadRequest) -> str:
    """The first line of the marks: to where they were brought up."""
    return json.dumps([str(request.url)]) + "\n"


def _write_mark(marks: TextIO, plan: str, file: RemoteFile) -> None:
    marks.write(json.dumps([plan, file.path, file.size, file.digest]) + "\n")
    marks.flush()
    os.fsync(marks.fileno())


def _uploaded_names(marks: Path, plan: str, remote_files: Sequence[RemoteFile]) -> set[str]:
    """The names that an earlier run of the same plan brought up, and that are still as it did."""
    if not marks.exists():
        return set()
    found, known = set[str](), {*remote_files}
    for line in marks.read_text().splitlines():
        try:
            of_plan, path, size, digest = json.loads(line)
        except ValueError:  # the address, or of a run that was killed while it wrote it
            continue
        if of_plan == plan and RemoteFile(path, size, digest) in known:
            found.add(path)
    return found
