"""Seq2seq datasets: compare with truncating and padding each text by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prepcli.core.errors import PrepError
from tests.helpers.corpus import EOS, change, encode, make_config, tokenize_quietly
from tests.trainer.data.test_packing import make_tokens
from trainer.data.packing import split_holdout
from trainer.data.seq2seq import seq2seq_dataset
from trainer.data.tokenize import tokenize_files

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


def test_store_identity_depends_on_fields_and_prefix(tmp_path: Path):
    path = write_pairs(tmp_path)
    config = make_config(
        tmp_path, path, type="json", fields="[t], s", source_length=4, has_encoder=True
    )
    changed = [
        change(config, source_length=9),
        change(config, fields="[s], t"),
        change(config, source_prefix="do: "),
    ]
    identities = [tokenize_quietly(variant).identity for variant in (config, *changed)]
    assert identities[0] == identities[1]
    assert len({*identities}) == 3


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
