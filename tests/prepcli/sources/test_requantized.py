"""Codes encoded from the values of an init: blocks of values follow the memory limit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import prepcli as prep
from prepcli.algebra.boxes import Range
from prepcli.engine.chunk_cache import ChunkCache
from prepcli.quantized.decoder import CodeArray, MatrixReader
from prepcli.quantized.encoder import BitArray, InvertibleDecoder
from prepcli.quantized.mxfp4 import Mxfp4Decoder
from prepcli.quantized.scaled import ScaledDecoder
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.requantized import ENCODING_NBYTES, RequantizedBlob, requantize_source
from tests.helpers.quantized_folders import make_mxfp4_experts, make_quantized


def read_codes(blob: RequantizedBlob, max_nbytes: int) -> bytes:
    """Return the codes of all weights, read with a memory limit."""
    codes = np.empty(blob.weight_offsets[-1], np.uint8)
    reader = blob.open_with_cache(ChunkCache(max_nbytes))
    reader.read_at(0, codes)
    reader.close()
    return codes.tobytes()


# Blocks of MXFP4 have 32 rows or more.
@pytest.mark.parametrize(
    ("decoder_type", "max_values"), [(ScaledDecoder, 1024), (Mxfp4Decoder, 4096)]
)
def test_blocks_of_values_follow_the_memory_limit(
    decoder_type: type[InvertibleDecoder],
    max_values: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    if decoder_type is ScaledDecoder:
        make_quantized(Path("m"), "fp8")
    else:
        make_mxfp4_experts(Path("m"))
    prep.save_init("./m", "init", quantized="dequantize")
    view = requantize_source(open_source(locate("init"), verbatim=None))
    blob = view.blobs[-1]
    assert isinstance(blob, RequantizedBlob)
    expected = read_codes(blob, max_nbytes=16 << 20)
    encode: Callable[..., CodeArray] = decoder_type.encode
    sizes: list[int] = []

    def record_size(
        decoder: InvertibleDecoder, rows: Range, values: BitArray, read: MatrixReader
    ) -> CodeArray:
        sizes.append(values.size)
        return encode(decoder, rows, values, read)

    monkeypatch.setattr(decoder_type, "encode", record_size)
    assert read_codes(blob, max_nbytes=max_values * ENCODING_NBYTES) == expected
    assert max(sizes) <= max_values
