"""Rotations that configs describe, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.tiny_configs import ROPES
from trainer.models.errors import PrepError
from trainer.models.rope_config import Rope, read_rope
from trainer.nn.position_encoding import inverse_frequencies, rotary_cos_sin

DIM, POSITIONS = 16, 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_without_a_word_it_is_the_first_one():
    assert read_rope({}, DIM, POSITIONS) == Rope(DIM, 10_000.0, POSITIONS)
    assert read_rope({"rope_theta": 5e5, "rope_scaling": None}, DIM, POSITIONS).theta == 5e5


@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "llama3", "yarn"])
def test_spellings_of_two_versions_are_one(kind: str):
    """Version 4 has the kind as `type` or `rope_type` in `rope_scaling`, theta beside it; version 5 all in one."""
    fields = {**ROPES.get(kind, {})}
    fields.pop("type", None)
    fields.pop("rope_type", None)
    old = {"rope_theta": 9e4, "rope_scaling": {"type": kind, **fields}}
    newer = {"rope_theta": 9e4, "rope_scaling": {"rope_type": kind, **fields}}
    newest = {"rope_parameters": {"rope_type": kind, "rope_theta": 9e4, **fields}}
    found = [read_rope(config, DIM, POSITIONS) for config in (old, newer, newest)]
    assert found[0] == found[1] == found[2]
    assert (found[0].rope_type, found[0].theta) == (kind, 9e4)


def test_the_length_of_pretraining_is_that_beside_it_first():
    inside = {**LLAMA3, "original_max_position_embeddings": 32}
    assert read_rope({"rope_scaling": LLAMA3}, DIM, POSITIONS).original_max_positions == POSITIONS
    assert read_rope({"rope_scaling": inside}, DIM, POSITIONS).original_max_positions == 32
    outside = {"rope_scaling": inside, "original_max_position_embeddings": 16}
    assert read_rope(outside, DIM, POSITIONS).original_max_positions == 16


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope type `ntk` is not known"),
    ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor of its rope scaling is None, it has to be 8"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 7}}, "long_factor"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7 + ["2"]}}, "short_factor"),
    ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7 + [0]}}, "short_factor of its rope scaling has 0"),
    ({"rope_scaling": "linear"}, "not an object"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
    ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor 0"),
    ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0}}, "low 0"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": "a", "mscale_all_dim": 1}}, "mscale"),
    ({"rope_theta": 1}, "theta"),
    ({"rope_theta": 10**400}, "rope_theta"),
    ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor"),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 0.5}}, "original_max_position_embeddings is 0.5"),
    ({"original_max_position_embeddings": 0, "rope_scaling": LLAMA3}, "original_max_position_embeddings is 0"),
    (
        {
            "original_max_position_embeddings": 1,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
        "made for 1 position",
    ),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "`full_attention` has a rotation of its own"),
    ({"rope_theta": None, "rope_scaling": {"type": "default", "rope_theta": -2}}, "theta"),
    ({"partial_rotary_factor": 0.5}, "`partial_rotary_factor` is not known - it is 0.5"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "`partial_rotary_factor` is not known - it is 0.25"),
]


@pytest.mark.parametrize(("config", "named"), BAD)
def test_what_makes_no_sense_is_named(config: dict[str, Any], named: str):
    with pytest.raises(PrepError, match=named):
        read_rope(config, DIM, POSITIONS)


@pytest.mark.parametrize(("dim", "kind"), [(3, "default"), (0, "default"), (2, "dynamic")])
def test_heads_have_pairs(dim: int, kind: str):
    with pytest.raises(PrepError, match="rotary positions"):
        Rope(dim, 1e4, POSITIONS, kind)


def test_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(inverse_frequencies(Rope(8, 10_000.0, POSITIONS), 5), [1, 0.1, 0.01, 0.001], rtol=1e-6)


@pytest.mark.parametrize("length", [1, 64, 65, 300])
def test_dynamic_ones_change_beyond_the_positions(length: int):
    plain = inverse_frequencies(Rope(DIM, 1e4, POSITIONS), length)
    found = inverse_frequencies(Rope(DIM, 1e4, POSITIONS, "dynamic", 4.0), length)
    assert np.array_equal(found, plain) == (length <= POSITIONS)


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_short_waves_stay_and_long_ones_are_stretched(kind: str):
    plain = inverse_frequencies(Rope(64, 1e4, 2048), 5)
    found = inverse_frequencies(read_rope({"rope_scaling": {**LLAMA3, "type": kind, "rope_type": kind}}, 64, 2048), 5)
    assert found[0] == plain[0]
    np.testing.assert_allclose(found[-1], plain[-1] / 8, rtol=1e-6)
    assert (np.diff(found) < 0).all()
    assert found.dtype == np.float32


def test_tables_have_the_attention_factor_in_them():
    cosine, sine = rotary_cos_sin(Rope(DIM, 1e4, POSITIONS, "yarn", 2.0, 1.0, 32.0, attention_factor=0.5), 3)
    assert cosine.shape == sine.shape == (3, DIM // 2)
    np.testing.assert_allclose(cosine**2 + sine**2, 0.25, rtol=1e-6)
