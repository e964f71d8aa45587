"""Errors of recipes: one error lists all faults, with hints for keys of other trainers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import create_model

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.activation_memory import SAVES_SCORES
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig, resolve_dropout
from prepcli.models.registry import FAMILIES
from tests.golden.make_recipe_errors import GOOD, InvalidRecipe, read_cases
from tests.helpers.doc_tables import check_names, code_in, recipe_keys, table_rows
from trainer.recipe import load_recipe, option_hint, recipe_to_toml
from trainer.recipe.hints import OTHER_NAMES, OTHER_NAMES_TEXT, guess, unknown_key_hint
from trainer.recipe.key_types import STRICT, to_toml
from trainer.recipe.loading import MAX_SHOWN
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES, Model, Recipe


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(GOOD)


SIX_THOUSAND_DIGITS = "f" * 6000


def error_of(text: str | bytes, *overrides: str) -> PrepError:
    """Return the error of loading a recipe text with overrides."""
    Path("x.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(PrepError) as caught:
        load_recipe(Path("x.toml"), overrides)
    return caught.value


def replaced(line: str, by: str) -> str:
    """Return GOOD with a line replaced, or removed if `by` is empty."""
    assert f"{line}\n" in GOOD
    return GOOD.replace(f"{line}\n", f"{by}\n" if by else "")


# A recipe of which no line can be named.
NO_RECIPE = (
    "x.toml: not a recipe - lists or tables are nested too deeply, or a number has too many digits"
    " - `prep recipes` lists recipes"
)


@pytest.mark.parametrize("case", read_cases(), ids=lambda case: case.title)
def test_invalid_recipe_has_one_message(case: InvalidRecipe):
    error = error_of(case.text, *case.overrides)
    assert error.message == case.message
    assert error.code == USAGE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = " + "[" * 100_000, NO_RECIPE),
        ("seed = " + "1" * 5_000, NO_RECIPE),
        (f"seed = 0x{SIX_THOUSAND_DIGITS}\n", NO_RECIPE),
        (f"{'.'.join('a' * 3000)} = 1\n", NO_RECIPE),
        (f"model.{'.'.join('a' * 3000)} = 1\n", NO_RECIPE),
        (
            GOOD.encode() + b"# \xe9t\xe9\n",
            f"x.toml:14: not UTF-8 - byte {len(GOOD) + 2} of the file is 0xe9 - save the file as UTF-8",
        ),
    ],
    ids=["lists", "digits", "hexadecimal", "key", "key in a table", "bytes"],
)
def test_hostile_recipe_has_one_message(text: str | bytes, message: str):
    error = error_of(text)
    assert (error.message, error.code) == (message, USAGE)


CONTROL = "is invalid - a value is one line of UTF-8 text without control characters - remove the character"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            f"seed=0x{SIX_THOUSAND_DIGITS}",
            f'`--set`: `seed` is "0x{"f" * 54}... - it takes an integer >= 0 and <= 4294967295: seed of the order of'
            " sequences and of all other random numbers - `--set seed=42`",
        ),
        ("seed=1\nname='x'", f"`--set seed='1\\nname='\"'\"'x'\"'\"''` {CONTROL}"),
        ("name=\udce9", f"`--set name='\\udce9'` {CONTROL}"),
    ],
    ids=["digits", "two lines", "bytes"],
)
def test_hostile_override_has_one_message(override: str, message: str):
    error = error_of(GOOD, override)
    assert (error.message, error.code) == (message, USAGE)


def test_huge_source_length_is_refused_at_once():
    """The block was searched token by token, for hours."""
    error = error_of(
        GOOD,
        "data.objective=span_corruption",
        f"data.source_length={10**12}",
        "data.seq_length=114",
    )
    assert "`data.source_length` is 1000000000000 - out of range" in str(error)


def test_policy_that_saves_scores_is_accepted_with_reference():
    overrides = ["model.attention_kernel=reference", "model.remat_policy=dots_saveable"]
    assert load_recipe(Path("x.toml"), overrides).recipe.model.remat_policy == "dots_saveable"


def test_every_policy_that_saves_scores_is_an_invalid_recipe():
    titles = [case.title for case in read_cases()]
    assert {f"blockwise attention: {policy}" for policy in SAVES_SCORES} <= {*titles}


def test_override_in_invalid_table_reports_the_table():
    assert error_of("optimizer = 3\n", "optimizer.lr=1").why.startswith(
        "x.toml:1: `optimizer` is 3 - "
    )


def test_override_fixes_invalid_recipe():
    Path("x.toml").write_text(replaced("lr = 1e-3", ""))
    assert load_recipe(Path("x.toml"), ["optimizer.lr=1"]).recipe.optimizer.lr == 1.0


VALUES = st.sampled_from(
    ["1", "-1", "0", "1.5", "nan", "''", '"x"', "true", "[]", '["a"]', "{}", "{ a = 1 }", "[[1]]",
     "1979-05-27", "x", ""]
)  # fmt: skip

NAMES = st.sampled_from(
    [
        *KEY_SCHEMAS,
        *TABLE_NAMES,
        "x",
        "model.x",
        '"model.path"',
        "data.path.x",
        "[model]",
        "[[data]]",
        "[x",
    ]
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.lists(st.tuples(NAMES, VALUES), max_size=2),
    st.booleans(),
)
def test_any_input_is_a_recipe_or_one_error(
    lines: list[tuple[str, str]], overrides: list[tuple[str, str]], on_top: bool
):
    text = "".join(name if name.startswith("[") else f"{name} = {value}\n" for name, value in lines)
    Path("x.toml").write_text(f"{text}\n{GOOD}" if on_top else text)
    error = None
    try:
        load_recipe(Path("x.toml"), [f"{name}={value}" for name, value in overrides])
    except PrepError as raised:
        error = raised
    assert error is None or (error.code == USAGE and error.what and "None" not in str(error))


def test_only_the_first_unknown_keys_have_hints(monkeypatch: pytest.MonkeyPatch):
    """A hint takes a millisecond: 100,000 of them took 40 s."""
    monkeypatch.setattr("trainer.recipe.loading.MAX_HINTED", 30)
    keys = "".join(f"learning_rate{number} = 1\n" for number in range(5000))
    searched = list[str]()

    def hint(path: str, *_: object, **__: object) -> str:
        searched.append(path)
        return "a hint"

    monkeypatch.setattr("trainer.recipe.loading.unknown_key_hint", hint)
    error = error_of(f"{GOOD}{keys}[other]\n{keys}[modle]\n{keys}")
    lines = error.why.split("\n")
    assert error.what == "x.toml has 5,002 errors"
    assert len(lines) == 21
    assert lines[-1].endswith(" more")
    assert len(searched) == 30


def test_adapters_without_a_checkpoint_are_one_error():
    random_start = replaced('path = "m-init"', 'init = "random"\nconfig = "config.json"')
    error = error_of(random_start, "lora.rank=3", "lora.path=x", "lora.targets=q")
    assert str(error).count("`lora` needs a checkpoint") == 1


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("lora.alpha=1e31", "`--set`: `lora.alpha` is 1e+31"),
        ("lora.alpha=1e-320", "`--set`: `lora.alpha` is 1e-320"),
        ("lora.alpha_pattern={'attn.q' = 1e31}", "`--set`: `lora.alpha_pattern` is a table"),
    ],
)
def test_scale_that_float32_cannot_hold_is_an_error(override: str, what: str):
    error = error_of(GOOD, "lora.rank=3", override)
    assert str(error.what) == what
    assert error.why == "an alpha is at least 1e-30 and at most 1e+30"


def test_recipe_of_another_size_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trainer.recipe.loading.MAX_RECIPE_NBYTES", 100)
    assert (
        str(error_of(GOOD))
        == "x.toml is not a recipe - it has more than 100 bytes - `prep recipes` lists recipes"
    )


# The recipe keys of dropout and forgetful causal masking: their forms, errors and hints.


def load_model(*overrides: str) -> Model:
    """Return `[model]` of GOOD with overrides, after writing it and reading it back."""
    loaded = load_recipe(Path("x.toml"), overrides)
    Path("complete.toml").write_text(recipe_to_toml(loaded.recipe, loaded.origins))
    assert load_recipe(Path("complete.toml")).recipe == loaded.recipe
    return loaded.recipe.model


def resolve(model: Model, config: dict[str, Any], family: str = "gpt2") -> DropoutConfig:
    """Return the rates of a recipe for a config."""
    fields = FAMILIES[family].dropout_fields
    return resolve_dropout(
        model.dropout, fcm_ratio=model.fcm_ratio, config=config, dropout_fields=fields
    )


def test_recipe_without_dropout_ignores_the_rates_of_the_config():
    assert resolve(load_model(), {"attn_pdrop": 0.5}) == NO_DROPOUT
    assert not NO_DROPOUT.is_active


def test_number_is_the_rate_of_all_sites():
    assert resolve(load_model("model.dropout=0.1"), {}) == DropoutConfig(0.1, 0.1, 0.1)


def test_sites_missing_in_the_table_have_no_dropout():
    model = load_model("model.dropout={attention = 0.1, embedding = 0}")
    assert resolve(model, {}) == DropoutConfig(attention=0.1)
    Path("x.toml").write_text(GOOD.replace("[data]", "[model.dropout]\nresidual = 0.25\n[data]"))
    assert resolve(load_model(), {}) == DropoutConfig(residual=0.25)


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("gpt2", {"attn_pdrop": 0.3, "embd_pdrop": None}, DropoutConfig(0.3, 0.1, 0.1)),
        ("t5", {"dropout_rate": 0.2}, DropoutConfig(0.2, 0.2, 0.2)),
        ("opt", {"attention_dropout": 0.05}, DropoutConfig(0.05, 0.1, 0.0)),
        ("gpt_neox", {"hidden_dropout": 0.2}, DropoutConfig(0.0, 0.2, 0.2)),
        ("llama", {"attention_dropout": 0.4, "hidden_dropout": 0.2}, DropoutConfig(attention=0.4)),
        ("phi3", {"resid_pdrop": 0.5}, DropoutConfig(residual=0.5)),
        ("mistral", {}, NO_DROPOUT),
    ],
)
def test_config_takes_the_rates_of_the_checkpoint(
    family: str, config: dict[str, Any], expected: DropoutConfig
):
    assert resolve(load_model("model.dropout=config"), config, family) == expected


@pytest.mark.parametrize("rate", [1.0, -0.1, True, "0.1"])
def test_invalid_rate_of_a_config_is_rejected(rate: Any):
    with pytest.raises(PrepError, match=r"attn_pdrop is .*, it must be a number from 0 to below 1"):
        resolve(load_model("model.dropout=config"), {"attn_pdrop": rate})


def test_forgetful_causal_masking_has_two_ratios():
    config = resolve(load_model("model.fcm_ratio=[0, 0.15]"), {})
    assert (config.fcm_ratio, config.is_active) == ((0.0, 0.15), True)


def with_rope(*lines: str) -> str:
    """Return GOOD with more lines in `[model]`."""
    return GOOD.replace("[data]", "\n".join([*lines, "[data]"]))


YARN = 'rope_scaling = {rope_type = "yarn", factor = 4.0}'


def test_rope_scaling_may_be_a_table_or_an_override():
    table = with_rope("[model.rope_scaling]", 'rope_type = "yarn"', "factor = 4.0")
    for text, overrides in (
        (with_rope(YARN), ()),
        (table, ()),
        (GOOD, ("model." + YARN.replace(" = {", "={"),)),
    ):
        Path("x.toml").write_text(text)
        scaling = load_recipe(Path("x.toml"), overrides).recipe.model.rope_scaling
        assert scaling == {"rope_type": "yarn", "factor": 4.0}


def test_one_rule_may_be_an_override():
    Path("x.toml").write_text(GOOD)
    assert load_recipe(Path("x.toml"), ["rules=embed=fsdp+sp"]).recipe.rules == ("embed=fsdp+sp",)


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
    "x.toml:1: unknown key `learning_rate` - did you mean `lr` in [optimizer]?",
    "x.toml:3: unknown key `model.model_name_or_path` - did you mean `path` in [model]?",
    "x.toml:4: unknown key `model.bf16` - did you mean `dtype` in [model]?",
    "x.toml:5: unknown key `model.gradient_checkpointing` - did you mean `remat_policy` in [model]?",
    "x.toml:9: unknown key `data.block_size` - did you mean `seq_length` in [data]?",
    "x.toml:11: unknown key `batch.per_device_train_batch_size` - did you mean `per_device` in [batch]?",
    "x.toml:13: unknown key `train.num_train_epochs` - did you mean `epochs` in [train]?",
    "x.toml:14: unknown key `train.resume` - run the same command again to resume",
    "x.toml:16: unknown key `eval.every` - did you mean `eval_every` in [train]?",
    "x.toml:18: unknown key `training.seq_len` - did you mean `seq_length` in [data]?",
    'x.toml:20: `optimizer.b1` is "0.9" - it takes a number >= 0 and < 1: decay rate of the first moment'
    " - `b1 = 0.9` in [optimizer]",
]


def test_all_errors_are_reported_with_lines():
    error = error_of(OTHER_TRAINERS_RECIPE)
    assert error.what == f"x.toml has {len(OTHER_TRAINERS_ERRORS)} errors"
    assert error.why.split("\n") == OTHER_TRAINERS_ERRORS


def test_override_errors_follow_file_errors():
    error = error_of(
        replaced("size = 4", "siez = 4"), "optimizer.lr=abc", "learning_rate=1", "seed"
    )
    places = [re.split(": | is invalid", line)[0] for line in error.why.split("\n")]
    assert places == ["x.toml:9", "`--set`", "`--set seed`", "`--set`"]


def test_empty_recipe_lists_all_required_keys():
    missing = re.findall(r"`([a-z_.]+)` is missing", error_of("").why)
    assert missing == ["model.path", "data.path", "data.seq_length", "optimizer.lr"]


def test_required_key_under_other_name_is_not_missing():
    error = error_of(replaced("lr = 1e-3", "learning_rate = 1e-3"))
    assert (
        str(error)
        == "x.toml:11: unknown key `optimizer.learning_rate` - did you mean `lr` in [optimizer]?"
    )


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
    assert second == "x.toml:13: unknown key `optimizer.beta1` - did you mean `b1` in [optimizer]?"


def test_conflict_caused_by_unknown_key_is_not_reported():
    error = error_of(replaced("steps = 20", "max_steps = 20"))
    assert (
        str(error) == "x.toml:13: unknown key `train.max_steps` - did you mean `steps` in [train]?"
    )


def test_errors_beyond_the_maximum_are_counted():
    lines = error_of(GOOD + "".join(f"key_{number} = 1\n" for number in range(2000))).why.split(
        "\n"
    )
    assert len(lines) == MAX_SHOWN + 1
    assert lines[-1] == f"and {2000 - MAX_SHOWN:,} more"


def test_table_of_another_trainer_is_translated_by_key():
    error = error_of(GOOD + "[lr_scheduler]\nwarmup_steps = 3\ndecay_type = 'cosine'\n")
    assert error.why.split("\n") == [
        "x.toml:15: unknown key `lr_scheduler.warmup_steps` - did you mean `warmup_steps` in [optimizer]?",
        "x.toml:16: unknown key `lr_scheduler.decay_type` - did you mean `schedule` in [optimizer]?",
    ]


def test_nested_table_of_another_trainer_is_translated_by_key():
    error = error_of(
        GOOD + "[data_args]\nmode = 'clm'\n[data_args.train]\ndataset = 'c4'\ndataset_name = 'en'\n"
    )
    assert error.why.split("\n") == [
        "x.toml:15: unknown key `data_args.mode` - `data.fields`: brackets for the encoder, none for clm",
        "x.toml:17: unknown key `data_args.train.dataset` - did you mean `path` in [data]?",
        "x.toml:18: unknown key `data_args.train.dataset_name` - did you mean `config` in [data]?",
    ]


def test_table_for_a_key_of_another_name_is_one_error():
    error = error_of(GOOD.replace("[data]", "rope_parameters = {rope_type = 'yarn'}\n[data]"))
    assert str(error).endswith("`model.rope_parameters` - did you mean `rope_scaling` in [model]?")


def test_each_name_of_another_trainer_has_one_meaning():
    names = re.findall(r"\S+", re.sub(r"^\S.*? <- ", "", OTHER_NAMES_TEXT, flags=re.MULTILINE))
    assert len(names) == len({*names}) == len(OTHER_NAMES)
    assert not {*names} & {*KEY_SCHEMAS}


def test_names_of_other_trainers_lead_to_keys_or_advice():
    tables = {key.partition(".")[0] for key in KEY_SCHEMAS if "." in key}
    for name, meaning in OTHER_NAMES.items():
        hint = option_hint(f"--{name.replace('_', '-')}")
        if meaning in KEY_SCHEMAS:
            assert hint == f"`--set {meaning}=VALUE`", name
        else:
            assert hint == meaning
            # A misspelled key would look like advice.
            assert " " in meaning
            assert {*re.findall(r"\[(\w+)\]", meaning)} <= tables, meaning


def test_examples_are_accepted_by_their_keys():
    num_examples = 0
    for key, key_schema in KEY_SCHEMAS.items():
        table, _, name = key.rpartition(".")
        models: list[Any] = [Recipe]
        if table == "optimizer":
            models = [each for each in OPTIMIZER_TABLES.values() if name in each.model_fields]
        elif table:
            models = [Recipe.model_fields[table].annotation]
        for example in key_schema.get("examples", ()):
            field = models[0].model_fields[name]
            model = create_model("Key", __config__=STRICT, key=(field.annotation, field))
            model.model_validate({"key": example})
            num_examples += 1
    assert num_examples


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_to_toml_float_reads_back_equal(value: float):
    assert float(to_toml(value)) == value
    assert len(to_toml(value)) <= len(repr(value))


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--resume", "run the same command again to resume"),
        ("--dtype", "`--set model.dtype=VALUE`"),
        ("--learning-rate", "`--set optimizer.lr=VALUE`"),
        ("--mesh", "`--set mesh=VALUE`"),
        ("--optimizer.lr", "`--set optimizer.lr=VALUE`"),
        ("--frobnicate", ""),
    ],
)
def test_option_of_another_trainer_gives_hint(option: str, hint: str):
    assert option_hint(option) == hint


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
    assert unknown_key_hint(key).startswith(command)
    if key.partition(".")[0] in ("eval_args", "eval_predictor", "eval_metric_fn"):
        page = Path(__file__).parents[3] / "docs" / "how-to" / "coming-from.md"
        rows = page.read_text().splitlines()
        assert command.replace(" RUN", "") in next(row for row in rows if f"`{key}`" in row)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("lora.r", "`rank` in [lora]"),
        ("lora.target_modules", "`targets` in [lora]"),
        ("lora.lora_dropout", "`dropout` in [lora]"),
        ("lora.use_dora", "DoRA is not supported"),
    ],
)
def test_settings_of_peft_lead_to_the_keys_of_lora(key: str, hint: str):
    assert hint in unknown_key_hint(key)


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
        keys, meaning = recipe_keys(code_in(counterparts)), guess(setting)
        assert meaning or keys, f"{setting} has neither a key nor advice"
        if meaning and meaning not in KEY_SCHEMAS:
            assert not keys or any(f"`{key}" in meaning for key in keys), setting
        elif setting not in KEY_SCHEMAS:
            assert meaning in keys, setting
            assert option_hint(f"--{setting}"), setting
