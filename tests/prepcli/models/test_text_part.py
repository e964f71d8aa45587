"""The text part of a multimodal checkpoint, and layers of multi-token prediction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import family_of
from prepcli.models.text_part import TextPart, read_text_part, with_text_config
from prepcli.models.truncation import (
    PREDICTION_FIELDS,
    is_prediction_vocabulary,
    prediction_names,
    without_prediction,
)
from tests.helpers.tiny_configs import FIRST_FAMILIES, GOLDEN, NEWER_FAMILIES
from tests.helpers.towers import TYPES, read_golden


def read_part(golden: Mapping[str, Any], *removed: str, **changes: Any) -> TextPart:
    """Return the text part of a model with some changes of its config and without some tensors."""
    names = golden["shapes"].keys() - {*removed}
    return read_text_part({**golden["config"], **changes}, names)


def renamed(golden: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """Return a model whose tensor names begin with `new` in place of `old`."""
    shapes = golden["shapes"]
    return {**golden, "shapes": {name.replace(old, new, 1): shapes[name] for name in shapes}}


@pytest.mark.parametrize("model_type", TYPES)
def test_other_tensors_are_towers(model_type: str):
    golden = read_golden(model_type)
    towers = golden["shapes"].keys() - read_part(golden).names
    roots = ("vision_tower.", "visual.", "multi_modal_projector.", "model.visual.")
    assert towers
    assert all(name.startswith(roots) for name in towers)


@pytest.mark.parametrize(
    ("prefix", "head_prefix"),
    [
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("model.text_model.", ""),
        ("a.b.", "a."),
        ("", ""),
    ],
)
def test_prefixes_are_found_in_the_names(prefix: str, head_prefix: str):
    golden = read_golden("llava")
    golden = renamed(golden, "language_model.lm_head.", f"{head_prefix}lm_head.")
    part = read_part(renamed(golden, "language_model.model.", prefix))
    assert (part.family.prefix, part.family.head_prefix) == (prefix, head_prefix)
    assert len(part.names) == 39


def test_config_with_fields_beside_the_towers_is_read():
    golden = read_golden("qwen2_5_vl")
    section = dict(golden["config"]["text_config"])
    theta = section.pop("rope_parameters")["rope_theta"]
    scaling = {"type": "mrope", "mrope_section": [2, 3, 3]}
    published = {
        **section,
        "model_type": "qwen2_5_vl",
        "rope_theta": theta,
        "rope_scaling": scaling,
        "vision_config": golden["config"]["vision_config"],
    }
    config = read_text_part(published, golden["shapes"].keys()).config
    assert config["model_type"] == "qwen2"
    assert config["rope_scaling"] == {"type": "default"}
    assert "vision_config" not in config


def test_head_is_tied_as_the_whole_config_says():
    golden = read_golden("internvl")
    assert golden["config"]["text_config"]["tie_word_embeddings"] is False
    assert read_part(golden, tie_word_embeddings=True).config["tie_word_embeddings"] is True


def test_stored_head_decides_if_the_config_states_no_tie():
    golden = read_golden("llava")
    whole = {**golden["config"]}
    del whole["tie_word_embeddings"]
    names = golden["shapes"].keys()
    assert read_text_part(whole, names).config["tie_word_embeddings"] is False
    names -= {"language_model.lm_head.weight"}
    assert read_text_part(whole, names).config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"text_config": None}, "its config has none of text_config"),
        ({"text_config": {"model_type": "mllama_text_model"}}, "'mllama_text_model', which"),
        ({"text_config": {"model_type": "qwen3_vl_text"}}, "does not state hidden_size"),
        ({"text_config": {"model_type": "zamba2", "state_size": 8}}, "state-space layers"),
        ({"text_config": {"model_type": ["llama"]}}, "['llama'], which"),
        ({"model_type": "paligemma"}, "attend to all"),
    ],
)
def test_unsupported_text_part_has_a_reason(change: dict[str, Any], reason: str):
    with pytest.raises(PrepError) as caught:
        read_part(read_golden("llava"), **change)
    assert reason in caught.value.why


@pytest.mark.parametrize(
    ("extra", "missing", "reason"),
    [
        ("language_model.model.layers.0.cross_attn.k_proj.weight", "", "is not part of family"),
        ("", "language_model.model.norm.weight", "the file has no language_model.model.norm"),
        ("", "language_model.lm_head.weight", "the file has no language_model.model.lm_head"),
        ("", "language_model.model.embed_tokens.weight", "no tensors are named embed_tokens"),
    ],
)
def test_mismatched_tensor_names_give_a_reason(extra: str, missing: str, reason: str):
    golden = read_golden("llava")
    if extra:
        golden["shapes"][extra] = [1]
    with pytest.raises(PrepError) as caught:
        read_part(golden, missing)
    assert reason in caught.value.why


def test_number_of_layers_is_bounded_by_the_file():
    golden = read_golden("llava")
    golden["config"]["text_config"]["num_hidden_layers"] = 60_000
    with pytest.raises(PrepError):
        read_part(golden)


def test_changed_fields_are_written_where_they_were():
    whole = {
        "dtype": "float32",
        "vocab_size": 8,
        "text_config": {"vocab_size": 8, "true_vocab_size": 7},
        "vision_config": {"hidden_size": 4},
    }
    before = {"vocab_size": 8, "true_vocab_size": 7, "dtype": "float32"}
    after = {"vocab_size": 16, "dtype": "bfloat16", "tie_word_embeddings": False}
    assert with_text_config(whole, before, after) == {
        "dtype": "bfloat16",
        "vocab_size": 16,
        "tie_word_embeddings": False,
        "text_config": {"vocab_size": 16, "dtype": "bfloat16", "tie_word_embeddings": False},
        "vision_config": {"hidden_size": 4},
    }


@pytest.mark.parametrize("rope_type", ["mrope", "default"])
def test_changed_rope_keeps_mrope_fields(rope_type: str):
    stored = {"type": rope_type, "mrope_section": [2, 3, 3], "mrope_interleaved": True}
    whole: dict[str, Any] = {"text_config": {"rope_scaling": stored}}
    before: dict[str, Any] = {"rope_scaling": {"type": "default"}}
    after = {"rope_scaling": {"type": "default", "rope_theta": 5e5}, "rope_theta": 5e5}
    assert with_text_config(whole, before, after) == {
        "text_config": {"rope_scaling": {**stored, "rope_theta": 5e5}, "rope_theta": 5e5}
    }


def test_changed_rope_of_flat_config_keeps_mrope_fields():
    stored = {"type": "mrope", "mrope_section": [2, 3, 3]}
    whole: dict[str, Any] = {
        "model_type": "qwen2_5_vl",
        "rope_theta": 1e6,
        "rope_scaling": stored,
        "vision_config": {},
    }
    before = {"rope_theta": 1e6, "rope_scaling": {"type": "default"}}
    after = {"rope_theta": 5e5, "rope_scaling": {"type": "default", "rope_theta": 5e5}}
    assert with_text_config(whole, before, after) == {
        **whole,
        "rope_theta": 5e5,
        "rope_scaling": {**stored, "rope_theta": 5e5},
    }


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
