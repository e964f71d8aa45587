"""Execute a plan: stage the output, write it within a memory budget, verify it and publish it when it is complete."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prepcli.core import version
from prepcli.core.errors import Option, OutputExistsError, PrepError, text
from prepcli.core.formatting import format_bytes
from prepcli.engine.blobs import open_blobs
from prepcli.engine.budget import anonymous_nbytes, make_budget
from prepcli.engine.digest import digest, digest_pieces
from prepcli.engine.files import Files
from prepcli.engine.fills import piece_nbytes
from prepcli.engine.journal import EMPTY_JOURNAL_STATE, JournalState
from prepcli.engine.low_rank import matrix_nbytes
from prepcli.engine.no_follow import check_no_symlinks
from prepcli.engine.pipeline import ConversionResult, Pipeline
from prepcli.execution.block_checksums import checksum_recorder, delete_checksums
from prepcli.execution.coordination import Team
from prepcli.execution.finalize import (
    check_small_files,
    data_folder,
    finalize_output,
    output_nbytes_to_compress,
)
from prepcli.execution.output_checks import check_data_files, check_unchanged, read_stamps
from prepcli.execution.request import ExecutionRequest
from prepcli.execution.resume import StreamReader, find_outdated, verify_journal_state, zero_gaps
from prepcli.execution.signals import note_durable_work
from prepcli.execution.source_checks import (
    SOURCE_STATE_FILE,
    IntegrityChecker,
    SourceState,
    parse_source_state,
    read_source_state,
    source_changed_error,
    touched_files,
)
from prepcli.execution.staging import PARTIAL_SUFFIX, Staging, remove_work_folder
from prepcli.formats.checksums import CHECKSUMS_FILE
from prepcli.formats.file_records import are_files_intact
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, foreign_output_error, read_manifest
from prepcli.formats.ocdbt import OCDBT_MANIFEST
from prepcli.planning import coverage
from prepcli.planning.manifest_fields import Manifest
from prepcli.planning.plan import Plan
from prepcli.planning.plan_text import encode_text, iter_text
from prepcli.planning.slabs import min_buffer_nbytes, split_streams
from prepcli.restore.digest_checks import check_before_reading
from prepcli.stores.paths import AnyPath
from prepcli.stores.reading import io_error


def plan_digest(plan: Plan) -> str:
    """Return the digest of a plan. Equal digests imply equal outputs, given unchanged sources."""
    return "xxh3:" + digest_pieces(piece.encode() for piece in iter_text(plan))


def make_run_identity(plan: Plan, run_id: str) -> dict[str, object]:
    """Return the identity of a run, given the digest of its plan. Runs with equal identities write equal bytes."""
    source_digest = digest(encode_text(plan.source_files).encode())
    return {
        "request": plan.request,
        "source": source_digest,
        "plan": run_id,
        "prep": version(),
    }


class ConversionExecutor:
    """Writes the output of a plan to a folder, together with its workers and with other processes.

    An interrupted run continues from its durable bytes.

    Attributes:
        request: The plan and its options.
        out: Path of the output.
        budget: How the memory is divided among buffers.
        stage: The staging folder.
        team: All processes of the conversion.
    """

    def __init__(self, request: ExecutionRequest, out: Path) -> None:
        self.request = request
        self.plan = request.plan
        self.source = request.source
        self.pool = request.pool
        self.note = request.note
        self.out = out
        # The matrices of a low-rank update and the pieces of new tokens stay in memory during the
        # run, in addition to the buffers.
        self.budget = make_budget(
            self.pool.memory_nbytes,
            min_buffer_nbytes(self.plan.streams),
            kept_nbytes=max(matrix_nbytes(self.plan.streams), piece_nbytes(self.plan.streams)),
        )
        self.run_identity = make_run_identity(self.plan, request.run_id)
        self.stage = Staging(out)
        folder = data_folder(self.plan, self.stage.folder)
        self._files = [folder / file.path for file in self.plan.files]
        # The reader reads the plan's streams back.
        self._reader = StreamReader(self.plan.streams, self.budget, self.pool.progress)
        self.team = Team(
            self.plan,
            self.stage,
            request.run_id,
            own_indices=self.pool.indices,
            check_workers=self.pool.check,
            note=self.note,
        )
        self._result = ConversionResult()
        # State of the source when this process began, and when the first process of the run began
        self._source_at_join: SourceState = []
        self._source_at_start: SourceState = []

    def run(self) -> ConversionResult:
        """Write this process's share, the streams assigned to it, and wait until the output is published.

        Returns:
            The work of this process and its workers.

        Raises:
            PrepError: The source changed, the output exists and may not be replaced, another process failed, or the
                system refused to read or write.
        """
        if self._is_already_done():
            remove_work_folder(self.out)
            return ConversionResult(already_done=True)
        start_nbytes = anonymous_nbytes()
        self._source_at_join = read_source_state(self.plan.source_files, self.source)
        check_small_files(self.plan)
        check_free_space(self.plan, self.stage.folder)
        # These checks come before `with self.stage` creates the staging folder: a refused plan leaves no files.
        coverage.check(self.plan, lambda: split_streams(self.plan.streams, self.budget.slab_nbytes))
        # Shares are known only in the staging folder.
        if self.pool.share.count == 1:
            self._check_transformed(self.plan)
        with self.stage:
            self.stage.open(self.run_identity, self.request.restart, share=self.pool.share)
            if self._is_already_published():
                self.stage.discard()
                return ConversionResult(already_done=True)
            with self.stage.failures.recording_errors():
                self._source_at_start = self._source_at_join
                earlier = self.stage.read_or_write_note(
                    SOURCE_STATE_FILE, {"files": self._source_at_join}
                )
                if earlier is not None:
                    self._source_at_start = parse_source_state(earlier.get("files"))
            with note_durable_work(self._describe_durable):
                with self.stage.failures.recording_errors():
                    self.pool.start()
                    self._result = self._write_share(self.pool.share.index)
                self.stage.mark_moved()
                with self.team.publishing() as is_needed:
                    if is_needed:
                        self._check_and_publish()
            peak_nbytes = max(self._result.peak_nbytes, anonymous_nbytes())
        remove_work_folder(self.out)
        self._result.peak_nbytes = max(0, peak_nbytes - start_nbytes)
        self.pool.add_reports(self._result)
        return self._result

    def _is_already_published(self) -> bool:
        """Return whether another process has published the output since the check before the staging folder.

        Raises:
            PrepError: Another command has published something else.
        """
        try:
            return self._is_already_done()
        except PrepError:
            # An empty folder of this run would block the next command for the same output.
            if self.stage.is_new:
                self.stage.discard()
            raise

    def _describe_durable(self) -> str:
        """Describe the durable part of the output, for the message of a stopped run, or empty if there is none."""
        done_nbytes, total_nbytes = self.team.durable_and_total_nbytes()
        if not done_nbytes:
            return ""
        sizes = f"{format_bytes(done_nbytes)} of {format_bytes(total_nbytes)}"
        return f"{sizes} are kept in {self.stage.folder.name}"

    def _write_share(self, index: int) -> ConversionResult:
        """Write the share of process `index`, its part of the streams, to the data files.

        A share is the streams of one process. A stream is a range of rows of a tensor. Streams that an earlier
        run wrote durably are skipped.
        """
        share_plan = self.team.share_plan(index)
        if self.pool.share.count > 1:
            self._check_transformed(share_plan)
        had_files = any(map(_allocated_nbytes, self._files))
        with (
            open_sink(share_plan, self.stage) as sink,
            open_blobs(self.source.byte_sources, self.budget.cache_nbytes) as files,
        ):
            # Bytes between tensors have no digest, so that a resumed run would keep whatever an
            # earlier run left there. In new files they are zero. Chunks to compress have no gaps.
            if had_files and index == 0 and not share_plan.compression:
                zero_gaps(self.plan, self._files)
            with self.team.open_journal(index, self._verify_earlier_run(index)) as journal:
                done_nbytes, total_nbytes = self.team.durable_and_total_nbytes()
                if done_nbytes:
                    sizes = f"{format_bytes(done_nbytes)} of {format_bytes(total_nbytes)}"
                    self.note(f"resuming {self.stage.folder.name}: {sizes} are durable")
                self.pool.progress.begin(share_plan.command, total_nbytes, done_nbytes)
                try:
                    integrity = IntegrityChecker(
                        share_plan, self.source, allow_overflow=self.request.allow_overflow
                    )
                    result = Pipeline(
                        share_plan.streams,
                        files,
                        sink=sink,
                        budget=self.budget,
                        progress=self.pool.progress,
                        journal=journal,
                        on_digest=integrity.on_digest,
                        checksums=checksum_recorder(share_plan, self.stage, index=index),
                    ).run()
                finally:
                    self.pool.progress.end()
                sink.check_unchanged()
        digests: dict[int, str] = {}
        for position, number in enumerate(self.team.shares[index]):
            digests[number] = result.digests[position]
        self._check_source(digests, self._source_at_join)
        return result

    # Checking

    def _check_transformed(self, plan: Plan) -> None:
        """Check the tensors that a plan reads in another form than the one with a recorded digest."""
        check_before_reading(self.source, plan.streams, self.pool.memory_nbytes, self.pool.progress)

    def _verify_earlier_run(self, index: int) -> JournalState:
        """Read back what an earlier run wrote of a share. Return its intact part."""
        durable = self.team.durable_part(index, self.team.read_journal_state(index))
        if not durable.durable_nbytes:
            return EMPTY_JOURNAL_STATE
        folder_name = self.stage.folder.name
        touched = touched_files(self.source.files, self._source_at_start, now=self._source_at_join)
        if touched:
            self.note(
                f"{_join_file_names(touched)} may have changed since {folder_name} was started: comparing"
            )
        intact = verify_journal_state(
            self._reader, durable, files=self._files, source=self.source if touched else None
        )
        num_damaged = len(durable.digests.keys() - intact.digests.keys())
        if durable.prefix != intact.prefix:
            num_damaged += 1
        if num_damaged:
            # The checksums may be of bytes that are about to be overwritten. Blocks without a
            # checksum are read back at the end.
            delete_checksums(self.stage)
            self.note(
                f"{num_damaged} of {len(durable.digests) + 1} tensors in {folder_name} are damaged:"
                " writing them again"
            )
        return intact

    def _check_source(self, digests: Mapping[int, str], baseline: SourceState) -> None:
        """Raise PrepError if the source has changed since it was read.

        If the inode or change time of any file differs from `baseline`, all streams in `digests` are read again.
        """
        state = read_source_state(self.plan.source_files, self.source)
        touched = touched_files(self.source.files, baseline, now=state)
        if touched:
            self.note(f"{_join_file_names(touched)} may have changed while it was read: comparing")
            if find_outdated(self._reader, digests, source=self.source):
                raise source_changed_error(touched, self.source)

    def _check_and_publish(self) -> None:
        """Verify and publish the output, after all running processes have moved their shares."""
        # A process that ended before this one started may have completed its share. Its journal is
        # trusted only after its bytes were read back.
        for index in self.team.unverified_shares():
            self._write_share(index)
        digests = self.team.all_digests()
        # With several processes, each read the source at another time.
        baseline = self._source_at_join
        if self.pool.share.count > 1:
            baseline = self._source_at_start
        self._check_source(digests, baseline)
        check_data_files(self.plan, self._files, digests=digests, reader=self._reader)
        stamps = read_stamps(self._files)
        finalize_output(
            self.plan,
            self.stage,
            run_identity=self.run_identity,
            digests=digests,
            progress=self.pool.progress,
        )
        # The stamps were read before the digest check. Equal stamps show that no file has changed since.
        check_unchanged(stamps)
        # Another program may have created the output meanwhile.
        _check_replaceable(self.out)
        self.stage.publish(self.request.overwrite)

    def _is_already_done(self) -> bool:
        """Return whether the requested output exists.

        With several processes, a late process never replaces the output of its peers.

        Raises:
            PrepError: The path holds something else, and `overwrite` is not set.
        """
        if not os.path.lexists(self.out):
            return False
        _check_replaceable(self.out)
        try:
            manifest = read_manifest(self.out)
        except PrepError:
            if self.request.overwrite:
                return False
            raise
        is_same_plan = manifest is not None and manifest.plan == self.request.run_id
        is_complete = is_same_plan and _is_complete(self.plan, self.out, manifest or NO_MANIFEST)
        is_joint = self.pool.share.count > 1
        if is_complete and (is_joint or not (self.request.restart or self.request.overwrite)):
            return True
        if self.request.overwrite:
            return False
        hint = text("{} or {}", Option("out", "NAME"), Option("overwrite", True))
        if is_same_plan:
            why = "this command created it, but its files are damaged"
            if is_complete:
                why = "this command created it earlier"
            raise OutputExistsError(f"{self.out} already exists", why, hint)
        why = _describe_origin(manifest, self.plan)
        raise OutputExistsError(f"{self.out} exists and is something else", why, hint)


def _join_file_names(paths: Sequence[AnyPath]) -> str:
    return ", ".join(path.name for path in paths)


def _check_replaceable(out: Path) -> None:
    """Raise PrepError if the path is neither free, nor an empty folder, nor an output of prep."""
    try:
        # This is a single call, because another process may be replacing the output.
        names = os.listdir(out)
    except FileNotFoundError:
        is_replaceable = not out.is_symlink()
    except NotADirectoryError:
        is_replaceable = False
    except OSError as error:
        raise io_error(out, error) from error
    else:
        is_replaceable = not names or MANIFEST_FILE in names
    if not is_replaceable:
        raise foreign_output_error(str(out))


def _is_complete(plan: Plan, out: Path, manifest: Manifest) -> bool:
    """Return whether all files of an output exist, its listed files are intact, and data files have their sizes."""
    folder = out / plan.item
    if plan.compression:
        sizes_by_path = manifest.packed
    else:
        sizes_by_path = {file.path: file.size for file in plan.files}
    small_files = [file.path for file in plan.small_files]
    for item in plan.items:
        small_files.append(str(Path(item or "", plan.storage.metadata_file)))
        if not plan.storage.has_chunk_files:
            small_files.append(str(Path(item or "", OCDBT_MANIFEST)))
    for path, size in sizes_by_path.items():
        data_file = folder / path
        if not data_file.is_file() or data_file.stat().st_size != size:
            return False
    for path in small_files:
        if not (folder / path).is_file():
            return False
    if manifest.checksums is not None and not (out / CHECKSUMS_FILE).is_file():
        return False
    return are_files_intact(out, manifest)


def _describe_origin(manifest: Manifest | None, plan: Plan) -> str:
    if manifest is None:
        return "it is empty"
    if manifest.request != plan.request:
        return f"made by `{manifest.request}`, asked for `{plan.request}`"
    return f"made by the same `{plan.request}` from a source that has changed since"


@contextlib.contextmanager
def open_sink(plan: Plan, stage: Staging) -> Iterator[Files]:
    """Create the output's data files with their sizes and headers. Raise PrepError for symbolic links among them."""
    check_no_symlinks(stage.folder)
    paths = [data_folder(plan, stage.folder) / file.path for file in plan.files]
    for folder in {path.parent for path in paths}:
        folder.mkdir(parents=True, exist_ok=True)
    with Files(paths, [file.size for file in plan.files]) as sink:
        for number, file in enumerate(plan.files):
            for offset, data in ((0, file.header), *file.constant_ranges):
                if data:
                    sink.write_bytes(number, data, offset=offset)
        yield sink


def check_free_space(plan: Plan, folder: Path) -> None:
    """Raise PrepError if the disk has no room for the remaining bytes. `folder` need not exist."""
    needed_nbytes = 0
    for file in plan.files:
        needed_nbytes += file.size - _allocated_nbytes(data_folder(plan, folder) / file.path)
    # Until the end, chunks are on disk both raw and compressed.
    needed_nbytes += output_nbytes_to_compress(plan, folder)
    existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free_nbytes = shutil.disk_usage(existing_folder).free
    if needed_nbytes > free_nbytes:
        raise PrepError(
            f"not enough room for {folder.name.removesuffix(PARTIAL_SUFFIX)}",
            f"needs {format_bytes(needed_nbytes)}, its disk has {format_bytes(free_nbytes)} free",
            text("use {} with a path on another disk", Option("out")),
        )


def _allocated_nbytes(path: Path) -> int:
    """Return the size of the file on disk, or 0 if it does not exist."""
    try:
        # `st_blocks` counts units of 512 bytes on every file system. Holes are not counted.
        return path.stat().st_blocks * 512
    except OSError:
        return 0
