"""Pairs of source and target, and span corruption: truncated and padded rows."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from prepcli.core.errors import PrepError
from tests.helpers.corpus import (
    EOS,
    TEXT,
    change,
    encode,
    make_config,
    make_tokenizer,
    tokenize_quietly,
)
from tests.helpers.thread_groups import ThreadGroup, run_group
from tests.trainer.data.test_packing import make_tokens
from trainer.data import document_rows
from trainer.data.document_packing import DocumentRows
from trainer.data.document_rows import DTYPES, make_rows, read_rows
from trainer.data.encode import EncodedBatch, OverlongRule, fit_documents
from trainer.data.order import RowOrder
from trainer.data.packing import split_holdout
from trainer.data.seq2seq import (
    SpanCorruptionDataset,
    SpanCorruptionTokenIds,
    noise_mask,
    sentinel_ids,
    seq2seq_dataset,
)
from trainer.data.store import MappedTokens, read_meta
from trainer.data.store_files import file_digest
from trainer.data.tokenize import open_tokens, tokenize_files, tokenize_in_group
from trainer.data.tokenize_config import TokenizeConfig
from trainer.data.tokenizer import load_tokenizer
from trainer.recipe.data_table import SpanSizes, span_sizes
from trainer.recipe.text_fields import Overlong

# Seq2seq datasets: compare with truncating and padding each text by hand.

TEXTS = st.lists(st.integers(2, 60000), max_size=9)

PAIRS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8)

START, END = 7, 1


def truncate(ids: list[int], max_length: int) -> list[int]:
    """Return ids cut to `max_length`, with END last if they were cut."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], END]


@given(PAIRS, st.integers(2, 9), st.integers(2, 9), st.data())
def test_seq2seq_dataset_matches_reference(
    pairs: list[tuple[list[int], list[int]]],
    source_length: int,
    seq_length: int,
    data: st.DataObject,
):
    tokens = make_tokens([text for pair in pairs for text in pair], seq_length)
    dataset = seq2seq_dataset(tokens, source_length, decoder_start_id=START, eos_id=END)
    assert (dataset.n_rows, dataset.seq_length) == (len(pairs), seq_length)
    rows = data.draw(st.lists(st.integers(-1, len(pairs) - 1), max_size=5))
    batch = dataset.get_batch(rows)
    assert {name: array.dtype for name, array in batch.items()} == {
        name: dtype for name, (_, dtype) in dataset.columns.items()
    }
    assert {name: array.shape for name, array in batch.items()} == {
        name: (len(rows), length) for name, (length, _) in dataset.columns.items()
    }
    for i, row in enumerate(rows):
        source, target = ([], []) if row < 0 else pairs[row]
        source, target = truncate(source, source_length), truncate(target, seq_length)
        is_present = batch["present"][i]
        assert batch["source"][i][is_present].tolist() == source
        assert is_present.tolist() == [column < len(source) for column in range(source_length)]
        has_target = batch["weights"][i] == 1
        assert batch["targets"][i][has_target].tolist() == target
        assert has_target.tolist() == [column < len(target) for column in range(seq_length)]
        assert batch["tokens"][i][has_target].tolist() == [START, *target][: len(target)]
        assert not batch["source"][i][~is_present].any()
        assert not batch["tokens"][i][~has_target].any()


def test_seq2seq_dataset_truncates_without_eos():
    tokens = make_tokens([[3, 4, 5], [6, 7, 8, 9]], 2)
    batch = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=None).get_batch([0])
    assert (batch["source"].tolist(), batch["targets"].tolist()) == ([[3, 4]], [[6, 7]])


def test_seq2seq_dataset_has_the_weights_of_targets():
    tokens = replace(
        make_tokens([[3], [6, 7], [4, 5], [8, 9, 2]], 2),
        weight_codes=np.array([1, 0, 1, 1, 1, 1, 0, 0], np.uint8),
    )
    batch = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=None).get_batch([1, -1, 0])
    assert batch["weights"].tolist() == [[1, 0], [0, 0], [0, 1]]


def test_target_ids_are_whole_and_have_loss():
    tokens = make_tokens([[3], [6, 7, 8], [4, 5], [8, 9, 2]], 2)
    dataset = seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=END)
    assert [dataset.target_ids(row).tolist() for row in (0, 1)] == [[6, 7, 8], [8, 9, 2]]
    weighted = replace(
        dataset,
        tokens=replace(tokens, weight_codes=np.array([1, 0, 1, 1, 1, 1, 1, 0, 1], np.uint8)),
    )
    assert [weighted.target_ids(row).tolist() for row in (0, 1)] == [[7, 8], [8, 2]]


def test_split_holdout_takes_last_pairs():
    tokens = make_tokens([[n] for n in range(20)], 3)
    train, evaluation = split_holdout(
        seq2seq_dataset(tokens, 2, decoder_start_id=START, eos_id=END), 0.2
    )
    assert evaluation is not None
    assert (train.n_rows, evaluation.n_rows) == (8, 2)
    assert evaluation.get_batch([0, 1])["source"].tolist() == [[16, 0], [18, 0]]
    with pytest.raises(IndexError):
        train.get_batch([8])


def write_pairs(folder: Path) -> Path:
    """Write two pairs as JSON lines; return the file."""
    lines = ('{"t": "the hat", "s": "that", "n": 1}', "", '{"s": "hat", "t": ""}')
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def test_tokenize_files_reads_pairs(tmp_path: Path):
    path = write_pairs(tmp_path)
    config = make_config(
        tmp_path,
        path,
        type="json",
        fields="[t], [s], s",
        source_length=4,
        has_encoder=True,
        source_prefix="do: ",
    )
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    texts = ["do: the hat that", "that", "do:  hat", "hat"]
    ids = [[*encode(config.tokenizer, text), EOS] for text in texts]
    assert tokens.ids[:].tolist() == [token_id for document in ids for token_id in document]
    assert np.diff(tokens.ends[:], prepend=0).tolist() == [len(document) for document in ids]
    n_truncated = sum(len(document) > 4 for document in ids[::2])
    assert f"in 2 pairs: {n_truncated} source" in notes[-1]


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ('{"t": "a"}', "a.jsonl:1: no column `s`", "`--set data.fields='[SOURCE], TARGET'`"),
        ('{"t": 3, "s": "a"}', "a.jsonl:1: column `t` is not text", "fix or remove the line"),
        ('["t"]', "a.jsonl, record 1: not an object but a string", "fix or remove the record"),
        ('{"t": "a", "s": "b"}\n["t"]', "a.jsonl:2: not an object but a list", "fix or remove"),
        ("\n\n", "the data has no source-target pair", ""),
    ],
)
def test_tokenize_files_rejects_invalid_pairs(tmp_path: Path, line: str, what: str, hint: str):
    (tmp_path / "a.jsonl").write_text(line)
    config = make_config(
        tmp_path,
        tmp_path / "a.jsonl",
        type="json",
        fields="[t], s",
        source_length=4,
        has_encoder=True,
    )
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(config)
    assert caught.value.what.endswith(what)
    assert hint in caught.value.hint


# Tests of span corruption: sizes are those of T5, sources and targets together are the text.

SENTINELS, SPAN_EOS, SPAN_START = np.arange(900, 1000, dtype=np.int32)[::-1], 1, 0

SOURCE_LENGTHS, DENSITIES, MEANS = (
    st.integers(40, 120),
    st.floats(0.1, 0.5, exclude_max=True),
    st.floats(1.5, 6),
)


def reference_lengths(
    inputs_length: int, noise_density: float, mean_noise_span_length: float
) -> tuple[int, int]:
    """Return tokens and target tokens of a block, as `random_spans_helper` of t5/data/preprocessors.py does."""

    def lengths(tokens_length: int) -> tuple[int, int]:
        num_noise_tokens = round(tokens_length * noise_density)
        num_noise_spans = round(num_noise_tokens / mean_noise_span_length)
        return (
            tokens_length - num_noise_tokens + num_noise_spans + 1,
            num_noise_tokens + num_noise_spans + 1,
        )

    tokens_length = inputs_length
    while lengths(tokens_length + 1)[0] <= inputs_length:
        tokens_length += 1
    inputs_length, targets_length = lengths(tokens_length)
    if noise_density == 0.5 and targets_length > inputs_length:
        tokens_length, targets_length = tokens_length - 1, targets_length - 1
    return tokens_length, targets_length


@pytest.mark.parametrize(
    ("source_length", "density", "mean", "expected"),
    [(512, 0.15, 3.0, (568, 114)), (1024, 0.15, 3.0, (1137, 229)), (512, 0.5, 3.0, (766, 512))],
)
def test_span_sizes_match_t5(
    source_length: int, density: float, mean: float, expected: tuple[int, int]
):
    assert reference_lengths(source_length, density, mean) == expected
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    assert (sizes.block_length, sizes.target_length) == expected


@given(SOURCE_LENGTHS, DENSITIES, MEANS)
def test_span_sizes_match_the_reference_formula(source_length: int, density: float, mean: float):
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    assert (sizes.block_length, sizes.target_length) == reference_lengths(
        source_length, density, mean
    )
    assert sizes.source_length <= source_length


def make_dataset(sizes: SpanSizes, n_rows: int, seed: int = 3) -> SpanCorruptionDataset:
    """Return the dataset of random blocks."""
    ids = np.random.default_rng(0).integers(2, 900, n_rows * sizes.block_length + 1).astype("<u2")
    tokens = MappedTokens(ids, np.array([ids.size], "<u8"), "x", sizes.block_length)
    room = (sizes.source_length + 2, sizes.target_length + 3)
    special_ids = SpanCorruptionTokenIds(SENTINELS, eos=SPAN_EOS, decoder_start=SPAN_START)
    return SpanCorruptionDataset(
        tokens, sizes, special_ids, *room, seed=seed, first_row=0, n_rows=tokens.n_blocks
    )


def spans_of(ids: list[int]) -> list[list[int]]:
    """Split ids at the sentinels, which must count up from the first; the part before the first is the first."""
    spans: list[list[int]] = [[]]
    for token in ids:
        if token >= 900:
            assert token == SENTINELS[len(spans) - 1]
            spans.append([])
        else:
            spans[-1].append(token)
    return spans


@given(SOURCE_LENGTHS, DENSITIES, MEANS, st.integers(0, 3), st.integers(0, 9))
def test_source_and_target_together_are_the_text(
    source_length: int, density: float, mean: float, epoch: int, seed: int
):
    sizes = span_sizes(source_length, noise_density=density, mean_span_length=mean)
    dataset = make_dataset(sizes, 3, seed)
    batch = dataset.get_batch([2, -1, 0], [epoch] * 3)
    assert {name: (array.shape[1], array.dtype) for name, array in batch.items()} == dict(
        dataset.columns
    )
    assert not any(array[1].any() for array in batch.values())
    for i, row in ((0, 2), (2, 0)):
        source, target = (
            batch["source"][i][batch["present"][i]].tolist(),
            batch["targets"][i].tolist(),
        )
        n_targets = int(batch["weights"][i].sum())
        assert (len(source), n_targets) == (sizes.source_length, sizes.target_length)
        assert batch["tokens"][i].tolist() == [
            SPAN_START,
            *target[: n_targets - 1],
            *[0] * (len(target) - n_targets),
        ]
        assert (source[-1], target[n_targets - 1]) == (SPAN_EOS, SPAN_EOS)
        others, (empty, *noise) = spans_of(source[:-1]), spans_of(target[: n_targets - 1])
        assert (empty, others[-1], len(others), len(noise)) == (
            [],
            [],
            sizes.n_spans + 1,
            sizes.n_spans,
        )
        assert all([*others[:-1], *noise])
        text = [token for pair in zip(others, noise) for span in pair for token in span]
        assert (
            text
            == dataset.tokens.ids[
                row * sizes.block_length : (row + 1) * sizes.block_length
            ].tolist()
        )


def test_spans_depend_on_seed_epoch_and_row_alone():
    sizes = span_sizes(64, noise_density=0.15, mean_span_length=3.0)
    dataset = make_dataset(sizes, 8)
    whole, parts = (
        dataset.get_batch([5, 5, 6], [0, 1, 0]),
        [dataset.get_batch([5], [e]) for e in (0, 1)],
    )
    for i, part in enumerate(parts):
        assert all((part[name][0] == whole[name][i]).all() for name in part)
    assert (whole["source"][0] != whole["source"][1]).any()
    assert (make_dataset(sizes, 8, seed=4).get_batch([5])["source"] != whole["source"][0]).any()
    assert (dataset.get_batch([5])["source"] == whole["source"][0]).all()
    _, evaluation = split_holdout(dataset, 0.5)
    assert evaluation is not None
    assert (evaluation.get_batch([1])["source"] == whole["source"][0]).all()


def test_all_tokens_are_noise_equally_often_but_near_the_ends():
    sizes = SpanSizes(40, n_noise=10, n_spans=4)
    counts = np.sum([noise_mask(sizes, str(i)) for i in range(2000)], axis=0) / 2000
    assert counts[0] == 0
    assert abs(counts[8:32] - 0.25).max() < 0.08


def test_epochs_of_a_step_match_its_rows():
    order = RowOrder(n_rows=5, batch_size=4, seed=0, shuffle=False)
    assert [order.epochs(step).tolist() for step in range(3)] == [
        [0] * 4,
        [0, 1, 1, 1],
        [1, 1, 2, 2],
    ]


def test_sentinels_must_be_in_the_tokenizer(tmp_path: Path):
    path = make_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(PrepError, match=r"has no token <extra_id_0>"):
        sentinel_ids(load_tokenizer(path), 2, 300)
    library = Tokenizer.from_file(str(path))
    library.add_special_tokens([f"<extra_id_{i}>" for i in (1, 0)])
    library.save(str(path))
    n = library.get_vocab_size()
    assert sentinel_ids(load_tokenizer(path), 2, 400).tolist() == [n - 1, n - 2]
    with pytest.raises(PrepError, match=r"is not in the model's vocabulary"):
        sentinel_ids(load_tokenizer(path), 2, n - 1)


# Rows of documents beside the tokens: made once, checked, and equal to those made in memory.

PACKINGS = ("documents", "none")


@pytest.fixture
def config(tmp_path: Path) -> TokenizeConfig:
    paths = [tmp_path / f"{number}.txt" for number in range(9)]
    for number, path in enumerate(paths):
        path.write_text(TEXT[: 7 * number + 3])
    return make_config(tmp_path, *paths, packing="documents")


def tokenize(config: TokenizeConfig) -> tuple[MappedTokens, DocumentRows, list[str]]:
    """Return the tokens, the rows and the notes of a run of tokenization."""
    notes: list[str] = []
    tokens = tokenize_files(config, progress=lambda *counts: None, note=notes.append)
    assert tokens.rows is not None
    return tokens, tokens.rows, notes


def contents(rows: DocumentRows) -> list[object]:
    """Return what is compared of rows."""
    pieces = [rows.pieces(row) for row in range(rows.n_rows)]
    return [pieces, rows.seq_length, rows.n_tokens, rows.max_length, rows.fraction_with_token]


def rows_folder(config: TokenizeConfig) -> Path:
    """Return the folder of the only rows in the cache."""
    (path,) = config.cache.glob("*/*/rows.json")
    return path.parent


def fail_packing(*args: object) -> None:
    raise AssertionError("rows are rebuilt")


@pytest.mark.parametrize("packing", PACKINGS)
def test_stored_rows_equal_rows_built_in_memory(config: TokenizeConfig, packing: str):
    tokens, rows, _ = tokenize(change(config, packing=packing))
    assert contents(rows) == contents(make_rows(tokens, packing))
    assert rows.n_rows > 3


def test_stored_rows_are_built_once(config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch):
    first = contents(tokenize(config)[1])
    monkeypatch.setattr(document_rows, "write_rows", fail_packing)
    assert contents(tokenize(config)[1]) == first
    opened = open_tokens(config, rows_folder(config).parent.name, note=print)
    assert opened.rows is not None
    assert contents(opened.rows) == first
    with pytest.raises(AssertionError, match="rebuilt"):
        tokenize(change(config, seq_length=5))


def test_stored_rows_of_other_settings_are_kept(config: TokenizeConfig):
    for seq_length in (8, 5, 8):
        for packing in PACKINGS:
            tokenize(change(config, seq_length=seq_length, packing=packing))
    assert len([*config.cache.glob("*/*/rows.json")]) == 4


def test_store_with_rows_is_complete(config: TokenizeConfig):
    tokenize(config)
    assert read_meta(rows_folder(config).parent).n_documents == 9


@pytest.mark.parametrize("name", [*DTYPES, "rows.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "fifo", "deep"])
def test_damaged_rows_are_rebuilt(config: TokenizeConfig, name: str, damage: str):
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    if damage == "fifo":
        os.mkfifo(path)
    elif damage != "remove":
        path.write_bytes({"flip": data, "cut": data[:-1], "deep": b"[" * 100_000}[damage])
    assert contents(tokenize(config)[1]) == first
    assert contents(read_rows(rows_folder(config), tokenize(config)[0])) == first
    assert not [*config.cache.rglob("*.partial")]


@pytest.mark.parametrize("key", ["seq_length", "max_length", "n_rows"])
def test_rows_with_wrong_metadata_are_rebuilt(config: TokenizeConfig, key: str):
    """The metadata has no digest of its own."""
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / "rows.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, key: values[key] + 2}))
    _, rows, notes = tokenize(config)
    assert contents(rows) == first
    assert any("they are rebuilt" in note for note in notes)


def test_rows_in_the_form_of_earlier_versions_are_made_again(config: TokenizeConfig):
    first = contents(tokenize(config)[1])
    path = rows_folder(config) / "rows.json"
    for file in rows_folder(config).glob("*.bin"):
        file.unlink()
    digests: dict[str, str] = {}
    for name in ("starts.bin", "lengths.bin", "ends.bin"):
        path.with_name(name).write_bytes(b"12345678")
        digests[name] = file_digest(path.with_name(name))
    path.write_text(json.dumps({**json.loads(path.read_text()), "digests": digests}))
    _, rows, notes = tokenize(config)
    assert contents(rows) == first
    assert not any("rebuilt" in note for note in notes)
    names = {file.name for file in rows_folder(config).iterdir()}
    assert names == {"windows.bin", "assignments.bin", "rows.json"}


def test_rows_of_changed_documents_are_not_used(config: TokenizeConfig):
    """The identity of rows has the digest of the ends of documents."""
    tokenize(config)
    meta_path = rows_folder(config).parent / "store.json"
    meta = json.loads(meta_path.read_text())
    path = meta_path.parent / "00000" / "documents.bin"
    ends = np.fromfile(path, "<u8")
    ends[0] += 1
    ends.tofile(path)
    meta["shards"][0]["digests"] = {}
    meta_path.write_text(json.dumps(meta))
    tokens, rows, _ = tokenize(config)
    assert contents(rows) == contents(make_rows(tokens, "documents"))


def test_rows_that_cannot_be_stored_are_built_in_memory(
    config: TokenizeConfig, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: Path, *args: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(document_rows, "_build_rows", fail)
    tokens, rows, notes = tokenize(config)
    assert contents(rows) == contents(make_rows(tokens, "documents"))
    assert any("made in memory" in note for note in notes)
    assert [path.name for path in config.cache.glob("*/*") if path.is_dir()] == ["00000"]


def test_scratch_dir_gets_the_rows_of_a_cached_store(config: TokenizeConfig, tmp_path: Path):
    """A dry run writes nothing to the folder of the run."""
    tokenize_files(change(config, packing="concatenate"), progress=lambda *counts: None, note=print)
    before = sorted(config.cache.rglob("*"))
    (tmp_path / "scratch").mkdir()
    tokens, rows, _ = tokenize(change(config, scratch_dir=tmp_path / "scratch"))
    assert contents(rows) == contents(make_rows(tokens, "documents"))
    assert sorted(config.cache.rglob("*")) == before
    assert [*tmp_path.glob("scratch/*/rows.json")]


def test_abandoned_rows_are_removed(config: TokenizeConfig):
    tokenize(config)
    folder = rows_folder(config)
    abandoned = folder.with_name(f"{folder.name}.0123456789ab.partial")
    folder.rename(abandoned)
    tokenize(config)
    assert rows_folder(config) == folder
    assert not abandoned.exists()


def test_processes_share_the_rows(config: TokenizeConfig):
    def tokenize_together(process: ThreadGroup) -> list[object]:
        tokens = tokenize_in_group(
            config, process, progress=lambda *counts: None, note=lambda text: None
        )
        assert tokens.rows is not None
        return contents(tokens.rows)

    results = run_group(3, tokenize_together)
    assert results == [contents(tokenize(config)[1])] * 3


def test_processes_that_build_rows_at_once_agree(
    config: TokenizeConfig,
):
    tokenize(change(config, packing="none"))
    results = run_group(4, lambda process: contents(tokenize(config)[1]))
    assert results == [results[0]] * 4
    assert not [*config.cache.rglob("*.partial")]


# Documents that are longer than a sequence: cut, dropped and counted, for any batches.

CHOICES: tuple[Overlong, ...] = ("split", "truncate", "truncate_prompt", "drop")

# A token id, and whether it has loss.
Document = list[tuple[int, bool]]

documents = st.lists(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12), max_size=6)


def make_batch(parts: list[Document], *, has_weights: bool) -> EncodedBatch:
    """Return a batch of documents."""
    tokens = [token for part in parts for token in part]
    weights = None
    if has_weights:
        weights = np.array([loss for _, loss in tokens], np.float32)
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    return EncodedBatch(
        np.array([token for token, _ in tokens], np.uint32), weights, ends, {"a": 1}
    )


def fit(part: Document, choice: Overlong, limit: int, bos_id: int | None) -> Document | None:
    """Return what stays of a document, one token at a time. None for a dropped one."""
    if len(part) <= limit or choice == "split":
        return part
    if choice == "drop":
        return None
    part = part.copy()
    if choice == "truncate_prompt":
        begin = part[:1] if part[0][0] == bos_id and not part[0][1] else []
        rest = part[len(begin) :]
        while len(begin) + len(rest) > limit and rest and not rest[0][1]:
            rest.pop(0)
        part = begin + rest
    return part[:limit]


def test_answer_after_a_prompt_of_one_token_keeps_its_start():
    batch = make_batch([[(3, False), (5, True), (6, True)]], has_weights=True)
    fitted = fit_documents(batch, OverlongRule("truncate_prompt", 2, bos_id=3))
    assert fitted.ids.tolist() == [3, 5]


@given(
    documents,
    st.sampled_from(CHOICES),
    st.integers(2, 6),
    st.booleans(),
    st.sampled_from([None, 3]),
)
def test_documents_fit_as_one_by_one(
    parts: list[Document], choice: Overlong, limit: int, has_weights: bool, bos_id: int | None
):
    if not has_weights:
        parts = [[(token, True) for token, _ in part] for part in parts]
    parts = [part for part in parts if part]
    fitted = fit_documents(
        make_batch(parts, has_weights=has_weights), OverlongRule(choice, limit, bos_id)
    )
    kept = [
        part for part in (fit(part, choice, limit, bos_id) for part in parts) if part is not None
    ]
    expected = make_batch(kept, has_weights=has_weights)
    assert fitted.ids.tolist() == expected.ids.tolist()
    assert fitted.ends.tolist() == expected.ends.tolist()
    if has_weights:
        assert fitted.weights is not None
        assert expected.weights is not None
        assert fitted.weights.tolist() == expected.weights.tolist()
    n_long = sum(len(part) > limit for part in parts)
    counts = {"drop": {"dropped_documents": n_long}, "split": {}}
    changed = counts.get(choice, {"cut_documents": n_long})
    assert fitted.ignored == {"a": 1, **(changed if n_long else {})}


@pytest.mark.parametrize("choice", CHOICES)
def test_empty_documents_stay(choice: Overlong):
    batch = EncodedBatch(np.arange(6, dtype=np.uint32), None, np.array([0, 5, 5, 6]), {})
    fitted = fit_documents(batch, OverlongRule(choice, 3))
    n_empty = sum(length == 0 for length in np.diff(fitted.ends, prepend=0))
    assert n_empty == 2
