"""Hints of recipe errors: all faults at once, and names and values of other trainers answered with ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.recipe.test_errors import GOOD, error_of, replaced
from trainer.recipe import load_recipe, option_hint
from trainer.recipe.corrections import VALUE_SYNONYMS, correct_value, is_accepted
from trainer.recipe.diagnostics import MAX_SHOWN
from trainer.recipe.formatting import alternatives, example_value, to_toml
from trainer.recipe.synonyms import ADVICE, SYNONYMS, VALUE_TRANSLATIONS, advice_for, key_for_synonym, translate_value
from trainer.recipe.tables import KEY_SCHEMAS

LIBRARY = re.compile(r"Input should|Field required|Extra inputs|type=|pydantic|tomllib|validation error", re.IGNORECASE)
OTHERS = """\
learning_rate = 3e-4
[model]
model_name_or_path = "m"
bf16 = true
gradient_checkpointing = true
[data]
type = "text"
path = "train.txt"
block_size = 1024
[batch]
per_device_train_batch_size = "4"
[train]
num_train_epochs = 3
resume = true
[eval]
every = 10
[training]
seq_len = 10
[optimizer]
b1 = "0.9"
"""
OTHERS_FAULTS = [
    "x.toml:1: unknown key `learning_rate` - `lr = 3e-4` in [optimizer]",
    'x.toml:3: unknown key `model.model_name_or_path` - `path = "m"`',
    'x.toml:4: unknown key `model.bf16` - `dtype = "bfloat16"`',
    'x.toml:5: unknown key `model.gradient_checkpointing` - `remat_policy = "nothing_saveable"`',
    "x.toml:9: unknown key `data.block_size` - `seq_length = 1024`",
    "x.toml:11: unknown key `batch.per_device_train_batch_size` - `per_device = 4`",
    "x.toml:13: unknown key `train.num_train_epochs` - `epochs = 3`",
    "x.toml:14: unknown key `train.resume` - a run resumes by itself: run the same command again",
    "x.toml:16: unknown key `eval.every` - `eval_every = 10` in [train]",
    "x.toml:17: unknown key `training` - did you mean `train`?",
    "x.toml:18: unknown key `training.seq_len` - `seq_length = 10` in [data]",
    'x.toml:20: `optimizer.b1` is "0.9" - it takes a number >= 0 and < 1: decay of the first moment - `b1 = 0.9`',
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_all_faults_are_reported_with_their_lines():
    error = error_of(OTHERS)
    assert error.what == f"x.toml has {len(OTHERS_FAULTS)} errors"
    assert error.why.split("\n") == OTHERS_FAULTS


def test_faults_of_set_follow_those_of_the_file():
    error = error_of(replaced("size = 4", "siez = 4"), "optimizer.lr=abc", "learning_rate=1", "seed")
    places = [line.partition(": ")[0] for line in error.why.split("\n")]
    assert places == ["x.toml:9", "--set", "--set seed", "--set"]


def test_an_empty_recipe_lists_all_required_keys():
    missing = re.findall(r"`([a-z_.]+)` is missing", error_of("").why)
    assert missing == ["model.path", "data.type", "data.path", "data.seq_length", "optimizer.lr"]


def test_a_renamed_required_key_is_not_missing_too():
    error = error_of(replaced("lr = 1e-3", "learning_rate = 1e-3"))
    assert str(error) == "x.toml:11: unknown key `optimizer.learning_rate` - `lr = 1e-3`"


def test_an_unrelated_unknown_key_leaves_a_missing_one():
    error = error_of(replaced("lr = 1e-3", "rl = 1e-3"))
    assert [line.partition(" - ")[0] for line in error.why.split("\n")] == [
        "x.toml:10: `optimizer.lr` is missing",
        "x.toml:11: unknown key `optimizer.rl`",
    ]


def test_conflicts_are_reported_beside_unknown_keys():
    text = GOOD.replace("size = 4", "per_device = 1\nper_replica = 2").replace("lr = 1e-3", "lr = 1e-3\nbeta1 = 0.5")
    first, second = error_of(text).why.split("\n")
    assert first.startswith("x.toml:10: `batch.per_device` is 1 and `batch.per_replica` is 2")
    assert second == "x.toml:13: unknown key `optimizer.beta1` - `b1 = 0.5`"


def test_a_conflict_that_an_unknown_key_explains_is_left_out():
    error = error_of(replaced("steps = 20", "max_steps = 20"))
    assert str(error) == "x.toml:13: unknown key `train.max_steps` - `steps = 20`"


def test_many_faults_are_counted_beyond_the_first():
    lines = error_of(GOOD + "".join(f"key_{number} = 1\n" for number in range(2000))).why.split("\n")
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1] == f"and {2000 - MAX_SHOWN:,} more"


def test_a_table_of_another_trainer_is_answered_by_key():
    error = error_of(GOOD + "[lr_scheduler]\nwarmup_steps = 3\ndecay_type = 'cosine'\n")
    assert error.why.split("\n") == [
        "x.toml:15: unknown key `lr_scheduler.warmup_steps` - `warmup_steps = 3` in [optimizer]",
        'x.toml:16: unknown key `lr_scheduler.decay_type` - `schedule = "cosine"` in [optimizer]',
    ]


def test_synonyms_name_existing_keys_and_no_key_of_ours():
    assert {*SYNONYMS} <= {*KEY_SCHEMAS}
    names = [name for each in SYNONYMS.values() for name in each]
    assert len(names) == len({*names}), "a name stands for one key"
    assert not {*names, *ADVICE} & {*KEY_SCHEMAS}
    assert not {*names} & {*ADVICE}
    assert {*VALUE_TRANSLATIONS} <= {*names}


@pytest.mark.parametrize("name", [name for names in SYNONYMS.values() for name in names])
def test_each_synonym_is_answered_with_its_key(name: str):
    key = key_for_synonym(name)
    assert name in SYNONYMS[key]
    hint = option_hint(f"--{name.replace('_', '-')}", "")
    assert hint.startswith(f"`--set {key}=")


@pytest.mark.parametrize("name", ADVICE)
def test_a_setting_without_a_key_is_answered_with_advice(name: str):
    assert advice_for(name) == option_hint(f"--{name}", "1") == ADVICE[name]
    keys = re.findall(r"\[(\w+)\]", ADVICE[name])
    assert all(any(key.startswith(f"{table}.") for key in KEY_SCHEMAS) for table in keys)


@pytest.mark.parametrize(
    ("name", "value", "ours"),
    [
        ("bf16", True, "bfloat16"),
        ("bf16", False, "float32"),
        ("training.gradient_checkpointing", False, "none"),
        ("n_model_shards", 4, "-1,1,4"),
        ("save_only_model", True, False),
        ("validation_split_percentage", 5, 0.05),
        ("validation_split_percentage", "five", "five"),
        ("learning_rate", 1.0, 1.0),
    ],
)
def test_values_of_other_trainers_are_translated(name: str, value: Any, ours: Any):
    assert translate_value(name, value) == ours


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("optimizer.lr", "1e-3", "1e-3"),
        ("optimizer.lr", "inf", ""),
        ("train.steps", 20.0, "20"),
        ("train.steps", "1e4", "10000"),
        ("train.steps", 0, ""),
        ("train.steps", True, ""),
        ("data.shuffle", "True", "true"),
        ("mesh", [1, 8, 1], '"1,8,1"'),
        ("model.dtype", "BF16", '"bfloat16"'),
        ("model.dtype", "fp16", ""),
        ("checkpoint.keep", "All", '"all"'),
        ("data.path", ["a", 3], ""),
        ("optimizer.type", "adamw_torch", '"adamw"'),
    ],
)
def test_a_value_is_corrected_to_what_the_key_takes(key: str, value: Any, text: str):
    assert correct_value(value, KEY_SCHEMAS[key]) == text


@pytest.mark.parametrize("value", VALUE_SYNONYMS)
def test_value_names_stand_for_values_that_exist(value: str):
    taken = [each for part in KEY_SCHEMAS.values() for option in alternatives(part) for each in option.get("enum", ())]
    assert value in [*taken, "adamw", "float16"]


@pytest.mark.parametrize("key", KEY_SCHEMAS)
def test_every_example_fits_its_key(key: str):
    part = KEY_SCHEMAS[key]
    examples = part.get("examples") or [part["default"]]
    assert all(is_accepted(each, part) for each in examples)
    assert correct_value(examples[0], part) == example_value(part)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_spelled_float_reads_back_the_same(value: float):
    assert float(to_toml(value)) == value
    assert len(to_toml(value)) <= len(repr(value))


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("--resume", "", "a run resumes by itself: run the same command again"),
        ("--dtype", "bf16", "`--set model.dtype=bfloat16`"),
        ("--learning-rate", "3e-4", "`--set optimizer.lr=3e-4`"),
        ("--lr", "nonsense", "`--set optimizer.lr=2e-5`"),
        ("--mesh", "1,8,1", "`--set mesh=1,8,1`"),
        ("--bf16", "", "`--set model.dtype=bfloat16`"),
        ("--frobnicate", "1", ""),
    ],
)
def test_an_option_of_another_trainer_is_answered(option: str, value: str, hint: str):
    assert option_hint(option, value) == hint


def test_set_takes_what_hints_of_set_show():
    error = error_of(GOOD, "bf16=true", "n_model_shards=4", "max_grad_norm=0.5")
    sets = re.findall(r"`--set ([^`]+)`", error.why)
    recipe = load_recipe(Path("x.toml"), sets).recipe
    assert (recipe.model.dtype, recipe.mesh, recipe.optimizer.clip_norm) == ("bfloat16", "-1,1,4", 0.5)


@pytest.mark.parametrize("text", [OTHERS, "", "a = [\n", "= 3\n", "[a\n", "a = 'x\n", "a.b = 1\na = 2\n", "[a]\n[a]\n"])
def test_errors_speak_in_no_librarys_voice(text: str):
    assert not LIBRARY.search(str(error_of(text)))
