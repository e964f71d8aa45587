"""Notes of units: whole, of one run, and without effect if they are damaged."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from prepcli.engine.background_sync import StreamPrefix
from prepcli.engine.digest import CastCounts, StreamDigest
from prepcli.execution.output import UnitNote, decode_record, encode_record
from prepcli.stores.byte_ranges import RemoteFile

NOTE = UnitNote(
    {7: StreamDigest("00ff", "00ff"), 9: StreamDigest("00", "ff", CastCounts(9, 8), "f0", 2)},
    np.array([1, 5], np.uint64),
    np.array([11, 55], np.uint64),
    "session",
    "host:1",
    "state of the source",
    (RemoteFile("d/1", 3, "etag:x"),),
    {2: [4, 9]},
)


@pytest.mark.parametrize("prefix", [None, StreamPrefix(8, 100, "abcd")])
def test_notes_are_decoded_as_they_were_encoded(prefix: StreamPrefix | None):
    note = replace(NOTE, prefix=prefix)
    decoded = UnitNote.decode(note.encode("run"), "run")
    assert decoded is not None
    assert (decoded.blocks.tolist(), decoded.sums.tolist()) == ([1, 5], [11, 55])
    known = {"blocks": note.blocks, "sums": note.sums}
    assert replace(decoded, **known) == replace(note, **known)


def test_notes_of_other_runs_count_as_none():
    assert UnitNote.decode(NOTE.encode("run"), "another run") is None
    assert UnitNote.decode(None, "run") is None


def test_torn_and_damaged_notes_count_as_none():
    data = NOTE.encode("run")
    for length in range(len(data)):
        assert UnitNote.decode(data[:length], "run") is None
    for position in range(0, len(data), 7):
        damaged = bytearray(data)
        damaged[position] ^= 1
        decoded = UnitNote.decode(bytes(damaged), "run")
        assert decoded is None or decoded.digests == NOTE.digests


@pytest.mark.parametrize("key", ["digests", "objects", "checksums", "lengths"])
@pytest.mark.parametrize("value", [None, 3, "x", [["x"]], {"x": 1}])
def test_notes_of_another_form_count_as_none(key: str, value: object):
    content = decode_record(NOTE.encode("run"))
    assert UnitNote.decode(encode_record({**content, key: value}), "run") is None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"a": 1}', json.dumps({"a": 1, "checksum": "x"}).encode()]
)
def test_damaged_records_are_refused(data: bytes):
    with pytest.raises(ValueError, match="not a file that prep wrote"):
        decode_record(data)
