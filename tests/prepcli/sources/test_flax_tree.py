"""Tests of Flax and EasyLM sources, with fuzzed bytes: a file opens or raises a PrepError."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import msgpack
import pytest

from prepcli.algebra.grids import ArrayParts
from prepcli.core.errors import PrepError
from prepcli.engine.blobs import open_blobs
from prepcli.formats.msgpack import read_flax_files
from prepcli.sources.locate import locate
from prepcli.sources.opening import open_source
from prepcli.sources.references import EASYLM_PARTS, split_part
from prepcli.sources.source import match_source_tensors, source_rows, stored_tensor
from prepcli.sources.tensor_match import DEFAULT_MATCH_OPTIONS, TensorMatch
from tests.helpers.golden_flax import FILES, FOLDER, LLAMA, decode_msgpack
from tests.helpers.memory_stores import store_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_arrays import tensor_bytes
from tests.prepcli.formats.test_msgpack import fuzzed_file

CONFIG: dict[str, Any] = json.loads((LLAMA / "hf/config.json").read_text())
VALUES = (0, 1, 3, 10**12, -1, None, True, "x", [], {}, 1.5)


def opens_fuzzed_file(folder: Path, seed: int) -> bool:
    """Open a fuzzed file, or a valid file with a wrong config, and return False if a PrepError was raised."""
    rng = random.Random(seed)
    config = dict(CONFIG)
    data, kind = fuzzed_file(seed)
    if seed % 4 == 0:
        name = rng.choice(sorted(FILES))
        data, kind = (FOLDER / name).read_bytes(), FILES[name]
        config[rng.choice(sorted(config))] = rng.choice(VALUES)
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / ("streaming_params" if kind == "easylm" else "params.msgpack")
    path.write_bytes(data)
    try:
        prefix = rng.choice(["", *(f"{part}::" for part in EASYLM_PARTS)])
        source = open_source(locate(f"{prefix}{path if seed % 2 else folder}"))
        match_source_tensors(source, source_rows(source), DEFAULT_MATCH_OPTIONS)
    except PrepError:
        return False
    finally:
        path.unlink()
    return True


@pytest.mark.parametrize("part", slow_except(range(6), (0,)))
def test_fuzzed_file_opens_or_raises_prep_error(tmp_path: Path, part: int):
    num_opened = sum(
        opens_fuzzed_file(tmp_path, seed) for seed in range(part * 150, part * 150 + 150)
    )
    assert 0 < num_opened < 150


def match_file(path: Path) -> TensorMatch:
    source = open_source(locate(str(path)))
    return match_source_tensors(source, source_rows(source), DEFAULT_MATCH_OPTIONS)


def test_truncated_stream_is_rejected(tmp_path: Path):
    unpacker = msgpack.Unpacker()
    unpacker.feed((LLAMA / "streaming_params").read_bytes())
    records = [msgpack.packb(record) or b"" for record in unpacker]
    shutil.copy(LLAMA / "hf/config.json", tmp_path)
    for count in range(len(records)):
        (tmp_path / "streaming_params").write_bytes(b"".join(records[:count]))
        with pytest.raises(PrepError):
            match_file(tmp_path)


def test_arrays_in_pieces_are_read_from_their_file():
    source = open_source(locate(str(LLAMA / "pieces.msgpack")), LLAMA / "hf")
    assert source.byte_sources == source.files
    in_parts = [t for t in source.tensors if isinstance(t.placement[0].array.chunks, ArrayParts)]
    assert {t.name for t in in_parts} == {t.name for t in source.tensors if t.nbytes > 600}


def test_arrays_in_pieces_are_read_from_a_store():
    data = (LLAMA / "pieces.msgpack").read_bytes()
    values = {".".join(path): value for path, value in decode_msgpack(data, "flax").items()}
    root, _ = store_of({"flax_model.msgpack": data})
    folder = read_flax_files(root, "flax")
    assert any(isinstance(array.chunks, ArrayParts) for array in folder.tensors)
    with open_blobs(folder.files) as files:
        for array in folder.tensors:
            content = tensor_bytes(files, stored_tensor(array))
            assert content == values.pop(array.name).tobytes()
    assert not values


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("params::/a/b", ("params", "/a/b")),
        ("trainstate_params::x", ("trainstate_params", "x")),
        ("flax::x", ("", "flax::x")),
        ("./params", ("", "./params")),
        ("params::", ("params", "")),
        ("x::params::y", ("", "x::params::y")),
    ],
)
def test_split_part_returns_known_part_and_path(name: str, expected: tuple[str, str]):
    assert split_part(name) == expected
