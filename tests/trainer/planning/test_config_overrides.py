"""Types of the values that a recipe sets in a config."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.core.errors import PrepError, UsageError
from prepcli.core.json_values import JsonValue
from prepcli.models.registry import FAMILIES, fields_read
from trainer.planning.model_shapes import override_fields

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("tie_word_embeddings", "yes", "true or false"),
        ("tie_word_embeddings", 1, "true or false"),
        ("pad_token_id", "x", "an integer"),
        ("bos_token_id", True, "an integer"),
        ("attention_dropout", "x", "a number"),
        ("rms_norm_eps", "x", "a number"),
        ("eos_token_id", "x", "an integer"),
        ("eos_token_id", [1, "x"], "an integer"),
    ],
)
def test_override_of_unset_field_must_have_its_type(field: str, value: JsonValue, kind: str):
    with pytest.raises(UsageError) as caught:
        override_fields(LLAMA, {field: value})
    assert caught.value.what == f"`model.overrides` sets `{field}` to {value!r}"
    assert caught.value.why == f"it must be {kind}"
    assert caught.value.hint.startswith("for example ")


def test_override_can_set_an_unset_field():
    values = {
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "attention_dropout": 0.1,
        "eos_token_id": [1, 2],
    }
    assert override_fields(LLAMA, values) == LLAMA | values


def test_rate_that_the_config_has_as_an_integer_takes_a_number():
    config = LLAMA | {"attention_dropout": 0, "rope_theta": 10000}
    assert (
        override_fields(config, {"attention_dropout": 0.1, "rope_theta": 5e5})["rope_theta"] == 5e5
    )


@pytest.mark.parametrize("before", [1, [1, 2]])
@pytest.mark.parametrize("after", [3, [3, 4]])
def test_end_token_may_be_one_or_a_list(before: JsonValue, after: JsonValue):
    assert (
        override_fields(LLAMA | {"eos_token_id": before}, {"eos_token_id": after})["eos_token_id"]
        == after
    )


@pytest.mark.parametrize("base", [10000, 12345.5])
def test_rotary_base_of_local_layers_is_a_number(base: float):
    config = {**LLAMA, "model_type": "gemma3_text", "head_dim": 8, "rope_local_base_freq": 10000}
    assert override_fields(config, {"rope_local_base_freq": base})["rope_local_base_freq"] == base


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, it must be an integer from 1"),
        ({"hidden_act": "foo"}, "activation `foo` is not supported: hidden_act of config.json"),
    ],
)
def test_error_of_an_invalid_value_names_the_key(overrides: dict[str, Any], why: str):
    with pytest.raises(UsageError) as caught:
        override_fields(LLAMA, overrides)
    assert str(caught.value).startswith(f"`model.overrides` is invalid - {why}")


def test_invalid_base_config_error_does_not_name_the_override():
    with pytest.raises(PrepError, match=r"config\.json is invalid - hidden_size is 0"):
        override_fields({**LLAMA, "hidden_size": 0}, {"num_hidden_layers": 3})


# Names of the field with the number of positions, in families with a rotary embedding.
POSITION_FIELDS = {"max_position_embeddings", "n_positions", "max_seq_len"}
ROTARY_FAMILIES = {
    name: family for name, family in FAMILIES.items() if family.arch_config({}).rope is not None
}


def test_rotary_families_read_positions_and_deviation():
    """The lists of fields are recorded on one config object. A copy of it would hide fields."""
    for family in ROTARY_FAMILIES.values():
        fields = fields_read(family)
        assert fields & POSITION_FIELDS, family.name
        assert "initializer_range" in fields


def test_families_read_no_field_without_a_name():
    for family in FAMILIES.values():
        assert "" not in fields_read(family), family.name


@pytest.mark.parametrize("name", ["lfm2", "lfm2_moe"])
def test_override_can_set_the_epsilon_of_lfm2(name: str):
    assert override_fields({"model_type": name}, {"norm_eps": 1e-6})["norm_eps"] == 1e-6


def test_override_can_set_a_field_by_its_alias():
    config = {"model_type": "granitemoehybrid", "num_hidden_layers": 2}
    layer_types: list[JsonValue] = ["mamba", "attention"]
    changed = override_fields(config, {"layers_block_type": layer_types})
    assert changed["layers_block_type"] == layer_types
