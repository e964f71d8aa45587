"""Rotary embeddings read from configs, and rejected configs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.core.errors import PrepError
from prepcli.models.rope_config import Rope, read_rope
from tests.helpers.tiny_configs import ROPES
from trainer.nn.attention_mask import inverse_frequencies, rotary_cos_sin

DIM, POSITIONS = 16, 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_read_rope_accepts_fields_of_both_versions(kind: str):
    """Version 4 has `rope_scaling` with `type` or `rope_type`, and `rope_theta`; version 5 has `rope_parameters`."""
    fields = {**ROPES.get(kind, {})}
    fields.pop("type", None)
    fields.pop("rope_type", None)
    version_4_type = {"rope_theta": 9e4, "rope_scaling": {"type": kind, **fields}}
    version_4 = {"rope_theta": 9e4, "rope_scaling": {"rope_type": kind, **fields}}
    version_5 = {"rope_parameters": {"rope_type": kind, "rope_theta": 9e4, **fields}}
    ropes = [
        read_rope(config, DIM, max_positions=POSITIONS)
        for config in (version_4_type, version_4, version_5)
    ]
    assert ropes[0] == ropes[1] == ropes[2]
    assert (ropes[0].rope_type, ropes[0].theta) == (kind, 9e4)


def test_read_rope_prefers_outer_original_positions():
    inside = {**LLAMA3, "original_max_position_embeddings": 32}
    assert (
        read_rope({"rope_scaling": LLAMA3}, DIM, max_positions=POSITIONS).original_max_positions
        == POSITIONS
    )
    assert (
        read_rope({"rope_scaling": inside}, DIM, max_positions=POSITIONS).original_max_positions
        == 32
    )
    outside = {"rope_scaling": inside, "original_max_position_embeddings": 16}
    assert read_rope(outside, DIM, max_positions=POSITIONS).original_max_positions == 16


INVALID_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type `ntk` is not supported"),
    (
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "short_factor of the rope scaling is None, it must be 8",
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}},
        "long_factor",
    ),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7 + ["2"]}}, "short_factor"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7 + [0]}},
        "short_factor of the rope scaling has 0",
    ),
    ({"rope_scaling": "linear"}, "it must be an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor of the rope scaling is 0"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
    (
        {"rope_scaling": {**LLAMA3, "low_freq_factor": 0}},
        "low_freq_factor of the rope scaling is 0",
    ),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "a", "mscale_all_dim": 1}},
        "mscale",
    ),
    ({"rope_theta": 1}, "theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor"),
    (
        {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0.5}},
        "original_max_position_embeddings is 0.5",
    ),
    (
        {"original_max_position_embeddings": 0, "rope_scaling": LLAMA3},
        "original_max_position_embeddings is 0",
    ),
    (
        {
            "original_max_position_embeddings": 1,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
        "1 original position",
    ),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "a rotary embedding for `full_attention`",
    ),
    ({"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": -2}}, "theta"),
    (
        {"partial_rotary_factor": 0.5},
        "`partial_rotary_factor` is not supported for this family - config.json has 0.5",
    ),
    (
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
        "`partial_rotary_factor` is not supported for this family - config.json has 0.25",
    ),
]


@pytest.mark.parametrize(("config", "reason"), INVALID_CONFIGS)
def test_read_rope_rejects_invalid_config(config: dict[str, Any], reason: str):
    with pytest.raises(PrepError, match=reason):
        read_rope(config, DIM, max_positions=POSITIONS)


def test_read_rope_rejects_longrope_without_pairs():
    config = {
        "rope_scaling": {"type": "longrope", "factor": 3.0, "short_factor": [], "long_factor": []}
    }
    with pytest.raises(PrepError, match="rotary embeddings rotate pairs, but 1 elements"):
        read_rope(config, 1, max_positions=POSITIONS)


@pytest.mark.parametrize(("dim", "kind"), [(3, "default"), (0, "default"), (2, "dynamic")])
def test_rope_rejects_invalid_rotary_dim(dim: int, kind: str):
    with pytest.raises(PrepError, match="rotary embeddings"):
        Rope(dim, 1e4, POSITIONS, kind)


def test_inverse_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(
        inverse_frequencies(Rope(8, 10_000.0, POSITIONS), 5), [1, 0.1, 0.01, 0.001], rtol=1e-6
    )


@pytest.mark.parametrize("length", [1, 64, 65, 300])
def test_dynamic_frequencies_change_in_long_sequences(length: int):
    plain = inverse_frequencies(Rope(DIM, 1e4, POSITIONS), length)
    dynamic = inverse_frequencies(Rope(DIM, 1e4, POSITIONS, "dynamic", 4.0), length)
    assert np.array_equal(dynamic, plain) == (length <= POSITIONS)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_scaling_keeps_high_frequencies_stretches_low_ones(kind: str):
    plain = inverse_frequencies(Rope(64, 1e4, 2048), 5)
    scaled = inverse_frequencies(
        read_rope(
            {"rope_scaling": {**LLAMA3, "type": kind, "rope_type": kind}}, 64, max_positions=2048
        ),
        5,
    )
    assert scaled[0] == plain[0]
    np.testing.assert_allclose(scaled[-1], plain[-1] / 8, rtol=1e-6)
    assert (np.diff(scaled) < 0).all()
    assert scaled.dtype == np.float32


def test_rotary_cos_sin_includes_attention_factor():
    rope = Rope(
        DIM,
        1e4,
        POSITIONS,
        rope_type="yarn",
        factor=2.0,
        high_freq_factor=32.0,
        attention_factor=0.5,
    )
    cosine, sine, _ = rotary_cos_sin(rope, jnp.arange(3))
    assert cosine.shape == sine.shape == (3, DIM // 2)
    np.testing.assert_allclose(cosine**2 + sine**2, 0.25, rtol=1e-6)
