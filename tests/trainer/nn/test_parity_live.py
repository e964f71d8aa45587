"""Tests of logits and gradients against the transformers library, which must be installed (the `parity` extra)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from prepcli.commands.testing.checks import FamilyUnderTest, check_gradients, check_logits
from prepcli.commands.testing.tiny_model import (
    model_logits,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
    torch_logits,
    torch_model,
)
from prepcli.models.parameters import HFConfig
from prepcli.models.registry import family_of
from tests.golden import make_decoders
from tests.helpers.lazy_modules import lazy_module
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN, LIVE, T5

torch = lazy_module("torch")
lazy_module("transformers")

# The layers of all other families are scanned here.
UNSCANNED_FAMILIES = ("gpt2", "gpt_neo", "llama")
# Lengths of right-padded rows.
SHORT, LONG = ((7, 4), (300,))
LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def batch_lengths(config: HFConfig) -> list[tuple[int, ...]]:
    """Return the lengths of the rows of each batch.

    One program computes all rows, unless the length of the batch changes the results or the shape of the source.
    """
    arch_config = family_of(config).arch_config(config)
    rope_types = {rope.rope_type for rope in arch_config.ropes}
    if arch_config.encoder is not None or rope_types & {*LENGTH_DEPENDENT_ROPES}:
        return [SHORT, LONG]
    return [(*SHORT, *LONG)]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """Limit torch to one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Configs with fields that golden files lack and that change the computation.
FAST = (
    *("gpt2-by-depth-upcast", "gpt_neo-odd", "opt-bare", "gpt_neox-version-5", "llama-yarn-mscale"),
    *("mistral-no-window", "qwen2-kinds", "qwen3-biases", "qwen3_moe-listed", "gemma2-no-caps"),
    *("gemma3_text-truncate", "phi3-su", "t5-36-buckets", "t5-aliases"),
)


# test_parity covers golden configs
@pytest.mark.parametrize("name", slow_except((name for name in LIVE if name not in GOLDEN), FAST))
def test_logits_match_transformers(name: str, tmp_path: Path):
    subject = FamilyUnderTest(LIVE[name], tmp_path)
    for lengths in batch_lengths(subject.config):
        check_logits(subject, lengths)


STORED_HEAD_CHANGES = {
    "null": {"tie_word_embeddings": None},
    "true, unscaled": {"scale_decoder_outputs": False},
}


@pytest.mark.parametrize("changes", STORED_HEAD_CHANGES.values(), ids=STORED_HEAD_CHANGES)
def test_logits_of_t5_with_stored_head_match_transformers(changes: dict[str, Any]):
    config = T5 | changes
    tensors, tiny = (
        random_tensors(config, has_stored_head=True),
        tiny_transformer(config, has_stored_head=True),
    )
    assert "lm_head.weight" in tensors
    batch = random_batch(config["vocab_size"], 2, 7, 4, has_source=True)
    logits = model_logits(tiny.model, tiny.params_from_tensors(tensors), batch)
    expected = torch_logits(torch_model(config, tensors), batch, (7, 7))
    assert abs(logits - expected).max() <= 2e-5


# One config for each kind of layer that golden files lack.
WITH_GRADIENTS = [
    *(
        "gpt2-names",
        "gpt_neo-odd",
        "gpt_neo-wide",
        "llama-groups",
        "llama-biases",
        "gptj-tied",
        "opt-bare",
    ),
    *("qwen3_moe-plain", "gemma3_text-version-5", "phi3-version-5", "t5-untied", "gpt2-by-depth"),
]


@pytest.mark.parametrize("name", slow_except(WITH_GRADIENTS, ("opt-bare",)))
def test_gradients_with_padded_vocab_match_torch(name: str, tmp_path: Path):
    is_scanned = LIVE[name]["model_type"] not in UNSCANNED_FAMILIES
    check_gradients(FamilyUnderTest(LIVE[name], tmp_path), is_scanned, loss_rtol=1e-6)


# A model of each module of transformers with layers of its own.
FAST_GOLDEN = ("gpt2", "gpt_neo", "llama", "t5", "gemma2", "mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", slow_except(GOLDEN, FAST_GOLDEN))
def test_golden_files_match_installed_transformers(name: str):
    golden = make_decoders.load(name)
    current = make_decoders.compute(GOLDEN[name], make_decoders.long_length(name))
    assert abs(golden.short_logits - current.short_logits).max() <= 2e-5
    assert abs(golden.long_logits - current.long_logits).max() <= 2e-5
    for tensor, expected in golden.gradients.items():
        assert relative_error(current.gradients[tensor], expected) <= 1e-5
