"""An output below a URL of an object store, with the state of its conversion in objects `URL/.prep/...`.

A conversion resumes from them on any machine. In addition to the state in `output`:

    source.json     is written after the objects of an earlier output are deleted, and names the session
    claims/N        the process that works on unit N
    alive/PROCESS   rewritten by a running process every ALIVE_RENEW_S seconds

A session begins when the objects of an earlier output or conversion are deleted. Notes name versions of objects,
compared before the publication. A note is therefore believed in the whole session.

Object stores have conditional writes instead of locks. A claim is created by one of several processes. It ends when its
process has ended: it has deleted its object below `alive`, has not rewritten it for ALIVE_STALE_S seconds, or is a
process of this host that no longer exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from prepcli.core.errors import RERUN_HINT, DamagedError, Option, PrepError, text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.engine.digest import record_digest
from prepcli.execution.output import (
    CLAIMS_FOLDER,
    DONE_FOLDER,
    RUN_FILE,
    SOURCE_FILE,
    WORK_FOLDER,
    Claim,
    decode_record,
    encode_record,
    host_identity,
    other_conversion_error,
)
from prepcli.formats.manifest import MANIFEST_FILE, NO_MANIFEST, decode_manifest
from prepcli.formats.orbax import COMMIT_MARKER
from prepcli.planning.manifest_fields import Manifest
from prepcli.stores.bucket_lock import BucketLock
from prepcli.stores.byte_ranges import RemoteFile, map_in_daemon_threads
from prepcli.stores.object_store import NUM_SMALL_REQUESTS, Bucket
from prepcli.stores.object_writes import (
    ConditionsNotSupportedError,
    create_object,
    read_object,
    replace_object,
)
from prepcli.stores.paths import SMALL_NBYTES, read_all

ALIVE_FOLDER = "alive"
BEGIN = "begin"  # the claim of the process that begins the conversion
MAX_RECORD_NBYTES = 1 << 20
MAX_NOTE_NBYTES = 64 << 20
ALIVE_RENEW_S = 20.0
ALIVE_STALE_S = 60.0
LEAVE_S = 20.0  # for a request in flight while a process leaves
LOOK_S = 0.5
# Seconds until a process says that it waits for another one to begin the conversion
SILENT_S = 5.0
OTHER_ADDRESS_HINT = text(
    "set {} to another address, or pass {}", Option("out"), Option("overwrite", True)
)


class BucketOutput:
    """An `Output` below a URL.

    Attributes:
        bucket: Client of the output's URL.
        session: Identifies the conversion since its last beginning.
    """

    def __init__(self, bucket: Bucket, plan_digest: str, say: Callable[[str], object]) -> None:
        """Describe the state without any request.

        Args:
            bucket: Client of the output's URL.
            plan_digest: Digest of the plan.
            say: Receives a line if the URL cannot be locked, or if the process waits for another one.
        """
        self.bucket = bucket
        self.session = ""
        # Its listings have the state alone: an output may have 100,000 objects.
        url = replace(bucket.url, path=bucket.url.key(WORK_FOLDER))
        self._state = Bucket(url, bucket.retries, bucket.retry_policy)
        self._plan_digest = plan_digest
        self._lock = BucketLock(bucket, plan_digest, say=say, is_shared=True)
        self._process = f"{secrets.token_hex(8)}_{os.getpid()}_{host_identity()}"
        self._left = threading.Event()
        self._renewing: threading.Thread | None = None
        self._source: JsonObject = {}
        # Version of the object below `alive` of another process, and the time since when it has it
        self._seen: dict[str, tuple[str, float]] = {}
        # Owners of claims
        self._owners: dict[str, str] = {}
        self._is_published = False
        self._say = say
        self._waited_s = 0.0
        self._has_said_waiting = False

    @property
    def name(self) -> str:
        """The URL."""
        return self.bucket.name

    # Joining

    def join(
        self,
        identity: Mapping[str, object],
        source: JsonObject,
        *,
        restart: bool,
        is_done: Callable[[], bool] = lambda: False,
        may_begin: bool = True,
    ) -> None:
        """Join the conversion, and begin it unless `is_done` finds the output. See `Output.join`."""
        self._lock.acquire()
        self._write_alive()
        self._renewing = threading.Thread(target=self._renew_until_left, daemon=True)
        self._renewing.start()
        while restart or not self._is_open(identity):
            claim = self.claim(BEGIN)
            # Without conditional writes, every process gets the claim.
            if claim is None or not (may_begin or self._state.has_conditions):
                self._wait_for_begin()
                continue
            with claim:
                # Another process may have begun the conversion since, and may even have published the output.
                if restart or not self._is_open(identity):
                    if is_done():
                        return
                    self._begin(identity, source, restart=restart)
                restart = False

    def _wait_for_begin(self) -> None:
        """Wait a moment for the process that begins the conversion, and look whether it still runs."""
        self._waited_s += LOOK_S
        if self._waited_s > SILENT_S and not self._has_said_waiting:
            process = "another process" if self._state.has_conditions else "process 0"
            self._say(f"waiting for {process} to begin {self.name}")
            self._has_said_waiting = True
        time.sleep(LOOK_S)
        self._is_alive(self._owners.get(BEGIN, ""))

    def _is_open(self, identity: Mapping[str, object]) -> bool:
        """Return whether processes of this conversion may write. Read its session."""
        record = self._read_record(SOURCE_FILE)
        match record:
            case {"run": dict(run), "session": str(session), "source": dict(source)} if (
                run == identity and self._read_record(RUN_FILE) == identity
            ):
                self.session = session
                self._source = source
                return True
        return False

    def _begin(self, identity: Mapping[str, object], source: JsonObject, *, restart: bool) -> None:
        """Delete all objects of an earlier output or conversion, and record this conversion.

        Raises:
            PrepError: Data objects of an unfinished conversion with another plan are there, and `restart` is not set.
        """
        earlier = self._read_record(RUN_FILE)
        files = self.bucket.list_files()
        has_manifest = any(file.path == MANIFEST_FILE for file in files)
        # A refused source or an early kill leaves a conversion without data objects and notes. Its objects are deleted
        # without a request of the user.
        records = [f"{WORK_FOLDER}/{name}" for name in (RUN_FILE, SOURCE_FILE)]
        folders = (f"{WORK_FOLDER}/{CLAIMS_FOLDER}/", f"{WORK_FOLDER}/{ALIVE_FOLDER}/")
        has_records_only = all(
            file.path in records or file.path.startswith(folders) for file in files
        )
        is_replaceable = has_manifest or restart or has_records_only
        if earlier is not None and earlier != identity and not is_replaceable:
            raise other_conversion_error(self.name, earlier, identity)
        # The order of requests, and what a kill between two of them leaves:
        #   1. delete source    no process of an earlier conversion joins any more
        #   2. write run        the objects are known to be of prep, even without a manifest
        #   3. delete markers   the URL holds no complete output from here on
        #   4. delete objects   the next process begins again: `source` is missing
        #   5. write source     from here on, objects are of this conversion
        self._state.delete(SOURCE_FILE)
        self._write_record(RUN_FILE, identity)
        kept = [f"{WORK_FOLDER}/{RUN_FILE}", f"{WORK_FOLDER}/{CLAIMS_FOLDER}/{BEGIN}"]
        kept.append(f"{WORK_FOLDER}/{ALIVE_FOLDER}/")
        markers = [file.path for file in files if _is_marker(file.path)]
        # The manifest comes first: prep reads no output without it.
        for path in sorted(markers, key=lambda path: path != MANIFEST_FILE):
            self.bucket.delete(path)
        others = [file.path for file in files if not _is_marker(file.path)]
        self.bucket.delete_files([path for path in others if not path.startswith(tuple(kept))])
        self.session = secrets.token_hex(8)
        self._source = source
        self._write_record(
            SOURCE_FILE, {"run": dict(identity), "session": self.session, "source": source}
        )

    def source_at_start(self) -> JsonObject:
        """Return the state of the source when the conversion began."""
        return self._source

    def check_same_run(self) -> None:
        """Raise PrepError unless the objects still belong to this conversion."""
        record = self._read_record(SOURCE_FILE)
        if record is None or record.get("session") != self.session:
            why = "another command has deleted the objects of this one"
            raise PrepError(f"{self.name} was taken over", why, RERUN_HINT)

    def confirm(self) -> None:
        """Raise PrepError if another plan has taken the URL over. Call it before the output becomes visible."""
        self._lock.confirm()
        self.check_same_run()

    def leave(self) -> None:
        """Leave the conversion. All claims of this process end."""
        if not self._left.is_set():
            self._left.set()
            # A renewal in flight would write the object again after its deletion.
            if self._renewing is not None:
                self._renewing.join(LEAVE_S)
            has_peers = False
            is_over = self._is_published
            with contextlib.suppress(PrepError):
                self._state.delete(f"{ALIVE_FOLDER}/{self._process}")
                has_peers = not is_over and self._has_peers()
                is_over = not has_peers
            # Without its lock, another plan could delete the objects of a peer that still writes. The peer renews it.
            self._lock.release(is_over=is_over, is_kept=has_peers)

    def _has_peers(self) -> bool:
        """Return whether other processes may be in the conversion."""
        self.list_state()
        # A store may list a deleted object for a time.
        self._seen.pop(self._process, None)
        return any(self._is_recent(process) for process in self._seen)

    def _renew_until_left(self) -> None:
        while not self._left.wait(ALIVE_RENEW_S):
            # Without an answer of the store, the next renewal tries again.
            with contextlib.suppress(PrepError):
                self._write_alive()

    def _write_alive(self) -> None:
        # Each content differs, and so does the version of each renewal.
        self.write(f"{ALIVE_FOLDER}/{self._process}", secrets.token_hex(8).encode())

    # State

    def read(self, name: str) -> bytes | None:
        """Return the content of an object of the state, or None if it does not exist."""
        stored = read_object(self._state, name, MAX_NOTE_NBYTES)
        return None if stored is None else stored.content

    def write(self, name: str, content: bytes) -> None:
        """Write an object of the state."""
        self._lock.check()
        self._state.write_pieces(name, [content], size=len(content))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects of the state."""
        self._state.delete_files(list(names))

    def list_state(self) -> tuple[RemoteFile, ...]:
        """List the objects of the state."""
        files = self._state.list_files()
        alive = [file for file in files if file.path.startswith(f"{ALIVE_FOLDER}/")]
        seen: dict[str, tuple[str, float]] = {}
        for file in alive:
            process = file.path.rpartition("/")[2]
            seen[process] = self._see(process, file)
        self._seen = seen
        return files

    def _see(self, process: str, file: RemoteFile) -> tuple[str, float]:
        """Return the version of the object of a process, and the time since when it has it."""
        version, since_s = self._seen.get(process, ("", 0.0))
        if file.digest == version:
            return version, since_s
        return file.digest, time.monotonic()

    def units_with(self, folder: str) -> set[int]:
        """Return the numbers of the units with an object in a folder of the state."""
        units: set[int] = set()
        for file in self.list_state():
            parent, _, name = file.path.partition("/")
            if parent == folder and name.isdecimal():
                units.add(int(name))
        return units

    def find_notes(self, numbers: Collection[int]) -> set[int]:
        """Return the units with a note among some units. A store may list an object later than it has written it."""
        listed = self.units_with(DONE_FOLDER).intersection(numbers)
        others = sorted(set(numbers) - listed)
        paths = [f"{DONE_FOLDER}/{number}" for number in others]
        found = map_in_daemon_threads(self._state.find_file, paths, num_threads=NUM_SMALL_REQUESTS)
        return listed | {number for number, file in zip(others, found) if file is not None}

    def read_many(self, names: Iterable[str]) -> list[bytes | None]:
        """Read objects of the state concurrently."""
        return map_in_daemon_threads(self.read, names, num_threads=NUM_SMALL_REQUESTS)

    def claim(self, name: str) -> Claim | None:
        """Return a claim, also the claim of an ended process, or None while another process has it."""
        path = f"{CLAIMS_FOLDER}/{name}"
        # Without a request as long as the last listing shows that the owner is alive
        if self._is_recent(self._owners.get(name, "")):
            return None
        content = json.dumps({"process": self._process}).encode()
        try:
            version = create_object(self._state, path, content)
            if version is None:
                stored = read_object(self._state, path, MAX_RECORD_NBYTES)
                if stored is None:
                    return None
                owner = _claim_process(stored.content)
                if owner == self._process:
                    # An earlier request arrived, and its answer was lost.
                    version = stored.version
                else:
                    if self._is_alive(owner):
                        self._owners[name] = owner
                        return None
                    version = replace_object(self._state, path, content, stored.version)
        except ConditionsNotSupportedError:
            # Processes may write the same unit twice.
            return contextlib.ExitStack()
        if version is None:
            return None
        claim = contextlib.ExitStack()
        claim.callback(self._release, path)
        return claim

    def _release(self, path: str) -> None:
        # The claim of a noted unit may stay: it is deleted with the state.
        if path.rpartition("/")[2] in (BEGIN, "publish"):
            with contextlib.suppress(PrepError):
                if not self.is_published():
                    self._state.delete(path)

    def _is_alive(self, process: str) -> bool:
        """Return whether the process of a claim may still run."""
        file = self._state.find_file(f"{ALIVE_FOLDER}/{process}")
        if file is None:
            self._seen.pop(process, None)
            return False
        self._seen[process] = self._see(process, file)
        return self._is_recent(process)

    def _is_recent(self, process: str) -> bool:
        """Return whether a process may still run, by what this one has seen of it."""
        # Its name has a token, its number and its host.
        _, _, place = process.partition("_")
        pid, _, host = place.partition("_")
        is_here = host == host_identity() and pid.isdecimal() and Path("/proc/self").exists()
        if process not in self._seen or (is_here and not Path(f"/proc/{pid}").exists()):
            return False
        return time.monotonic() - self._seen[process][1] < ALIVE_STALE_S

    # Publication

    def is_published(self) -> bool:
        """Return whether the output of this conversion is published."""
        if not self._is_published:
            file = self.bucket.find_file(MANIFEST_FILE)
            if file is not None:
                manifest = stored_manifest(self.bucket, [file])
                self._is_published = manifest is not None and manifest.plan == self._plan_digest
        return self._is_published

    def delete_state(self) -> None:
        """Delete the state of a published output, its identity last."""
        paths = [file.path for file in self.list_state()]
        self._state.delete_files([path for path in paths if path != RUN_FILE])
        self._state.delete_files([path for path in paths if path == RUN_FILE])

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


def _claim_process(content: bytes) -> str:
    """Return the process of a claim, or an empty text if the claim is damaged."""
    try:
        match load_json(content):
            case {"process": str(process)}:
                return process
    except ValueError:
        pass
    return ""


def _is_marker(path: str) -> bool:
    return path.rpartition("/")[2] in (MANIFEST_FILE, COMMIT_MARKER)


def stored_manifest(bucket: Bucket, remote_files: Sequence[RemoteFile]) -> Manifest | None:
    """Return the manifest of an output. None if it has no manifest, NO_MANIFEST if its manifest is damaged."""
    for file in remote_files:
        if file.path == MANIFEST_FILE:
            try:
                return decode_manifest(Path(MANIFEST_FILE), read_all(bucket, file))
            except DamagedError:
                return NO_MANIFEST
    return None


def check_stored_output(
    bucket: Bucket,
    remote_files: Sequence[RemoteFile],
    manifest: Manifest,
    plan_digest: str,
    *,
    restart: bool,
) -> None:
    """Raise PrepError unless the URL holds an intact output of this plan.

    With `restart`, such an output is an error too.
    """
    if manifest.plan != plan_digest:
        why = "it was made by another request, or of another source"
    elif not has_intact_files(bucket, remote_files, manifest):
        why = "this command created it, but its files are damaged"
    elif restart:
        why = "this command created it earlier"
    else:
        return
    raise PrepError(f"{bucket.name} already exists", why, OTHER_ADDRESS_HINT)


def has_intact_files(
    bucket: Bucket, remote_files: Sequence[RemoteFile], manifest: Manifest
) -> bool:
    """Return whether all listed files of an output exist and agree with their records.

    The size of each file is compared. Files of at most SMALL_NBYTES are also fetched, to compare their digests.
    """
    files = {file.path: file for file in remote_files}
    for name, record in manifest.files.items():
        file = files.get(name)
        if file is None or file.size != record["bytes"]:
            return False
        recorded = record.get("xxh3")
        if recorded is None or file.size > SMALL_NBYTES:
            continue
        if record_digest(read_all(bucket, file)) != recorded:
            return False
    return True
