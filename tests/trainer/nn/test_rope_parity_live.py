"""Configs with the rotary embedding of a recipe, read by the transformers library (the `parity` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.testing.checks import FamilyUnderTest, check_logits
from prepcli.commands.testing.tiny_model import (
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from prepcli.core.json_values import JsonObject
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GPT_NEOX, GPTJ, LIVE, LLAMA, LONG_ROPE, PHI3
from trainer.recipe.rope_overrides import RopeOverrides, override_rope

lazy_module("torch")
lazy_module("transformers")

LINEAR, DYNAMIC = ({"rope_type": name, "factor": 4.0} for name in ("linear", "dynamic"))
YARN = {"type": "yarn", "factor": 4.0, "beta_fast": 20, "truncate": False}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG: JsonObject = {**LONG_ROPE, "short_factor": [1.0, 1.5], "long_factor": [2.0, 9.0]}
CASES: dict[str, tuple[dict[str, Any], RopeOverrides]] = {
    "llama-linear": (LLAMA, RopeOverrides(LINEAR, max_positions=256)),
    "llama-dynamic": (LLAMA, RopeOverrides(DYNAMIC)),
    "llama-yarn": (LLAMA, RopeOverrides(YARN, max_positions=256)),
    "llama-llama3": (
        LLAMA,
        RopeOverrides(LLAMA3 | {"original_max_position_embeddings": 32}, max_positions=512),
    ),
    "llama-theta": (LLAMA, RopeOverrides(theta=5e5, max_positions=512)),
    "llama-of-yarn": (LIVE["llama-yarn"], RopeOverrides(YARN, 3e4, 512)),
    "llama-version-5": (LIVE["llama-version-5"], RopeOverrides(YARN, max_positions=256)),
    "llama-both": (LIVE["llama-both-spellings"], RopeOverrides(YARN, theta=3e4)),
    "gpt_neox-yarn": (GPT_NEOX, RopeOverrides(YARN, 3e4, 256)),
    "gpt_neox-theta": (GPT_NEOX | {"rotary_emb_base": 500}, RopeOverrides(theta=5e5)),
    "gpt_neox-version-5": (LIVE["gpt_neox-version-5"], RopeOverrides(LINEAR, theta=5e5)),
    "gptj-positions": (GPTJ, RopeOverrides(max_positions=512)),
    "phi3-longrope": (
        PHI3,
        RopeOverrides(LONG | {"original_max_position_embeddings": 32}, max_positions=512),
    ),
    "phi3-positions": (LIVE["phi3-version-5"], RopeOverrides(max_positions=512)),
}
FAST = ("llama-version-5", "gpt_neox-yarn", "phi3-longrope")


@pytest.mark.parametrize("name", slow_except(CASES, FAST))
def test_overridden_rope_matches_transformers(name: str, tmp_path: Path):
    subject = FamilyUnderTest(override_rope(*CASES[name]), tmp_path)
    for length in (7, 300):
        check_logits(subject, (length,))


def test_overridden_rope_changes_the_logits():
    """The comparison above would also pass if both libraries ignored the scaling."""
    base, overrides = CASES["llama-yarn"]
    tensors, batch = random_tensors(base, seed=3), random_batch(base["vocab_size"], 1, 300, 4)
    before, after = (
        model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
        for tiny in map(tiny_transformer, (base, override_rope(base, overrides)))
    )
    assert abs(before - after).max() > 1e-3
