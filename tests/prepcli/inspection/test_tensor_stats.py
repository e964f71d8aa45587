"""Statistics, compared with NumPy on whole arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.algebra.strided_copies import StridedCopy
from prepcli.engine.blobs import open_blobs
from prepcli.formats.orbax_chunks import unplaced_array
from prepcli.formats.safetensors import DTYPE_CODES
from prepcli.formats.zarr import ZARR_TYPESTRS
from prepcli.inspection import tensor_stats as module
from prepcli.inspection.contents import CheckpointContents, read_contents
from prepcli.inspection.tensor_stats import TensorStats, compute_stats, stored_nbytes
from prepcli.sources.locate import locate
from prepcli.sources.source import SourceTensor
from prepcli.stores.buffers import ByteArray
from tests.helpers.hf_folders import write_hf_folder
from tests.helpers.orbax_items import random_array, write_item


def contents_of(folder: Path) -> CheckpointContents:
    return read_contents(locate(str(folder)))


def measure(contents: CheckpointContents, entry: SourceTensor) -> tuple[TensorStats | None, int]:
    read: list[int] = []
    with open_blobs(contents.byte_sources) as files:
        return compute_stats(entry, files, read.append), sum(read)


def numpy_stats(array: np.ndarray) -> TensorStats:
    """Return the statistics of all values at once, in float64. A bool counts as uint8."""
    array = array.view(np.uint8) if array.dtype == bool else array
    if array.dtype.kind == "c":
        parts = np.isnan(array), np.isinf(array) & ~np.isnan(array), array == 0
        return TensorStats(None, None, None, *(int(part.sum()) for part in parts))
    with np.errstate(invalid="ignore"):  # a signalling NaN says so
        wide = array if array.dtype.kind in "iu" else array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    ends = (finite.min().item(), finite.max().item()) if finite.size else (None, None)
    mean = math.fsum(finite.tolist()) / finite.size if finite.size else None
    counts = np.isnan(wide), np.isinf(wide), wide == 0
    return TensorStats(*ends, mean, *(int(part.sum()) for part in counts))


def assert_same(actual: TensorStats | None, array: np.ndarray) -> None:
    expected = numpy_stats(array)
    assert actual is not None
    assert (actual.minimum, actual.maximum, actual.nan, actual.inf, actual.zeros) == (
        expected.minimum, expected.maximum, expected.nan, expected.inf, expected.zeros,
    )  # fmt: skip
    if expected.mean is None:
        assert actual.mean is None
    else:
        largest = max(abs(expected.minimum or 0), abs(expected.maximum or 0))
        assert actual.mean == pytest.approx(expected.mean, rel=1e-9, abs=1e-9 * largest)


@st.composite
def grids(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a shape and a chunk shape that need not divide it."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    return shape, tuple(draw(st.integers(1, extent + 2)) for extent in shape)


@given(
    dtype=st.sampled_from([name for name in ZARR_TYPESTRS if name != "float64"]),
    grid=grids(),
    run_nbytes=st.sampled_from([8, 24, 1 << 20]),
    seed=st.integers(0, 99),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stats_of_chunked_arrays_match_numpy(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    dtype,
    grid,
    run_nbytes,
    seed,
) -> None:
    monkeypatch.setattr(module, "RUN_NBYTES", run_nbytes)
    shape, chunk = grid
    array = random_array(dtype, shape, seed)
    folder = tmp_path_factory.mktemp("item")
    write_item(folder, {unplaced_array(("x",), shape, dtype, chunk): array})
    contents = contents_of(folder)
    actual, read_nbytes = measure(contents, contents.entries[0])
    assert_same(actual, array)
    counts = [-(-extent // length) for extent, length in zip(shape, chunk)]
    assert (
        read_nbytes
        == stored_nbytes(contents.entries[0])
        == math.prod(counts) * math.prod(chunk) * array.itemsize
    )


SPECIAL = {
    "float16": [0.0, -0.0, 65504, 6e-8, -65504, math.nan, math.inf, -math.inf, 1],
    "bfloat16": [3e38, -3e38, 1e-40, 0.0, -0.0, math.nan, math.inf, -math.inf, math.inf],
    "float32": [3e38, 3e38, 3e38, 1e-45, -0.0, math.nan, -math.nan, -math.inf, math.inf],
    "float64": [1e300, -1e-300, 5e-324, 0.0, -0.0, math.nan, math.inf, -math.inf, 2],
    "complex64": [
        1 + 2j,
        0,
        complex(math.nan, 0),
        complex(math.inf, math.nan),
        complex(0, math.inf),
        -0.0,
        1,
        2,
        3,
    ],
    "float8_e4m3fn": [448, -448, 2**-9, 0.0, -0.0, math.nan, math.nan, 1, 2],
    "float8_e5m2": [57344, -57344, 2**-16, 0.0, -0.0, math.nan, math.inf, -math.inf, 2],
    "float8_e8m0fnu": [2.0**127, 2.0**-127, 1, 2, 4, math.nan, math.nan, 8, 16],
    "int64": [2**63 - 1, -(2**63), 0, 1, 2, 3, 4, 5, 6],
    "uint64": [2**64 - 1, 0, 0, 1, 2, 3, 4, 5, 6],
    "bool": [True, False, True, True, False, False, False, False, False],
}


@pytest.mark.parametrize("dtype", SPECIAL)
def test_stats_of_special_values_match_numpy(tmp_path: Path, dtype: str) -> None:
    array = np.array(SPECIAL[dtype], getattr(ml_dtypes, dtype, dtype)).reshape(3, 3)
    write_hf_folder(tmp_path / "model", {"model.safetensors": {"x": array}})
    contents = contents_of(tmp_path / "model")
    actual, _ = measure(contents, contents.entries[0])
    assert_same(actual, array)


def test_mean_beyond_float64_is_none(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", {"model.safetensors": {"x": np.full(4, 1.7e308)}})
    contents = contents_of(tmp_path / "model")
    assert measure(contents, contents.entries[0])[0] == TensorStats(1.7e308, 1.7e308, None, 0, 0, 0)


@pytest.mark.parametrize(("shape", "special"), [((0, 3), 0), ((4,), 4)])
def test_stats_without_finite_values_are_none(
    tmp_path: Path, shape: tuple[int, ...], special: int
) -> None:
    write_hf_folder(
        tmp_path / "model", {"model.safetensors": {"x": np.full(shape, np.nan, np.float32)}}
    )
    contents = contents_of(tmp_path / "model")
    assert measure(contents, contents.entries[0])[0] == TensorStats(None, None, None, special, 0, 0)


def test_stats_of_packed_dtypes_are_none(tmp_path: Path) -> None:
    assert "F4" in DTYPE_CODES.values()
    header = b'{"x":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\x12\x34"
    )
    contents = contents_of(tmp_path)
    assert measure(contents, contents.entries[0]) == (None, 0)
    assert stored_nbytes(contents.entries[0]) == 0


def test_remote_tensor_is_read_in_large_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "RUN_NBYTES", 1 << 10)
    monkeypatch.setattr(module, "REMOTE_READ_NBYTES", 4 << 10)
    array = np.random.default_rng(0).standard_normal((100, 30), np.float32)
    folder = write_hf_folder(tmp_path / "m", {"model.safetensors": {"x": array}})
    contents = contents_of(folder)
    entry = contents.entries[0]
    sizes: list[int] = []
    with open_blobs(contents.byte_sources) as files:
        read_runs = files.read_runs

        def record_runs(copies: Sequence[StridedCopy], into: ByteArray) -> ByteArray:
            data = read_runs(copies, into)
            sizes.append(data.size)
            return data

        monkeypatch.setattr(files, "read_runs", record_runs)
        local = compute_stats(entry, files, lambda nbytes: None)
        assert max(sizes) <= 1 << 10
        sizes.clear()
        remote = compute_stats(entry, files, lambda nbytes: None, is_remote=True)
    # The sums are added in the same order: equal to the last bit.
    assert remote == local
    # 8 rows of 120 bytes fit into a run, and 4 runs into a read.
    assert sizes == [3840, 3840, 3840, 480]
