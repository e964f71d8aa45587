"""Configs as published and random ones: logits of transformers, or an error. Needs the `parity` extra."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import (
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
    torch_logits,
    torch_model,
)
from prepcli.core.errors import PrepError
from prepcli.core.json_values import JsonValue
from prepcli.models.registry import FAMILIES, family_of
from tests.helpers import fuzz_configs, fuzz_samples
from tests.helpers.config_fields import DEEP_YARN, DEEPSEEK, GROUPS, LATENT
from tests.helpers.fuzz_configs import (
    CHILD_SAMPLES,
    FuzzResult,
    compare_sample,
    format_row,
    run_chunk,
    run_samples,
)
from tests.helpers.fuzz_samples import BASE_CONFIGS, Sample, make_sample
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import LIVE, LLAMA

lazy_module("torch")
lazy_module("transformers")
pytestmark = pytest.mark.usefixtures("one_torch_thread")

LOCAL, GLOBAL = "sliding_attention", "full_attention"
LENGTHS = (40, 7)


def without(config: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Return a config without some fields."""
    return {name: value for name, value in config.items() if name not in fields}


EXAONE4 = without(LIVE["exaone4"], "sliding_window_pattern") | {"num_hidden_layers": 5}
EXAONE_MOE = without(LIVE["exaone_moe"], "sliding_window_pattern") | {"num_hidden_layers": 4}
DEEPSEEK_V3 = DEEPSEEK | LATENT | GROUPS | {"model_type": "deepseek_v3", "rope_scaling": DEEP_YARN}
LAYERS_OF_LLG = [LOCAL, LOCAL, GLOBAL, LOCAL, GLOBAL]
LAYERS_OF_LLLG = [LOCAL, LOCAL, LOCAL, GLOBAL]
# Name -> config as published, and the config with the fields that transformers reads.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # The last layer is global.
    "exaone4, letters": (
        EXAONE4 | {"sliding_window_pattern": "LLG"},
        EXAONE4 | {"layer_types": LAYERS_OF_LLG},
    ),
    "exaone4, letters and layer types": (
        EXAONE4 | {"sliding_window_pattern": "LLLG", "layer_types": LAYERS_OF_LLG},
        EXAONE4 | {"layer_types": LAYERS_OF_LLG},
    ),
    "exaone4, no window": (
        EXAONE4 | {"sliding_window": None, "sliding_window_pattern": None},
        EXAONE4 | {"sliding_window": None, "layer_types": [GLOBAL] * 5},
    ),
    "exaone_moe": (
        EXAONE_MOE | {"sliding_window_pattern": "LLLG"},
        EXAONE_MOE | {"layer_types": LAYERS_OF_LLLG},
    ),
    "hunyuan_v1_dense": (
        LIVE["hunyuan_v1_dense"] | {"use_qk_norm": True, "use_cla": False},
        LIVE["hunyuan_v1_dense"],
    ),
    "hunyuan_v1_moe": (LIVE["hunyuan_v1_moe"] | {"use_qk_norm": True}, LIVE["hunyuan_v1_moe"]),
    "dots1": (LIVE["dots1"] | {"use_qk_norm": True}, LIVE["dots1"]),
    "hy_v3": (
        LIVE["hy_v3"] | {"use_qk_norm": True, "first_k_dense_replace": 1},
        LIVE["hy_v3"],
    ),
    "glm4_moe_lite": (LIVE["glm4_moe_lite"] | {"first_k_dense_replace": 1}, LIVE["glm4_moe_lite"]),
    "kimi_k2": (DEEPSEEK_V3 | {"model_type": "kimi_k2"}, DEEPSEEK_V3),
}
FAST = ("exaone4, letters", "hunyuan_v1_dense")


@pytest.mark.parametrize("name", slow_except(PUBLISHED, FAST))
def test_logits_of_published_config_match_transformers(name: str):
    published, plain = PUBLISHED[name]
    tensors = random_tensors(plain, seed=3)
    tiny = tiny_transformer(published)
    batch = random_batch(plain["vocab_size"], len(LENGTHS), max(LENGTHS), 4, has_source=False)
    logits = model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
    expected = torch_logits(torch_model(plain, tensors), batch, LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert abs(logits[row, :length] - expected[row, :length]).max() <= 2e-5


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_config_has_the_plain_architecture(name: str):
    published, plain = PUBLISHED[name]
    family, plain_family = family_of(published), family_of(plain)
    assert family.sizes(published) == plain_family.sizes(plain)
    if "layer_types" not in plain:
        assert family.arch_config(published) == plain_family.arch_config(plain)


@pytest.mark.parametrize("pattern", ["", "LLX", "llg", None, 0, True, [4]])
def test_invalid_window_patterns_are_errors(pattern: JsonValue):
    for config in (EXAONE4, EXAONE_MOE):
        with pytest.raises(PrepError, match="sliding_window_pattern"):
            family_of(config).arch_config(config | {"sliding_window_pattern": pattern})


@pytest.mark.parametrize("name", ["gemma3_text", "cohere2"])
def test_other_families_have_no_letters(name: str):
    config = LIVE[name] | {"sliding_window_pattern": "LG"}
    with pytest.raises(PrepError, match="sliding_window_pattern"):
        family_of(config).arch_config(without(config, "layer_types"))


@pytest.mark.parametrize("name", ["glm4_moe_lite", "hy_v3"])
def test_contradictory_dense_layers_are_an_error(name: str):
    with pytest.raises(PrepError, match="first_k_dense_replace"):
        family_of(LIVE[name]).arch_config(LIVE[name] | {"first_k_dense_replace": 2})


def test_alias_of_a_model_type_is_not_listed():
    assert "kimi_k2" in FAMILIES
    assert "kimi_k2" not in list(FAMILIES)
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


# Random configs: prep and transformers compute equal logits, or prep rejects the config. Needs the `parity` extra.


SEED = int(os.environ.get("PREP_FUZZ_SEED", "1"))
CHUNKS = 1000 // CHILD_SAMPLES
# Families of the default suite. The first sample of each shape takes seconds to compile.
FAST_FAMILIES = ("llama",)
# Families with all kinds of fields: dense, alternating layers, experts, latents, recurrent layers, an encoder.
SAMPLED_FAMILIES = (
    "gpt_neo",
    "gemma3_text",
    "mixtral",
    "deepseek_v3",
    "qwen3_next",
    "mamba2",
    "t5",
)


def wrong_samples(results: Iterable[tuple[int, Sample, FuzzResult]]) -> dict[int, str]:
    """Return number -> reason of the samples with other logits than transformers, or with a traceback."""
    return {
        number: f"{sample}: {result.why}"
        for number, sample, result in results
        if result.outcome == "wrong"
    }


@pytest.mark.parametrize("family", FAST_FAMILIES)
def test_sampled_configs_match_transformers_or_are_rejected(family: str):
    assert wrong_samples(run_chunk(family, 0, range(4))) == {}


# Family, seed and number of samples that once had other logits or shapes
FOUND_SAMPLES = (("ministral3", 7, 9), ("olmoe", 7, 19))


@pytest.mark.parametrize(("family", "seed", "number"), FOUND_SAMPLES)
def test_found_samples_match_or_are_rejected(family: str, seed: int, number: int):
    assert wrong_samples(run_chunk(family, seed, [number])) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", BASE_CONFIGS)
def test_thousand_sampled_configs_match_or_are_rejected(family: str, chunk: int):
    """Run 1,000 samples; the variable PREP_FUZZ_SEED selects other samples."""
    numbers = range(chunk * CHILD_SAMPLES, (chunk + 1) * CHILD_SAMPLES)
    assert wrong_samples(run_samples(family, SEED, numbers)) == {}


@pytest.mark.slow
def test_run_samples_keeps_numbers_across_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fuzz_configs, "CHILD_SAMPLES", 2)
    assert list(run_samples("llama", 0, range(3, 6))) == run_chunk("llama", 0, range(3, 6))


def test_base_configs_cover_all_families():
    assert {*BASE_CONFIGS} == {*FAMILIES}
    assert {name: base["model_type"] for name, base in BASE_CONFIGS.items()} == {
        name: name for name in FAMILIES
    }


def test_make_sample_is_deterministic():
    assert make_sample("qwen2", 3, 4) == make_sample("qwen2", 3, 4)
    assert make_sample("qwen2", 3, 4) != make_sample("qwen2", 3, 5) != make_sample("qwen2", 4, 5)


@pytest.mark.parametrize("family", slow_except(BASE_CONFIGS, SAMPLED_FAMILIES))
def test_samples_change_every_field_and_most_are_valid(family: str):
    samples = [make_sample(family, 0, number) for number in range(600)]
    changed = Counter(name for sample in samples for name in sample.changed)
    assert {*fuzz_samples.fields_to_change(family)} <= changed.keys()
    assert sum(map(is_accepted, samples)) > 0.55 * len(samples)


def is_accepted(sample: Sample) -> bool:
    """Return whether prep supports the config of a sample."""
    try:
        FAMILIES[sample.config["model_type"]].arch_config(sample.config)
    except PrepError:
        return False
    return True


real_model_logits = fuzz_configs.model_logits


def logits_with_error(error: float) -> Any:
    """Return `model_logits` with an error in every logit."""
    return lambda *args: real_model_logits(*args) + np.float32(error)


def test_compare_sample_finds_wrong_logits(monkeypatch: pytest.MonkeyPatch):
    plain = Sample(LLAMA, (), has_stored_head=False)
    assert compare_sample(plain).outcome == "equal"
    monkeypatch.setattr(fuzz_configs, "model_logits", logits_with_error(1e-3))
    assert compare_sample(plain).outcome == "wrong"


@pytest.mark.parametrize("error", [ValueError("x"), ZeroDivisionError(), OverflowError()])
def test_compare_sample_counts_tracebacks_as_wrong(
    error: Exception, monkeypatch: pytest.MonkeyPatch
):
    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(fuzz_configs, "model_logits", fails)
    assert compare_sample(Sample(LLAMA, (), has_stored_head=False)).outcome == "wrong"


def test_format_row_counts_outcomes():
    results = [
        FuzzResult("equal"),
        FuzzResult("equal"),
        FuzzResult("rejected", torch_computes=True),
        FuzzResult("torch fails"),
        FuzzResult("wrong"),
    ]
    assert format_row("llama", results, 7).split() == ["llama", "5", "2", "1", "1", "1", "1", "7"]
