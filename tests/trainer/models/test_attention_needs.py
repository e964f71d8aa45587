"""The features of attention that each family's models need."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.tiny_configs import GOLDEN
from trainer.models.attention_needs import Feature, model_features, run_features
from trainer.models.registry import family_of
from trainer.models.remat import SAVES_SCORES
from trainer.nn.model_spec import ModelSpec, build_model


def build(config: dict[str, Any]) -> ModelSpec:
    """Build a model from a tiny config."""
    family = family_of(config)
    return build_model(family, config, family.is_tied(config))


def features_of(name: str, **changes: Any) -> set[Feature]:
    """Return the features that a tiny model needs."""
    model = build(GOLDEN[name] | changes)
    return {*model_features(model.arch_config, model.leaves)}


LLAMA = {Feature.CAUSAL, Feature.GROUPED_HEADS}
ENCODER = {Feature.BIDIRECTIONAL, Feature.CROSS, Feature.KEY_PADDING, Feature.SCORE_BIAS}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama-biases", {}, LLAMA),
        ("llama-biases", {"num_key_value_heads": 2}, {Feature.CAUSAL}),
        ("mistral", {"sliding_window": 8}, LLAMA | {Feature.WINDOW}),
        ("gpt_neo", {}, {Feature.CAUSAL, Feature.WINDOW, Feature.MIXED_WINDOWS}),
        ("gemma2", {}, LLAMA | {Feature.WINDOW, Feature.MIXED_WINDOWS, Feature.SOFTCAP}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {Feature.CAUSAL, Feature.LAYER_SCALE}),
        ("t5", {}, {Feature.CAUSAL} | ENCODER),
    ],
)
def test_model_features_follow_the_config(name: str, changes: dict[str, Any], expected: set[Feature]):
    assert features_of(name, **changes) == expected


def test_run_features_are_saved_scores_and_split_sequences():
    assert run_features(remat_policy="nothing_saveable", num_sequence_shards=1) == set()
    assert all(
        run_features(remat_policy=policy, num_sequence_shards=1) == {Feature.SAVED_SCORES} for policy in SAVES_SCORES
    )
    assert run_features(remat_policy="none", num_sequence_shards=2) == {Feature.SPLIT_SEQUENCE}
