"""Datasets of a recipe: settings that a model cannot follow are errors, the others reach the batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.registry import family_of
from tests.helpers.corpus import encode, make_tokenizer
from tests.helpers.tiny_configs import LLAMA, T5
from trainer.nn.model_spec import build_model
from trainer.recipe import load_recipe
from trainer.training.datasets import DatasetBuilder, Datasets

RECIPE = """
mesh = "1,1,1"
[model]
path = "x"
[data]
type = "json"
path = "{folder}/a.jsonl"
seq_length = 4
[batch]
size = 1
[optimizer]
lr = 1e-3
[train]
steps = 1
"""
SPANS = (
    "data.objective=span_corruption",
    "data.source_length=10",
    "data.seq_length=6",
    "data.fields=prompt+completion",
)
LINES = """\
{"prompt": "the cat", "completion": "the hat sat", "how": "[prompt+completion], prompt"}
{"prompt": "the mat", "completion": "the cat sat", "how": "prompt"}
"""


def load_datasets(
    folder: Path,
    config: dict[str, Any],
    *overrides: str,
    note: Callable[[str], None] = print,
    **changes: Any,
) -> Datasets:
    """Return the datasets of a recipe for a model with special tokens 1 (bos) and 2 (eos)."""
    (folder / "a.jsonl").write_text(LINES)
    (folder / "x.toml").write_text(RECIPE.replace("{folder}", str(folder)))
    config = {**config, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 304, **changes}
    model = build_model(family_of(config), config, is_tied=False)
    return DatasetBuilder(
        load_recipe(folder / "x.toml", overrides).recipe,
        model,
        model_config=config,
        tokenizer=make_tokenizer(folder / "tokenizer.json"),
        cache=folder / "cache",
        progress=lambda *counts: None,
        note=note,
    ).build()


def read_tokens(datasets: Datasets) -> tuple[list[int], list[float]]:
    """Return inputs and weights of all rows, concatenated."""
    batch = datasets.train.get_batch(range(datasets.train.n_rows))
    return batch["tokens"].ravel().tolist(), batch["weights"].ravel().tolist()


def test_prompts_have_no_loss(tmp_path: Path):
    ids, weights = read_tokens(
        load_datasets(tmp_path, LLAMA, "data.format=prompt_completion", "data.add_bos=true")
    )
    expected: list[tuple[int, int]] = []
    for prompt, completion in (("the cat", "the hat sat"), ("the mat", "the cat sat")):
        expected += [
            (1, 0),
            *((token_id, 0) for token_id in encode(tmp_path / "tokenizer.json", prompt)),
        ]
        expected += [
            (token_id, 1) for token_id in (*encode(tmp_path / "tokenizer.json", completion), 2)
        ]
    n = len(ids)
    assert ids == [token_id for token_id, _ in expected[:n]]
    assert n > len(expected) - 4
    shifted = [weight for _, weight in expected[1:]]
    assert weights == [0 if i % 4 == 3 else shifted[i] for i in range(n)]


def test_always_start_with_bos_reaches_every_row(tmp_path: Path):
    overrides = ("data.fields=completion", "data.holdout=0.5", "data.always_start_with_bos=true")
    datasets = load_datasets(tmp_path, LLAMA, *overrides)
    assert datasets.evaluation is not None
    for dataset in (datasets.train, datasets.evaluation):
        tokens = dataset.get_batch(range(dataset.n_rows))["tokens"]
        assert (tokens[:, 0] == 1).all()
        assert not (tokens[:, 1:] == 1).any()


def test_max_examples_limits_only_the_training_data(tmp_path: Path):
    overrides = (
        "data.fields=completion",
        "data.seq_length=2",
        f"data.eval_path={tmp_path}/a.jsonl",
    )
    limited = load_datasets(tmp_path, LLAMA, *overrides, "data.max_examples=1")
    assert limited.evaluation is not None
    assert limited.train.n_rows < limited.evaluation.n_rows


@pytest.mark.parametrize(
    ("config", "changes", "overrides", "what", "why"),
    [
        (LLAMA, {"bos_token_id": None}, ["data.add_bos=true"], "`data.add_bos` is true", "no bos_token_id"),
        (LLAMA, {"bos_token_id": 304}, ["data.add_bos=true"], "`data.add_bos` is true", "bos_token_id 304, but 304"),
        (LLAMA, {"eos_token_id": None}, ["data.add_eos=true"], "`data.add_eos` is true", "no eos_token_id"),
        (
            *(LLAMA, {"bos_token_id": None}, ["data.always_start_with_bos=true"]),
            *("`data.always_start_with_bos` is true", "no bos_token_id"),
        ),
        (
            *(LLAMA, {}, ["data.fields=[prompt], completion", "data.source_length=4"]),
            *("`data.source_length` is 4", "llama has no encoder"),
        ),
        (LLAMA, {}, ["data.fields=<|304|>, prompt"], '`data.fields` is "<|304|>, prompt"', "<|304|> is not in the"),
        (T5, {}, ["data.fields=prompt"], "t5 has an encoder, but the data has no source column", ""),
        (T5, {}, ["data.format=chat"], "the tokenizer in ", "looked for chat_template.jinja"),
        (T5, {}, ["data.prepend_text=x"], "`data.prepend_text` is 'x'", "t5 has an encoder"),
        (T5, {}, [*SPANS], "has no token <extra_id_0>", "and a sentinel token for each"),
        (
            *(LLAMA, {}, ["data.packing=none", "data.fields=<|1|>", "data.add_eos=false"]),
            *("the data has no token to train on", "each document has one token"),
        ),
        (
            *(LLAMA, {}, ["data.fields_from_example=prompt"]),
            *(':1: no column `the cat`', "its columns: `prompt`, `completion`, `how`"),
        ),
    ],
)  # fmt: skip
def test_settings_that_the_model_cannot_follow_are_rejected(
    tmp_path: Path,
    config: dict[str, Any],
    changes: dict[str, Any],
    overrides: list[str],
    what: str,
    why: str,
):
    with pytest.raises(PrepError) as caught:
        load_datasets(tmp_path, config, *overrides, **changes)
    assert what in caught.value.what
    assert why in caught.value.why
    assert (caught.value.code == USAGE) == caught.value.what.startswith(("`", "t5"))


def test_fields_from_example_differ_by_record(tmp_path: Path):
    ids, weights = read_tokens(
        load_datasets(tmp_path, LLAMA, "data.fields_from_example=how", "data.seq_length=2")
    )
    tokenizer = tmp_path / "tokenizer.json"
    expected = [(token_id, 0) for token_id in encode(tokenizer, "the cat the hat sat")]
    expected += [
        (token_id, 1)
        for text in ("the cat", "the mat")
        for token_id in (*encode(tokenizer, text), 2)
    ]
    assert ids == [token_id for token_id, _ in expected[: len(ids)]]
    assert weights[::2] == [weight for _, weight in expected[1 : len(ids) + 1 : 2]]


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_packing_of_documents_reaches_the_rows(tmp_path: Path, packing: str):
    notes: list[str] = []
    overrides = (
        f"data.packing={packing}",
        "data.fields=completion",
        "data.seq_length=64",
        "data.holdout=0",
    )
    datasets = load_datasets(tmp_path, LLAMA, *overrides, note=notes.append)
    batch = datasets.train.get_batch(range(datasets.train.n_rows))
    expected = [
        [*encode(tmp_path / "tokenizer.json", text), 2] for text in ("the hat sat", "the cat sat")
    ]
    n_tokens = sum(map(len, expected))
    if packing == "none":
        assert [
            row[: len(ids)].tolist() for row, ids in zip(batch["tokens"], expected, strict=True)
        ] == expected
        assert "segment_ids" not in batch
    else:
        assert batch["tokens"][0, :n_tokens].tolist() == [
            token_id for ids in expected for token_id in ids
        ]
        assert batch["segment_ids"][0].max() == 2
    places = f"{100 * n_tokens / batch['tokens'].size:.2f} % of their places have a token"
    assert notes == [
        f"{n_tokens} tokens in 2 documents",
        f"{len(batch['tokens'])} sequences of 64: {places}",
    ]


def test_span_corruption_reaches_the_rows(tmp_path: Path):
    tokenizer = Tokenizer.from_file(str(make_tokenizer(tmp_path / "tokenizer.json")))
    tokenizer.add_special_tokens(["<extra_id_0>"])
    tokenizer.save(str(tmp_path / "spans.json"))
    sentinel = tokenizer.token_to_id("<extra_id_0>")
    datasets = load_datasets(
        tmp_path, T5, *SPANS, f"data.tokenizer={tmp_path}/spans.json", vocab_size=310
    )
    batch = datasets.train.get_batch([0])
    text = [
        token_id
        for line in ("the cat the hat sat", "the mat the cat sat")
        for token_id in (*encode(tmp_path / "tokenizer.json", line), 2)
    ]
    # The only span has 2 tokens, and is at the end of the block.
    assert batch["source"].tolist() == [[*text[:8], sentinel, 2]]
    assert batch["targets"].tolist() == [[sentinel, *text[8:10], 2, 0, 0]]
    assert batch["tokens"].tolist() == [[0, sentinel, *text[8:10], 0, 0]]
