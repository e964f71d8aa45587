"""Pairs are what cutting and filling up each text by hand gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.corpus import EOS, encode, make_config, tokenize_quietly
from tests.trainer.data.test_packing import tokens_of
from trainer.data.packing import split_holdout
from trainer.data.seq2seq import count_truncated, seq2seq_dataset
from trainer.data.tokenize import tokenize_files
from trainer.models.errors import PrepError

TEXTS = st.lists(st.integers(2, 60000), max_size=9)
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=8)
START, END = 7, 1


def cut(text: list[int], most: int) -> list[int]:
    return text if len(text) <= most else [*text[: most - 1], END]


@given(PAIRS, st.integers(2, 9), st.integers(2, 9), st.data())
def test_rows_are_those_of_the_naive_version(
    texts: list[tuple[list[int], list[int]]], source_length: int, seq_length: int, data: st.DataObject
):
    held = tokens_of([text for pair in texts for text in pair], seq_length)
    whole = seq2seq_dataset(held, source_length, START, END)
    assert (whole.n_rows, whole.seq_length) == (len(texts), seq_length)
    rows = data.draw(st.lists(st.integers(-1, len(texts) - 1), max_size=5))
    found = whole.get_batch(rows)
    assert {name: array.dtype for name, array in found.items()} == {n: kind for n, (_, kind) in whole.columns.items()}
    assert {name: array.shape for name, array in found.items()} == {
        name: (len(rows), length) for name, (length, _) in whole.columns.items()
    }
    for at, row in enumerate(rows):
        source, target = ([], []) if row < 0 else texts[row]
        source, target = cut(source, source_length), cut(target, seq_length)
        counts = found["present"][at]
        assert found["source"][at][counts].tolist() == source
        assert counts.tolist() == [i < len(source) for i in range(source_length)]
        weighed = found["weights"][at] == 1
        assert found["targets"][at][weighed].tolist() == target
        assert weighed.tolist() == [i < len(target) for i in range(seq_length)]
        assert found["tokens"][at][weighed].tolist() == [START, *target][: len(target)]
        assert not found["source"][at][~counts].any()
        assert not found["tokens"][at][~weighed].any()


def test_without_an_end_a_text_is_cut_as_it_is():
    held = tokens_of([[3, 4, 5], [6, 7, 8, 9]], 2)
    found = seq2seq_dataset(held, 2, START, None).get_batch([0])
    assert (found["source"].tolist(), found["targets"].tolist()) == ([[3, 4]], [[6, 7]])
    assert count_truncated(held, 2) == (1, 1)
    assert count_truncated(held, 3) == (0, 1)


def test_the_last_pairs_validate():
    held = tokens_of([[n] for n in range(20)], 3)
    train, evaluation = split_holdout(seq2seq_dataset(held, 2, START, END), 0.2)
    assert evaluation is not None
    assert (train.n_rows, evaluation.n_rows) == (8, 2)
    assert evaluation.get_batch([0, 1])["source"].tolist() == [[16, 0], [18, 0]]
    with pytest.raises(IndexError):
        train.get_batch([8])


def write(folder: Path) -> Path:
    lines = ('{"t": "the hat", "s": "that", "n": 1}', "", '{"s": "hat", "t": ""}')
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder / "a.jsonl"


def test_pairs_are_read_a_line_each(tmp_path: Path):
    wanted = make_config(tmp_path, write(tmp_path), type="json", fields="[t], [s], s", source_length=4, prefix="do: ")
    notes: list[str] = []
    tokens = tokenize_files(wanted, lambda done, total: None, notes.append)
    texts = ["do: the hat that", "that", "do:  hat", "hat"]
    ids = [[*encode(wanted.tokenizer, text), EOS] for text in texts]
    assert tokens.ids.tolist() == [id for text in ids for id in text]
    assert np.diff(tokens.ends, prepend=0).tolist() == [len(text) for text in ids]
    too_long = sum(len(text) > 4 for text in ids[::2])
    assert f"in 2 pairs: {too_long} source" in notes[-1]


def test_what_texts_are_made_of_makes_another_store(tmp_path: Path):
    path = write(tmp_path)
    base = make_config(tmp_path, path, type="json", fields="[t], s", source_length=4)
    changes = [{}, {"source_length": 9}, {"fields": "[s], t"}, {"prefix": "do: "}]
    found = [tokenize_quietly(make_config(tmp_path, path, **{"type": "json", "fields": base.fields, "source_length": 4, **change}))
             for change in changes]  # fmt: skip
    assert found[0].identity == found[1].identity
    assert len({each.identity for each in found}) == 3


@pytest.mark.parametrize(
    ("line", "what", "hint"),
    [
        ('{"t": "a"}', "a.jsonl:1: no column `s`", "`--set data.fields='[SOURCE], TARGET'`"),
        ('{"t": 3, "s": "a"}', "a.jsonl:1: column `t` is no text", "mend or remove the line"),
        ('["t"]', "a.jsonl:1: not an object but a list", "jq"),
        ("\n\n", "the data has no pair", ""),
    ],
)
def test_lines_that_are_no_pair(tmp_path: Path, line: str, what: str, hint: str):
    (tmp_path / "a.jsonl").write_text(line)
    wanted = make_config(tmp_path, tmp_path / "a.jsonl", type="json", fields="[t], s", source_length=4)
    with pytest.raises(PrepError) as caught:
        tokenize_quietly(wanted)
    assert caught.value.what.endswith(what)
    assert hint in caught.value.hint
