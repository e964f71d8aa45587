"""Checks of a recipe before data are read, and doubts about lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runs import make_job, make_setup
from trainer.distributed.sharding import sharding_without_devices
from trainer.models.errors import PrepError
from trainer.models.mesh import parse_mesh
from trainer.models.registry import FAMILIES
from trainer.nn.transformer import ModelSpec, build_model
from trainer.recipe import Recipe, load_recipe
from trainer.training.preflight import check_inputs, context_warnings, memory_run, run_warnings

ON = sharding_without_devices(parse_mesh("1,2,4"))
RECIPE = """\
[model]
path = "m"
[data]
type = "text"
path = "train.txt"
seq_length = 16
[batch]
size = 8
[optimizer]
lr = 1e-3
[train]
steps = 20
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("w1 w2")
    Path("recipe.toml").write_text(RECIPE)


def recipe(*sets: str) -> Recipe:
    return load_recipe(Path("recipe.toml"), sets).recipe


def llama(**changes: Any) -> ModelSpec:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
    return build_model(FAMILIES["llama"], {**sizes, "max_position_embeddings": 64, **changes}, is_tied=False)


@pytest.mark.parametrize(
    ("sets", "what"),
    [
        (["batch.accumulate=3"], "`batch.size` 8 is not a whole number of micro-batches"),
        (["batch.size=7"], "a micro-batch of 7 does not divide among 2 replicas"),
        (["data.eval_path=nowhere.txt"], "no data in `nowhere.txt`"),
        (["data.eval_path=empty.txt"], "empty.txt is empty"),
        (["data.path=[train.txt, empty.txt]"], "no data in `[train.txt, empty.txt]`"),
        (['data.path=["train.txt", "empty.txt"]'], "empty.txt is empty"),
        (["data.tokenizer=nowhere"], "no tokenizer at nowhere"),
        (["data.tokenizer=."], ". has no tokenizer.json"),
    ],
)
def test_a_wrong_input_is_found_without_reading_data(sets: list[str], what: str):
    Path("empty.txt").touch()
    with pytest.raises(PrepError) as caught:
        check_inputs(recipe(*sets), ON)
    assert caught.value.what == what


def test_good_inputs_pass():
    check_inputs(recipe(), ON)


def test_a_step_in_memory_follows_batch_and_dtype():
    made = recipe("batch.accumulate=2", "model.dtype=bfloat16", "model.remat_policy=nothing_saveable")
    run = memory_run(made, llama(), ON, widens_bfloat16=False)
    assert (run.micro_batch_size, run.local_batch_size, run.seq_length, run.itemsize) == (4, 2, 16, 2)
    assert run.remat_policy == "nothing_saveable"
    assert memory_run(made, llama(), ON, widens_bfloat16=True).itemsize == 4


def test_a_context_beyond_the_positions_is_doubted():
    assert list(context_warnings(recipe("data.seq_length=64"), llama())) == []
    (doubt,) = context_warnings(recipe("data.seq_length=65"), llama())
    assert doubt == "`data.seq_length` is 65, and the model was made for 64 positions"


def test_a_stretched_rotation_counts_as_longer():
    model = llama(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert list(context_warnings(recipe("data.seq_length=256"), model)) == []
    assert list(context_warnings(recipe("data.seq_length=257"), model))


@pytest.mark.parametrize(
    ("sets", "steps", "size", "words"),
    [
        ([], 20, 8, []),
        ([], 20, 64, ["takes sequences more than once: the data has 45"]),
        ([], 10_000, 8, ["10,000 steps are 1,778 epochs of 45 sequences"]),
        (["train.steps=1", "optimizer.warmup_steps=0"], 1, 8, []),
    ],
)
def test_lengths_that_do_not_go_with_the_data(sets: list[str], steps: int, size: int, words: list[str]):
    doubts = list(run_warnings(recipe(*sets), make_job(make_setup(), size, steps)))
    assert len(doubts) == len(words)
    assert all(word in doubt for word, doubt in zip(words, doubts))


def test_epochs_of_less_than_one_step():
    text = RECIPE.replace("steps = 20", "epochs = 0.1")
    Path("recipe.toml").write_text(text)
    (doubt,) = run_warnings(recipe(), make_job(make_setup(), 8, 1))
    assert doubt == "`train.epochs` 0.1 of 45 sequences is less than one step of 8"


def test_intervals_longer_than_the_run():
    doubts = list(run_warnings(recipe(), make_job(make_setup(), 8, 20, eval_every=21, save_every=50)))
    assert [doubt.partition("`")[2].partition("`")[0] for doubt in doubts] == ["train.eval_every", "checkpoint.every"]


def test_more_evaluation_than_training():
    made = make_job(make_setup(), 8, 20)
    swapped = make_job(make_setup(), 8, 20, train=made.evaluation, evaluation=made.train)
    (first, *_) = run_warnings(recipe(), swapped)
    assert first == "a batch of 8 takes sequences more than once: the data has 5"
    doubts = list(run_warnings(recipe(), swapped))
    assert any(doubt.startswith("45 sequences are evaluated, more than the 5") for doubt in doubts)
    limited = make_job(make_setup(), 8, 20, train=made.evaluation, evaluation=made.train, eval_limit=5)
    assert not any("are evaluated" in doubt for doubt in run_warnings(recipe(), limited))
