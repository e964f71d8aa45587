"""Rotary embeddings of a recipe, as changes of a model's config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.registry import family_of
from prepcli.models.rope_config import Rope
from tests.helpers.tiny_configs import (
    GEMMA3,
    GOLDEN,
    GPT2,
    GPT_NEOX,
    GPTJ,
    LIVE,
    LLAMA,
    LONG_ROPE,
    PHI3,
    ROPES,
    T5,
)
from trainer.nn.attention_mask import inverse_frequencies
from trainer.recipe.rope_overrides import RopeOverrides, check_rope_scaling, override_rope

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
VERSION_5 = LIVE["gpt_neox-version-5"]  # has rope_parameters with theta and partial_rotary_factor


def read_rope(config: Any) -> Rope:
    rope = family_of(config).arch_config(config).rope
    assert rope is not None
    return rope


def test_override_rope_without_overrides_keeps_the_config():
    assert override_rope(GPT2, RopeOverrides()) is GPT2


def test_yarn_frequencies_follow_the_paper():
    """Section 3.2 of https://arxiv.org/abs/2309.00071: r(d) = L / wavelength, ramp from beta_slow 1 to beta_fast 32."""
    fields = {"max_position_embeddings": 4096, "head_dim": 128}
    config = override_rope(
        LLAMA | fields, RopeOverrides(YARN | {"truncate": False}, max_positions=16384)
    )
    base = 10_000.0 ** (-np.arange(0, 128, 2) / 128)
    turns = 4096 * base / (2 * np.pi)
    dims = np.arange(64)
    low, high = (128 * np.log(4096 / (n * 2 * np.pi)) / (2 * np.log(10_000)) for n in (32, 1))
    kept = 1 - np.clip((dims - low) / (high - low), 0, 1)
    expected = (1 - kept) * base / 4 + kept * base
    np.testing.assert_allclose(inverse_frequencies(read_rope(config), 16384), expected, rtol=2e-6)
    np.testing.assert_allclose(expected[turns > 32], base[turns > 32])
    np.testing.assert_allclose(expected[turns < 1], base[turns < 1] / 4)
    assert read_rope(config).attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_ntk_theta_divides_the_lowest_frequency_by_the_factor():
    factor, dim = 4.0, 16
    theta = 10_000 * factor ** (dim / (dim - 2))
    changed = inverse_frequencies(read_rope(override_rope(LLAMA, RopeOverrides(theta=theta))), 64)
    default = inverse_frequencies(read_rope(LLAMA), 64)
    assert changed[0] == default[0]
    assert changed[-1] == pytest.approx(default[-1] / factor, rel=1e-5)


@pytest.mark.parametrize("kind", ROPES)
def test_override_gives_the_rope_of_a_golden_file(kind: str):
    """`tests/trainer/nn/test_parity.py` compares these configs with the results of transformers."""
    assert read_rope(override_rope(LLAMA, RopeOverrides(ROPES[kind]))) == read_rope(
        GOLDEN[f"llama-{kind}"]
    )


@pytest.mark.parametrize(
    "config", [LLAMA, GPT_NEOX, VERSION_5], ids=["llama", "gpt_neox", "version 5"]
)
@pytest.mark.parametrize("scaling", [YARN, LLAMA3], ids=["yarn", "llama3"])
def test_original_positions_default_to_the_checkpoint(
    config: dict[str, Any], scaling: dict[str, Any]
):
    changed = override_rope(config, RopeOverrides(scaling, max_positions=512))
    assert (read_rope(changed).original_max_positions, changed["max_position_embeddings"]) == (
        64,
        512,
    )


def test_original_positions_of_the_recipe_replace_all_others():
    config = LLAMA | {"original_max_position_embeddings": 16, "rope_scaling": LLAMA3}
    changed = override_rope(config, RopeOverrides(YARN | {"original_max_position_embeddings": 48}))
    assert read_rope(changed).original_max_positions == 48


def test_more_positions_keep_the_original_ones_of_the_checkpoint():
    changed = override_rope(LLAMA | {"rope_scaling": YARN}, RopeOverrides(max_positions=512))
    assert read_rope(changed).original_max_positions == 64


def test_second_override_keeps_the_original_positions():
    once = override_rope(LLAMA, RopeOverrides(YARN, max_positions=256))
    twice = override_rope(once, RopeOverrides(YARN | {"factor": 16.0}, max_positions=1024))
    assert (read_rope(twice).original_max_positions, read_rope(twice).factor) == (64, 16)


def test_scaling_keeps_theta_and_rotated_share():
    rope = read_rope(override_rope(VERSION_5, RopeOverrides({"type": "linear", "factor": 2.0})))
    assert rope == Rope(read_rope(VERSION_5).rotary_dim, 700.0, 64, rope_type="linear", factor=2.0)


@pytest.mark.parametrize(
    "config", [LLAMA, LLAMA | {"rope_scaling": YARN}, GPT_NEOX | {"rotary_emb_base": 500}]
)
def test_theta_changes_nothing_else(config: dict[str, Any]):
    before, after = read_rope(config), read_rope(override_rope(config, RopeOverrides(theta=7e5)))
    assert (after.theta, after.rope_type, after.factor) == (7e5, before.rope_type, before.factor)
    assert override_rope(config, RopeOverrides(theta=7e5))["rope_theta"] == 7e5, (
        "transformers 4 reads it there"
    )


def test_scaling_may_name_theta():
    assert read_rope(override_rope(LLAMA, RopeOverrides(YARN | {"rope_theta": 3e4}))).theta == 3e4


def test_default_removes_a_scaling():
    config = LLAMA | {"rope_scaling": DYNAMIC}
    assert read_rope(override_rope(config, RopeOverrides({"rope_type": "default"}))) == read_rope(
        LLAMA
    )


def test_gptj_override_sets_n_positions():
    changed = override_rope(GPTJ, RopeOverrides(max_positions=600))
    assert (changed["n_positions"], read_rope(changed).original_max_positions) == (600, 600)
    assert "max_position_embeddings" not in changed


def test_longrope_stretch_follows_the_positions():
    changed = override_rope(PHI3 | {"partial_rotary_factor": 1.0}, RopeOverrides(
        LONG_ROPE | {"original_max_position_embeddings": 32}, max_positions=1024
    ))  # fmt: skip
    assert read_rope(changed).attention_factor == pytest.approx(
        (1 + np.log(32) / np.log(32)) ** 0.5
    )


REJECTED: dict[str, tuple[dict[str, Any], RopeOverrides, str, str]] = {
    "learned positions": (
        GPT2,
        RopeOverrides(YARN),
        "`model.rope_scaling` cannot be applied to gpt2",
        "it has learned positions instead of a rotary embedding",
    ),
    "relative bias": (
        T5,
        RopeOverrides(theta=5e5),
        "`model.rope_theta` cannot be applied to t5",
        "it has a relative position bias instead of a rotary embedding",
    ),
    "recurrent mixer": (
        {"model_type": "mamba2", "num_hidden_layers": 2},
        RopeOverrides(theta=5e5),
        "`model.rope_theta` cannot be applied to mamba2",
        "it has recurrent mixers instead of a rotary embedding",
    ),
    "two rotary embeddings": (
        GEMMA3,
        RopeOverrides(YARN),
        "`model.rope_scaling` is not supported for gemma3_text",
        "it has one rotary embedding for layers with a sliding window and another for the other layers",
    ),
    "fixed rotary embedding": (
        GPTJ,
        RopeOverrides(theta=5e5),
        "`model.rope_theta` cannot be applied to this gptj model",
        "`rope_scaling` is not supported for this family",
    ),
    "unsupported type": (
        PHI3,
        RopeOverrides(LLAMA3, max_positions=128),
        "`model.rope_scaling`, `model.max_position_embeddings` cannot be applied to this phi3 model",
        "rope type `llama3` is not supported for this family",
    ),
    "number of factors": (
        LLAMA,
        RopeOverrides(LONG_ROPE),
        "`model.rope_scaling` cannot be applied to this llama model",
        "short_factor of the rope scaling is [1.0, 1.5, 2.5, 4.0], it must be 8 numbers, one per rotated pair",
    ),
    "theta": (
        LLAMA,
        RopeOverrides(theta=0.5),
        "`model.rope_theta` cannot be applied to this llama model",
        "rope_theta is 0.5, it must be above 1",
    ),
    "postponed scaling": (
        LLAMA,
        RopeOverrides(DYNAMIC, max_positions=256),
        "`model.max_position_embeddings` is 256",
        "dynamic scaling begins after these positions: 64 in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_override_rope_rejects_unsupported_overrides(name: str):
    config, overrides, what, why = REJECTED[name]
    with pytest.raises(PrepError) as caught:
        override_rope(config, overrides)
    assert (caught.value.code, caught.value.what, caught.value.why) == (USAGE, what, why)


INVALID_SCALINGS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "`model.rope_scaling` has no `rope_type`", ""),
    (
        {"rope_type": "ntk", "factor": 2.0},
        "rope type `ntk` is not supported",
        "`model.rope_theta` = theta",
    ),
    ({"rope_type": "llama"}, "rope type `llama` is not supported", "did you mean `llama3`?"),
    ({"rope_type": 3}, "rope type `3` is not supported", ""),
    (
        YARN | {"beta_fats": 32},
        "`model.rope_scaling` has the unknown key `beta_fats`",
        "did you mean `beta_fast`?",
    ),
    (
        {"rope_type": "linear", "factor": 2, "beta_fast": 32},
        "`model.rope_scaling` has the unknown key `beta_fast`",
        "",
    ),
    ({"type": "yarn"}, "`model.rope_scaling` has no `factor`", ""),
    (
        {"rope_type": "longrope", "short_factor": [1.0]},
        "`model.rope_scaling` has no `long_factor`",
        "",
    ),
    (YARN | {"factor": 0}, "`model.rope_scaling` has factor = 0", ""),
    (YARN | {"factor": "4"}, "`model.rope_scaling` has factor = '4'", ""),
    (YARN | {"factor": True}, "`model.rope_scaling` has factor = True", ""),
    (YARN | {"factor": float("nan")}, "`model.rope_scaling` has factor = nan", ""),
    (YARN | {"truncate": 1}, "`model.rope_scaling` has truncate = 1", ""),
    (YARN | {"type": 1}, "`model.rope_scaling` has type = 1", ""),
    (
        YARN | {"original_max_position_embeddings": 4096.0},
        "`model.rope_scaling` has original_max_position_embeddings = 4096.0",
        "",
    ),
    (LONG_ROPE | {"short_factor": [1, -1]}, "`model.rope_scaling` has short_factor = [1, -1]", ""),
    (LONG_ROPE | {"short_factor": 1.0}, "`model.rope_scaling` has short_factor = 1.0", ""),
    (
        LLAMA3 | {"high_freq_factor": 1.0},
        "`model.rope_scaling` has low_freq_factor 1 and high_freq_factor 1",
        "",
    ),
    (
        YARN | {"beta_slow": 9, "beta_fast": 3},
        "`model.rope_scaling` has beta_slow 9 and beta_fast 3",
        "",
    ),
]


@pytest.mark.parametrize(("scaling", "what", "hint"), INVALID_SCALINGS)
def test_check_rope_scaling_rejects_invalid_tables(scaling: dict[str, Any], what: str, hint: str):
    with pytest.raises(PrepError) as caught:
        check_rope_scaling(scaling)
    assert (caught.value.code, caught.value.what) == (USAGE, what)
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize("scaling", [YARN, LLAMA3, DYNAMIC, LONG_ROPE, {"rope_type": "default"}])
def test_check_rope_scaling_accepts_published_tables(scaling: dict[str, Any]):
    check_rope_scaling(scaling)
