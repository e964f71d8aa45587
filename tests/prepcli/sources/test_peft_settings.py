"""Every field of the installed PEFT's `LoraConfig` is read, has no effect, or is refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.sources.openers.peft_settings import (
    IGNORED_FIELDS,
    SUPPORTED_VALUES,
    PeftSettings,
    read_settings,
)
from tests.helpers.lazy_modules import lazy_module

peft = lazy_module("peft")
UNREAD_FIELDS = IGNORED_FIELDS | SUPPORTED_VALUES.keys()


def other_values() -> dict[str, Any]:
    """Return a value of each field of PEFT that is not its default."""
    from peft.tuners.lora import config

    return {
        "r": 4,
        "lora_alpha": 16,
        "lora_dropout": 0.1,
        "use_rslora": True,
        "fan_in_fan_out": True,
        "base_model_name_or_path": "base",
        "target_modules": ["q_proj"],
        "exclude_modules": ["k_proj"],
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"q_proj": 2},
        "modules_to_save": ["lm_head"],
        "ensure_weight_tying": True,
        "target_parameters": ["mlp.experts.down_proj"],
        "bias": "lora_only",
        "lora_bias": True,
        "use_dora": True,
        "use_qalora": True,
        "use_bdlora": config.BdLoraConfig(nblocks=2),
        "velora_config": config.VeloraConfig(),
        "kasa_config": config.KasaConfig(),
        "monteclora_config": config.MontecloraConfig(),
        "arrow_config": config.ArrowConfig(),
        "alora_invocation_tokens": [1, 2],
        "trainable_token_indices": [3],
        "layers_to_transform": [0],
        "layer_replication": [(0, 1)],
        "megatron_config": {"tensor_model_parallel_size": 2},
        "init_lora_weights": "pissa",
        "peft_type": "IA3",
        "task_type": "CAUSAL_LM",
        "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
        "peft_version": "0.1.0",
        "revision": "main",
        "inference_mode": True,
        "runtime_config": config.LoraRuntimeConfig(ephemeral_gpu_offload=True),
        "megatron_core": "other.core",
        "layers_pattern": "blocks",
        "qalora_group_size": 8,
        "loftq_config": {"loftq_bits": 8},
        "eva_config": config.EvaConfig(),
        "corda_config": config.CordaConfig(),
        "lora_ga_config": config.LoraGAConfig(),
    }


# Fields that need another one in PEFT.
NEEDED: Mapping[str, Mapping[str, object]] = {
    "layers_pattern": {"layers_to_transform": []},
    "ensure_weight_tying": {"modules_to_save": ["embed_tokens"]},
}


def read_config(folder: Path, **settings: Any) -> PeftSettings:
    """Write a config with PEFT, and read it with prep."""
    peft_type = settings.pop("peft_type", None)
    config = peft.LoraConfig(**settings)
    if peft_type is not None:
        config.peft_type = peft_type
    config.save_pretrained(folder)
    return read_settings(folder)


def test_default_config_of_peft_is_read(tmp_path: Path):
    settings = read_config(tmp_path)
    defaults = peft.LoraConfig()
    assert (settings.r, settings.lora_alpha) == (defaults.r, defaults.lora_alpha)


def test_every_field_of_peft_is_read_or_has_a_reason(tmp_path: Path):
    names = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    values = other_values()
    assert names == values.keys()
    assert names <= PeftSettings.model_fields.keys() | UNREAD_FIELDS
    assert PeftSettings.model_fields.keys() <= names
    assert PeftSettings.model_fields.keys().isdisjoint(UNREAD_FIELDS)
    # Fields of the first versions.
    assert UNREAD_FIELDS - names == {"enable_lora", "merge_weights"}
    for name, value in values.items():
        needed = dict(NEEDED.get(name, {}))
        default = read_config(tmp_path, **needed)
        if name in PeftSettings.model_fields:
            settings = read_config(tmp_path, **{**needed, name: value})
            assert getattr(settings, name) == value != getattr(default, name), name
        elif name in IGNORED_FIELDS:
            assert read_config(tmp_path, **{**needed, name: value}) == default, name
        else:
            with pytest.raises(PrepError) as caught:
                read_config(tmp_path, **{name: value})
            assert f"{tmp_path}: {name} = " in caught.value.what
            assert caught.value.why == SUPPORTED_VALUES[name][1]
            assert "merge_and_unload" in str(caught.value.hint)


def test_page_about_adapters_has_every_field():
    page = Path(__file__).resolve().parents[3] / "docs/how-to/lora.md"
    text = page.read_text()
    names = (*PeftSettings.model_fields, *UNREAD_FIELDS)
    assert not [name for name in names if f"`{name}`" not in text and name != "peft_type"]
