"""Files of token ids: documents end at end-of-sequence tokens, and ids out of range are errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import PrepError, UsageError
from tests.helpers.corpus import EOS, make_config, tokenize_quietly
from trainer.data.readers import ids_files
from trainer.data.store import MappedTokens
from trainer.data.tokenize import tokenize_files

IDS = [5, 6, EOS, 7, EOS, EOS, 8, 9]


def read_tokens(path: Path, **changes: Any) -> MappedTokens:
    return tokenize_quietly(make_config(path.parent, path, type="ids", seq_length=1, **changes))


@pytest.fixture(params=[2, 1 << 20], ids=["small chunks", "one chunk"])
def _chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_files, "CHUNK_NBYTES", request.param)


@pytest.mark.usefixtures("_chunks")
def test_documents_end_at_end_of_sequence_tokens(tmp_path: Path):
    np.array(IDS, "<u2").tofile(tmp_path / "a.bin")
    tokens = read_tokens(tmp_path / "a.bin")
    assert tokens.ids[:].tolist() == IDS
    assert tokens.ends[:].tolist() == [3, 5, 6, 8]


@pytest.mark.parametrize("dtype", ["uint32", "int32", "int64"])
def test_bin_file_has_the_dtype_of_the_recipe(tmp_path: Path, dtype: str):
    np.array(IDS, dtype).tofile(tmp_path / "a.bin")
    assert read_tokens(tmp_path / "a.bin", ids_dtype=dtype).ids[:].tolist() == IDS


def test_rows_of_an_array_are_documents(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3], [4, EOS, 5]], np.int32))
    tokens = read_tokens(tmp_path / "a.npy")
    assert (tokens.ids[:].tolist(), tokens.ends[:].tolist()) == ([1, 2, 3, 4, EOS, 5], [3, 5, 6])


def test_large_ids_are_stored_unchanged(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.array([70_000, 1]))
    assert read_tokens(tmp_path / "a.npy", vocab=80_000).ids[:].tolist() == [70_000, 1]


ADDED = {"prepend_text": "the", "bos_id": 1, "add_bos": True, "add_eos": True}


@pytest.mark.parametrize("key", ["add_bos", "add_eos", "prepend_text"])
def test_settings_without_effect_on_ids_are_errors(tmp_path: Path, key: str):
    np.array(IDS, "<u2").tofile(tmp_path / "a.bin")
    settings = {name: value for name, value in ADDED.items() if name in (key, "bos_id")}
    config = make_config(tmp_path, tmp_path / "a.bin", type="auto", seq_length=1, **settings)
    with pytest.raises(
        UsageError,
        match=f"`data.{key}` cannot be used with token ids - token ids in data files are stored",
    ):
        tokenize_files(config, progress=lambda *counts: None, note=lambda text: None)


def test_settings_of_other_sources_are_noted_for_ids(tmp_path: Path):
    np.array(IDS, "<u2").tofile(tmp_path / "a.bin")
    notes: list[str] = []
    config = replace(
        make_config(tmp_path, tmp_path / "a.bin", type="ids", seq_length=1, **ADDED), source="wiki"
    )
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    assert tokens.ids[:].tolist() == IDS
    assert (
        "token ids are stored as they are, without `data.add_bos`, `data.add_eos`, `data.prepend_text`"
        in notes
    )


@pytest.mark.parametrize("bad", [-1, 300])
def test_error_names_the_position_of_an_id_out_of_range(tmp_path: Path, bad: int):
    np.save(tmp_path / "a.npy", np.array([1, 2, bad]))
    with pytest.raises(
        PrepError, match=rf"a.npy, token 2: the id {bad} is out of range - .* has 300 tokens"
    ):
        read_tokens(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "array", [np.zeros(3), np.zeros((1, 1, 1), int), np.asfortranarray(np.zeros((2, 2), int))]
)
def test_array_without_ids_fails(tmp_path: Path, array: np.ndarray):
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(PrepError, match=r"a.npy has no token ids"):
        read_tokens(tmp_path / "a.npy")


def test_file_with_an_incomplete_id_fails(tmp_path: Path):
    (tmp_path / "a.bin").write_bytes(b"123")
    with pytest.raises(
        PrepError,
        match=r"a.bin ends with an incomplete id - it has 3 bytes, and each uint16 id has 2",
    ):
        read_tokens(tmp_path / "a.bin")


def test_array_that_is_cut_short_fails(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(9))
    data = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(data[:-8])
    with pytest.raises(PrepError, match=r"a.npy is cut short"):
        read_tokens(tmp_path / "a.npy")
    (tmp_path / "a.npy").write_bytes(b"no array")
    with pytest.raises(PrepError, match=r"a.npy is not a NumPy array"):
        read_tokens(tmp_path / "a.npy")


def write_npy(path: Path, header: bytes, *, version: bytes = b"\x01\x00") -> Path:
    """Write an .npy file with a header of these bytes, without values."""
    length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    path.write_bytes(b"\x93NUMPY" + version + length + header)
    return path


def npy_header(shape: str) -> bytes:
    return f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}".encode()


def test_array_with_rows_of_length_zero_has_no_tokens(tmp_path: Path):
    path = write_npy(tmp_path / "a.npy", npy_header(f"({10**18}, 0)"))
    with pytest.raises(PrepError, match="the data is shorter than one block"):
        read_tokens(path)


@pytest.mark.parametrize(
    "shape", ["(1000,)", "(10, 1000000000000)", f"({'9' * 4000}, {'9' * 4000})"]
)
def test_array_larger_than_its_file_is_an_error(tmp_path: Path, shape: str):
    with pytest.raises(
        PrepError,
        match=r"a\.npy is cut short - it has [\d,]+ bytes, and its header declares the shape",
    ):
        read_tokens(write_npy(tmp_path / "a.npy", npy_header(shape)))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\x00",
        b"{",
        b"(" * 5000,
        b"-" * 9000 + b"1",
        npy_header("(-1,)"),
        npy_header("(True,)"),
        npy_header("'ab'"),
        npy_header("(" + "9" * 9000 + ",)"),
        npy_header("(1,)").replace(b"'<i4'", b"[('a', 'O')]"),
        b"{'descr': '<i4'}",
    ],
)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x09\x00"])
def test_malformed_header_of_an_array_is_an_error(tmp_path: Path, header: bytes, version: bytes):
    with pytest.raises(PrepError, match=r"a\.npy (is not a NumPy array|has no token ids)"):
        read_tokens(write_npy(tmp_path / "a.npy", header, version=version))


def test_header_of_an_array_has_a_limit(tmp_path: Path):
    path = write_npy(tmp_path / "a.npy", b" " * 70_000, version=b"\x02\x00")
    with pytest.raises(PrepError, match="its header has 70,000 bytes, the limit is 10,000"):
        read_tokens(path)
