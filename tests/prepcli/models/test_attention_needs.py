"""The features of attention that each family's models need."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.core.errors import PrepError
from prepcli.models.activation_memory import SAVES_SCORES
from prepcli.models.attention_kernels import (
    AttentionFeature,
    check_mixer,
    required_attention_features,
    run_features,
)
from prepcli.models.registry import family_of
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn.model_spec import ModelSpec, build_model


def build(config: dict[str, Any]) -> ModelSpec:
    """Build a model from a tiny config."""
    family = family_of(config)
    return build_model(family, config, family.is_tied(config))


def features_of(name: str, **changes: Any) -> set[AttentionFeature]:
    """Return the features that a tiny model needs."""
    model = build(GOLDEN[name] | changes)
    return {*required_attention_features(model.arch_config, model.leaves)}


LLAMA = {AttentionFeature.CAUSAL, AttentionFeature.GROUPED_HEADS}
ENCODER = {
    AttentionFeature.BIDIRECTIONAL,
    AttentionFeature.CROSS,
    AttentionFeature.KEY_PADDING,
    AttentionFeature.SCORE_BIAS,
}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama-biases", {}, LLAMA),
        ("llama-biases", {"num_key_value_heads": 2}, {AttentionFeature.CAUSAL}),
        ("mistral", {"sliding_window": 8}, LLAMA | {AttentionFeature.WINDOW}),
        (
            "gpt_neo",
            {},
            {AttentionFeature.CAUSAL, AttentionFeature.WINDOW, AttentionFeature.MIXED_WINDOWS},
        ),
        (
            "gemma2",
            {},
            LLAMA
            | {AttentionFeature.WINDOW, AttentionFeature.MIXED_WINDOWS, AttentionFeature.SOFTCAP},
        ),
        (
            "gpt2",
            {"scale_attn_by_inverse_layer_idx": True},
            {AttentionFeature.CAUSAL, AttentionFeature.LAYER_SCALE},
        ),
        ("t5", {}, {AttentionFeature.CAUSAL} | ENCODER),
    ],
)
def test_model_features_follow_the_config(
    name: str, changes: dict[str, Any], expected: set[AttentionFeature]
):
    assert features_of(name, **changes) == expected


def test_run_features_are_saved_scores_and_split_sequences():
    assert run_features(remat_policy="nothing_saveable", num_sequence_shards=1) == set()
    assert all(
        run_features(remat_policy=policy, num_sequence_shards=1) == {AttentionFeature.SAVED_SCORES}
        for policy in SAVES_SCORES
    )
    assert run_features(remat_policy="none", num_sequence_shards=2) == {
        AttentionFeature.SPLIT_SEQUENCE
    }


@pytest.mark.parametrize(
    ("feature", "what"),
    [
        (AttentionFeature.SPLIT_SEQUENCE, "sequences split over sp are not supported"),
        (AttentionFeature.FCM, "forgetful causal masking is not supported"),
    ],
)
def test_check_mixer_rejects_split_sequences_and_hidden_keys(feature: AttentionFeature, what: str):
    features = frozenset({feature})
    check_mixer(build(GOLDEN["llama"]).arch_config, features)
    check_mixer(build(GOLDEN["lfm2"]).arch_config, frozenset({AttentionFeature.SEGMENTS}))
    with pytest.raises(PrepError, match=what):
        check_mixer(build(GOLDEN["lfm2"]).arch_config, features)
