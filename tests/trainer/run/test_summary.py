"""Lines about a run before its first step."""

from __future__ import annotations

import re

import pytest

from prepcli.models.lora_config import LoraConfig
from prepcli.models.registry import FAMILIES
from tests.helpers.tiny_checkpoints import FAMILY_CONFIGS
from trainer.nn.model_spec import build_model
from trainer.run.summary import adapters_text


@pytest.mark.parametrize(
    ("lora", "expected"),
    [
        (
            LoraConfig(4, 8.0, ("attn.q", "attn.v")),
            "adapters of rank 4 for attn.q, attn.v, scaled by 2",
        ),
        (
            LoraConfig(
                rank=4,
                alpha=8.0,
                targets=("attn.*",),
                target_parameters=("mlp.*",),
                rank_pattern={"mlp.down": 8},
                alpha_pattern={"attn.q": 4.0},
                modules_to_save=("embed.tokens", "head"),
            ),
            "adapters of rank 4 for attn.*, mlp.* of experts, scaled by 2; rank 8 for mlp.down; alpha 4 for attn.q;"
            " embed.tokens, head trained as a whole",
        ),
        (
            LoraConfig(4, 8.0, (), target_parameters=("mlp.up",)),
            "adapters of rank 4 for mlp.up of experts, scaled by 2",
        ),
    ],
)
def test_adapters_are_described_with_all_settings(lora: LoraConfig, expected: str):
    config = FAMILY_CONFIGS["mixtral"]
    text = adapters_text(build_model(FAMILIES["mixtral"], config, is_tied=False, lora=lora))
    described, _, share = text.rpartition("; ")
    assert described == expected
    assert re.fullmatch(r"[\d,]+ of [\d,]+ parameters are trained", share)
