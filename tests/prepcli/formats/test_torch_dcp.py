"""Torch distributed checkpoints that prep writes without torch, loaded by torch."""

from __future__ import annotations

import io
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.engine.fills import numpy_dtype
from prepcli.formats.manifest import bytes_between
from prepcli.formats.safetensors import LayoutEntry
from prepcli.formats.torch_archive import PATH_TYPES, encode_object
from prepcli.formats.torch_dcp import (
    MAX_METADATA_OPCODES,
    DcpEntry,
    encode_metadata,
    read_dcp_folder,
)
from prepcli.formats.torch_pickle import MAX_NBYTES, SUPPORTED_DTYPES, StoredTensor
from prepcli.stores.files import open_regular_file
from prepcli.targets import torch_folder
from prepcli.targets.torch_folder import place_dcp_entries
from tests.helpers.memory_stores import store_of

ARRAYS = {
    "a.weight": np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32),
    "a.bias": np.random.default_rng(1).normal(size=7).astype(np.float64),
    "scalar": np.array(3, np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "deep": np.random.default_rng(2).normal(size=(4, 3, 2, 5)).astype(ml_dtypes.bfloat16),
    "é/ids": np.arange(300, dtype=np.int64),
    "flags": np.array([True, False, True]),
}


def write_folder(folder: Path, arrays: dict[str, np.ndarray], shard_nbytes: int) -> list[str]:
    """Write arrays by a layout, and return the names of the data files."""
    entries: list[LayoutEntry] = []
    for name, array in arrays.items():
        entries.append((name, array.dtype.name, array.shape, array.nbytes))
    placed = place_dcp_entries(entries, shard_nbytes)
    folder.mkdir()
    for number, file in enumerate(placed.files):
        content = bytearray(file.size)
        for offset, data in file.constant_ranges:
            content[offset : offset + len(data)] = data
        for name, locations in placed.locations.items():
            (location,) = locations
            file_number, start = location.position
            if file_number == number:
                data = arrays[name].tobytes()
                content[start : start + len(data)] = data
        (folder / file.path).write_bytes(content)
    (metadata,) = placed.index
    (folder / metadata.path).write_bytes(metadata.content)
    return [file.path for file in placed.files]


def torch_bits(tensor: Any) -> bytes:
    """Return the bytes of a tensor of torch."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_saved_by_python_3_11_2_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Python 3.11.0 to 3.11.3 pickles a member of an enum as `getattr(CLASS, NAME)`."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint import metadata
    from torch.distributed.checkpoint.state_dict_saver import save

    formats = metadata._MEM_FORMAT_ENCODING

    def reduce_by_name(member: Any, protocol: int) -> tuple[object, ...]:
        return getattr, (formats, member.name)

    monkeypatch.setattr(formats, "__reduce_ex__", reduce_by_name)
    save({"a": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=str(tmp_path / "out"))
    assert b"getattr" in (tmp_path / "out/.metadata").read_bytes()
    (tensor,) = read_dcp_folder(tmp_path / "out").tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("a", "float32", (2, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path_type", sorted(PATH_TYPES))
def test_checkpoints_of_every_python_are_read(tmp_path: Path, path_type: str):
    """The metadata has the path of the checkpoint. Its class has another module in Python 3.13."""
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"a": torch.arange(6.0).reshape(2, 3)}, checkpoint_id=str(tmp_path / "out"))
    path = tmp_path / "out/.metadata"
    words = [b"\x8c\x07pathlib", b"\x8c\tPosixPath"]
    content = path.read_bytes()
    assert all(content.count(word) == 1 for word in words)
    for word, text in zip(words, path_type.rsplit(".", 1), strict=True):
        content = content.replace(word, b"\x8c" + bytes([len(text)]) + text.encode())
    path.write_bytes(content)
    (tensor,) = read_dcp_folder(tmp_path / "out").tensors
    assert (tensor.name, tensor.dtype, tensor.shape) == ("a", "float32", (2, 3))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("shard_nbytes", [1, 300, 1 << 30])
def test_torch_loads_every_bit(tmp_path: Path, shard_nbytes: int):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.state_dict_loader import load

    write_folder(tmp_path / "out", ARRAYS, shard_nbytes)
    state: dict[str, Any] = {}
    for name, array in ARRAYS.items():
        state[name] = torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name))
    load(state, checkpoint_id=str(tmp_path / "out"))
    for name, array in ARRAYS.items():
        assert torch_bits(state[name]) == array.tobytes(), name


@pytest.mark.filterwarnings("ignore")
def test_torch_converts_the_folder_to_one_file(tmp_path: Path):
    torch = pytest.importorskip("torch")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    write_folder(tmp_path / "out", ARRAYS, 1 << 30)
    dcp_to_torch_save(str(tmp_path / "out"), str(tmp_path / "model.pt"))
    loaded = torch.load(tmp_path / "model.pt")
    assert loaded.keys() == ARRAYS.keys()
    assert all(torch_bits(loaded[name]) == array.tobytes() for name, array in ARRAYS.items())


def test_reader_finds_every_tensor(tmp_path: Path):
    names = write_folder(tmp_path / "out", ARRAYS, 300)
    assert names[:2] == ["__0_0.distcp", "__0_1.distcp"]
    folder = read_dcp_folder(tmp_path / "out")
    for tensor in folder.tensors:
        array = ARRAYS[tensor.name]
        assert (tensor.dtype, tensor.shape) == (array.dtype.name, array.shape)
        assert tensor.is_contiguous
        with open_regular_file(folder.files[tensor.file]) as file:
            file.seek(tensor.offset)
            assert file.read(array.nbytes) == array.tobytes()


def test_reader_requests_both_ends_of_archives_in_a_store(tmp_path: Path):
    arrays = {f"layer.{i}": np.full((40, 100), i, np.float32) for i in range(50)}
    (file,) = write_folder(tmp_path / "out", arrays, 1 << 30)
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    root, reader = store_of(files)
    folder = read_dcp_folder(root)
    assert folder.tensors == read_dcp_folder(tmp_path / "out").tensors
    sizes = [nbytes for name, _, nbytes in reader.requests if name == file]
    # One request has the end of an archive and the start of the next one.
    assert len(sizes) <= len(arrays) + 2
    assert max(sizes) <= 16 << 10


def test_bytes_between_tensors_are_the_same_in_a_store(tmp_path: Path):
    content = np.random.default_rng(0).bytes(5 << 20)
    (tmp_path / "data").write_bytes(content)
    root, reader = store_of({"data": content})
    for ranges in ([(10, 4 << 20)], [(0, 3), (3, 100), (200, 300), (300, 5 << 20)], []):
        rest = bytearray(content)
        for start, stop in reversed(ranges):
            del rest[start:stop]
        reader.requests.clear()
        assert b"".join(bytes_between(root / "data", ranges)) == rest
        assert b"".join(bytes_between(tmp_path / "data", ranges)) == rest
        assert sum(nbytes for _, _, nbytes in reader.requests) == len(rest)


@pytest.mark.parametrize("dtype", sorted(SUPPORTED_DTYPES))
def test_archive_is_a_zip_with_aligned_payload(dtype: str):
    archive = encode_object(StoredTensor("0", dtype, (5, 3)))
    (_, prefix), (_, suffix) = archive.constant_ranges
    nbytes = 15 * numpy_dtype(dtype).itemsize
    assert archive.nbytes == len(prefix) + nbytes + len(suffix)
    assert archive.offsets["0"] == len(prefix)
    assert len(prefix) % 64 == 0
    content = prefix + bytes(nbytes) + suffix
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        sizes = {info.filename: info.file_size for info in file.infolist()}
        assert sizes["archive/data/0"] == nbytes
        assert file.read("archive/byteorder") == b"little"


@pytest.mark.parametrize("rows", [(1 << 32) - 1, 1 << 32, 1 << 33])
def test_archive_above_4_gib_is_a_zip64(tmp_path: Path, rows: int):
    archive = encode_object(StoredTensor("0", "uint8", (rows,)))
    (_, prefix), (_, suffix) = archive.constant_ranges
    path = tmp_path / "sparse.zip"
    # The payload is a hole in the file.
    with path.open("wb") as file:
        file.write(prefix)
        file.seek(rows, io.SEEK_CUR)
        file.write(suffix)
    with zipfile.ZipFile(path) as file:
        assert file.getinfo("archive/data/0").file_size == rows
        with file.open("archive/data.pkl") as record:
            assert b"_rebuild_tensor_v2" in record.read()


@pytest.mark.slow
def test_reader_takes_the_metadata_of_many_tensors():
    """DeepSeek-V3 has 46,000 tensors, most of them experts."""
    entries: list[DcpEntry] = []
    for number in range(46_000):
        name = f"model.layers.{number // 768}.mlp.experts.{number % 768}.down_proj.weight"
        offset = number << 32
        entries.append(DcpEntry(name, "bfloat16", (7168, 2048), "__0_99.distcp", offset, 1 << 33))
    content = encode_metadata(entries)
    assert len(content) < MAX_NBYTES
    num_opcodes = sum(1 for _ in pickletools.genops(content))
    assert num_opcodes < MAX_METADATA_OPCODES
    assert num_opcodes / len(entries) < 64


def test_moments_of_max_tensors_are_readable():
    """`MAX_TENSORS` follows from the number of opcodes of a moment."""
    entries: list[DcpEntry] = []
    for number in range(1000):
        path = ("optimizer", "state", f"model.layers.{number}.weight", "exp_avg")
        entries.append(DcpEntry(".".join(path), "float32", (number, 7), "__0_0.distcp", 0, 1, path))
    num_opcodes = sum(1 for _ in pickletools.genops(encode_metadata(entries)))
    assert num_opcodes / len(entries) * torch_folder.MAX_TENSORS < MAX_METADATA_OPCODES


def test_more_tensors_than_the_reader_takes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_folder, "MAX_TENSORS", 2)
    entries: list[LayoutEntry] = [(f"w{number}", "uint8", (1,), 1) for number in range(3)]
    with pytest.raises(PrepError, match="3 tensors are too many"):
        place_dcp_entries(entries, 1 << 30)


def test_unsupported_dtype_is_named():
    """`--dtype` casts no such tensor."""
    with pytest.raises(PrepError, match="w is float8_e4m3fn") as raised:
        place_dcp_entries([("w", "float8_e4m3fn", (2,), 2)], 100)
    assert str(raised.value.hint) == "use `--format safetensors`"
