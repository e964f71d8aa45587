"""Tests of families with recurrent mixers without a comparison of logits: stacks of layers, and states."""

from __future__ import annotations

import pytest

from prepcli.commands.testing.tiny_model import random_tensors, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.core.json_values import HFConfig, JsonValue
from prepcli.models.registry import family_of
from prepcli.models.truncation import later_layers, truncate_config
from tests.helpers.hybrid_configs import HYBRID_FAMILIES
from trainer.generation.decode import init_kv_cache
from trainer.nn.model_spec import ForwardConfig

KINDS = {
    "lfm2": ("attention_layers", "mixer_layers"),
    "lfm2_moe": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "qwen3_next": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "mamba2": (),
    "falcon_h1": (),
    "mamba": (),
    "jamba": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
    "nemotron_h": ("attention_layers", "mixer_layers", "dense_layers", "sparse_layers"),
}


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_first_layers_have_the_tensors_of_a_shorter_model(name: str):
    config = HYBRID_FAMILIES[name]
    family = family_of(config)
    for num_layers in (1, 2):
        shorter = truncate_config(config, num_layers)
        if name in ("lfm2_moe", "qwen3_next") and num_layers == 1:
            with pytest.raises(PrepError, match="all 1 layers are dense"):
                family.arch_config(shorter)
            continue
        names = {tensor.removeprefix(family.prefix) for tensor in random_tensors(config)}
        kept = names - later_layers(family, config, names, num_layers)
        expected = {tensor.removeprefix(family.prefix) for tensor in random_tensors(shorter)}
        assert kept == expected


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_layer_has_its_own_stack(name: str):
    leaves = tiny_transformer(HYBRID_FAMILIES[name]).model.leaves
    stacks = {path.partition(".")[0] for path in leaves} - {"layers", "embed", "head", "final_norm"}
    assert stacks == {*KINDS[name]}


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_recurrent_states_do_not_grow_with_the_number_of_tokens(name: str):
    model = tiny_transformer(HYBRID_FAMILIES[name]).model
    short, long = (
        init_kv_cache(model, (2, slots), ForwardConfig()).recurrent for slots in (8, 4096)
    )
    assert short is not None
    assert long is not None
    shapes = {state: array.shape for state, array in short.states.items()}
    assert shapes == {state: array.shape for state, array in long.states.items()}
    num_mixers = len(model.arch_config.mixer_layers)
    assert {shape[:2] for shape in shapes.values()} == {(num_mixers, 2)}


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_rescaled_output_projections_are_refused(name: str):
    config = HYBRID_FAMILIES[name] | {"rescale_prenorm_residual": True}
    with pytest.raises(PrepError, match="rescale_prenorm_residual=true is not supported"):
        family_of(config).arch_config(config)


def test_nemotron_h_reads_its_layers_from_the_alias_first():
    layer_types: list[JsonValue] = ["linear_attention"] * 4
    config = {**HYBRID_FAMILIES["nemotron_h"], "layer_types": layer_types}
    assert family_of(config).arch_config(config).mixer_layers == (0, 1, 2, 3)


def test_nemotron_h_refuses_experts_with_a_latent():
    config = HYBRID_FAMILIES["nemotron_h"] | {"moe_latent_size": 8}
    with pytest.raises(PrepError, match="`moe_latent_size` is not supported"):
        family_of(config).arch_config(config)


def test_granite_attention_without_rotation_is_refused():
    layer_types: list[JsonValue] = ["attention"] * 3
    config: HFConfig = {**HYBRID_FAMILIES["granitemoehybrid"], "layer_types": layer_types}
    family = family_of(config)
    with pytest.raises(PrepError, match="layers without Mamba-2 and without rotation"):
        family.arch_config(config)
    arch_config = family.arch_config({**config, "position_embedding_type": "rope"})
    assert arch_config.mixer is None
    assert arch_config.rope is not None
