"""Low-rank updates of streams: equal bits for all divisions of the stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from prepcli.core.errors import DamagedError, UsageError
from prepcli.engine.budget import make_budget
from prepcli.engine.files import Files
from prepcli.engine.low_rank import BLOCK_VALUES, StreamUpdate, matrix_nbytes
from prepcli.planning.plan import LowRankUpdate, Stream, encode_text
from tests.helpers.plans import flat

MIB = 1 << 20


def make_stream(
    folder: Path, num_rows: int, num_columns: int, *, is_transposed: bool = False
) -> Stream:
    """Write random matrices of rank 2, and return a stream [rows, columns] with their update."""
    random = np.random.default_rng(0)
    num_outputs, num_inputs = (num_columns, num_rows) if is_transposed else (num_rows, num_columns)
    a, b = (
        random.standard_normal(shape, np.float32) for shape in ((2, num_inputs), (num_outputs, 2))
    )
    (folder / "matrices").write_bytes(a.tobytes() + b.tobytes())
    streams = [
        Stream(
            name,
            "float32",
            matrix.shape,
            (0, len(matrix)),
            (flat("float32", matrix.shape, offset),),
            (),
        )
        for name, matrix, offset in (("a", a, 0), ("b", b, a.nbytes))
    ]
    update = LowRankUpdate(streams[0], streams[1], 0.5, is_transposed)
    return Stream("w", "float32", (num_rows, num_columns), (0, num_rows), (), (), update=update)


def apply_update(
    folder: Path, stream: Stream, values: np.ndarray, num_pieces: int
) -> tuple[np.ndarray, StreamUpdate]:
    """Update values in pieces, and return the result and the update."""
    with Files([folder / "matrices"]) as files:
        update = StreamUpdate(stream, files)
    pieces = np.array_split(values.reshape(-1), num_pieces)
    results = [
        update.apply(piece.view(np.uint8), np.empty(piece.nbytes, np.uint8)).copy()
        for piece in pieces
    ]
    return np.concatenate(results).view(np.float32).reshape(values.shape), update


@pytest.mark.parametrize("shape", [(37, 53), (3, BLOCK_VALUES + 5), (BLOCK_VALUES + 5, 2)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_update_does_not_depend_on_pieces(
    tmp_path: Path, shape: tuple[int, int], is_transposed: bool
):
    stream = make_stream(tmp_path, *shape, is_transposed=is_transposed)
    values = np.random.default_rng(2).standard_normal(shape, np.float32)
    whole, update = apply_update(tmp_path, stream, values, 1)
    pieces, other = apply_update(tmp_path, stream, values, 7)
    assert np.array_equal(whole, pieces)
    assert (update.counts, update.digest()) == (other.counts, other.digest())


def test_update_equals_the_product_in_double_precision(tmp_path: Path):
    stream = make_stream(tmp_path, 37, 53)
    data = np.frombuffer((tmp_path / "matrices").read_bytes(), np.float32)
    a, b = data[: 2 * 53].reshape(2, 53), data[2 * 53 :].reshape(37, 2)
    values = np.zeros((37, 53), np.float32)
    result, update = apply_update(tmp_path, stream, values, 1)
    np.testing.assert_allclose(
        result, 0.5 * b.astype(np.float64) @ a.astype(np.float64), rtol=1e-6, atol=1e-6
    )
    assert update.counts.changed == values.size


def test_update_with_a_damaged_matrix_is_an_error(tmp_path: Path):
    stream = make_stream(tmp_path, 37, 53)
    assert stream.update is not None
    content = (tmp_path / "matrices").read_bytes()
    split = stream.update.a.nbytes
    digests = xxhash.xxh3_128_hexdigest(content[:split]), xxhash.xxh3_128_hexdigest(content[split:])
    stream = replace(stream, update=replace(stream.update, digests=digests))
    values = np.zeros((37, 53), np.float32)
    apply_update(tmp_path, stream, values, 1)
    for position in (0, len(content) - 1):
        damaged = bytearray(content)
        damaged[position] ^= 1
        (tmp_path / "matrices").write_bytes(damaged)
        with pytest.raises(DamagedError, match="of the adapter is damaged"):
            apply_update(tmp_path, stream, values, 1)


def test_recorded_digests_do_not_change_the_plan(tmp_path: Path):
    stream = make_stream(tmp_path, 3, 5)
    assert stream.update is not None
    with_digests = replace(stream, update=replace(stream.update, digests=("1", "2")))
    assert encode_text(with_digests) == encode_text(stream)


def test_budget_makes_room_for_matrices(tmp_path: Path):
    assert matrix_nbytes([make_stream(tmp_path, 100, 50)]) > 4 * 2 * 150
    small, large = make_budget(32 * MIB), make_budget(32 * MIB, kept_nbytes=8 * MIB)
    assert (
        large.slab_nbytes * large.buffer_count <= small.slab_nbytes * small.buffer_count - 5 * MIB
    )
    with pytest.raises(UsageError, match="too small for the adapter"):
        make_budget(32 * MIB, kept_nbytes=30 * MIB)
