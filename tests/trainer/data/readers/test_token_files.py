"""Files of token ids and datasets of Megatron-LM: documents, ids out of range, and exports."""

from __future__ import annotations

import itertools
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import PrepError, UsageError
from tests.helpers.corpus import EOS, change, make_config, tokenize_quietly
from trainer.data import token_formats
from trainer.data.readers import ids_files
from trainer.data.store import MappedTokens, read_meta
from trainer.data.token_formats import ExportFormat, export_tokens
from trainer.data.tokenize import tokenize_files

# Files of token ids: documents end at end-of-sequence tokens, and ids out of range are errors.

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
    ) as caught:
        read_tokens(tmp_path / "a.npy")
    assert "the tokenizer of this model" in caught.value.hint


def test_error_for_an_id_of_a_bin_file_names_its_dtype(tmp_path: Path):
    np.array([1, 2, 300], np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(PrepError, match=r"a.bin, token 2: .*`data.ids_dtype` sets the dtype"):
        read_tokens(tmp_path / "a.bin")


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


# Datasets of Megatron-LM: written by an independent writer, and by Megatron itself where it is installed.

# Documents of sequences. One has an end token inside, one no sequence, and one a sequence without ids.
DOCUMENTS = [[[5, EOS, 7], [8]], [[9, EOS]], [], [[], [250]], [[3] * 40]]

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_dataset(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    """Write a dataset as megatron/core/datasets/indexed_dataset.py describes it."""
    sequences = [np.array(ids, dtype) for document in documents for ids in document]
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    lengths = np.array([len(ids) for ids in sequences], np.int32)
    offsets = np.cumsum([0, *(ids.nbytes for ids in sequences)])[:-1]
    prefix.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    header = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, CODES[dtype], len(sequences), len(documents) + 1
    )
    arrays = (
        lengths.tobytes() + offsets.astype(np.int64).tobytes() + bounds.astype(np.int64).tobytes()
    )
    prefix.with_suffix(".idx").write_bytes(header + arrays)


def read_index(path: Path) -> tuple[str, list[int], list[int], list[int]]:
    """Return dtype, lengths, offsets and bounds of an index, by an independent reader."""
    data = path.read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, n_sequences, n_bounds = struct.unpack_from("<QBQQ", data, 9)
    assert version == 1
    lengths = np.frombuffer(data, "<i4", n_sequences, 34)
    offsets = np.frombuffer(data, "<i8", n_sequences, 34 + lengths.nbytes)
    bounds = np.frombuffer(data, "<i8", n_bounds, 34 + lengths.nbytes + offsets.nbytes)
    assert len(data) == 34 + lengths.nbytes + offsets.nbytes + bounds.nbytes
    (dtype,) = [name for name, number in CODES.items() if number == code]
    return dtype, lengths.tolist(), offsets.tolist(), bounds.tolist()


def documents_of(tokens: MappedTokens) -> list[list[int]]:
    bounds = [0, *tokens.ends[:].tolist()]
    return [tokens.ids[low:high].tolist() for low, high in itertools.pairwise(bounds)]


def joined(documents: list[list[list[int]]]) -> list[list[int]]:
    return [[token for ids in document for token in ids] for document in documents]


@pytest.mark.parametrize("dtype", CODES)
def test_documents_are_those_of_the_index(tmp_path: Path, dtype: str):
    write_dataset(tmp_path / "data", DOCUMENTS, dtype)
    config = make_config(tmp_path, tmp_path / "data.idx", type="auto")
    assert documents_of(tokenize_quietly(config)) == joined(DOCUMENTS)


def test_blocks_and_chunks_do_not_change_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    numbers = np.random.default_rng(0)
    documents = [
        [
            numbers.integers(0, 250, numbers.integers(0, 9)).tolist()
            for _ in range(numbers.integers(4))
        ]
        for _ in range(50)
    ]
    write_dataset(tmp_path / "data", documents)
    monkeypatch.setattr(ids_files, "BLOCK_DOCUMENTS", 7)
    monkeypatch.setattr(ids_files, "CHUNK_NBYTES", 6)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    assert documents_of(tokenize_quietly(config)) == joined(documents)


def test_folder_of_datasets_is_read_in_order(tmp_path: Path):
    (tmp_path / "data").mkdir()
    for name in ("b", "a"):
        write_dataset(tmp_path / "data" / name, [[[ord(name)] * 9]])
    config = make_config(tmp_path, tmp_path / "data", type="megatron")
    assert documents_of(tokenize_quietly(config)) == [[97] * 9, [98] * 9]


def test_ids_are_part_of_the_identity(tmp_path: Path):
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    before = tokenize_quietly(config).identity
    ids = tmp_path / "data.bin"
    ids.write_bytes(ids.read_bytes()[:-2] + b"\x04\x00")
    assert tokenize_quietly(config).identity != before


def change_index(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "data", "message"),
    [
        (0, b"X", "is not an index of Megatron"),
        (9, b"\x02", "is malformed - it has version 2"),
        (17, b"\x07", "dtype code 7"),
        (18, b"\xff\xff", "its header declares"),
        (34, struct.pack("<i", -1), "its sequences are not one after the other"),
        (-8, struct.pack("<q", 99), "its document bounds are not ascending from 0 to its 6 seq"),
        (-8, struct.pack("<q", 5), "its document bounds are not ascending from 0 to its 6 seq"),
        (-48, struct.pack("<q", 1), "its document bounds are not ascending from 0 to its 6 seq"),
        (58, struct.pack("<q", 2), "its sequences are not one after the other"),
    ],
    ids=[
        "magic",
        "version",
        "dtype",
        "count",
        "length",
        "bounds",
        "last-bound",
        "first-bound",
        "first-offset",
    ],
)
def test_malformed_index_is_one_error(tmp_path: Path, offset: int, data: bytes, message: str):
    write_dataset(tmp_path / "data", DOCUMENTS)
    index = tmp_path / "data.idx"
    change_index(index, offset % index.stat().st_size, data)
    with pytest.raises(PrepError, match=message):
        tokenize_quietly(make_config(tmp_path, index, type="megatron"))


def test_ids_after_the_last_document_are_an_error(tmp_path: Path):
    write_dataset(tmp_path / "data", DOCUMENTS)
    with (tmp_path / "data.bin").open("ab") as file:
        file.write(bytes(2))
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    with pytest.raises(PrepError, match=r"end at byte 94 of data\.bin, which has 96"):
        tokenize_quietly(config)


def test_id_out_of_range_of_an_index_has_no_hint_about_dtypes(tmp_path: Path):
    write_dataset(tmp_path / "data", [[[5, 9999]]])
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    with pytest.raises(PrepError, match=r"data\.bin, token 1: .*the tokenizer of this model"):
        tokenize_quietly(config)


def test_gap_between_blocks_of_documents_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ids_files, "BLOCK_DOCUMENTS", 1)
    write_dataset(tmp_path / "data", [[[5]], [[6]], [[7]]])
    # The second offset is after three lengths and the first offset.
    change_index(tmp_path / "data.idx", 34 + 12 + 8, struct.pack("<q", 4))
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    with pytest.raises(PrepError, match="not one after the other"):
        tokenize_quietly(config)


def test_glob_may_match_both_files(tmp_path: Path):
    (tmp_path / "data").mkdir()
    write_dataset(tmp_path / "data" / "a", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data" / "a.*", type="megatron")
    assert documents_of(tokenize_quietly(config)) == joined(DOCUMENTS)
    (tmp_path / "data" / "a.idx").unlink()
    with pytest.raises(UsageError, match=r"name \.idx files only"):
        tokenize_quietly(config)


def test_missing_and_short_ids_are_errors(tmp_path: Path):
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    ids = tmp_path / "data.bin"
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(PrepError, match=r"data\.bin is cut short"):
        tokenize_quietly(config)
    ids.unlink()
    with pytest.raises(PrepError, match=r"cannot read or write .*data\.bin"):
        tokenize_quietly(config)


@pytest.mark.parametrize("vocab", [300, 70_000])
def test_export_is_read_by_an_independent_reader(tmp_path: Path, vocab: int):
    documents = [[[5, 6, EOS]], [[7, vocab - 1]], [[4] * 20]]
    write_dataset(tmp_path / "data", documents, "int32")
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron", vocab=vocab)
    store = config.cache / tokenize_quietly(config).identity
    index = export_tokens(store, read_meta(store), tmp_path / "out" / "train", "megatron")
    dtype, lengths, offsets, bounds = read_index(index)
    assert dtype == ("uint16" if vocab == 300 else "int32")
    ids = np.fromfile(index.with_suffix(".bin"), dtype)
    itemsize = np.dtype(dtype).itemsize
    read = [ids[at // itemsize :][:length].tolist() for at, length in zip(offsets, lengths)]
    assert read == joined(documents)
    assert bounds == [0, 1, 2, 3]


def test_export_is_read_back_equal(tmp_path: Path):
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    tokens = tokenize_quietly(config)
    store = config.cache / tokens.identity
    index = export_tokens(store, read_meta(store), tmp_path / "copy", "megatron")
    again = tokenize_quietly(change(config, paths=(str(index),)))
    assert documents_of(again) == documents_of(tokens)
    # A second export finds equal ids, and one of other tokens refuses to replace them.
    export_tokens(store, read_meta(store), tmp_path / "copy", "megatron")
    (tmp_path / "copy.bin").write_bytes(bytes(20))
    with pytest.raises(PrepError, match="already exists - it has other tokens"):
        export_tokens(store, read_meta(store), tmp_path / "copy", "megatron")


@pytest.mark.parametrize("file_format", ["megatron", "parquet"])
def test_processes_write_one_export_together(
    tmp_path: Path, file_format: ExportFormat, monkeypatch: pytest.MonkeyPatch
):
    """All processes begin before the first one has written a file."""
    if file_format == "parquet":
        pytest.importorskip("pyarrow")
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    store = config.cache / tokenize_quietly(config).identity
    all_began = threading.Barrier(3)
    map_tokens = token_formats.map_tokens

    def map_together(*args: Any, **options: Any) -> MappedTokens:
        all_began.wait(timeout=30)
        return map_tokens(*args, **options)

    monkeypatch.setattr(token_formats, "map_tokens", map_together)

    def export(_: int) -> Path:
        return export_tokens(store, read_meta(store), tmp_path / "copy", file_format)

    with ThreadPoolExecutor(3) as pool:
        assert len({*pool.map(export, range(3))}) == 1


def test_output_folder_must_be_a_folder(tmp_path: Path):
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    store = config.cache / tokenize_quietly(config).identity
    (tmp_path / "file").touch()
    with pytest.raises(PrepError, match=r"cannot read or write .*file"):
        export_tokens(store, read_meta(store), tmp_path / "file" / "train", "megatron")


def test_loss_weights_are_refused_by_megatron_only(tmp_path: Path):
    pq: Any = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.jsonl").write_text('{"q": "the cat", "text": "sat on the mat"}\n' * 5)
    config = make_config(tmp_path, tmp_path / "a.jsonl", type="json", fields="[q], text")
    tokens = tokenize_quietly(config)
    store = config.cache / tokens.identity
    with pytest.raises(PrepError, match="for Megatron - its format has no loss weights"):
        export_tokens(store, read_meta(store), tmp_path / "out", "megatron")
    path = export_tokens(store, read_meta(store), tmp_path / "out", "parquet")
    table = pq.read_table(path).to_pydict()
    assert table["input_ids"] == documents_of(tokens)
    assert tokens.weight_codes is not None
    assert [weight for row in table["loss_mask"] for weight in row] == tokens.weight_codes[
        :
    ].tolist()


def test_parquet_is_read_back_equal(tmp_path: Path):
    pytest.importorskip("pyarrow")
    write_dataset(tmp_path / "data", [document for document in DOCUMENTS if joined([document])[0]])
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    tokens = tokenize_quietly(config)
    store = config.cache / tokens.identity
    path = export_tokens(store, read_meta(store), tmp_path / "copy", "parquet")
    again = change(config, type="parquet", paths=(str(path),), fields="{input_ids}", add_eos=False)
    assert documents_of(tokenize_quietly(again)) == documents_of(tokens)
    assert export_tokens(store, read_meta(store), tmp_path / "copy", "parquet") == path
    path.write_bytes(b"no table")
    with pytest.raises(PrepError, match="already exists - it has other tokens"):
        export_tokens(store, read_meta(store), tmp_path / "copy", "parquet")


def test_row_groups_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pq: Any = pytest.importorskip("pyarrow.parquet")
    write_dataset(tmp_path / "data", DOCUMENTS)
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    tokens = tokenize_quietly(config)
    store = config.cache / tokens.identity
    monkeypatch.setattr(token_formats, "ROW_GROUP_TOKENS", 5)
    path = export_tokens(store, read_meta(store), tmp_path / "copy", "parquet")
    file = pq.ParquetFile(path)
    sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    # Documents of 4, 2, 0, 1 and 40 tokens
    assert sizes == [1, 3, 1]
    assert file.read().to_pydict()["input_ids"] == documents_of(tokens)


@pytest.mark.slow
def test_megatron_reads_the_export_and_is_read(tmp_path: Path):
    pytest.importorskip("megatron.core")
    torch: Any = pytest.importorskip("torch")
    from megatron.core.datasets import indexed_dataset  # type: ignore[import-not-found]

    builder = indexed_dataset.IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=np.uint16)
    for document in DOCUMENTS:
        for ids in document:
            builder.add_item(torch.tensor(ids, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "data.idx"))
    config = make_config(tmp_path, tmp_path / "data.idx", type="megatron")
    tokens = tokenize_quietly(config)
    assert documents_of(tokens) == joined(DOCUMENTS)
    store = config.cache / tokens.identity
    index = export_tokens(store, read_meta(store), tmp_path / "copy", "megatron")
    dataset: Any = indexed_dataset.IndexedDataset(str(index.with_suffix("")))
    assert [dataset[i].tolist() for i in range(len(dataset))] == joined(DOCUMENTS)
    assert dataset.document_indices.tolist() == [*range(len(DOCUMENTS) + 1)]
