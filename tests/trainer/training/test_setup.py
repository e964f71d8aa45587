"""The setup of a step: its kernel and tiles, plans compiled apart, and shapes of data sets found by their columns."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.models.attention_kernels import (
    ANY_ACCELERATOR,
    AttentionFeature,
    AttentionNeeds,
    DeviceKind,
    KernelChoice,
    rank_kernels,
)
from prepcli.models.layer_config import DropoutConfig
from prepcli.models.mesh import parse_mesh
from prepcli.models.registry import family_of
from prepcli.models.rules import DEFAULT_RULES
from tests.helpers import runs
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import LLAMA
from tests.trainer.data.test_chat_turns import STOPS
from tests.trainer.planning.test_memory_estimate import llama
from tests.trainer.run.test_checks import RECIPE
from trainer.data.chat_template import ChatTemplate
from trainer.data.columns import find_data_shape
from trainer.data.examples import ExampleSettings
from trainer.data.fields import compile_fields
from trainer.data.readers.reader import Record
from trainer.distributed.sharding import ShardingContext, make_sharding_context
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model, model_from_manifest
from trainer.planning.model_shapes import override_config
from trainer.planning.step_inputs import attention_needs
from trainer.recipe import Recipe, load_recipe
from trainer.recipe.data_table import Data
from trainer.recipe.text_fields import CHAT_FORMATS
from trainer.training import setup as step_setup
from trainer.training.compiled_plan import compile_plan, compiled_plan
from trainer.training.feed import batch_shapes
from trainer.training.setup import build_step_setup, choose_kernel, first_correct

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_stored_rope_type_is_kept_with_mrope(tmp_path: Path):
    config = {**LLAMA, "rope_scaling": YARN}
    manifest = {"config": config, "towers": {"mrope": True, "model_type": "qwen2_vl"}}
    (tmp_path / "x.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "x.toml", ["model.rope_theta=2e4"]).recipe
    assert override_config(manifest, recipe)["config"]["rope_scaling"] == YARN | {"rope_theta": 2e4}


def build_forward_config(
    tmp_path: Path, *overrides: str, device: DeviceKind | None = None
) -> ForwardConfig:
    """Return the options of a step on two CPU devices, with 8 sequences of 300 tokens."""
    (tmp_path / "x.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "x.toml", ["data.seq_length=300", *overrides]).recipe
    model, sharding = (
        build_model(family_of(LLAMA), LLAMA, is_tied=False),
        ShardingContext(parse_mesh("1,2,1")),
    )
    return build_step_setup(
        recipe, model, sharding=sharding, kernel="blockwise", steps=9, device=device
    ).forward_config


@pytest.mark.parametrize(
    ("overrides", "device", "tile", "head_chunk_size"),
    [
        ((), None, (64, 64), 64),
        (("batch.accumulate=4",), None, (64, 64), 256),
        (("data.seq_length=2048",), None, (128, 128), 64),
        ((), ANY_ACCELERATOR, (512, 512), 512),
        (("model.q_chunk_size=512", "model.head_chunk_size=-1"), None, (512, 64), -1),
    ],
)
def test_step_has_the_sizes_of_recipe_or_devices(
    tmp_path: Path,
    overrides: tuple[str, ...],
    device: DeviceKind | None,
    tile: tuple[int, int],
    head_chunk_size: int,
):
    forward_config = build_forward_config(tmp_path, *overrides, device=device)
    assert forward_config.attention_options == AttentionOptions("blockwise", *tile)
    assert forward_config.head_chunk_size == head_chunk_size


# The attention kernel of a run: the recipe's, or the first that passes its numeric check.

HOPPER = DeviceKind("cuda", (9, 0))

NEEDS = AttentionNeeds(frozenset({AttentionFeature.CAUSAL}), "bfloat16", 64)


@pytest.fixture(autouse=True)
def _in_recipe_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.toml").write_text(RECIPE)


def load(*overrides: str) -> Recipe:
    """Load recipe.toml with overrides."""
    return load_recipe(Path("recipe.toml"), overrides).recipe


def fail_checks(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let the numeric check of some kernels fail, and that of all others pass."""
    monkeypatch.setattr(
        step_setup, "find_mismatch", lambda name, *_: "it is wrong" if name in names else ""
    )


def choose_auto(device: DeviceKind, length: int = 4096) -> tuple[KernelChoice, list[str]]:
    """Return the choice of `auto` on a device, and the warnings."""
    warnings: list[str] = []
    choices = rank_kernels("auto", NEEDS, device=device, length=length)
    return first_correct(choices, NEEDS, device, is_auto=True, warn=warnings.append), warnings


def test_needs_come_from_model_recipe_and_mesh():
    recipe = load("model.dtype=bfloat16", "model.remat_policy=dots_saveable")
    needs = attention_needs(
        recipe, llama(num_key_value_heads=2), parse_mesh("1,2,4"), DEFAULT_RULES
    )
    assert needs == AttentionNeeds(
        frozenset(
            {AttentionFeature.CAUSAL, AttentionFeature.GROUPED_HEADS, AttentionFeature.SAVED_SCORES}
        ),
        "bfloat16",
        8,
    )


def test_needs_include_random_masks():
    rates = DropoutConfig(attention=0.1, fcm_ratio=(0.0, 0.2))
    needs = attention_needs(load(), llama(), None, DEFAULT_RULES, rates)
    assert needs.features == {
        AttentionFeature.CAUSAL,
        AttentionFeature.DROPOUT,
        AttentionFeature.FCM,
    }


@pytest.mark.parametrize(("length", "name"), [(255, "reference"), (256, "blockwise")])
def test_auto_depends_on_the_length(monkeypatch: pytest.MonkeyPatch, length: int, name: str):
    fail_checks(monkeypatch)
    choice = choose_kernel(
        load(f"data.seq_length={length}"), llama(), ShardingContext(), warn=pytest.fail
    )
    assert choice.name == name
    assert "no kernel for cpu" in choice.reason


def test_auto_takes_the_kernel_of_the_platform_if_it_is_right(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch)
    assert choose_auto(HOPPER) == (KernelChoice("cudnn", "auto: the kernel for cuda"), [])


def test_auto_warns_and_falls_back_if_a_check_fails(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "cudnn")
    choice, warnings = choose_auto(HOPPER)
    assert str(choice) == (
        "attention blockwise (auto: sequences of more than 1,024 tokens; cudnn failed its numeric check)"
    )
    assert warnings == ["attention kernel `cudnn` failed its numeric check: it is wrong"]


def test_auto_ends_with_the_reference_kernel(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "cudnn", "blockwise", "reference")
    choice, warnings = choose_auto(HOPPER)
    assert choice.name == "reference"
    assert len(warnings) == 2


def test_failure_of_all_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "blockwise")
    choices = (KernelChoice("blockwise", "auto: the only one for split sequences"),)
    with pytest.raises(
        PrepError, match="all attention kernels failed their numeric check - blockwise failed"
    ):
        first_correct(choices, NEEDS, HOPPER, is_auto=True, warn=lambda _: None)


def test_requested_kernel_that_fails_its_check_is_an_error(monkeypatch: pytest.MonkeyPatch):
    fail_checks(monkeypatch, "blockwise")
    with pytest.raises(PrepError) as caught:
        choose_kernel(
            load("model.attention_kernel=blockwise"), llama(), ShardingContext(), warn=pytest.fail
        )
    assert not isinstance(caught.value, UsageError)
    assert str(caught.value) == (
        'attention kernel `blockwise` failed its numeric check - it is wrong - `model.attention_kernel = "auto"`'
    )


def test_requested_kernel_without_its_platform_is_a_usage_error():
    with pytest.raises(UsageError, match="it runs on cuda, not on cpu"):
        choose_kernel(
            load("model.attention_kernel=cudnn"), llama(), ShardingContext(), warn=pytest.fail
        )


def test_reference_kernel_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: Any) -> str:
        raise AssertionError("checked")

    monkeypatch.setattr(step_setup, "find_mismatch", refuse)
    assert choose_kernel(load(), llama(), ShardingContext(), warn=pytest.fail).name == "reference"


# Tests of compiling a recipe's training step in a process of its own.

MESH = "1,2,4"

TEXTS = {"type": "text", "path": ("nowhere.txt",)}

needs_libtpu = pytest.mark.skipif(find_spec("libtpu") is None, reason="needs the extra `tpu`")


def make_recipe(data: Mapping[str, Any] = TEXTS, **model: Any) -> Recipe:
    """Return a recipe whose checkpoint and data do not exist."""
    return Recipe.model_validate(
        {
            "name": "planned",
            "mesh": MESH,
            "model": {"path": "nowhere", "head_chunk_size": 5, **model},
            "data": {"seq_length": runs.LENGTH, **data},
            "batch": {"size": 8},
            # SGD compiles fast.
            "optimizer": {"type": "sgd", "lr": 1e-3, "warmup_ratio": 0.1},
            "train": {"epochs": 1},
        }
    )


def make_manifest(config: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a manifest that describe a model."""
    return {"config": config, "tied": False, "scan": True, "scan_axis": 0, "rules": []}


def test_plan_matches_the_training_step():
    """The process compiles for as many CPU devices as this one has."""
    recipe = make_recipe(remat_policy="nothing_saveable", param_dtype="bfloat16")
    manifest = make_manifest(runs.LLAMA)
    plan = compiled_plan(recipe, manifest, parse_mesh(MESH))
    sharding = make_sharding_context(parse_mesh(MESH))
    setup = build_step_setup(
        recipe, model_from_manifest(manifest), sharding=sharding, kernel="reference", steps=10
    )
    expected = compile_plan(
        setup, batch_shapes(runs.make_job(setup).train, 8, setup.sharding), "8 CPU devices"
    )
    assert (plan.target, plan.is_upper_bound) == ("8 CPU devices", True)
    assert plan.alias_nbytes >= 0.9 * plan.output_nbytes > 0, "the state is donated"
    cost_of_process = {"compile_s": 0, "host_nbytes": 0}
    assert plan.to_json() | cost_of_process == expected.to_json() | cost_of_process
    assert {collective.kind for collective in plan.collectives} >= {"all-gather", "all-reduce"}


SCHEDULES = {
    "decay steps": {"schedule": "linear", "warmup_ratio": 0.03, "decay_steps": 10_000},
    "restarts": {"schedule": "cosine_restarts", "cycles": 4},
}


# trainer/recipe/test_tables.py computes the rates of both with other numbers of steps.
@pytest.mark.parametrize("name", slow_except(SCHEDULES, ["decay steps"]))
def test_plan_of_epochs_needs_no_number_of_steps(name: str):
    recipe = make_recipe()
    optimizer = recipe.optimizer.model_copy(update={"warmup_ratio": None, **SCHEDULES[name]})
    recipe = Recipe.model_validate(
        recipe.model_copy(update={"optimizer": optimizer}).model_dump(mode="json")
    )
    plan = compiled_plan(recipe, make_manifest(runs.LLAMA), parse_mesh("1,1,1"))
    assert plan.alias_nbytes >= 0.9 * plan.output_nbytes > 0


def test_errors_of_the_process_are_raised():
    with pytest.raises(
        PrepError, match="a micro-batch of 8 does not divide among 16 replicas"
    ) as caught:
        compiled_plan(make_recipe(), make_manifest(runs.LLAMA), parse_mesh("1,16,1"))
    assert caught.value.code == USAGE


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tpu_plan_is_not_an_upper_bound(dtype: str, monkeypatch: pytest.MonkeyPatch):
    """XLA_FLAGS of the test suite are unknown to libtpu."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    recipe, manifest = make_recipe(dtype=dtype), make_manifest(runs.LLAMA)
    plan = compiled_plan(recipe, manifest, parse_mesh("1,2,2"), "v5e:2x2")
    assert (plan.target, plan.is_upper_bound) == ("v5e:2x2", False)
    assert min(plan.temp_nbytes, plan.alias_nbytes) > 0


@needs_libtpu
@pytest.mark.slow
def test_unknown_topology_is_a_usage_error():
    with pytest.raises(
        PrepError, match=r"unknown TPU topology 'v5p' - INVALID_ARGUMENT.* - for example"
    ) as caught:
        compiled_plan(make_recipe(), make_manifest(runs.LLAMA), parse_mesh("1,2,2"), "v5p")
    assert caught.value.code == USAGE


# Shapes of data sets found by their columns: the keys, the text and the parts with loss of public layouts.

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
HUMAN = {"from": "human", "value": "1+1?"}
GPT = {"from": "gpt", "value": "2"}
CALL = {"from": "function_call", "value": '{"name": "sum", "arguments": {"a": "1"}}'}
CHAT_TEXT = "<user>1+1?<|im_end|><assistant>⟦2<|im_end|>⟧"
# Twelve public layouts: columns of a record, the keys of its shape, its text with brackets around the parts with loss.
LAYOUTS: dict[str, tuple[dict[str, Any], tuple[str, str], str]] = {
    "ultrachat": (
        {"prompt": "1+1?", "prompt_id": "a", "messages": [USER, ANSWER]},
        ("chat", "messages"),
        CHAT_TEXT,
    ),
    "tulu-3": ({"id": "a", "messages": [USER, ANSWER], "source": "b"}, ("chat", "messages"), CHAT_TEXT),
    "conversation": ({"conversation": [USER, ANSWER]}, ("chat", "conversation"), CHAT_TEXT),
    "openhermes": (
        {"conversations": [HUMAN, GPT], "system_prompt": None, "source": "b"},
        ("sharegpt", "conversations"),
        CHAT_TEXT,
    ),
    "slim-orca": (
        {"conversations": [
            {"from": "system", "value": "Be kind", "weight": None},
            {"from": "human", "value": "1+1?", "weight": 0},
            {"from": "gpt", "value": "2", "weight": 1},
        ]},
        ("sharegpt", "conversations"),
        f"<system>Be kind<|im_end|>{CHAT_TEXT}",
    ),
    "glaive-toolcall": (
        {"conversations": [HUMAN, CALL, {"from": "observation", "value": "2"}, GPT], "system": "Be kind",
         "tools": '[{"name": "sum", "description": "", "parameters": {}}]'},
        ("sharegpt", "conversations"),
        "<system>Be kind<|im_end|><user>1+1?<|im_end|>"
        '<assistant>⟦sum({"a": "1"})<|im_end|>⟧<tool>2<|im_end|><assistant>⟦2<|im_end|>⟧',
    ),
    "trl-tldr": (
        {"prompt": "1+1?", "completion": " 2"},
        ("prompt_completion", "[prompt], completion"),
        "1+1?⟦ 2⟧",
    ),
    "trl-conversational": (
        {"prompt": [ANSWER, USER], "completion": [ANSWER]},
        ("chat", "[prompt], completion"),
        f"<assistant>2<|im_end|>{CHAT_TEXT}",
    ),
    "prompt-response": (
        {"prompt": "1+1?", "response": " 2"},
        ("prompt_response", "[prompt], response"),
        "1+1?⟦ 2⟧",
    ),
    "alpaca": (
        {"instruction": "Add.", "input": "1+1", "output": "2", "system": "Be kind", "history": [["a", "b"]]},
        ("alpaca", "[instruction+input], output"),
        "<system>Be kind<|im_end|><user>a<|im_end|><assistant>⟦b<|im_end|>⟧"
        "<user>Add.\n1+1<|im_end|><assistant>⟦2<|im_end|>⟧",
    ),
    "alpaca-no-input": (
        {"instruction": "1+1?", "input": "", "output": "2"},
        ("alpaca", "[instruction+input], output"),
        CHAT_TEXT,
    ),
    "dolly": (
        {"instruction": "Add.", "context": "1+1", "response": "2", "category": "c"},
        ("alpaca", "[instruction+context], response"),
        "<user>Add.\n1+1<|im_end|><assistant>⟦2<|im_end|>⟧",
    ),
    "gsm8k": ({"question": "1+1?", "answer": "2"}, ("question_answer", "[question], answer"), "1+1?⟦2⟧"),
    "wikitext": ({"text": "One."}, ("text", "text"), "⟦One.⟧"),
}  # fmt: skip


def make_data(path: Path | str, **keys: Any) -> Data:
    return Data(path=(str(path),), seq_length=8, **keys)


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def find(path: Path, **keys: Any) -> tuple[Data, list[str]]:
    notes: list[str] = []
    return find_data_shape(make_data(path, **keys), note=notes.append), notes


def settings_of(data: Data) -> ExampleSettings:
    template = None
    if data.format in CHAT_FORMATS:
        template = ChatTemplate("chat.jinja", TEMPLATE, ())
    return ExampleSettings(
        fields=data.fields or "",
        chat_template=template,
        chat_format=data.format if template else "chat",
        add_eos=False,
        stop_texts=STOPS,
    )


def shown(data: Data, record: dict[str, Any]) -> str:
    """Return the text of a record with brackets around its parts with loss."""
    text = ""
    for segment in (
        compile_fields(settings_of(data), vocab=9).build(Record(record, "a:1", 1)).target
    ):
        assert isinstance(segment.content, str)
        spans = segment.loss_spans
        if spans is None:
            spans = ((0, len(segment.content), 1.0),) if segment.weight else ()
        part = segment.content
        for start, end, _ in reversed(spans):
            part = f"{part[:start]}⟦{part[start:end]}⟧{part[end:]}"
        text += part
    return text


@pytest.mark.parametrize("name", LAYOUTS)
def test_public_layouts_are_found_by_their_columns(name: str, tmp_path: Path):
    record, shape, expected = LAYOUTS[name]
    data, notes = find(write_rows(tmp_path, record))
    assert (data.format, data.fields) == shape
    assert shown(data, record) == expected
    assert len(notes) == 1
    assert notes[0].startswith("the columns of the data mean `data.f")


@pytest.mark.parametrize(
    ("record", "keys"),
    [
        ({"text": "a", "messages": [USER]}, ["data.format=chat", "data.format=text"]),
        ({"prompt": "a", "instruction": "b", "output": "c"}, ["data.format=alpaca", "[prompt], output"]),
        ({"prompt": "a", "completion": "b", "response": "c"}, ["prompt_completion", "prompt_response"]),
        ({"conversations": [HUMAN], "messages": [USER]}, ["data.format=chat", "data.format=sharegpt"]),
    ],
)  # fmt: skip
def test_ambiguous_columns_print_the_keys(record: dict[str, Any], keys: list[str], tmp_path: Path):
    with pytest.raises(
        PrepError, match=r"rows\.jsonl:1: the shape of the data is not clear"
    ) as caught:
        find(write_rows(tmp_path, record))
    assert all(key in caught.value.hint for key in keys)


@pytest.mark.parametrize(
    ("record", "shape"),
    [
        ({"instruction": None, "input": "1+1", "output": "2"}, ("alpaca", "[instruction+input], output")),
        ({"prompt": "1+1?", "completion": None}, ("prompt_completion", "[prompt], completion")),
        ({"messages": None, "id": 1}, ("chat", "messages")),
        ({"text": "One.", "messages": None}, ("text", "text")),
    ],
)  # fmt: skip
def test_null_of_the_first_record_is_an_invalid_line(
    record: dict[str, Any], shape: tuple[str, str], tmp_path: Path
):
    data, _ = find(write_rows(tmp_path, record))
    assert (data.format, data.fields) == shape


@pytest.mark.parametrize(
    ("records", "shape"),
    [
        ([{"conversations": None}, {"conversations": [HUMAN]}], ("sharegpt", "conversations")),
        ([{"text": None, "messages": None}, {"messages": [USER]}], ("chat", "messages")),
    ],
)
def test_record_with_values_tells_the_shape_after_one_of_nulls(
    records: list[dict[str, Any]], shape: tuple[str, str], tmp_path: Path
):
    path = write_rows(tmp_path, *records)
    data, _ = find(path, bad_lines=1)
    assert (data.format, data.fields) == shape


@pytest.mark.parametrize("file_type", ["csv", "gzip", "list", "parquet"])
def test_shape_is_found_in_other_files(file_type: str, tmp_path: Path):
    row = {"question": "1+1?", "answer": "2"}
    names = {"csv": "a.csv", "gzip": "a.jsonl.gz", "list": "a.json", "parquet": "a.parquet"}
    path = tmp_path / names[file_type]
    if file_type == "csv":
        with path.open("w") as file:
            csv.writer(file).writerows([row.keys(), row.values()])
    elif file_type == "gzip":
        path.write_bytes(gzip.compress(json.dumps(row).encode()))
    elif file_type == "list":
        path.write_text(json.dumps([row, {"text": "other"}], indent=2))
    else:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    data, _ = find(path)
    assert (data.format, data.fields) == ("question_answer", "[question], answer")


def test_named_columns_are_not_looked_for(tmp_path: Path):
    path = write_rows(tmp_path, {"text": "a", "messages": [USER]})
    for keys in ({"fields": "text"}, {"format": "chat", "fields": "messages"}):
        data, notes = find(path, **keys)
        assert data.fields == keys["fields"]
        assert not notes


def test_text_files_have_no_shape(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("One.")
    data, notes = find(path)
    assert (data.format, data.fields, notes) == ("text", None, [])


def test_later_record_without_the_columns_is_an_error(tmp_path: Path):
    data, _ = find(write_rows(tmp_path, {"messages": [USER, ANSWER]}, {"text": "a"}))
    builder = compile_fields(settings_of(data), vocab=9)
    with pytest.raises(PrepError, match=r"rows\.jsonl:2: no column `messages`"):
        builder.build(Record({"text": "a"}, "rows.jsonl:2", 1))


@pytest.mark.parametrize(
    ("turn", "what"),
    [
        ({"from": "narrator", "value": "a"}, "turn 2 is from `narrator`"),
        ({"from": "gpt", "value": 3}, "turn 2 is no turn"),
        ({"from": "function_call", "value": "sum()"}, "turn 2: not JSON"),
        ({"from": "function_call", "value": "[1]"}, "turn 2 is no call"),
        ("a", "turn 2 is no object"),
    ],
)
def test_invalid_turns_name_their_place(turn: object, what: str, tmp_path: Path):
    record = {"conversations": [HUMAN, turn]}
    data, _ = find(write_rows(tmp_path, record))
    with pytest.raises(PrepError, match=f"a:1: column `conversations`: {what}"):
        shown(data, record)


def test_history_of_other_values_is_an_error(tmp_path: Path):
    record = {"instruction": "a", "output": "b", "history": [["c"]]}
    data, _ = find(write_rows(tmp_path, record))
    with pytest.raises(PrepError, match="`history` is not a list of pairs"):
        shown(data, record)


def test_columns_of_other_names_are_not_read(tmp_path: Path):
    """E.g. a time that Python does not have, next to the text."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    far = pa.array([10**17], pa.timestamp("ms"))
    parquet.write_table(pa.table({"text": ["One."], "time": far}), tmp_path / "rows.parquet")
    data, _ = find(tmp_path / "rows.parquet")
    assert (data.format, data.fields) == ("text", "text")
