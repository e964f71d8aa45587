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
from prepcli.engine.own_files import open_own
from prepcli.errors import PrepError, usage
from prepcli.execution.staging import WORK, remove
from prepcli.formats.manifest import MANIFEST, not_ours
from prepcli.remote.object_store import Bucket, Url, is_url, parse_url
from prepcli.remote.patience import patience_of
from prepcli.remote.placeholders import whole
from prepcli.remote.remote_files import RemoteFile
from prepcli.sources.links import side_file

SUFFIX = ".upload"
MARKS = "uploaded.jsonl"
COMMITTED = "commit_success.txt"  # of Orbax
PART_NBYTES = 8 << 20  # of an upload, of which two are in memory
MOST_PARTS = 9_000  # stores take 10,000
RETRIES = 10


@dataclass(frozen=True, slots=True)
class Request:
    """Where it goes, and what the command line says of what is there."""

    url: Url
    dry_run: bool
    overwrite: bool
    restart: bool

    @property
    def here(self) -> Path:
        """The folder in which the output is made before it is uploaded."""
        name = (self.url.path or self.url.bucket).rpartition("/")[2]
        return Path(name + SUFFIX, name)

    @property
    def marks(self) -> Path:
        return self.here.parent / MARKS


def url_of(out: Path | None) -> Url | None:
    """The address that `--out` names: as a path it has lost one of its slashes. A usage PrepError for one that prep
    does not know."""
    scheme, colon, rest = out.as_posix().partition(":/") if out is not None else ("", "", "")
    text = f"{scheme}://{rest}"
    return parse_url(text) if colon and is_url(text) else None


def to_url(request: Request, several: bool, ui: Ui, make: Callable[[Path, bool], Report]) -> Report:
    """Make an output, with `make(folder, dry run)`, and upload it; what is there already, and the same, is left.

    Raises PrepError as `make` does, for something else that has the address, and for an upload that failed: then what
    was made stays here.
    """
    if request.dry_run:
        return _renamed(make(request.here, True), request)
    if several:
        hint = "write to a folder that all see, then copy it"
        raise usage(f"`--out {request.url}` is for one process", "several write this output", hint)
    bucket = Bucket(request.url, RETRIES, patience_of(os.environ, ui.note))
    there = bucket.files()
    if there and not _is_ours(request, there):
        raise not_ours(bucket.name)
    if there and not request.overwrite and (already := _already(request, bucket, there, ui, make)):
        return already
    if request.restart:
        _drop(request)
    report = make(request.here, False)
    _upload(request, str(report.fields["plan_digest"]), bucket, there, ui.progress())
    _drop(request)
    return _renamed(report, request)


def _already(
    request: Request, bucket: Bucket, there: Sequence[RemoteFile], ui: Ui, make: Callable[[Path, bool], Report]
) -> Report | None:
    """The report where the output is there; None where an upload of it goes on. PrepError for another output."""
    manifest = next((file for file in there if file.path == MANIFEST), None)
    if manifest is None:
        return None
    report = make(request.here, True)
    try:
        found = json.loads(whole(bucket, manifest))
        same = isinstance(found, dict) and found.get("plan") == report.fields["plan_digest"]
    except ValueError:
        same = False
    if not same or request.restart:
        why = "it was made by this request" if same else "it was made by another request, or of another source"
        raise PrepError(f"{bucket.name} exists", why, "`--out` another address, or `--overwrite`")
    ui.note(f"already done: {request.url} was made by the same request from the same source")
    _drop(request)
    fields = {key: value for key, value in report.fields.items() if key != "dry_run"}
    return _renamed(replace(report, text=str(request.here), fields={**fields, "already": True}), request)


def _drop(request: Request) -> None:
    """Remove what was made here, and nothing that lies beside it."""
    here = request.here
    try:
        for path in (request.marks, here, here.with_name(f"{here.name}.partial")):
            remove(path)
    except OSError as error:
        raise io_error(here.parent, error) from error
    with contextlib.suppress(OSError):  # there is more in it, or it is not there
        here.parent.rmdir()


def _renamed(report: Report, request: Request) -> Report:
    """The report with the address in place of the folder here."""
    here, url = str(request.here), str(request.url)
    return replace(
        report,
        text=report.text.replace(here, url),
        fields={**report.fields, "output": url},
        next_command=report.next_command.replace(here, url),
    )


def _upload(request: Request, plan: str, bucket: Bucket, there: Sequence[RemoteFile], progress: Progress) -> None:
    """Bring everything up that is not; data first, what says that it is whole last."""
    folder = request.here
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.relative_to(folder).parts[0] != WORK]
    names = {path.relative_to(folder).as_posix(): side_file(path, folder) for path in paths}
    last = [name for name in (COMMITTED, MANIFEST) if name in names]
    up = _uploaded(request.marks, plan, there) if _is_begun(request) else _begin(request)
    for file in there:
        if file.path in (COMMITTED, MANIFEST):
            bucket.delete(file.path)
    progress.begin("upload", sum(path.stat().st_size for path in paths))
    try:
        with open(open_own(request.marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "a") as marks:
            for name in sorted(names.keys() - {*last}):
                if name in up:
                    progress.advance(names[name].stat().st_size)
                else:
                    _mark(marks, plan, bucket.write(name, names[name], PART_NBYTES, MOST_PARTS, progress.advance))
            for file in there:
                if file.path not in names:
                    bucket.delete(file.path)
            for name in last:
                bucket.write(name, names[name], PART_NBYTES, MOST_PARTS, progress.advance)
    finally:
        progress.end()


def _is_ours(request: Request, there: Sequence[RemoteFile]) -> bool:
    """Whether what is there is an output of prep, or one that is on its way up from here."""
    return any(file.path == MANIFEST for file in there) or _is_begun(request)


def _is_begun(request: Request) -> bool:
    """Whether an upload to this address was begun here."""
    return request.marks.exists() and request.marks.read_text().startswith(_title(request))


def _begin(request: Request) -> set[str]:
    """Begin an upload: nothing is up."""
    with open(open_own(request.marks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as marks:
        marks.write(_title(request))
        marks.flush()
        os.fsync(marks.fileno())
    return set()


def _title(request: Request) -> str:
    """The first line of the marks: to where they were brought up."""
    return json.dumps([str(request.url)]) + "\n"


def _mark(marks: TextIO, plan: str, file: RemoteFile) -> None:
    marks.write(json.dumps([plan, file.path, file.size, file.digest]) + "\n")
    marks.flush()
    os.fsync(marks.fileno())


def _uploaded(marks: Path, plan: str, there: Sequence[RemoteFile]) -> set[str]:
    """The names that an earlier run of the same plan brought up, and that are still as it did."""
    if not marks.exists():
        return set()
    found, known = set[str](), {*there}
    for line in marks.read_text().splitlines():
        try:
            of_plan, path, size, digest = json.loads(line)
        except ValueError:  # the address, or of a run that was killed while it wrote it
            continue
        if of_plan == plan and RemoteFile(path, size, digest) in known:
            found.add(path)
    return found
