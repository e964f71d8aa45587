"""State of a conversion into an object store: objects in `URL/.prep/`. A run resumes from them on any machine.

    run.json      the identity of the run, written first
    ready.json    objects of earlier outputs are deleted: processes may write. It has the state of the source files
    done/N        the objects, digests and checksums of the complete unit of work N
    failed/I      the error of process I

A run with another plan replaces a run without data objects and notes. Otherwise it is an error.
No object is ever changed by two processes. They need no lock between them. A kill leaves complete objects only.
The next run computes the bytes of a unit without `done/N` again, and compares them with the objects.
"""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import numpy as np

from prepcli.core.errors import RERUN_HINT, Option, PrepError, text
from prepcli.core.json_types import JsonObject
from prepcli.engine.checksum_recorder import ChecksumArray
from prepcli.engine.digest import CHECKSUM_DTYPE
from prepcli.execution.run_notes import decode_record, encode_record
from prepcli.execution.source_checks import SourceState, parse_source_state
from prepcli.execution.staging import WORK_FOLDER, other_run_error
from prepcli.formats.manifest import MANIFEST_FILE
from prepcli.formats.orbax import COMMIT_MARKER
from prepcli.planning.shares import Share
from prepcli.stores.byte_ranges import RemoteFile, map_in_daemon_threads
from prepcli.stores.object_store import Bucket
from prepcli.stores.object_writes import put_object, read_object
from prepcli.stores.paths import SMALL_NBYTES

RUN_OBJECT = "run.json"
READY_OBJECT = "ready.json"
DONE_FOLDER = "done"
FAILED_FOLDER = "failed"
MAX_RECORD_NBYTES = 1 << 20
# Launchers do not start all processes at once.
REJOIN_S = 20.0
NUM_THREADS = 16  # concurrent requests for small objects
# A store may list an object later than it has written it. Up to so many are looked up by name.
MAX_LOOKED_UP = 32


@dataclass(frozen=True, slots=True)
class UnitNote:
    """Result of a unit of work.

    Attributes:
        objects: The written objects.
        digests: Digests of its streams, by number.
        blocks: Numbers of the checksum blocks in its objects.
        sums: Checksum of each of these blocks.
        lengths: Compressed lengths of the chunks in each data file, by file number. Empty without compression.
    """

    objects: tuple[RemoteFile, ...]
    digests: Mapping[int, str]
    blocks: ChecksumArray
    sums: ChecksumArray
    lengths: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])

    def encode(self, run_id: str) -> bytes:
        """Return the content of the note's object.

        Args:
            run_id: Digest of the plan. A process that still runs may note a unit in the state of a later run.
        """
        known = np.stack([self.blocks.astype(CHECKSUM_DTYPE), self.sums.astype(CHECKSUM_DTYPE)])
        objects = [[file.path, file.size, file.digest] for file in self.objects]
        checksums = base64.b64encode(known.tobytes()).decode()
        content: dict[str, object] = {
            "run": run_id,
            "objects": objects,
            "digests": dict(self.digests),
            "checksums": checksums,
        }
        if self.lengths:
            content["lengths"] = dict(self.lengths)
        return encode_record(content)

    @classmethod
    def decode(cls, data: bytes, run_id: str) -> UnitNote:
        """Return the note in an object. Raise ValueError if it is damaged, or of another run."""
        content = decode_record(data)
        if content.get("run") != run_id:
            raise ValueError("it is of another run")
        match content:
            case {"objects": list(objects), "digests": dict(digests), "checksums": str(checksums)}:
                known = np.frombuffer(base64.b64decode(checksums), CHECKSUM_DTYPE).reshape(2, -1)
                files = [_parse_object(entry) for entry in objects]
                numbered = {int(number): str(digest) for number, digest in digests.items()}
                lengths = _parse_lengths(content.get("lengths", {}))
                return cls(tuple(files), numbered, known[0], known[1], lengths)
        raise ValueError("it has no objects, no digests or no checksums")


def _parse_lengths(entry: object) -> dict[int, Sequence[int]]:
    match entry:
        case dict(entries):
            return {int(file): list(map(int, lengths)) for file, lengths in entries.items()}
    raise ValueError("it has invalid lengths")


def _parse_object(entry: object) -> RemoteFile:
    match entry:
        case [str(path), int(size), str(digest)]:
            return RemoteFile(path, size, digest)
    raise ValueError("it has an invalid object")


class BucketRun:
    """The state of one run, as one of its processes sees it."""

    def __init__(self, bucket: Bucket, identity: Mapping[str, object], share: Share) -> None:
        """Describe a run without any request.

        Args:
            bucket: Client of the output's URL.
            identity: Identity of the run. Runs with equal identities write equal objects.
            share: Share of this process.
        """
        self._bucket = bucket
        # Its listings have the state alone: an output may have 100,000 objects.
        url = replace(bucket.url, path=bucket.url.key(WORK_FOLDER))
        self._state = Bucket(url, bucket.retries, bucket.retry_policy)
        self._identity = dict(identity)
        self._run_id = str(identity["plan"])
        self._share = share
        # State of the source when the first process of the run began
        self.source_at_start: SourceState = []
        # Failures of other processes before this one joined
        self._earlier_failures: set[RemoteFile] = set()
        self._joined_s = 0.0

    def begin(
        self, files: Collection[RemoteFile], source_state: SourceState, *, restart: bool
    ) -> None:
        """Begin or resume the run. Only the holder of the URL's lock calls it.

        Args:
            files: The objects below the URL. All of them belong to outputs of prep.
            source_state: The current state of the source files.
            restart: Delete the objects of an unfinished earlier run.

        Raises:
            PrepError: Data objects of an unfinished run with another plan are there, and `restart` is not set.
        """
        earlier = self._read_record(RUN_OBJECT)
        has_manifest = any(file.path == MANIFEST_FILE for file in files)
        is_same_run = earlier == self._identity
        is_replaceable = has_manifest or restart or _has_records_only(files)
        if earlier is not None and not is_same_run and not is_replaceable:
            raise other_run_error(self._bucket.name, earlier, self._identity)
        is_ready = is_same_run and self._read_ready()
        if not is_ready or has_manifest or restart:
            self._start_anew(files, source_state)
        self._forget_failures()

    def _start_anew(self, files: Collection[RemoteFile], source_state: SourceState) -> None:
        """Delete all objects, and record this run."""
        # The order of requests, and what a kill between two of them leaves:
        #   1. delete ready     no process of an earlier run joins any more
        #   2. write run        the objects are known to be of prep, even without a manifest
        #   3. delete markers   the URL holds no complete output from here on
        #   4. delete objects   the next `begin` deletes the rest: `ready` is missing
        #   5. write ready      from here on, objects are of this run
        self._state.delete(READY_OBJECT)
        self._write_record(RUN_OBJECT, self._identity)
        run_path = f"{WORK_FOLDER}/{RUN_OBJECT}"
        markers = [file.path for file in files if _is_marker(file.path)]
        # The manifest comes first: prep reads no output without it.
        for path in sorted(markers, key=lambda path: path != MANIFEST_FILE):
            self._bucket.delete(path)
        others = [file.path for file in files if not _is_marker(file.path)]
        self._bucket.delete_files([path for path in others if path != run_path])
        self.source_at_start = source_state
        self._write_record(READY_OBJECT, {"run": self._identity, "source_files": source_state})

    def _read_ready(self) -> bool:
        """Return whether processes of this run may write. Read the state of the source at its start."""
        record = self._read_record(READY_OBJECT)
        if record is None or record.get("run") != self._identity:
            return False
        self.source_at_start = parse_source_state(record.get("source_files"))
        return True

    def is_open(self) -> bool:
        """Return whether the run has begun, and another process may join it.

        Raises:
            PrepError: The run there has another plan, and data objects.
        """
        earlier = self._read_record(RUN_OBJECT)
        if earlier is None:
            return False
        if earlier != self._identity:
            # Process 0 replaces the record before it deletes the manifest of an older output. The record is
            # therefore read again after a look at the manifest.
            has_manifest = self._bucket.find_file(MANIFEST_FILE) is not None
            is_replaceable = has_manifest or _has_records_only(self._bucket.list_files())
            if not is_replaceable and self._read_record(RUN_OBJECT) == earlier:
                raise other_run_error(self._bucket.name, earlier, self._identity)
            return False
        is_ready = self._read_ready()
        if is_ready:
            self._forget_failures()
        return is_ready

    def check_same_run(self) -> None:
        """Raise PrepError unless the objects still belong to this run."""
        if self._read_record(RUN_OBJECT) != self._identity:
            why = "another command has deleted the objects of this one"
            raise PrepError(f"{self._bucket.name} was taken over", why, RERUN_HINT)

    # Units of work

    def find_done(self, num_units: int, files: Collection[RemoteFile] | None = None) -> set[int]:
        """Return the numbers of the complete units.

        Args:
            num_units: Number of units.
            files: A listing of the state, or None to list it now.
        """
        if files is None:
            files = self.list_state()
        done: set[int] = set()
        for file in files:
            folder, _, name = file.path.partition("/")
            if folder == DONE_FOLDER and name.isdecimal():
                done.add(int(name))
        missing = [number for number in range(num_units) if number not in done]
        if 0 < len(missing) <= MAX_LOOKED_UP:
            paths = [_done_path(number) for number in missing]
            found = map_in_daemon_threads(self._state.find_file, paths, num_threads=NUM_THREADS)
            done.update(number for number, file in zip(missing, found) if file is not None)
        return done

    def list_state(self) -> tuple[RemoteFile, ...]:
        """List the objects of the state."""
        return self._state.list_files()

    def write_note(self, number: int, note: UnitNote) -> None:
        """Record a complete unit. Another process may have recorded it already."""
        data = note.encode(self._run_id)
        # A note with another version of an object is of a second process with the same plan. The
        # check before the publication compares the objects with one of the notes.
        if self._state.find_file(_done_path(number)) is None:
            put_object(self._state, _done_path(number), np.frombuffer(data, np.uint8))

    def read_notes(self, num_units: int) -> list[UnitNote]:
        """Read the notes of all units."""
        return map_in_daemon_threads(self._read_note, range(num_units), num_threads=NUM_THREADS)

    def _read_note(self, number: int) -> UnitNote:
        try:
            return self._decode_note(number)
        except ValueError as error:
            # A resumed run deletes the note, and writes the unit again.
            hint = text("{}, or {}", RERUN_HINT, Option("restart", True))
            what = f"{_done_path(number)} of {self._state.name} is damaged"
            raise PrepError(what, str(error), hint) from error

    def _decode_note(self, number: int) -> UnitNote:
        """Read the note of a unit. Raise ValueError if it is missing, damaged, or of another run."""
        stored = read_object(self._state, _done_path(number), SMALL_NBYTES)
        if stored is None:
            raise ValueError("it does not exist")
        return UnitNote.decode(stored.content, self._run_id)

    def delete_invalid_notes(self, numbers: Collection[int]) -> set[int]:
        """Delete the notes that are damaged or do not name this run, e.g. of an earlier version.

        Args:
            numbers: Numbers of units of this process.

        Returns:
            The numbers of the deleted notes.
        """

        def is_valid(number: int) -> bool:
            try:
                self._decode_note(number)
            except ValueError:
                return False
            return True

        ordered = sorted(numbers)
        are_valid = map_in_daemon_threads(is_valid, ordered, num_threads=NUM_THREADS)
        invalid = [number for number, valid in zip(ordered, are_valid) if not valid]
        self.delete_notes(invalid)
        return set(invalid)

    def delete_notes(self, numbers: Sequence[int]) -> None:
        """Delete the notes of units. The next run writes these units again."""
        self._state.delete_files([_done_path(number) for number in numbers])

    def delete_state(self, files: Collection[RemoteFile] | None = None) -> None:
        """Delete the state of a published output.

        Args:
            files: A listing of the state, or None to list it now.
        """
        if files is None:
            files = self.list_state()
        self._state.delete_files([file.path for file in files])

    # Failures

    @contextmanager
    def recording_errors(self) -> Iterator[None]:
        """Record an error of the block for the other processes."""
        try:
            yield
        except PrepError as error:
            if self._share.count > 1:
                fields = {**error.fields(), "attempt": secrets.token_hex(8)}
                # The error of the block is raised, also if the store is the reason for it.
                with suppress(PrepError):
                    self._write_record(f"{FAILED_FOLDER}/{self._share.index}", fields)
            raise

    def check_failures(self, files: Collection[RemoteFile]) -> None:
        """Raise the error of another process. `files` is a listing of the state.

        A process with an earlier failure has REJOIN_S to join again.
        """
        is_over = time.monotonic() - self._joined_s > REJOIN_S
        for file in files:
            if self._is_failure(file) and (is_over or file not in self._earlier_failures):
                record = self._read_record(file.path)
                if record is not None:
                    raise _failure(file.path.rpartition("/")[2], record)

    def _is_failure(self, file: RemoteFile) -> bool:
        """Return whether an object of the state is the failure of one of the processes."""
        folder, _, name = file.path.partition("/")
        # A run with more processes may have left failures of others.
        is_process = name.isdecimal() and int(name) < self._share.count
        return folder == FAILED_FOLDER and is_process

    def _forget_failures(self) -> None:
        """Delete the failure of this process, and remember the ones of the others."""
        # A failure of another process is ambiguous: it failed before this process joined, or all
        # processes are started again and it has not joined yet.
        if self._share.count == 1:
            return
        self._joined_s = time.monotonic()
        own_path = f"{FAILED_FOLDER}/{self._share.index}"
        files = self.list_state()
        if any(file.path == own_path for file in files):
            self._state.delete(own_path)
        self._earlier_failures = {file for file in files if self._is_failure(file)}

    # Records

    def _read_record(self, path: str) -> JsonObject | None:
        """Read a record. Return None if it does not exist."""
        stored = read_object(self._state, path, MAX_RECORD_NBYTES)
        if stored is None:
            return None
        try:
            return decode_record(stored.content)
        except ValueError as error:
            hint = text("{} deletes it", Option("restart", True))
            raise PrepError(f"{path} of {self._state.name} is damaged", str(error), hint) from error

    def _write_record(self, path: str, content: Mapping[str, object]) -> None:
        data = encode_record(content)
        self._state.write_pieces(path, [data], size=len(data))


def _done_path(number: int) -> str:
    return f"{DONE_FOLDER}/{number}"


def _has_records_only(files: Collection[RemoteFile]) -> bool:
    """Return whether an unfinished run has no data objects and no notes.

    A refused source or an early kill leaves such a run. Its objects are deleted without a request of the user.
    """
    records = {f"{WORK_FOLDER}/{name}" for name in (RUN_OBJECT, READY_OBJECT)}
    failures = f"{WORK_FOLDER}/{FAILED_FOLDER}/"
    return all(file.path in records or file.path.startswith(failures) for file in files)


def _is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in (MANIFEST_FILE, COMMIT_MARKER)


def _failure(process: str, record: JsonObject) -> PrepError:
    """Return the error of another process."""
    what = f"process {process}: {record.get('what', 'the work failed')}"
    return PrepError(what, str(record.get("why", "")), str(record.get("hint", RERUN_HINT)))
