"""Tests of zip archives of PyTorch: malformed records and directories, zip64, and archives of prep loaded by torch."""

from __future__ import annotations

import itertools
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from prepcli.formats.torch_archive import ObjectArchive, encode_object
from prepcli.formats.torch_pickle import PickledValue, StoredTensor
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.pickle_builder import (
    ONE_TENSOR,
    SIX_FLOATS,
    encode_mapping,
    encode_storage,
    encode_tensor,
    make_pickle,
    make_zip_file,
)
from tests.helpers.torch_reading import read_content, read_error, tensor_bytes

torch = lazy_module("torch")


def zipped(edit: Callable[[bytearray], None]) -> bytes:
    content = bytearray(make_zip_file(ONE_TENSOR))
    edit(content)
    return bytes(content)


def put(mark: bytes, after: int, value: bytes, last: bool = True) -> bytes:
    """Return the archive with `value` written `after` bytes behind its last (or first) `mark`."""

    def edit(content: bytearray) -> None:
        position = (content.rfind(mark) if last else content.find(mark)) + after
        content[position : position + len(value)] = value

    return zipped(edit)


ENTRY, END, LOCAL = b"PK\x01\x02", b"PK\x05\x06", b"PK\x03\x04"
ARCHIVES = {
    "compressed": (put(ENTRY, 10, b"\x08\x00"), "compressed or encrypted"),
    "encrypted": (put(ENTRY, 8, b"\x01\x00"), "compressed or encrypted"),
    "of two lengths": (put(ENTRY, 20, b"\x01\x00\x00\x00"), "compressed or encrypted"),
    "on another disk": (put(ENTRY, 34, b"\x01\x00"), "compressed or encrypted"),
    "of several parts": (put(END, 4, b"\x01\x00"), "a split archive"),
    "with another number of entries": (
        put(END, 8, b"\x03\x00\x03\x00"),
        "2 entries, its end record 3",
    ),
    "with a directory elsewhere": (put(END, 16, b"\x00\x00\x00\x00"), "its directory ends at byte"),
    "with an endless directory": (put(END, 12, b"\xff\xff\xff\xff"), "its directory ends at byte"),
    "with a broken directory": (
        put(ENTRY, 0, b"PK\x01\x03"),
        "its directory is broken at its byte",
    ),
    "with an endless name": (put(ENTRY, 28, b"\xff\xff"), "its directory is cut short"),
    "with a header elsewhere": (put(ENTRY, 42, b"\x01\x00\x00\x00"), "overlaps another record"),
    "with a header behind its end": (put(ENTRY, 42, b"\xf0\xff\xff\x7f"), "overlaps its directory"),
    "with large numbers that are not there": (
        put(ENTRY, 42, b"\xff\xff\xff\xff"),
        "overlaps its directory",
    ),
    "with another name in its header": (put(LOCAL, 30, b"Archive"), "header of `data/0` differ"),
    "with another length in its header": (put(LOCAL, 22, b"\x17"), "header of `data/0` differ"),
    "compressed by its header": (put(LOCAL, 8, b"\x08\x00"), "header of `data/0` differ"),
    "with data far away": (put(LOCAL, 28, b"\xff\x7f"), "overlaps its directory"),
    "that goes on": (make_zip_file(ONE_TENSOR) + b"x", "bytes follow its end"),
    "cut short": (make_zip_file(ONE_TENSOR)[:-30], "no directory at its end"),
    "with a record outside": (
        make_zip_file(ONE_TENSOR, {"../../x": SIX_FLOATS}),
        "not a plain path",
    ),
    "with an absolute record": (
        make_zip_file(ONE_TENSOR, {"data/0": SIX_FLOATS}, "/a"),
        "not a plain path",
    ),
    "with a drive": (make_zip_file(ONE_TENSOR, {"a\\b": SIX_FLOATS}), "not a plain path"),
    "without a pickle": (
        make_zip_file(ONE_TENSOR).replace(b"/data.pkl", b"/data.pk1"),
        "0 pickles of tensors, not one",
    ),
    "of big numbers": (
        make_zip_file(ONE_TENSOR, {"data/0": SIX_FLOATS, "byteorder": b"big"}),
        "big-endian machine",
    ),
    "with a long byte order": (
        make_zip_file(ONE_TENSOR, {"data/0": SIX_FLOATS, "byteorder": b"little" * 9}),
        "54 bytes, the limit is 16",
    ),
    "of a program": (
        make_zip_file(ONE_TENSOR, {"data/0": SIX_FLOATS, "code/a.py": b"1"}),
        "TorchScript",
    ),
}


@pytest.mark.parametrize(("content", "why"), ARCHIVES.values(), ids=ARCHIVES)
def test_invalid_archives_are_rejected(tmp_path: Path, content: bytes, why: str) -> None:
    error = read_error(tmp_path, content)
    assert error.what == "x.bin is not a usable PyTorch file"
    assert why in error.why


def test_duplicate_and_overlapping_records_are_rejected(tmp_path: Path) -> None:
    two = make_pickle(
        encode_mapping({"a": encode_tensor(), "b": encode_tensor(storage=encode_storage(key="1"))})
    )
    content = make_zip_file(two, {"data/0": SIX_FLOATS, "data/1": SIX_FLOATS})
    assert len(read_content(tmp_path, content).tensors) == 2
    twice = content.replace(b"archive/data/1", b"archive/data/0")
    assert "it has `archive/data/0` twice" in read_error(tmp_path, twice).why
    # A local header within the data of another record.
    inner = make_zip_file(ONE_TENSOR, {"data/1": SIX_FLOATS})
    header = inner[inner.rfind(LOCAL) : inner.find(ENTRY)]
    outer = make_pickle(
        encode_mapping(
            {
                "a": encode_tensor(storage=encode_storage(numel=len(header) // 4)),
                "b": encode_tensor(storage=encode_storage(key="1")),
            }
        )
    )
    content = bytearray(make_zip_file(outer, {"data/0": header, "data/1": SIX_FLOATS}))
    header_offset = content.find(header)
    position = content.rfind(ENTRY) + 42
    content[position : position + 4] = struct.pack("<I", header_offset)
    assert "`data/0` overlaps another record" in read_error(tmp_path, bytes(content)).why


def test_zip64_archive_is_read(tmp_path: Path) -> None:
    content = make_zip_file(ONE_TENSOR)
    entry_start, end_start = content.rfind(ENTRY), content.rfind(END)
    header = struct.unpack_from("<I", content, entry_start + 42)[0]
    extra = struct.pack("<2H3Q", 1, 24, len(SIX_FLOATS), len(SIX_FLOATS), header)
    entry = bytearray(content[entry_start:end_start])
    entry[20:28], entry[42:46] = b"\xff" * 8, b"\xff" * 4
    entry[30:32] = struct.pack("<H", len(extra))
    start = content.find(ENTRY)
    directory = content[start:entry_start] + bytes(entry) + extra
    zip64_end = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2, 2, len(directory), start
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(directory), 1)
    end_record = struct.pack("<4s4H2LH", END, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    large = content[:start] + directory + zip64_end + locator + end_record
    parsed = read_content(tmp_path, large)
    assert tensor_bytes(parsed.tensors[0], large) == SIX_FLOATS
    for bad_zip64_end in (
        zip64_end.replace(b"PK\x06\x06", b"PK\x06\x07"),
        zip64_end[:32] + struct.pack("<Q", 3) + zip64_end[40:],
    ):
        broken = content[:start] + directory + bad_zip64_end + locator + end_record
        assert "zip64 end record" in read_error(tmp_path, broken).why


# Writing


MOMENT = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
STEP = np.float32(7)
STATE: PickledValue = {
    "state": {
        0: {
            "step": StoredTensor("0", "float32", (), STEP.tobytes()),
            "exp_avg": StoredTensor("1", "float32", MOMENT.shape),
            "empty": StoredTensor("2", "bfloat16", (0, 4)),
        }
    },
    "param_groups": [
        {"lr": 1e-3, "betas": (0.9, 0.999), "foreach": None, "amsgrad": False, "params": [0, 1]},
        {"lr": -2.5, "large": 1 << 40, "negative": -3, "is": True, "params": []},
    ],
}


def write_archive(path: Path, archive: ObjectArchive, payloads: dict[str, bytes]) -> None:
    """Write an archive with the payloads of its tensors, by the keys of their storages."""
    with path.open("wb") as file:
        file.truncate(archive.nbytes)
        for offset, data in archive.constant_ranges:
            file.seek(offset)
            file.write(data)
        for key, data in payloads.items():
            file.seek(archive.offsets[key])
            file.write(data)


def test_torch_load_returns_the_object(tmp_path: Path):
    write_archive(tmp_path / "a.pt", encode_object(STATE), {"1": MOMENT.tobytes()})
    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    entry = loaded["state"][0]
    assert np.array_equal(entry["exp_avg"].numpy(), MOMENT)
    assert (entry["step"].item(), entry["step"].dtype) == (7, torch.float32)
    assert (entry["empty"].shape, entry["empty"].dtype) == ((0, 4), torch.bfloat16)
    assert loaded["param_groups"] == STATE["param_groups"]  # pyright: ignore[reportArgumentType,reportIndexIssue,reportOptionalSubscript,reportCallIssue]


def test_payloads_are_aligned_and_apart_from_constants():
    archive = encode_object(STATE)
    ranges = [(start, start + len(data)) for start, data in archive.constant_ranges]
    ranges.append((archive.offsets["1"], archive.offsets["1"] + MOMENT.nbytes))
    ranges.sort()
    assert ranges[0][0] == 0
    assert ranges[-1][1] == archive.nbytes
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(ranges))
    assert all(offset % 64 == 0 for offset in archive.offsets.values())


def small_tensors(count: int) -> dict[int, StoredTensor]:
    """Return tensors of one byte."""
    return {number: StoredTensor(str(number), "uint8", (1,)) for number in range(count)}


def test_archive_of_many_tensors_has_a_64_bit_count(tmp_path: Path):
    """The number of records beyond 65,535 needs zip64."""
    archive = encode_object(small_tensors(66_000))
    write_archive(tmp_path / "a.pt", archive, {})
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        # The pickle, the byte order and the version are records, too.
        assert len(file.infolist()) == 66_003


def test_archive_of_large_tensors_has_64_bit_offsets(tmp_path: Path):
    """Offsets beyond 4 GiB need zip64. The file is sparse."""
    large = StoredTensor("large", "uint8", (5 << 30,))
    archive = encode_object({"large": large, "small": small_tensors(3)})
    write_archive(tmp_path / "a.pt", archive, {"2": b"\x05"})
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        info = file.getinfo("archive/data/2")
    assert 5 << 30 < info.header_offset < archive.offsets["2"]
    loaded = torch.load(tmp_path / "a.pt", weights_only=True, mmap=True)
    assert loaded["small"][2].item() == 5
    assert loaded["large"].shape == (5 << 30,)
