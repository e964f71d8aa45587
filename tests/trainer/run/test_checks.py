"""Checks of a recipe against its files, devices, memory and disk, and of a run that resumes."""

from __future__ import annotations

import io
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.core.intervals import EventSteps
from prepcli.models.lora_config import LoraConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import ParamLeaf
from prepcli.models.registry import FAMILIES
from prepcli.models.rules import merge_rules
from tests.helpers import runs
from tests.helpers.runs import make_job, make_setup
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS
from tests.helpers.tiny_configs import LLAMA, MIXTRAL, T5
from trainer.data.files import DataFile
from trainer.data.find_files import DataFinder
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.model_spec import build_model
from trainer.planning.model_shapes import model_of_config
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.lr_schedule import LRSchedule
from trainer.run import machine
from trainer.run.checks import (
    check_devices,
    check_inputs,
    check_model,
    run_warnings,
)
from trainer.run.machine import check_disk, checkpoint_nbytes, device_memory_nbytes, disk_warnings
from trainer.run.resume import check_changed_keys, check_resumable, environment_warning
from trainer.run.summary import adapters_text, rounding_environment
from trainer.training.setup import check_batch

# Checks of a recipe against its files and devices, and warnings about a run.

SPANS = ["data.objective=span_corruption", "data.source_length=40"]

MIXTURE = ["data.path=", 'data.sources=[{name = "a", path = "train.txt"}]']

MIXED_SPANS = [*SPANS, *MIXTURE]

PAIRS = ["data.type=json", "data.fields=[a], b"]

MIXED_PAIRS = [*PAIRS, *MIXTURE]

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


SHARDING = ShardingContext(parse_mesh("1,2,4"))


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


# Checks of memory and disk before a training run reads data.

GIB = 1 << 30


@dataclass
class DeviceWithMemory:
    platform: str = "cpu"
    stats: dict[str, int] | None = field(default=None)

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


@pytest.mark.parametrize(
    ("devices", "host", "nbytes"),
    [
        ([DeviceWithMemory("gpu", {"bytes_limit": 60 * GIB})], {"available": GIB}, 60 * GIB),
        ([DeviceWithMemory()] * 8, {"available": 16 * GIB, "limit": None}, 2 * GIB),
        ([DeviceWithMemory()] * 2, {"available": 16 * GIB, "limit": 8 * GIB}, 4 * GIB),
        ([DeviceWithMemory("tpu", {})], {"available": 16 * GIB}, None),
        ([DeviceWithMemory()], {"available": None, "limit": None}, None),
    ],
)
def test_device_memory_depends_on_the_platform(
    devices: list[Any], host: dict[str, int | None], nbytes: int | None
):
    assert device_memory_nbytes(devices, host) == nbytes


def test_processes_of_a_host_share_its_memory():
    host = {"available": 16 * GIB, "limit": None}
    assert device_memory_nbytes([DeviceWithMemory()] * 4, host, num_processes=2) == 2 * GIB
    assert (
        device_memory_nbytes([DeviceWithMemory("gpu", {"bytes_limit": GIB})], host, num_processes=2)
        == GIB
    )


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> int:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    return 1000


def test_check_disk_requires_room_for_one_checkpoint(tmp_path: Path, free: int):
    check_disk(tmp_path / "runs" / "a", free)
    with pytest.raises(PrepError, match="not enough room for a checkpoint"):
        check_disk(tmp_path / "runs" / "a", free + 1)


def test_check_disk_requires_a_writable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append((path, mode)))
    with pytest.raises(PrepError, match=f"cannot write to {tmp_path}"):
        check_disk(tmp_path / "runs" / "a", 0)
    assert asked == [(tmp_path, os.W_OK | os.X_OK)]


def recipe(tmp_path: Path, *sets: str) -> Recipe:
    (tmp_path / "x.toml").write_text(
        '[model]\npath = "m"\n[data]\ntype = "text"\npath = "t"\nseq_length = 8\n[batch]\nsize = 4\n'
        "[optimizer]\nlr = 1e-3\n[train]\nsteps = 20\n"
    )
    return load_recipe(tmp_path / "x.toml", sets).recipe


def leaves(count: int) -> dict[str, ParamLeaf]:
    return {"w": ParamLeaf("w", "w", (count,), (("embed",),))}


def test_checkpoint_nbytes_counts_parameters_and_moments(tmp_path: Path):
    assert checkpoint_nbytes(recipe(tmp_path), leaves(10)) == 120
    params_only = "checkpoint.optimizer_state=false"
    assert checkpoint_nbytes(recipe(tmp_path, params_only), leaves(10)) == 40
    cast = recipe(tmp_path, params_only, "checkpoint.dtype=bfloat16")
    assert checkpoint_nbytes(cast, leaves(10)) == 20


@pytest.mark.parametrize(
    ("every", "words", "steps", "held"),
    [
        (0, ["keep=2"], (1, 20), "1 checkpoint"),
        (5, ["keep=2"], (1, 20), "3 checkpoints"),
        (5, ["keep=9"], (1, 20), "4 checkpoints"),
        (1, ["keep=all"], (1, 20), "20 checkpoints"),
        # The second half of a run: steps 15 and 20
        (5, ["keep=all"], (12, 20), "2 checkpoints"),
        # Steps 3, 5, 8, 10, 13, 15, 18 and 20
        (Fraction(5, 2), ["keep=all"], (1, 20), "8 checkpoints"),
        (Fraction(5, 2), ["keep=2"], (1, 20), "3 checkpoints"),
        # Milestones and exports are saved too.
        (0, ["keep=1", "milestones=8"], (1, 20), "4 checkpoints"),
        (4, ["keep=all", "export_every=8"], (1, 20), "5 checkpoints and 2 exports"),
        (0, ["keep=2", "export_every=6"], (1, 20), "3 checkpoints and 3 exports"),
        (0, ["keep=2", "push=me/model"], (1, 20), "1 checkpoint and 1 export"),
        (0, ["keep=2", "push=me/model", "export_every=10"], (1, 20), "2 checkpoints and 2 exports"),
    ],
    ids=str,
)
def test_disk_warnings_name_checkpoints_beyond_the_disk(
    tmp_path: Path,
    free: int,
    every: int | Fraction,
    words: list[str],
    steps: tuple[int, int],
    held: str,
):
    made = recipe(tmp_path, *(f"checkpoint.{word}" for word in words))
    # A checkpoint has 12 bytes per parameter, an export 4.
    numbers = [int(number) for number in re.findall(r"\d+", held)]
    count = free // sum(n * size for n, size in zip(numbers, (12, 4), strict=False))
    table = made.checkpoint
    intervals = (every, table.milestones, table.export_every)
    options: dict[str, Any] = {
        "first_step": steps[0],
        "save_steps": EventSteps(intervals, steps[1]),
    }
    assert list(disk_warnings(tmp_path / "run", made, leaves(count), **options)) == []
    (doubt,) = disk_warnings(tmp_path / "run", made, leaves(count + 1), **options)
    assert f"will hold {held}" in re.sub(r" of \d+ bytes", "", doubt)


def test_disk_warnings_are_for_steps_that_are_left(tmp_path: Path, free: int):
    made = recipe(tmp_path)
    options: dict[str, Any] = {"first_step": 21, "save_steps": EventSteps((5,), 20)}
    assert not list(disk_warnings(tmp_path / "run", made, leaves(free), **options))


# Whether a run may resume with other keys, data or another learning rate schedule.

STEPS, MORE_STEPS = 20, 30


def schedule(kind: Any, **changes: Any) -> LRSchedule:
    """Return the schedule of a run of STEPS steps."""
    fields: dict[str, Any] = {"peak": 1e-2, "end": 1e-3, "warmup": 3, "decay": STEPS}
    return LRSchedule(kind=kind, **(fields | changes))


def check(before: LRSchedule, after: LRSchedule) -> None:
    """Check that a run with one schedule may resume with another one."""
    job = make_job(
        make_setup(), steps=MORE_STEPS, manifest_fields={"rate": after.manifest_fields()}
    )
    check_resumable({"rate": before.manifest_fields()}, job, changed={}, step=1)


@pytest.mark.parametrize("kind", ["constant", "rsqrt"])
def test_schedule_without_a_decay_can_be_extended(kind: str):
    check(schedule(kind), schedule(kind, decay=MORE_STEPS, end=0.0))
    with pytest.raises(PrepError, match="warmup 3 -> 4"):
        check(schedule(kind), schedule(kind, warmup=4, decay=MORE_STEPS))


def test_error_names_the_changed_schedule():
    with pytest.raises(PrepError) as caught:
        check(schedule("linear"), schedule("wsd", cooldown=5))
    assert caught.value.what == "the learning rate schedule has changed since the last start"
    assert caught.value.why == 'kind "linear" -> "wsd", cooldown not set -> 5'
    assert caught.value.hint.startswith("`--restart`")


def test_later_end_of_the_decay_has_a_hint():
    with pytest.raises(PrepError, match="decay 20 -> 30") as caught:
        check(schedule("cosine"), schedule("cosine", decay=MORE_STEPS))
    assert caught.value.hint.startswith("`--set optimizer.decay_steps=20` keeps it; `--restart`")


def test_cooldown_derived_from_a_later_end_has_the_hint_too():
    with pytest.raises(PrepError, match="decay 20 -> 30, cooldown 2 -> 3") as caught:
        check(schedule("wsd", cooldown=2), schedule("wsd", decay=MORE_STEPS, cooldown=3))
    assert caught.value.hint.startswith("`--set optimizer.decay_steps=20` keeps")


@pytest.mark.parametrize("key", ["data.path", "data.eval_path", "data.tokenizer"])
def test_moved_data_may_have_another_path(key: str):
    job = make_job(make_setup(), manifest_fields={"data": "digest"})
    changed = {key: (("a",), ("b",))}
    check_changed_keys(changed)
    check_resumable({"data": "digest"}, job, changed=changed, step=1)
    with pytest.raises(
        PrepError, match="the data has changed since the run began - other digest, now digest"
    ):
        check_resumable({"data": "other digest"}, job, changed=changed, step=1)


@pytest.mark.parametrize(
    ("change", "is_allowed"),
    [
        ({"path": "moved.txt"}, True),
        ({"eval_path": ["b", "c"]}, True),
        ({"weight": 2.0}, False),
        ({"name": "x"}, False),
    ],
)
def test_moved_sources_may_have_other_paths(change: dict[str, Any], is_allowed: bool):
    source = {"name": "web", "path": "web.txt", "eval_path": ["a", "b"], "weight": 1.0}
    before = ({"name": "wiki", "path": "wiki.txt", "weight": 1.0}, source)
    changed = {"data.sources": (before, (before[0], source | change))}
    with (
        nullcontext()
        if is_allowed
        else pytest.raises(PrepError, match=r"the last start - data\.sources: ")
    ):
        check_changed_keys(changed)


def test_sources_instead_of_a_path_are_another_recipe():
    changed = {"data.sources": (None, ({"name": "wiki", "path": "wiki.txt"},))}
    with pytest.raises(PrepError, match=r"data\.sources: not set -> "):
        check_changed_keys(changed)


# The environment that decides how sums are rounded, and the warning about its changes.

BEFORE = {"device": "cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "xla_flags": "", "cores": 2}


def test_environment_has_versions_flags_and_cores(monkeypatch: pytest.MonkeyPatch):
    # XLA reads its flags when the backend starts, which this call does.
    sharding = make_sharding_context(parse_mesh("1,1,1"), devices=jax.devices()[:1])
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_force_host_platform_device_count=8  --xla_a=2")
    assert rounding_environment(sharding) == {
        "device": "cpu",
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "xla_flags": "--xla_a=2 --xla_b=1",
        "cores": len(os.sched_getaffinity(0)),
    }


@pytest.mark.parametrize(
    ("before", "changes", "text"),
    [
        (BEFORE, {}, ""),
        (None, {}, ""),
        (BEFORE, {"jaxlib": "0.11"}, "jaxlib 0.10.2 -> 0.11"),
        (
            BEFORE,
            {"xla_flags": "--xla_a=1", "cores": 4},
            "XLA_FLAGS none -> --xla_a=1, cores 2 -> 4",
        ),
        (
            BEFORE,
            {"device": "NVIDIA H100", "cores": None},
            "device cpu -> NVIDIA H100, cores 2 -> none",
        ),
    ],
)
def test_warning_lists_changed_environment_values(before: Any, changes: dict[str, Any], text: str):
    warning = environment_warning(before, BEFORE | changes, step=7)
    assert warning == (f"results may differ in the last bits: since step 7, {text}" if text else "")


# Lines about a run before its first step.


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (
            LoraConfig(4, 8.0, ("attn.q", "attn.v")),
            "adapters of rank 4 for attn.q, attn.v, scaled by 2",
        ),
        (
            LoraConfig(
                rank=4,
                alpha=8.0,
                targets=("attn.*",),
                target_parameters=("mlp.*",),
                rank_pattern={"mlp.down": 8},
                alpha_pattern={"attn.q": 4.0},
                modules_to_save=("embed.tokens", "head"),
            ),
            "adapters of rank 4 for attn.*, mlp.* of experts, scaled by 2; rank 8 for mlp.down; alpha 4 for attn.q;"
            " embed.tokens, head trained as a whole",
        ),
        (
            LoraConfig(4, 8.0, (), target_parameters=("mlp.up",)),
            "adapters of rank 4 for mlp.up of experts, scaled by 2",
        ),
    ],
)
def test_adapters_are_described_with_all_settings(lora: LoraConfig, expected: str):
    config = FAMILY_CONFIGS["mixtral"]
    text = adapters_text(build_model(FAMILIES["mixtral"], config, is_tied=False, lora=lora))
    described, _, share = text.rpartition("; ")
    assert described == expected
    assert re.fullmatch(r"[\d,]+ of [\d,]+ parameters are trained", share)
