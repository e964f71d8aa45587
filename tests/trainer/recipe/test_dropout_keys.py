"""The recipe keys of dropout and forgetful causal masking: their forms, errors and hints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.dropout_config import NO_DROPOUT, DropoutConfig, resolve_dropout
from prepcli.models.registry import FAMILIES
from tests.trainer.recipe.test_errors import GOOD, error_of
from trainer.recipe import load_recipe, recipe_to_toml
from trainer.recipe.tables import Model


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text(GOOD)


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


UNKNOWN_KEY = (
    "`model.dropout` has the unknown key `{}` - the keys are attention, residual, embedding"
)
ERRORS = {
    "dropout = 1.0": '`model.dropout` is 1.0 - it takes a number >= 0 and < 1 or "config" or a table: ',
    'dropout = "confg"': '`model.dropout` is "confg" - ',
    "dropout = {attn = 0.1}": UNKNOWN_KEY.format("attn"),
    "dropout = {residul = 0.1}": UNKNOWN_KEY.format("residul") + " - did you mean `residual`?",
    "dropout = {residual = 1}": "`residual` of `model.dropout` is 1 - a rate is a number from 0 to below 1 - "
    "`model.dropout = {residual = 0.1}`",
    "fcm_ratio = [0.2, 0.1]": "`model.fcm_ratio` is [0.2, 0.1] - the minimum 0.2 is above the maximum 0.1 - "
    "`model.fcm_ratio = [0.1, 0.2]`",
    "fcm_ratio = 0.1": "`model.fcm_ratio` is 0.1 - it takes a list of 2 numbers >= 0 and < 1: ",
    "fcm_ratio = [0.1]": "`model.fcm_ratio` is [0.1] - it takes a list of 2 numbers >= 0 and < 1: ",
    "fcm_ratio = [0.1, 1.0]": "`model.fcm_ratio` is [0.1, 1.0] - it takes a list of 2 numbers >= 0 and < 1: ",
}


@pytest.mark.parametrize("line", ERRORS)
def test_invalid_values_are_rejected_with_their_line(line: str):
    message = str(error_of(GOOD.replace("[data]", f"{line}\n[data]")))
    assert message.startswith(f"x.toml:4: {ERRORS[line]}")
    assert "fcm_ratio = [0.0, 0.15]" in message or "takes a list" not in message


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("attn_pdrop = 0.2", "`dropout = 0.1`"),
        ("dropout_rate = 0.2", "`dropout = 0.2`"),
        ("fcm_max_ratio = 0.2", "`fcm_ratio = [0.0, 0.15]`"),
    ],
)
def test_names_of_other_trainers_lead_to_the_key(line: str, hint: str):
    assert hint in str(error_of(GOOD.replace("[data]", f"{line}\n[data]")))
