"""Hints for keys of other trainers, and the page about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.make_recipe_errors import GOOD
from tests.helpers.doc_tables import check_names, code_in, recipe_keys, table_rows
from tests.trainer.recipe.test_errors import error_of, replaced
from trainer.recipe import load_recipe, option_hint
from trainer.recipe.formatting import example_value, to_toml
from trainer.recipe.hints import (
    accepts,
    advice_for,
    correct_value,
    guess_key,
    key_for_synonym,
    unknown_key_hint,
)
from trainer.recipe.hints import option_hint as hint_of_option
from trainer.recipe.key_types import alternatives
from trainer.recipe.loading import MAX_SHOWN
from trainer.recipe.other_trainers import ADVICE, NAMES, OTHER_VALUES, VALUE_NAMES
from trainer.recipe.tables import KEY_SCHEMAS

# Hints of recipe errors: all errors are reported, and names of other trainers are translated.

LIBRARY_WORDS = re.compile(
    r"Input should|Field required|Extra inputs|type=|pydantic|tomllib|validation error",
    re.IGNORECASE,
)


OTHER_TRAINERS_RECIPE = """\
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


OTHER_TRAINERS_ERRORS = [
    "x.toml:1: unknown key `learning_rate` - `lr = 3e-4` in [optimizer]",
    'x.toml:3: unknown key `model.model_name_or_path` - `path = "m"`',
    'x.toml:4: unknown key `model.bf16` - `dtype = "bfloat16"`',
    'x.toml:5: unknown key `model.gradient_checkpointing` - `remat_policy = "nothing_saveable"`',
    "x.toml:9: unknown key `data.block_size` - `seq_length = 1024`",
    "x.toml:11: unknown key `batch.per_device_train_batch_size` - `per_device = 4`",
    "x.toml:13: unknown key `train.num_train_epochs` - `epochs = 3`",
    "x.toml:14: unknown key `train.resume` - run the same command again to resume",
    "x.toml:16: unknown key `eval.every` - `eval_every = 10` in [train]",
    "x.toml:17: unknown key `training` - did you mean `train`?",
    "x.toml:18: unknown key `training.seq_len` - `seq_length = 10` in [data]",
    'x.toml:20: `optimizer.b1` is "0.9" - it takes a number >= 0 and < 1: decay rate of the first moment - `b1 = 0.9`',
]


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def test_all_errors_are_reported_with_lines():
    error = error_of(OTHER_TRAINERS_RECIPE)
    assert error.what == f"x.toml has {len(OTHER_TRAINERS_ERRORS)} errors"
    assert error.why.split("\n") == OTHER_TRAINERS_ERRORS


def test_override_errors_follow_file_errors():
    error = error_of(
        replaced("size = 4", "siez = 4"), "optimizer.lr=abc", "learning_rate=1", "seed"
    )
    places = [line.partition(": ")[0] for line in error.why.split("\n")]
    assert places == ["x.toml:9", "`--set`", "`--set seed`", "`--set`"]


def test_empty_recipe_lists_all_required_keys():
    missing = re.findall(r"`([a-z_.]+)` is missing", error_of("").why)
    assert missing == ["model.path", "data.path", "data.seq_length", "optimizer.lr"]


def test_required_key_under_other_name_is_not_missing():
    error = error_of(replaced("lr = 1e-3", "learning_rate = 1e-3"))
    assert str(error) == "x.toml:11: unknown key `optimizer.learning_rate` - `lr = 1e-3`"


def test_unrelated_unknown_key_does_not_hide_missing_key():
    error = error_of(replaced("lr = 1e-3", "rl = 1e-3"))
    assert [line.partition(" - ")[0] for line in error.why.split("\n")] == [
        "x.toml:10: `optimizer.lr` is missing",
        "x.toml:11: unknown key `optimizer.rl`",
    ]


def test_conflicts_are_reported_with_unknown_keys():
    text = GOOD.replace("size = 4", "per_device = 1\nper_replica = 2").replace(
        "lr = 1e-3", "lr = 1e-3\nbeta1 = 0.5"
    )
    first, second = error_of(text).why.split("\n")
    assert first.startswith("x.toml:10: `batch.per_device` is 1 and `batch.per_replica` is 2")
    assert second == "x.toml:13: unknown key `optimizer.beta1` - `b1 = 0.5`"


def test_conflict_caused_by_unknown_key_is_not_reported():
    error = error_of(replaced("steps = 20", "max_steps = 20"))
    assert str(error) == "x.toml:13: unknown key `train.max_steps` - `steps = 20`"


def test_errors_beyond_the_maximum_are_counted():
    lines = error_of(GOOD + "".join(f"key_{number} = 1\n" for number in range(2000))).why.split(
        "\n"
    )
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1] == f"and {2000 - MAX_SHOWN:,} more"


def test_table_of_another_trainer_is_translated_by_key():
    error = error_of(GOOD + "[lr_scheduler]\nwarmup_steps = 3\ndecay_type = 'cosine'\n")
    assert error.why.split("\n") == [
        "x.toml:15: unknown key `lr_scheduler.warmup_steps` - `warmup_steps = 3` in [optimizer]",
        'x.toml:16: unknown key `lr_scheduler.decay_type` - `schedule = "cosine"` in [optimizer]',
    ]


def test_nested_table_of_another_trainer_is_translated_by_key():
    error = error_of(
        GOOD + "[data_args]\nmode = 'clm'\n[data_args.train]\ndataset = 'c4'\ndataset_name = 'en'\n"
    )
    assert error.why.split("\n") == [
        "x.toml:14: unknown key `data_args` - did you mean `data`?",
        "x.toml:15: unknown key `data_args.mode` - `data.fields`: brackets for the encoder, none for clm",
        'x.toml:17: unknown key `data_args.train.dataset` - `path = "data/train.txt"` in [data]',
        'x.toml:18: unknown key `data_args.train.dataset_name` - `config = "en"` in [data]',
    ]


def names_in(table: Mapping[str, str]) -> list[str]:
    """Return all names of a table of other trainers."""
    return " ".join(table.values()).split()


def test_each_name_of_another_trainer_has_one_meaning():
    for table in (NAMES, ADVICE, VALUE_NAMES):
        names = names_in(table)
        assert len(names) == len({*names})
    keys, advice = {*names_in(NAMES)}, {*names_in(ADVICE)}
    assert not keys & advice
    assert not (keys | advice) & {*KEY_SCHEMAS}
    assert {*NAMES} <= {*KEY_SCHEMAS}
    assert {*OTHER_VALUES.split()} <= keys


def test_synonym_gives_hint_with_its_key():
    for names in NAMES.values():
        for name in names.split():
            key = key_for_synonym(name)
            assert name in NAMES[key].split()
            hint = option_hint(f"--{name.replace('_', '-')}", "")
            assert hint.startswith(f"`--set {key}="), name


def test_foreign_setting_without_a_key_gets_advice():
    tables = {key.partition(".")[0] for key in KEY_SCHEMAS if "." in key}
    for advice, names in ADVICE.items():
        for name in names.split():
            assert advice_for(name) == option_hint(f"--{name}", "1") == advice
        assert {*re.findall(r"\[(\w+)\]", advice)} <= tables, advice


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
        ("model.dtype", "fp16", '"float16"'),
        ("checkpoint.keep", "All", '"all"'),
        ("data.path", ["a", 3], ""),
        ("optimizer.type", "adamw_torch", '"adamw"'),
    ],
)
def test_correct_value_returns_valid_text_or_nothing(key: str, value: Any, text: str):
    assert correct_value(key, value) == text


@pytest.mark.parametrize("value", VALUE_NAMES)
def test_value_synonyms_stand_for_existing_values(value: str):
    types = [
        alternative
        for key_schema in KEY_SCHEMAS.values()
        for alternative in alternatives(key_schema)
    ]
    choices = [choice for alternative in types for choice in alternative.get("enum", ())]
    assert value in [*choices, "adamw", "float16"]


def test_examples_are_accepted_by_their_keys():
    for key, key_schema in KEY_SCHEMAS.items():
        examples: list[Any] = [*key_schema.get("examples", [key_schema.get("default")])]
        assert all(accepts(key, example) for example in examples), key
        assert correct_value(key, examples[0]) == example_value(key_schema), key


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_to_toml_float_reads_back_equal(value: float):
    assert float(to_toml(value)) == value
    assert len(to_toml(value)) <= len(repr(value))


@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("--resume", "", "run the same command again to resume"),
        ("--dtype", "bf16", "`--set model.dtype=bfloat16`"),
        ("--learning-rate", "3e-4", "`--set optimizer.lr=3e-4`"),
        ("--lr", "nonsense", "`--set optimizer.lr=2e-5`"),
        ("--mesh", "1,8,1", "`--set mesh=1,8,1`"),
        ("--bf16", "", "`--set model.dtype=bfloat16`"),
        ("--frobnicate", "1", ""),
    ],
)
def test_option_of_another_trainer_gives_hint(option: str, value: str, hint: str):
    assert option_hint(option, value) == hint


def test_hint_shows_the_example_where_values_differ():
    assert unknown_key_hint("attn_pdrop", 0.2) == unknown_key_hint("attn_pdrop", 0.3)
    assert "0.2" not in unknown_key_hint("attn_pdrop", 0.2)
    assert unknown_key_hint("learning_rate", 0.3) == "`lr = 0.3` in [optimizer]"


def test_override_hints_are_valid_overrides():
    error = error_of(GOOD, "bf16=true", "n_model_shards=4", "max_grad_norm=0.5")
    sets = re.findall(r"`--set ([^`]+)`", error.why)
    recipe = load_recipe(Path("x.toml"), sets).recipe
    assert (recipe.model.dtype, recipe.mesh, recipe.optimizer.clip_norm) == (
        "bfloat16",
        "1,8,1",
        0.5,
    )


@pytest.mark.parametrize(
    "text",
    [
        OTHER_TRAINERS_RECIPE,
        "",
        "a = [\n",
        "= 3\n",
        "[a\n",
        "a = 'x\n",
        "a.b = 1\na = 2\n",
        "[a]\n[a]\n",
    ],
)
def test_errors_hide_library_messages(text: str):
    assert not LIBRARY_WORDS.search(str(error_of(text)))


@pytest.mark.parametrize(
    ("key", "command"),
    [
        ("eval_args.max_generation_new_tokens", "`prep eval RUN --metric NAME --seq-length N`"),
        ("max_new_tokens", "`prep generate RUN --max-new-tokens N`"),
        ("eval_predictor", "`prep eval RUN --metric NAME`"),
        ("eval_metric_fn", "`prep eval RUN --metric NAME`"),
    ],
)
def test_generation_hints_name_commands_of_migration_pages(key: str, command: str):
    assert unknown_key_hint(key, 1).startswith(command)
    if key.partition(".")[0] in ("eval_args", "eval_predictor", "eval_metric_fn"):
        page = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"
        rows = page.read_text().splitlines()
        assert command.replace(" RUN", "") in next(row for row in rows if f"`{key}`" in row)


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("lora.r", 8, "`rank = 8`"),
        ("lora.target_modules", ["q_proj", "v_proj"], '`targets = ["attn.*", "mlp.*"]`'),
        ("lora.lora_dropout", 0.1, "`dropout = 0.1`"),
        ("lora.use_dora", True, "DoRA is not supported"),
    ],
)
def test_settings_of_peft_lead_to_the_keys_of_lora(key: str, value: Any, hint: str):
    assert hint in unknown_key_hint(key, value)


# The page docs/how-to/coming-from.md: what it names exists, and hints for old names agree with it.

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"


# Titles of the first column in tables with settings.
SETTING_TITLES = ("flag", "setting", "argument")


# Titles of the first column in tables from tasks to commands and assignments with values.
TASK_TITLES = ("redco", "what you do there")


SETTING = re.compile(r"[a-z]\w*(\.\w+)*")


KEY = re.compile(r"(?!prep\.)[a-z_]+\.[a-z_]+( = .*)?")


NO_COUNTERPART = ("not needed", "not supported")


# Setting of another system, and the cell with its counterparts.
SETTINGS = [
    (setting, cells[1])
    for title, cells in table_rows(PAGE)
    if title in SETTING_TITLES and cells[0].startswith("`")
    for setting in code_in(cells[0])
]


def test_each_system_has_a_section():
    sections = re.findall(r"^## (.*)", PAGE.read_text(), re.MULTILINE)
    others = ["MaxText", "Levanter", "torchtitan", "torchtune", "llama.cpp and GGUF"]
    assert sections == [
        *others, "GPT-Neo example", "llamabpt", "EasyLM", "redco", "flaxlm and JAXSeq",
    ]  # fmt: skip
    assert len(SETTINGS) > 250
    assert all(SETTING.fullmatch(setting) for setting, _ in SETTINGS)


def test_keys_and_commands_of_the_settings_exist(capsys: pytest.CaptureFixture[str]):
    for title, cells in table_rows(PAGE):
        if title in (*SETTING_TITLES, "in the script", "program"):
            assert code_in(cells[1]) or cells[1] in NO_COUNTERPART, cells
            check_names(code_in(cells[1]), capsys)


def test_keys_and_commands_of_the_tasks_exist(capsys: pytest.CaptureFixture[str]):
    for title, cells in table_rows(PAGE):
        if title in TASK_TITLES:
            names = code_in(cells[1])
            check_names([name for name in names if KEY.fullmatch(name)], capsys)
            check_names([name for name in names if name.startswith("prep ")], capsys)


def test_hint_for_a_setting_agrees_with_the_page():
    for setting, counterparts in SETTINGS:
        keys, advice = recipe_keys(code_in(counterparts)), advice_for(setting)
        assert advice or keys, f"{setting} has neither a key nor advice"
        if advice:
            assert not keys or any(f"`{key}" in advice for key in keys), setting
        elif setting not in KEY_SCHEMAS:
            assert guess_key(setting) in keys, setting
            assert hint_of_option(f"--{setting}", ""), setting
