"""Checks of a recipe before its data is read, and warnings about a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.runs import make_job, make_setup
from trainer.distributed.sharding import ShardingContext, sharding_without_devices
from trainer.models.errors import USAGE, PrepError
from trainer.models.mesh import parse_mesh
from trainer.models.registry import FAMILIES
from trainer.nn.model_spec import ModelSpec, build_model
from trainer.recipe import Recipe, load_recipe
from trainer.training.preflight import check_inputs, context_warnings, memory_run, run_warnings

SHARDING = sharding_without_devices(parse_mesh("1,2,4"))
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
def _in_recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("w1 w2")
    Path("recipe.toml").write_text(RECIPE)


def load_test_recipe(*overrides: str) -> Recipe:
    """Load recipe.toml with overrides."""
    return load_recipe(Path("recipe.toml"), overrides).recipe


def llama(**changes: Any) -> ModelSpec:
    """Return a tiny Llama."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 96}
    return build_model(FAMILIES["llama"], {**sizes, "max_position_embeddings": 64, **changes}, is_tied=False)


@pytest.mark.parametrize(
    ("overrides", "what"),
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
def test_check_inputs_rejects_invalid_input(overrides: list[str], what: str):
    Path("empty.txt").touch()
    with pytest.raises(PrepError) as caught:
        check_inputs(load_test_recipe(*overrides), SHARDING)
    assert caught.value.what == what


def test_check_inputs_accepts_valid_inputs():
    check_inputs(load_test_recipe(), SHARDING)


@dataclass
class Device:
    """A device with memories of some kinds."""

    platform: str
    kinds: tuple[str, ...]

    def addressable_memories(self) -> list[Any]:
        return [SimpleNamespace(kind=kind) for kind in self.kinds]


def sharding_on(device: Device) -> ShardingContext:
    """Return a sharding context on a device of another kind than this machine's."""
    device_mesh: Any = SimpleNamespace(local_devices=[device])
    return ShardingContext(mesh=parse_mesh("1,1,1"), device_mesh=device_mesh)


@pytest.mark.parametrize("device", [Device("cpu", ("device", "pinned_host")), Device("gpu", ("device",))])
def test_check_inputs_rejects_offload_without_host_memory(device: Device):
    recipe = load_test_recipe("model.remat_policy=nothing_saveable", "model.offload=residuals")
    with pytest.raises(PrepError) as caught:
        check_inputs(recipe, sharding_on(device))
    assert caught.value.code == USAGE
    assert str(caught.value) == (
        f"`model.offload` is not supported on {device.platform} devices - "
        "they have no host memory beside their own - `--set model.offload=none`"
    )


def test_check_inputs_accepts_offload_with_host_memory():
    recipe = load_test_recipe("model.remat_policy=nothing_saveable", "model.offload=residuals")
    check_inputs(recipe, sharding_on(Device("tpu", ("device", "pinned_host"))))


def test_memory_run_follows_batch_and_dtype():
    recipe = load_test_recipe("batch.accumulate=2", "model.dtype=bfloat16", "model.remat_policy=nothing_saveable")
    run = memory_run(recipe, llama(), SHARDING, widens_bfloat16=False)
    assert (run.micro_batch_size, run.local_batch_size, run.seq_length, run.itemsize) == (4, 2, 16, 2)
    assert run.remat_policy == "nothing_saveable"
    assert memory_run(recipe, llama(), SHARDING, widens_bfloat16=True).itemsize == 4


def test_memory_run_has_names_of_activations_and_offload():
    recipe = load_test_recipe('model.remat_policy=["q", "o"]', "model.offload=residuals")
    run = memory_run(recipe, llama(), SHARDING, widens_bfloat16=False)
    assert (run.remat_policy, run.offload) == (("q", "o"), "residuals")


def test_context_warnings_name_too_long_sequences():
    assert list(context_warnings(load_test_recipe("data.seq_length=64"), llama())) == []
    (warning,) = context_warnings(load_test_recipe("data.seq_length=65"), llama())
    assert warning == "`data.seq_length` is 65, and the model was made for 64 positions"


def test_context_warnings_include_rope_scaling():
    model = llama(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    assert list(context_warnings(load_test_recipe("data.seq_length=256"), model)) == []
    assert list(context_warnings(load_test_recipe("data.seq_length=257"), model))


@pytest.mark.parametrize(
    ("overrides", "steps", "batch_size", "words"),
    [
        ([], 20, 8, []),
        ([], 20, 64, ["takes sequences more than once: the data has 45"]),
        ([], 10_000, 8, ["10,000 steps are 1,778 epochs of 45 sequences"]),
        (["train.steps=1", "optimizer.warmup_steps=0"], 1, 8, []),
    ],
)
def test_run_warnings_compare_lengths_with_data(overrides: list[str], steps: int, batch_size: int, words: list[str]):
    warnings = list(run_warnings(load_test_recipe(*overrides), make_job(make_setup(), batch_size, steps)))
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings))


def test_run_warnings_name_epochs_below_one_step():
    text = RECIPE.replace("steps = 20", "epochs = 0.1")
    Path("recipe.toml").write_text(text)
    (warning,) = run_warnings(load_test_recipe(), make_job(make_setup(), 8, 1))
    assert warning == "`train.epochs` 0.1 of 45 sequences is less than one step of 8"


def test_run_warnings_name_intervals_beyond_the_run():
    warnings = list(run_warnings(load_test_recipe(), make_job(make_setup(), 8, 20, eval_every=21, save_every=50)))
    assert [warning.partition("`")[2].partition("`")[0] for warning in warnings] == [
        "train.eval_every",
        "checkpoint.every",
    ]


def test_run_warnings_name_evaluation_larger_than_training():
    job = make_job(make_setup(), 8, 20)
    swapped = make_job(make_setup(), 8, 20, train=job.evaluation, evaluation=job.train)
    (first, *_) = run_warnings(load_test_recipe(), swapped)
    assert first == "a batch of 8 takes sequences more than once: the data has 5"
    warnings = list(run_warnings(load_test_recipe(), swapped))
    assert any(warning.startswith("45 sequences are evaluated, more than the 5") for warning in warnings)
    limited = make_job(make_setup(), 8, 20, train=job.evaluation, evaluation=job.train, eval_limit=5)
    assert not any("are evaluated" in warning for warning in run_warnings(load_test_recipe(), limited))
