"""Random configs: logits equal those of transformers, or prep refuses the config. Needs the `parity` extra."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.helpers import fuzz_configs, fuzz_samples  # noqa: E402
from tests.helpers.fuzz_configs import FuzzResult, compare_sample, format_row, run_samples  # noqa: E402
from tests.helpers.fuzz_samples import BASE_CONFIGS, Sample, make_sample  # noqa: E402
from tests.helpers.tiny_configs import LLAMA, MISTRAL  # noqa: E402
from trainer.models.errors import PrepError  # noqa: E402
from trainer.models.registry import FAMILIES  # noqa: E402

SEED = int(os.environ.get("PREP_FUZZ_SEED", "1"))
CHUNKS, EACH = 20, 50  # 1,000 samples of each family
FEW = ("llama",)  # in the default suite: the first sample of each shape takes seconds to compile


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def wrong(family: str, seed: int, numbers: range) -> dict[int, str]:
    """Samples that prep computes otherwise than transformers, or ends in a traceback, with the reason."""
    found = run_samples(family, seed, numbers)
    return {number: f"{given}: {result.why}" for number, given, result in found if result.outcome == "wrong"}


@pytest.mark.parametrize("family", FEW)
def test_samples_are_equal_or_refused(family: str):
    assert wrong(family, 0, range(4)) == {}


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("family", BASE_CONFIGS)
def test_thousand_samples_are_equal_or_refused(family: str, chunk: int):
    """`PREP_FUZZ_SEED` chooses other samples."""
    assert wrong(family, SEED, range(chunk * EACH, (chunk + 1) * EACH)) == {}


def test_bases_are_of_all_families():
    assert {*BASE_CONFIGS} == {*FAMILIES}
    assert {name: base["model_type"] for name, base in BASE_CONFIGS.items()} == {name: name for name in FAMILIES}


def test_samples_are_functions_of_family_seed_and_number():
    assert make_sample("qwen2", 3, 4) == make_sample("qwen2", 3, 4)
    assert make_sample("qwen2", 3, 4) != make_sample("qwen2", 3, 5) != make_sample("qwen2", 4, 5)


@pytest.mark.parametrize("family", BASE_CONFIGS)
def test_samples_change_every_field_and_most_are_accepted(family: str):
    samples = [make_sample(family, 0, number) for number in range(600)]
    changed = Counter(name for each in samples for name in each.changed)
    assert {*fuzz_samples.fields_to_change(family)} <= changed.keys()
    assert sum(map(accepted, samples)) > 0.55 * len(samples)


def accepted(given: Sample) -> bool:
    try:
        FAMILIES[given.config["model_type"]].arch_config(given.config)
    except PrepError:
        return False
    return True


def off(amount: float) -> Any:
    """`logits_of` with an error."""
    return lambda *args: real(*args) + np.float32(amount)


real = fuzz_configs.model_logits


def test_fuzzer_finds_logits_that_are_off(monkeypatch: pytest.MonkeyPatch):
    plain = Sample(LLAMA, (), own_head=False)
    assert compare_sample(plain).outcome == "equal"
    monkeypatch.setattr(fuzz_configs, "model_logits", off(1e-3))
    assert compare_sample(plain).outcome == "wrong"


def test_fuzzer_finds_window_that_is_lost(monkeypatch: pytest.MonkeyPatch):
    """As it was where `layer_types` made a list of layers without a window."""
    listed = Sample(MISTRAL | {"layer_types": ["full_attention"] * 2}, (), own_head=False)
    assert compare_sample(listed).outcome == "equal"
    monkeypatch.setattr("trainer.models.families.mistral.uniform_windows", lambda layers, window: (0,) * layers)
    assert compare_sample(listed).outcome == "wrong"


@pytest.mark.parametrize("error", [ValueError("x"), ZeroDivisionError(), OverflowError()])
def test_fuzzer_counts_tracebacks_as_wrong(error: Exception, monkeypatch: pytest.MonkeyPatch):
    def fails(*args: Any) -> Any:
        raise error

    monkeypatch.setattr(fuzz_configs, "model_logits", fails)
    assert compare_sample(Sample(LLAMA, (), own_head=False)).outcome == "wrong"


def test_fuzzer_tells_refusals_that_transformers_shares():
    assert compare_sample(Sample(LLAMA | {"num_key_value_heads": 3}, (), own_head=False)).outcome == "refused"
    alone = compare_sample(Sample(LLAMA | {"hidden_act": "mish"}, (), own_head=False))
    assert (alone.outcome, alone.reference_computes) == ("refused", True)
    assert compare_sample(Sample(LLAMA | {"attention_bias": 1}, (), own_head=False)).outcome == "judge fails"


def test_fuzzer_finds_tensors_that_transformers_lacks(monkeypatch: pytest.MonkeyPatch):
    def more(*args: Any, **options: Any) -> Any:
        return real_filled(*args, **options) | {"stray": np.zeros(3, np.float32)}

    real_filled = fuzz_configs.random_tensors
    monkeypatch.setattr(fuzz_configs, "random_tensors", more)
    assert compare_sample(Sample(LLAMA, (), own_head=False)).outcome == "wrong"


def test_line_of_table_counts_outcomes():
    results = [
        FuzzResult("equal"),
        FuzzResult("equal"),
        FuzzResult("refused", reference_computes=True),
        FuzzResult("judge fails"),
        FuzzResult("wrong"),
    ]
    assert format_row("llama", results, 7).split() == ["llama", "5", "2", "1", "1", "1", "1", "7"]
