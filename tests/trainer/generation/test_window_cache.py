"""Tests of the memory and results of the KV cache: rings of slots for sliding windows, and prefill in tiles."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax

from prepcli.commands.testing.tiny_model import (
    TinyTransformer,
    random_tensors,
    tiny_transformer,
)
from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.param_tree import Tree
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN, NEWER_FAMILY_VARIANTS
from trainer.generation import decode
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator, _make_prompt_batch
from trainer.nn import cache, transformer
from trainer.nn.cache import KVCache
from trainer.nn.model_spec import ForwardConfig

CONFIGS: dict[str, Any] = {
    **{name: GOLDEN[name] for name in ("mistral", "gemma2", "gemma3_text", "gpt_neo")},
    "phi3": NEWER_FAMILY_VARIANTS["phi3-window"],
}
# The windows of the models have 3 to 5 slots.
START_SLOTS, PREFILL_LENGTH, LENGTH = (0, 3, 6), 9, 24


def use_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give all layers a slot for each token."""
    monkeypatch.setattr(cache, "layer_slots", lambda window, num_slots: num_slots)


def prefilled_logits(tiny: TinyTransformer, params: Tree, tokens: Array) -> Array:
    """Prefill the first tokens, decode the others one at a time, and return the logits after each step."""

    @jax.jit
    def compute(params: Tree, tokens: Array) -> Array:
        step = partial(decode.decode_step, params, model=tiny.model, forward_config=ForwardConfig())
        start_slots = jnp.array(START_SLOTS)
        cache = decode.init_kv_cache(tiny.model, tokens.shape, ForwardConfig())
        logits, cache = step(cache, tokens[:, :PREFILL_LENGTH], start_slots)

        def decode_one(cache: KVCache, column: Array) -> tuple[KVCache, Array]:
            logits, cache = step(cache, column[:, None], start_slots)
            return cache, logits

        return jnp.concatenate(
            [logits[None], lax.scan(decode_one, cache, tokens[:, PREFILL_LENGTH:].T)[1]]
        )

    return compute(params, tokens)


def random_params(name: str) -> tuple[TinyTransformer, Tree]:
    """Return a tiny model and random parameters."""
    tiny = tiny_transformer(CONFIGS[name])
    assert any(FULL_ATTENTION < window <= 5 for window in tiny.model.arch_config.sliding_windows)
    return tiny, tiny.params_from_tensors(random_tensors(CONFIGS[name]))


# All layers of the first have windows, every second one of the other.
@pytest.mark.parametrize("name", slow_except(CONFIGS, ("mistral", "gemma2")))
def test_ring_cache_logits_equal_full_cache(name: str, monkeypatch: pytest.MonkeyPatch):
    tiny, params = random_params(name)
    tokens = jnp.asarray(
        np.random.default_rng(1).integers(0, 29, (len(START_SLOTS), LENGTH), dtype=np.int32)
    )
    logits = prefilled_logits(tiny, params, tokens)
    whole_logits = jax.jit(
        lambda params, row: transformer.compute_logits(params, row, tiny.model, ForwardConfig())
    )
    for row, start in enumerate(START_SLOTS):
        whole = whole_logits(params, tokens[row : row + 1, start:])
        expected = whole[0, PREFILL_LENGTH - 1 - start :, : tiny.model.true_vocab_size]
        np.testing.assert_allclose(logits[:, row], expected, atol=1e-5)
    use_full_cache(monkeypatch)
    np.testing.assert_allclose(logits, prefilled_logits(tiny, params, tokens), atol=1e-5)


@pytest.mark.parametrize("name", slow_except(CONFIGS, ("gpt_neo",)))
def test_ring_cache_tokens_equal_full_cache(name: str, monkeypatch: pytest.MonkeyPatch):
    tiny, params = random_params(name)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8], [9, 7, 9]]

    def generate() -> list[list[int]]:
        config = GenerationConfig(20)
        return Generator(
            params, tiny.model, forward_config=ForwardConfig(), generation_config=config
        ).generate(prompts)

    tokens = generate()
    use_full_cache(monkeypatch)
    assert generate() == tokens


def test_cache_of_mistral_does_not_grow_with_length():
    tiny, _ = random_params("mistral")

    def cache_nbytes(length: int) -> int:
        cache = jax.eval_shape(
            lambda: decode.init_kv_cache(tiny.model, (2, length), ForwardConfig())
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    assert cache_nbytes(100_000) == cache_nbytes(100) < cache_nbytes(4) * 2


@pytest.mark.parametrize("name", slow_except(("gemma3_text", "t5"), ("gemma3_text",)))
def test_prefill_in_tiles_generates_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch):
    tiny = tiny_transformer(GOLDEN[name])
    params, prompts = (
        tiny.params_from_tensors(random_tensors(GOLDEN[name])),
        [[3, 1, 4, 1, 5, 9, 2, 6, 5], [9, 7]],
    )
    encoder_inputs = ([[0]] * len(prompts), prompts) if name == "t5" else (prompts,)

    def generate() -> list[list[int]]:
        config = GenerationConfig(6)
        generator = Generator(
            params, tiny.model, forward_config=ForwardConfig(), generation_config=config
        )
        return generator.generate(*encoder_inputs)

    dense = generate()
    monkeypatch.setattr(decode, "MAX_DENSE_LENGTH", 8)
    assert generate() == dense


def test_prefill_memory_is_linear_in_the_prompt():
    tiny, params = random_params("mistral")
    config = GenerationConfig(1)

    def temp_nbytes(length: int) -> int:
        batch = jax.eval_shape(lambda: _make_prompt_batch([[1] * length], length, 1, 1, 0))
        options: dict[str, Any] = {
            "model": tiny.model,
            "forward_config": ForwardConfig(),
            "generation_config": config,
        }
        compiled = (
            jax.jit(partial(decode.prefill, count=length, **options)).lower(params, batch).compile()
        )
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temp_nbytes(4096) < 3 * temp_nbytes(2048)
