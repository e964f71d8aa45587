"""Errors of recipes: one error lists all faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.activation_memory import SAVES_SCORES
from prepcli.models.layer_config import NO_DROPOUT, DropoutConfig, resolve_dropout
from prepcli.models.registry import FAMILIES
from tests.golden.make_recipe_errors import GOOD, InvalidRecipe, read_cases
from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.tables import KEY_SCHEMAS, TABLE_NAMES, Model


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
