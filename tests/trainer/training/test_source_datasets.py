"""Datasets of several sources: mixed by weight, or shuffled together, with the tokens of each counted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.registry import family_of
from tests.helpers.corpus import make_tokenizer
from tests.helpers.tiny_configs import LLAMA
from trainer.data.packing import ConcatenatedDataset
from trainer.nn.model_spec import build_model
from trainer.recipe import load_recipe
from trainer.training.datasets import DatasetBuilder, Datasets, make_order, tokens_by_source

RECIPE = """
[model]
path = "x"
[data]
seq_length = 4
holdout = {holdout}
{keys}
[[data.sources]]
name = "a"
path = "{folder}/a.txt"
{first}
[[data.sources]]
name = "b"
path = "{folder}/b.jsonl"
{second}
[batch]
size = 8
[optimizer]
lr = 1e-3
[train]
steps = 1
"""


def load_datasets(
    folder: Path, first: str = "", second: str = "", *, holdout: float = 0.25, keys: str = ""
) -> tuple[Datasets, list[str]]:
    """Return the datasets of two sources, and the notes."""
    (folder / "a.txt").write_text("the cat sat on the mat. " * 30)
    (folder / "b.jsonl").write_text(
        "".join(json.dumps({"text": f"12 hats {i}"}) + "\n" for i in range(40))
    )
    text = (
        RECIPE.replace("{folder}", str(folder))
        .replace("{first}", first)
        .replace("{second}", second)
    )
    text = text.replace("{holdout}", str(holdout)).replace("{keys}", keys)
    (folder / "x.toml").write_text(text)
    config = {**LLAMA, "eos_token_id": 2, "vocab_size": 304}
    notes: list[str] = []
    datasets = DatasetBuilder(
        load_recipe(folder / "x.toml").recipe,
        build_model(family_of(config), config, is_tied=False),
        model_config=config,
        tokenizer=make_tokenizer(folder / "tokenizer.json"),
        cache=folder / "cache",
        progress=lambda *counts: None,
        note=notes.append,
    ).build()
    return datasets, notes


def test_weighted_sources_have_their_shares_and_token_counts(tmp_path: Path):
    datasets, notes = load_datasets(tmp_path, "weight = 3", "weight = 1")
    order = make_order(datasets, 8, seed=1, shuffle=True)
    assert isinstance(datasets.train, ConcatenatedDataset)
    n_first = datasets.train.parts["a"].n_rows
    rows = np.concatenate([order.rows(step) for step in range(10)])
    assert (rows < n_first).sum() == 60
    assert tokens_by_source(order, datasets.train, 10, tokens_per_row=4) == {
        "tokens.a": 240,
        "tokens.b": 80,
    }
    assert any(note.startswith("a: 75 % of ") for note in notes)


def test_sources_without_weights_are_shuffled_together(tmp_path: Path):
    datasets, _ = load_datasets(tmp_path)
    order = make_order(datasets, 8, seed=1, shuffle=True)
    n_rows = datasets.train.n_rows
    rows = np.concatenate([order.rows(step) for step in range(n_rows // 8 + 1)])
    assert sorted(rows[:n_rows]) == list(range(n_rows))
    assert tokens_by_source(order, datasets.train, 10, tokens_per_row=4) == {}


def test_holdout_is_taken_of_each_source(tmp_path: Path):
    datasets, _ = load_datasets(tmp_path)
    assert isinstance(datasets.train, ConcatenatedDataset)
    assert isinstance(datasets.evaluation, ConcatenatedDataset)
    for name, part in datasets.evaluation.parts.items():
        assert part.n_rows == pytest.approx(datasets.train.parts[name].n_rows / 3, abs=1)
    first = datasets.train.get_batch([0])["tokens"]
    assert (first == datasets.train.parts["a"].get_batch([0])["tokens"]).all()


def test_source_may_have_evaluation_files(tmp_path: Path):
    (tmp_path / "v.txt").write_text("the hat " * 20)
    second = f'eval_path = "{tmp_path}/v.txt"'
    datasets, _ = load_datasets(tmp_path, "", second, holdout=0.0)
    assert isinstance(datasets.evaluation, ConcatenatedDataset)
    assert [*datasets.evaluation.parts] == ["b"]
    assert len(datasets.identity.split()) == 3


def test_tokens_added_to_texts_are_not_added_to_ids(tmp_path: Path):
    np.save(tmp_path / "c.npy", np.arange(8).repeat(8))
    third = f'[[data.sources]]\nname = "c"\npath = "{tmp_path}/c.npy"'
    datasets, notes = load_datasets(tmp_path, second=third, keys="add_eos = true")
    assert isinstance(datasets.train, ConcatenatedDataset)
    assert datasets.train.parts["c"].get_batch([0])["tokens"].tolist() == [[0, 0, 0, 0]]
    assert "c: token ids are stored as they are, without `data.add_eos`" in notes


def test_error_of_a_source_names_it(tmp_path: Path):
    with pytest.raises(PrepError, match=r"^source `b`: .*b.jsonl:1: no column `body`"):
        load_datasets(tmp_path, second='fields = "body"')
