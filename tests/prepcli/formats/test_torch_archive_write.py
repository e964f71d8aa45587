"""PyTorch loads the archives that prep writes, with its safe unpickler."""

from __future__ import annotations

import itertools
import zipfile
from pathlib import Path

import numpy as np

from prepcli.formats.torch_archive_write import ObjectArchive, encode_object
from prepcli.formats.torch_pickle_write import PickledValue, StoredTensor
from tests.helpers.lazy_modules import lazy_module

torch = lazy_module("torch")

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
