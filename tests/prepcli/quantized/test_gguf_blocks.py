"""Blocks of GGUF, compared with the package gguf."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.core.errors import DamagedError
from prepcli.planning.arrays import whole_array
from prepcli.quantized.gguf_blocks import BLOCK_TYPES, GgufDecoder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all
from tests.helpers.slow_cases import slow_except

gguf = lazy_module("gguf")


def decoder_of(name: str, blocks: np.ndarray, blocks_per_row: int) -> GgufDecoder:
    rows = len(blocks) // blocks_per_row
    shape = (rows, blocks[0].size * blocks_per_row)
    stored = whole_array("w", "uint8", shape, (0, 0))
    return GgufDecoder(stored, name, (rows, BLOCK_TYPES[name].values * blocks_per_row))


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_size_matches_gguf(name: str):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert size == (BLOCK_TYPES[name].values, BLOCK_TYPES[name].dtype.itemsize)


# The values of 10,000 blocks fit into the caches of a CPU, so that 10^7 blocks take less than a minute.
# test_every_value_of_every_byte_decodes_like_gguf has all values of single bytes.
@pytest.mark.parametrize(
    ("batches", "num_blocks"), slow_except([(1, 20_000), (1000, 10_000)], [(1, 20_000)])
)
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_equal_gguf(name: str, batches: int, num_blocks: int):
    rng = np.random.default_rng(1)
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    for _ in range(batches):
        blocks = rng.integers(0, 256, (num_blocks, nbytes), dtype=np.uint8)
        blocks[0] = 0
        blocks[1] = 255
        decoder = decoder_of(name, blocks, blocks_per_row=4)
        values = decode_all(decoder, {"w": blocks}).astype(np.float32)
        assert_equal_bits(values.reshape(num_blocks, -1), reference(name, blocks))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_value_of_every_byte_decodes_like_gguf(name: str):
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    # Each byte of a block has each of its 256 values once, beside bytes of other values.
    blocks = np.arange(256, dtype=np.uint8)[:, None] * np.uint8(1) + np.arange(
        nbytes, dtype=np.uint8
    )
    values = decode_all(decoder_of(name, blocks, blocks_per_row=1), {"w": blocks}).astype(
        np.float32
    )
    assert_equal_bits(values, reference(name, blocks))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_parts_equal_whole_tensor(name: str):
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    blocks = np.random.default_rng(2).integers(0, 256, (36, nbytes), dtype=np.uint8)
    decoder = decoder_of(name, blocks, blocks_per_row=3)
    whole = decode_all(decoder, {"w": blocks})
    assert_equal_bits(decode_all(decoder, {"w": blocks}, rows_per_part=5), whole)


@pytest.mark.parametrize("name", ["F16", "Q8_0", "Q6_K"])
def test_transposed_columns_equal_whole_tensor(name: str):
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    blocks = np.random.default_rng(3).integers(0, 256, (10, nbytes), dtype=np.uint8)
    plain = decode_all(decoder_of(name, blocks, blocks_per_row=2), {"w": blocks})
    stored = whole_array("w", "uint8", (5, 2 * nbytes), (0, 0))
    decoder = GgufDecoder(stored, name, plain.T.shape, is_transposed=True)
    for rows_per_part in (None, 1, 37):
        values = decode_all(decoder, {"w": blocks}, rows_per_part)
        assert_equal_bits(values, np.ascontiguousarray(plain.T))


def test_interleaved_rows_of_heads_are_separated():
    # 2 heads of 6 rows: the stored rows 0 2 4 of a head are its first half, and 1 3 5 its second half.
    rows = np.arange(12, dtype=np.float32)[:, None] * np.ones((1, 3), np.float32)
    octets = rows.view(np.uint8)
    stored = whole_array("w", "uint8", octets.shape, (0, 0))
    decoder = GgufDecoder(stored, "F32", (12, 3), interleaved_rows=6)
    for rows_per_part in (None, 1, 5):
        values = decode_all(decoder, {"w": octets}, rows_per_part)
        assert values[:, 0].tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]


def test_offset_is_added_in_float32():
    rows = np.array([[1.0, 1.5, 0.1]], np.float32)
    stored = whole_array("w", "uint8", (1, 12), (0, 0))
    decoder = GgufDecoder(stored, "F32", (3,), offset=-1.0)
    values = decode_all(decoder, {"w": rows.view(np.uint8)})
    assert_equal_bits(values, rows[0] - np.float32(1))


def test_rows_of_part_of_a_block_are_refused():
    stored = whole_array("blk.0.ffn_up.weight", "uint8", (2, 100), (0, 0))
    with pytest.raises(DamagedError, match=r"blk\.0\.ffn_up\.weight"):
        GgufDecoder(stored, "Q4_K", (2, 256))
