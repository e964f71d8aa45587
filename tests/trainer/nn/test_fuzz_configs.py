"""Random configs: prep and transformers compute equal logits, or prep rejects the config. Needs the `parity` extra."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers.lazy_modules import lazy_module

torch = lazy_module("torch")
lazy_module("transformers")

from prepcli.core.errors import PrepError  # noqa: E402
from prepcli.models.registry import FAMILIES  # noqa: E402
from tests.helpers import fuzz_configs, fuzz_samples  # noqa: E402
from tests.helpers.fuzz_configs import (  # noqa: E402
    CHILD_SAMPLES,
    FuzzResult,
    compare_sample,
    format_row,
    run_chunk,
    run_samples,
)
from tests.helpers.fuzz_samples import BASE_CONFIGS, Sample, make_sample  # noqa: E402
from tests.helpers.slow_cases import slow_except  # noqa: E402
from tests.helpers.tiny_configs import LLAMA  # noqa: E402

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


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Run torch with one thread in the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
