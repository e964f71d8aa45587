"""Blocks of GGUF, compared with the package gguf."""

from __future__ import annotations

import numpy as np
import pytest

from prepcli.errors import DamagedError
from prepcli.planning.tensors import FileTensor
from prepcli.quantized.gguf_blocks import BLOCK_TYPES, GgufDecoder
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.quantized import assert_equal_bits, decode_all

gguf = lazy_module("gguf")
BLOCKS_PER_BATCH = 100_000


def decoder_of(name: str, blocks: np.ndarray, blocks_per_row: int) -> GgufDecoder:
    rows = len(blocks) // blocks_per_row
    shape = (rows, blocks[0].size * blocks_per_row)
    stored = FileTensor("w", "uint8", shape, 0, 0, blocks.nbytes)
    return GgufDecoder(stored, name, (rows, BLOCK_TYPES[name].values * blocks_per_row))


def reference(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_block_size_is_that_of_gguf(name: str):
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    assert size == (BLOCK_TYPES[name].values, BLOCK_TYPES[name].dtype.itemsize)


@pytest.mark.parametrize("batches", [1, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks_equal_gguf(name: str, batches: int):
    rng = np.random.default_rng(1)
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    for _ in range(batches):
        blocks = rng.integers(0, 256, (BLOCKS_PER_BATCH, nbytes), dtype=np.uint8)
        blocks[0] = 0
        blocks[1] = 255
        decoder = decoder_of(name, blocks, blocks_per_row=4)
        values = decode_all(decoder, {"w": blocks})
        assert_equal_bits(values.reshape(BLOCKS_PER_BATCH, -1), reference(name, blocks))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_every_code_at_every_place_equals_gguf(name: str):
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    # Each byte of a block has each of its 256 values once, beside bytes of other values.
    blocks = np.arange(256, dtype=np.uint8)[:, None] * np.uint8(1) + np.arange(
        nbytes, dtype=np.uint8
    )
    values = decode_all(decoder_of(name, blocks, blocks_per_row=1), {"w": blocks})
    assert_equal_bits(values, reference(name, blocks))


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_parts_equal_whole_tensor(name: str):
    nbytes = BLOCK_TYPES[name].dtype.itemsize
    blocks = np.random.default_rng(2).integers(0, 256, (36, nbytes), dtype=np.uint8)
    decoder = decoder_of(name, blocks, blocks_per_row=3)
    whole = decode_all(decoder, {"w": blocks})
    assert_equal_bits(decode_all(decoder, {"w": blocks}, rows_per_part=5), whole)


def test_rows_of_part_of_a_block_are_refused():
    stored = FileTensor("blk.0.ffn_up.weight", "uint8", (2, 100), 0, 0, 200)
    with pytest.raises(DamagedError, match=r"blk\.0\.ffn_up\.weight"):
        GgufDecoder(stored, "Q4_K", (2, 256))
