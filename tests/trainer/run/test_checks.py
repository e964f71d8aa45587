"""Checks of a recipe against its files and devices, and warnings about a run."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.lora_config import LoraConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import FAMILIES
from prepcli.models.rule_text import merge_rules
from tests.helpers import runs
from tests.helpers.runs import make_job, make_setup
from tests.helpers.tiny_configs import LLAMA, MIXTRAL, T5
from trainer.data.files import DataFile
from trainer.data.find_files import DataFinder
from trainer.distributed.sharding import ShardingContext
from trainer.nn.model_spec import build_model
from trainer.planning.model_shapes import model_of_config
from trainer.recipe import Recipe, load_recipe
from trainer.run.checks import check_devices, check_inputs, check_model, run_warnings
from trainer.training.setup import check_batch

SPANS = ["data.objective=span_corruption", "data.source_length=40"]
MIXTURE = ["data.path=", 'data.sources=[{name = "a", path = "train.txt"}]']
MIXED_SPANS = [*SPANS, *MIXTURE]
PAIRS = ["data.type=json", "data.fields=[a], b"]
MIXED_PAIRS = [*PAIRS, *MIXTURE]
SHARDING = ShardingContext(parse_mesh("1,2,4"))
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


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["data.eval_path=nowhere.txt"], "no data in `nowhere.txt`"),
        (["data.eval_path=empty.txt"], "empty.txt is empty"),
        (["data.path=[train.txt, empty.txt]"], "no data in `[train.txt, empty.txt]`"),
        (['data.path=["empty.txt", "empty.txt"]'], "empty.txt is empty"),
        (["data.split=train"], "`data.split` is 'train'"),
        (["data.path=s3://bucket/a.txt"], "cannot read s3://bucket/a.txt"),
        (
            ["data.type=auto", 'data.path=["train.txt", "recipe.toml"]'],
            "the type of recipe.toml is unknown",
        ),
        (["data.eval_split=test"], "`data.eval_split` is 'test'"),
        (["data.tokenizer=nowhere"], "no tokenizer at nowhere"),
        (["data.tokenizer=."], ". has no tokenizer"),
    ],
)
def test_check_inputs_rejects_invalid_input(overrides: list[str], what: str):
    Path("empty.txt").touch()
    with pytest.raises(PrepError) as caught:
        check_inputs(load_test_recipe(*overrides))
    assert caught.value.what == what


def test_check_inputs_accepts_valid_inputs():
    check_inputs(load_test_recipe())


def test_check_inputs_accepts_an_empty_file_among_others():
    Path("empty.txt").touch()
    check_inputs(load_test_recipe('data.path=["train.txt", "empty.txt"]'))


def test_check_inputs_checks_every_source():
    tables = [
        f'[[data.sources]]\nname = "{name}"\npath = "{name}.txt"' for name in ("train", "nowhere")
    ]
    text = RECIPE.replace('path = "train.txt"\n', "").replace(
        "[batch]", "\n".join([*tables, "[batch]"])
    )
    Path("recipe.toml").write_text(text)
    with pytest.raises(PrepError, match=r"no data in `nowhere\.txt`"):
        check_inputs(load_test_recipe())


def test_absent_inputs_of_a_plan_are_no_error():
    recipe = load_test_recipe("data.path=nowhere.txt", "data.tokenizer=nowhere")
    check_inputs(recipe, may_be_absent=True)
    present = load_test_recipe("data.split=train", "data.tokenizer=nowhere")
    with pytest.raises(PrepError, match=r"`data\.split` is 'train'"):
        check_inputs(present, may_be_absent=True)


@pytest.mark.parametrize("part", ["data.config=all", "data.revision=refs/convert/parquet"])
def test_dataset_with_holdout_may_have_a_configuration(part: str):
    hub = "hf://datasets/o/n"
    recipe = load_test_recipe(f"data.path={hub}", part, "data.holdout=0.1", "data.type=json")
    file = DataFile(f"{hub}/a.jsonl", 3, "digest", lambda: io.BytesIO(b"{}\n"))
    remote = SimpleNamespace(find=lambda url, accepts, selection: [file])
    check_inputs(recipe, cast(DataFinder, remote))
    check_inputs(recipe, may_be_absent=True)


@pytest.mark.parametrize(
    ("config", "overrides", "what", "why"),
    [
        (T5, ["data.packing=documents"], '`data.packing` is "documents"', "has an encoder"),
        (T5, ["data.packing=none"], '`data.packing` is "none"', "has an encoder"),
        (LLAMA, SPANS, '`data.objective` is "span_corruption"', "has no encoder"),
        (LLAMA, MIXED_SPANS, '`data.objective` is "span_corruption"', "has no encoder"),
        (T5, PAIRS, "`data.source_length` is missing", "has an encoder"),
        (T5, MIXED_PAIRS, "`data.source_length` is missing", "has an encoder"),
    ],
)
def test_check_model_rejects_data_that_does_not_fit(
    config: dict[str, Any], overrides: list[str], what: str, why: str
):
    with pytest.raises(PrepError) as caught:
        check_model(load_test_recipe(*overrides), model_of_config(config))
    assert caught.value.what == what
    assert why in caught.value.why


@pytest.mark.parametrize("policy", ["dots_saveable", '["mlp_output"]', '["mlp_hidden"]'])
def test_check_model_rejects_hidden_units_of_experts(policy: str):
    recipe = load_test_recipe(f"model.remat_policy={policy}")
    dense, moe = (model_of_config(config) for config in (LLAMA, MIXTRAL))
    check_model(recipe, dense)
    if "mlp_hidden" not in policy:
        check_model(recipe, moe)
        return
    with pytest.raises(PrepError) as caught:
        check_model(recipe, moe)
    why = "the experts of mixtral compute their hidden units again"
    assert (
        str(caught.value)
        == f"`model.remat_policy` has mlp_hidden - {why} - remove it from the list"
    )


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("batch.accumulate=3", "`batch.size` 8 is not a whole number of micro-batches"),
        ("batch.size=7", "a micro-batch of 7 does not divide among 2 replicas"),
    ],
)
def test_check_batch_rejects_indivisible_batch(override: str, what: str):
    with pytest.raises(PrepError) as caught:
        check_batch(load_test_recipe(override), SHARDING)
    assert caught.value.what == what


def test_check_batch_follows_activation_rules():
    whole_batch = ShardingContext(parse_mesh("1,2,4"), merge_rules(["act:batch=dp"]))
    check_batch(load_test_recipe("batch.size=7"), whole_batch)


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


@pytest.mark.parametrize(
    "device", [Device("cpu", ("device", "pinned_host")), Device("gpu", ("device",))]
)
def test_check_devices_rejects_offload_without_host_memory(device: Device):
    recipe = load_test_recipe("model.remat_policy=nothing_saveable", "model.offload=residuals")
    with pytest.raises(PrepError) as caught:
        check_devices(recipe, sharding_on(device))
    assert caught.value.code == USAGE
    assert caught.value.message == (
        f"`model.offload` is not supported on {device.platform} devices - "
        "they have no separate memory of the host - `--set model.offload=none`"
    )


def test_check_devices_accepts_offload_with_host_memory():
    recipe = load_test_recipe("model.remat_policy=nothing_saveable", "model.offload=residuals")
    check_devices(recipe, sharding_on(Device("tpu", ("device", "pinned_host"))))


@pytest.mark.parametrize(
    ("overrides", "steps", "batch_size", "words"),
    [
        ([], 20, 8, []),
        ([], 20, 64, ["takes sequences more than once: the data has 45"]),
        ([], 10_000, 8, ["10,000 steps are 1,778 epochs of 45 sequences"]),
        ([], 5_625, 8, []),
        ([], 5_626, 8, ["5,626 steps are 1,000 epochs of 45 sequences"]),
        (["train.steps=1", "optimizer.warmup_steps=0"], 1, 8, []),
    ],
)
def test_run_warnings_compare_lengths_with_data(
    overrides: list[str], steps: int, batch_size: int, words: list[str]
):
    warnings = list(
        run_warnings(load_test_recipe(*overrides), make_job(make_setup(), batch_size, steps))
    )
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings))


def test_run_warnings_name_epochs_below_one_step():
    text = RECIPE.replace("steps = 20", "epochs = 0.1")
    Path("recipe.toml").write_text(text)
    (warning,) = run_warnings(load_test_recipe(), make_job(make_setup(), 8, 1))
    assert warning == "`train.epochs` 0.1 of 45 sequences is less than one step of 8"


@pytest.mark.parametrize(
    ("start", "words"), [(21, "the run has 20 steps"), (5, "resumes after step 5"), (6, "")]
)
def test_run_warnings_name_a_profile_without_steps(start: int, words: str):
    recipe = load_test_recipe(f"train.profile={{ start = {start}, steps = 2 }}")
    warnings = [*run_warnings(recipe, make_job(make_setup(), 8, 20), last_step=5)]
    assert [words in warning for warning in warnings if "profile" in warning] == (
        [True] if words else []
    )


def test_run_warnings_name_intervals_beyond_the_run():
    warnings = list(
        run_warnings(
            load_test_recipe(), make_job(make_setup(), 8, 20, eval_every=21, save_every=50)
        )
    )
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
    assert any(
        warning.startswith("45 sequences are evaluated, more than the 5") for warning in warnings
    )
    limited = make_job(
        make_setup(), 8, 20, train=job.evaluation, evaluation=job.train, eval_limit=5
    )
    assert not any(
        "are evaluated" in warning for warning in run_warnings(load_test_recipe(), limited)
    )


@pytest.mark.parametrize("scan_axis", [0, 1])
@pytest.mark.parametrize(("rank", "is_warned"), [(16, False), (17, True)])
def test_run_warnings_name_a_rank_above_the_dimensions(scan_axis: int, rank: int, is_warned: bool):
    lora = LoraConfig(rank, 8.0, ("attn.*", "mlp.*"))
    model = build_model(
        FAMILIES["llama"], runs.LLAMA, is_tied=False, lora=lora, scan_axis=scan_axis
    )
    job = make_job(replace(make_setup(), model=model), 8, 20)
    warnings = [*run_warnings(load_test_recipe(), job)]
    expected = "`lora.rank` is 17, but `layers.attn.k` has a dimension of 16: a higher rank learns nothing more"
    assert warnings == ([expected] if is_warned else [])
