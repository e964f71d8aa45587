"""Names of multi-token prediction, and configs without it."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from prepcli.models.truncation import (
    PREDICTION_FIELDS,
    is_prediction_vocabulary,
    prediction_names,
    without_prediction,
)
from tests.helpers.tiny_configs import FIRST_FAMILIES, GOLDEN, NEWER_FAMILIES

LAYERS = [f"layers.{number}.enorm.weight" for number in (2, 3, 4, 5)]


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({}, 1),
        ({"num_nextn_predict_layers": 0}, 0),
        ({"num_nextn_predict_layers": 2}, 2),
        ({"num_nextn_predict_layers": None}, 1),
        ({"num_mtp_layers": 2}, 2),
    ],
)
def test_prediction_layers_follow_the_last_layer(fields: dict[str, Any], count: int):
    """Layers 3 and 4 follow the 3 layers of the model."""
    config = NEWER_FAMILIES["deepseek_v3"] | fields
    selected = prediction_names(family_of(config), config, LAYERS)
    assert selected == set(LAYERS[1 : 1 + count])


def test_prediction_layers_of_any_family_are_stated():
    config = FIRST_FAMILIES["llama"]
    layers = config["num_hidden_layers"]
    name = f"layers.{layers}.enorm.weight"
    assert prediction_names(family_of(config), config, [name]) == set()
    stated = config | {"num_nextn_predict_layers": 1}
    assert prediction_names(family_of(config), stated, [name]) == {name}


@pytest.mark.parametrize("value", [-1, True, "1", 1 << 40])
def test_prediction_layers_of_invalid_number_are_an_error(value: Any):
    config = NEWER_FAMILIES["deepseek_v3"] | {"num_nextn_predict_layers": value}
    with pytest.raises(PrepError, match=r"config\.json is invalid"):
        prediction_names(family_of(config), config, LAYERS)


def test_prediction_modules_are_known_by_name():
    config = FIRST_FAMILIES["llama"]
    modules = {
        "mtp.fc.weight",
        "mtp_block.0.self_attn.q_proj.weight",
        "mtp_emb_norm.0.weight",
        "mtp_layers.0.input_proj.weight",
    }
    others = {"mtpx.fc.weight", "layers.0.mtp.weight", "mtp"}
    assert prediction_names(family_of(config), config, modules | others) == modules


def test_prediction_vocabulary_has_names_of_published_files():
    names = {
        "layers.61.embed_tokens.weight",
        "layers.61.shared_head.head.weight",
        "layers.45.transformer.shared_head.output.weight",
        "layers.61.shared_head.head.qweight",
        "mtp.embed_tokens.weight",
        "mtp.lm_head.bias",
    }
    others = {"layers.61.shared_head.norm.weight", "layers.61.eh_proj.weight", "mtp.fc.weight"}
    assert {name for name in names | others if is_prediction_vocabulary(name)} == names


def test_prediction_names_are_no_parameters():
    for config in GOLDEN.values():
        family = family_of(config)
        sizes = family.sizes(config)
        names: set[str] = set()
        for row in parameter_rows(family, config).values():
            names.update(name for name, _ in bind_row(row, sizes).tensors())
        assert not prediction_names(family, config, names)


def test_config_without_prediction_states_zero():
    config: dict[str, Any] = {"vocab_size": 8, **dict.fromkeys(PREDICTION_FIELDS, 1)}
    assert without_prediction(config) == {"vocab_size": 8, **dict.fromkeys(PREDICTION_FIELDS, 0)}
    assert without_prediction({"num_nextn_predict_layers": None}) == {
        "num_nextn_predict_layers": None
    }
