"""An incomplete output: the protocol of a folder and of a bucket, and the notes about its durable parts.

Any number of processes work on one output, on one or several hosts, and exchange no messages. They share the state of
the conversion below `.prep/`:

    run.json      identity of the conversion, written before other state except locks
    source.json   inode and change time of the source's files when the conversion began. In a bucket also its session
    done/N        note of the complete unit N
    part/N        folder only: note of the durable part of a large unit N
    claims/N      the process that works on unit N
    raw/N         folder only: raw chunks of a unit in progress, if they are compressed
    session       folder only: the session, and the state of the source when it began
    lock, door    folder only: locks. All processes share the first; one at a time holds the second, to join or publish

1. The bytes and the places of a unit are a function of the plan. Units may be written twice: a claim only avoids double
   work.
2. A note marks a unit as durable. It is written after the bytes of the unit are. A kill leaves it whole or absent.
3. The output gets its name in one step, once all units have notes and all other files are durable.

A note is a JSON object with a checksum of itself. A torn or damaged note counts as none: its unit is written again.
A note is believed in the session in which it was written. In a folder, a session is a time in which processes run
together: it ends when the last of them has ended, so the next start reads the bytes of earlier notes back. In a bucket,
a session begins when the objects of an earlier output are deleted, and outlives its processes: notes name versions of
objects, which are compared before the publication.
"""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from prepcli.core import version
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.json_values import JsonObject, load_json
from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.checksum_recorder import ChecksumArray
from prepcli.engine.digest import (
    CHECKSUM_DTYPE,
    StreamDigest,
    record_digest,
    record_digest_of_pieces,
)
from prepcli.planning.plan import Plan, encode_text, iter_text
from prepcli.stores.byte_ranges import RemoteFile

WORK_FOLDER = ".prep"  # the state of a conversion, in an output that is not complete
RUN_FILE = "run.json"
SOURCE_FILE = "source.json"
DONE_FOLDER = "done"
PART_FOLDER = "part"
CLAIMS_FOLDER = "claims"
PUBLISH = "publish"  # the claim of the process that publishes

Claim = AbstractContextManager[object]
CHECKSUM_KEY = "checksum"  # key in each record, covers all other keys
_NO_NUMBERS: ChecksumArray = np.empty(0, np.uint64)


class Output(Protocol):
    """The state and the name of one output.

    Names of state are relative to `.prep`, e.g. `done/7`.
    """

    @property
    def name(self) -> str:
        """Name of the output while it is incomplete, for messages."""
        ...

    def join(self, identity: Mapping[str, object], source: JsonObject, *, restart: bool) -> None:
        """Enter the conversion, and begin it if necessary.

        One identity has the output until it is published: of two processes with different identities, at most one
        enters, at any interleaving.

        Args:
            identity: Identity of the conversion. Conversions with equal identities write equal bytes.
            source: State of the source, recorded by the first process.
            restart: Delete what an unfinished earlier conversion has written, unless its processes still run.

        Raises:
            PrepError: Another conversion has durable bytes here, or running processes.
        """
        ...

    def leave(self) -> None:
        """Leave the conversion. A killed process leaves it too."""
        ...

    def is_published(self) -> bool:
        """Return whether this conversion's output has its final name. Once true, it stays true.

        Raises:
            PrepError: The output can no longer be published.
        """
        ...

    def read(self, name: str) -> bytes | None:
        """Return state as it was written, whole, or None if it does not exist."""
        ...

    def write(self, name: str, content: bytes) -> None:
        """Write state. A reader sees the old or the new content. It need not survive a power cut."""
        ...

    def delete(self, names: Iterable[str]) -> None:
        """Delete state that exists."""
        ...

    def units_with(self, folder: str) -> AbstractSet[int]:
        """Return the numbers in the names `FOLDER/N` of existing state."""
        ...

    def claim(self, name: str) -> Claim | None:
        """Return the right to work on a unit, or None while another process has it.

        It ends with the context, and with the process.
        """
        ...


def host_identity() -> str:
    """Return the name of this host, with its start and the namespace of its process numbers if they are known.

    Processes with the same identity see each other's numbers. Two containers may have one name.
    """
    name = socket.gethostname()
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")  # e.g. pid:[4026531836]
    except OSError:
        return name
    return f"{name}_{boot_id}_{namespace.strip('pid:[]')}"


def digest_plan(plan: Plan) -> str:
    """Return the digest of a plan. Equal digests imply equal outputs, given unchanged sources."""
    return "xxh3:" + record_digest_of_pieces(piece.encode() for piece in iter_text(plan))


def make_identity(plan: Plan, plan_digest: str) -> dict[str, object]:
    """Return the identity of an output, given the digest of its plan. Equal identities imply equal bytes."""
    source_digest = record_digest(encode_text(plan.source_files).encode())
    return {
        "request": plan.request,
        "source": source_digest,
        "plan": plan_digest,
        "prep": version(),
    }


def other_conversion_error(
    name: str, earlier_identity: Mapping[str, object], identity: Mapping[str, object]
) -> PrepError:
    """Return the error for an unfinished output of another conversion, given its folder or URL."""
    is_same_request = earlier_identity.get("request") == identity.get("request")
    if is_same_request and earlier_identity.get("source") != identity.get("source"):
        why = "the source has changed since: its files have other sizes, times or headers"
    elif is_same_request:
        why = "it was started by another version of prep"
    else:
        why = f"it was started by `{earlier_identity.get('request')}`, this is `{identity.get('request')}`"
    hint = text("{} deletes it", Option("restart", True))
    return PrepError(f"{name} belongs to another run", why, hint)


@dataclass(frozen=True, slots=True)
class UnitNote:
    """Result of a unit of work, or of the durable part of a large one.

    Attributes:
        digests: Digests of its durable streams, by number.
        blocks: Numbers of the checksum blocks recorded while its bytes are written. Empty for a durable part.
        sums: Checksum of each of these blocks.
        session: Session of its writer.
        writer: Identity of the host, and number of the process.
        source: Digest of the state of the source's files when the process joined.
        objects: The written objects, in a bucket.
        lengths: Compressed lengths of the chunks in each object, by file number. Empty without compression.
        prefix: The partly durable stream. None in the note of a complete unit.
        nbytes: Number of durable bytes, as they are read.
    """

    digests: Mapping[int, StreamDigest]
    blocks: ChecksumArray = field(default_factory=lambda: _NO_NUMBERS)
    sums: ChecksumArray = field(default_factory=lambda: _NO_NUMBERS)
    session: str = ""
    writer: str = ""
    source: str = ""
    objects: tuple[RemoteFile, ...] = ()
    lengths: Mapping[int, Sequence[int]] = field(default_factory=dict[int, Sequence[int]])
    prefix: StreamPrefix | None = None
    nbytes: int = 0

    def encode(self, plan_digest: str) -> bytes:
        """Return the content of the note.

        Args:
            plan_digest: Digest of the plan. A process that still runs may note a unit of a later conversion.
        """
        known = np.stack([self.blocks.astype(CHECKSUM_DTYPE), self.sums.astype(CHECKSUM_DTYPE)])
        content: dict[str, object] = {
            "run": plan_digest,
            "session": self.session,
            "writer": self.writer,
            "source": self.source,
            "objects": [[file.path, file.size, file.digest] for file in self.objects],
            "digests": {number: digest.encode() for number, digest in self.digests.items()},
            "checksums": base64.b64encode(known.tobytes()).decode(),
            "lengths": dict(self.lengths),
            "nbytes": self.nbytes,
        }
        if self.prefix:
            prefix = self.prefix
            content["prefix"] = [prefix.stream_number, prefix.nbytes, prefix.digest]
        return encode_record(content)

    @classmethod
    def decode(cls, data: bytes | None, plan_digest: str) -> UnitNote | None:
        """Return the note, or None if it is missing, damaged, of another version or of another conversion."""
        try:
            content = decode_record(data or b"")
            prefix: StreamPrefix | None = None
            match content.get("prefix"):
                case [int(stream), int(durable_nbytes), str(digest)]:
                    prefix = StreamPrefix(stream, durable_nbytes, digest)
            match content:
                case {
                    "run": str(run),
                    "session": str(session),
                    "writer": str(writer),
                    "source": str(source),
                    "objects": list(objects),
                    "digests": dict(digests),
                    "checksums": str(checksums),
                    "lengths": dict(lengths),
                    "nbytes": int(nbytes),
                } if run == plan_digest:
                    known = np.frombuffer(base64.b64decode(checksums), CHECKSUM_DTYPE)
                    blocks, sums = known.reshape(2, -1)
                    return UnitNote(
                        _parse_digests(digests),
                        blocks,
                        sums,
                        session,
                        writer,
                        source,
                        tuple(map(_parse_object, objects)),
                        {int(file): _parse_lengths(entry) for file, entry in lengths.items()},
                        prefix,
                        nbytes,
                    )
        except ValueError:
            pass
        return None


def _parse_digests(entries: Mapping[str, object]) -> dict[int, StreamDigest]:
    digests: dict[int, StreamDigest] = {}
    for number, word in entries.items():
        digests[int(number)] = StreamDigest.decode(str(word))
    return digests


def _parse_object(entry: object) -> RemoteFile:
    match entry:
        case [str(path), int(size), str(text)]:
            return RemoteFile(path, size, text)
    raise ValueError("it has an invalid object")


def _parse_lengths(entry: object) -> list[int]:
    match entry:
        case list(lengths):
            return list(map(int, lengths))
    raise ValueError("it has invalid lengths")


def all_digests(plan: Plan, notes: Collection[UnitNote]) -> dict[int, StreamDigest]:
    """Return the digests of all streams of a plan, by number, from the notes of all units."""
    digests: dict[int, StreamDigest] = {}
    for number, stream in enumerate(plan.streams):
        if not stream.nbytes:
            digests[number] = StreamDigest.of_empty(stream.digest_algorithm)
    for note in notes:
        digests |= note.digests
    return digests


def all_checksums(num_blocks: int, notes: Iterable[UnitNote]) -> ChecksumArray:
    """Return the checksums of all blocks in notes, by block number. 0 is unknown."""
    sums: ChecksumArray = np.zeros(num_blocks, np.uint64)
    for note in notes:
        sums[note.blocks.astype(np.int64)] = note.sums
    return sums


# Records


def encode_record(content: Mapping[str, object]) -> bytes:
    """Return the bytes of a record: the content as JSON, with its checksum."""
    return json.dumps({**content, CHECKSUM_KEY: _checksum(content)}).encode()


def decode_record(data: bytes) -> JsonObject:
    """Return the JSON object in the bytes of a record. Raise ValueError if they are damaged."""
    try:
        content = load_json(data)
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.pop(CHECKSUM_KEY, None) != _checksum(content):
        raise ValueError("it is not a file that prep wrote")
    return content


def _checksum(content: Mapping[str, object]) -> str:
    """Return the checksum of a record's content after a JSON round trip, which converts keys to text."""
    return record_digest(json.dumps(json.loads(json.dumps(content)), sort_keys=True).encode())
