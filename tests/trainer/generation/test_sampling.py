"""Sampling of tokens: probabilities, rules, caches of windows, and metrics of texts."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax

from prepcli.commands.testing.tiny_model import TinyTransformer, random_tensors, tiny_transformer
from prepcli.core.errors import USAGE, PrepError, UsageError
from prepcli.models.architecture import FULL_ATTENTION
from prepcli.models.param_tree import Tree
from prepcli.sources.generation_config import generation_defaults
from tests.golden.make_processors import (
    CASES,
    EOS,
    FILE,
    MAX_NEW_TOKENS,
    PROMPT_LENGTH,
    TOKENS,
    VOCAB,
    processed_probabilities,
    raw_logits,
)
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN, NEWER_FAMILY_VARIANTS
from trainer.generation import decode
from trainer.generation.decode import GenerationConfig
from trainer.generation.generator import Generator, _make_prompt_batch
from trainer.generation.sampling import (
    DecodedTokens,
    Sampling,
    apply_token_rules,
    sample_tokens,
    warp_logits,
)
from trainer.generation.text_metrics import METRICS, check_metrics, score_texts
from trainer.nn import cache, transformer
from trainer.nn.cache import KVCache
from trainer.nn.model_spec import ForwardConfig

# Tests of sampling: filtered tokens, frequencies, and independence of the batch.

VOCAB_SIZE = 12

# These logits are exact in float32, with frequent ties.
LOGITS = st.integers(-20, 20).map(lambda quarters: quarters / 4)


def token_probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Compute the probability of each token by the algorithm of transformers' warpers, in float64."""
    scores = logits.astype(np.float64) / sampling.temperature
    if sampling.top_k:
        scores = np.where(
            scores < np.sort(scores)[-min(sampling.top_k, len(scores))], -np.inf, scores
        )
    if sampling.top_p < 1:
        order = np.argsort(scores, kind="stable")
        is_removed = np.cumsum(softmax(scores[order])) <= 1 - sampling.top_p + 1e-9
        is_removed[-1] = False
        scores[order[is_removed]] = -np.inf
    return softmax(scores)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Compute the softmax of one row."""
    exponentials = np.exp(scores - scores.max())
    return exponentials / exponentials.sum()


@given(
    logits=st.lists(LOGITS, min_size=2, max_size=VOCAB_SIZE, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, VOCAB_SIZE + 2),
    top_p=st.sampled_from([1e-6, 0.1, 0.35, 0.6, 0.9, 0.999, 1.0]),
)
@settings(max_examples=40)
def test_warp_logits_matches_probabilities(
    logits: list[float], temperature: float, top_k: int, top_p: float
):
    sampling = Sampling(temperature, top_k, top_p)
    # Logits are padded like a vocabulary, so that all examples have one shape.
    row = np.full(VOCAB_SIZE, -1e30, np.float32)
    row[: len(logits)] = logits
    expected = token_probabilities(row, sampling)
    warped = np.asarray(warp_logits(jnp.asarray(row[None]), sampling))[0]
    np.testing.assert_allclose(softmax(warped.astype(np.float64)), expected, atol=1e-5)


def test_top_k_keeps_ties_with_kth_token():
    warped = np.asarray(warp_logits(jnp.array([[1.0, 3.0, 2.0, 2.0, 0.0]]), Sampling(1.0, 2)))
    assert np.isfinite(warped[0]).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(
    "sampling",
    slow_except(
        [Sampling(1.0), Sampling(0.5, top_k=4), Sampling(2.0, top_p=0.7), Sampling(1.5, 6, 0.8)],
        [Sampling(1.5, 6, 0.8)],
    ),
)
def test_sampled_frequencies_match_probabilities(sampling: Sampling):
    """A chi-square statistic with at most 11 degrees of freedom exceeds 40 in 1 of 30,000 cases."""
    logits = np.random.default_rng(1).standard_normal(VOCAB_SIZE).astype(np.float32)
    count, probabilities = 20_000, token_probabilities(logits, sampling)
    row_numbers = jnp.arange(count, dtype=jnp.int32)
    rows = jnp.broadcast_to(logits, (count, VOCAB_SIZE))
    tokens = np.asarray(sample_tokens(rows, row_numbers, jnp.int32(0), sampling))
    frequencies = np.bincount(tokens, minlength=VOCAB_SIZE)
    is_possible = probabilities > 0
    assert not frequencies[~is_possible].any()
    expected = count * probabilities[is_possible]
    assert ((frequencies[is_possible] - expected) ** 2 / expected).sum() < 40


def test_sample_depends_on_seed_row_number_and_step_only():
    logits = jnp.zeros((6, 100_000))
    row_numbers = jnp.arange(6, dtype=jnp.int32)

    def sample(seed: int, step: int) -> list[int]:
        return sample_tokens(
            logits, row_numbers, jnp.int32(step), Sampling(1.0, seed=seed)
        ).tolist()

    tokens = sample(0, 0)
    assert tokens == sample(0, 0)
    assert len({*tokens, *sample(0, 1), *sample(1, 0)}) == 18
    last_rows = sample_tokens(logits[:2], row_numbers[4:], jnp.int32(0), Sampling(1.0))
    assert last_rows.tolist() == tokens[4:], "samples must not depend on other rows"
    padded_logits = jnp.pad(logits, ((0, 0), (0, 24)), constant_values=-1e30)
    padded = sample_tokens(padded_logits, row_numbers, jnp.int32(0), Sampling(1.0))
    assert padded.tolist() == tokens, "samples must not depend on padding of the vocabulary"


@pytest.mark.parametrize(
    ("temperature", "top_p"),
    slow_except(
        [(0.0, 0.5), (1e-30, 0.5), (1e-300, 1.0), (1.0, 1e-300)], [(0.0, 0.5), (1.0, 1e-300)]
    ),
)
def test_tiny_temperature_or_top_p_takes_most_likely(temperature: float, top_p: float):
    """Values that underflow in float32 behave like 0."""
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((50, VOCAB_SIZE)), jnp.float32)
    sampling = Sampling(temperature, top_k=3, top_p=top_p)
    tokens = sample_tokens(logits, jnp.arange(50), jnp.int32(0), sampling)
    assert (tokens.dtype, tokens.tolist()) == (jnp.int32, logits.argmax(-1).tolist())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"))),
        ("top_k", -1),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"))),
        *(("seed", value) for value in (-1, 1 << 32)),
    ],
)
def test_sampling_rejects_values_out_of_range(field: str, value: float):
    values: dict[str, Any] = {"temperature": 1.0, field: value}
    with pytest.raises(PrepError, match=f"{field} .* is out of range") as caught:
        Sampling(**values)
    assert caught.value.code == USAGE


# Probabilities after the rules of a model and the filters of sampling are those of transformers.


def probabilities(fields: Mapping[str, Any]) -> np.ndarray:
    """Return the probabilities with the fields of a generation_config.json, in rows that begin in different slots."""
    defaults = generation_defaults({**fields, "eos_token_id": EOS}, None, VOCAB)
    tokens = np.asarray(TOKENS, np.int32)
    # Two free slots before each row, and one for the new token.
    slots = np.pad(tokens, ((0, 0), (2, 1)))
    length = 2 + tokens.shape[1]
    decoded = DecodedTokens(
        jnp.asarray(slots),
        jnp.full(len(tokens), 2, jnp.int32),
        jnp.int32(length),
        jnp.int32(tokens.shape[1] - PROMPT_LENGTH),
    )
    logits = apply_token_rules(
        jnp.asarray(raw_logits()),
        decoded,
        eos_token_ids=defaults.eos_token_ids,
        max_new_tokens=MAX_NEW_TOKENS,
        rules=defaults.rules,
    )
    if fields.get("do_sample"):
        sampling = Sampling(
            fields.get("temperature", 1.0),
            fields.get("top_k", 0),
            fields.get("top_p", 1.0),
            min_p=fields.get("min_p", 0.0),
        )
        logits = warp_logits(logits, sampling)
    scores = np.asarray(logits, np.float64)
    # Infinite scores have no probabilities: NaN, as in torch.
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_transformers(name: str):
    expected = np.array(json.loads(FILE.read_text())[name])
    np.testing.assert_allclose(probabilities(CASES[name]), expected, atol=1e-6)


LARGE_FIELDS: dict[str, Any] = {
    "repetition_penalty": 1e300,
    "min_length": 10**20,
    "min_new_tokens": 10**20,
    "no_repeat_ngram_size": 10**20,
    "sequence_bias": [[[5], -1e300]],
    "exponential_decay_length_penalty": [1, 1e300],
}


@pytest.mark.parametrize("field", LARGE_FIELDS)
def test_large_numbers_give_probabilities_of_transformers(field: str):
    pytest.importorskip("transformers")
    fields = {field: LARGE_FIELDS[field]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual = probabilities(fields)
    np.testing.assert_allclose(actual, processed_probabilities(fields), atol=1e-6)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 10**400},
        {"sequence_bias": [[[5], 10**400]]},
        {"exponential_decay_length_penalty": [1, 10**400]},
    ],
)
def test_integer_too_large_for_a_float_is_an_error(fields: dict[str, Any]):
    (field,) = fields
    with pytest.raises(PrepError, match=f"`{field}` is "):
        generation_defaults({**fields, "eos_token_id": EOS}, None, VOCAB)


@pytest.mark.parametrize("name", CASES)
def test_golden_probabilities_are_those_of_transformers_now(name: str):
    pytest.importorskip("transformers")
    expected = np.array(json.loads(FILE.read_text())[name])
    np.testing.assert_allclose(processed_probabilities(CASES[name]), expected, atol=1e-8)


def test_every_rule_has_a_case_with_an_effect():
    raw = raw_logits().astype(np.float64)
    plain = np.exp(raw) / np.exp(raw).sum(-1, keepdims=True)
    unchanged = {"begin_suppress_tokens", "late_decay", "renormalize_logits"}
    for name in CASES:
        is_changed = not np.allclose(probabilities(CASES[name]), plain, atol=1e-4)
        assert is_changed == (name not in unchanged), name


# Metrics of generated texts, against the values of their definitions.

TEXTS = ["the cat sat on the mat", "a dog"]

REFERENCES = ["the cat sat on the mat", "the dog ran"]


def test_exact_match_ignores_outer_spaces():
    assert score_texts(["exact_match"], [" a b", "a"], ["a b ", "b"]) == {"exact_match": 0.5}


def test_rouge_is_the_mean_f_measure():
    pytest.importorskip("rouge_score")
    scores = score_texts(["rouge"], TEXTS, REFERENCES)
    one_of_two = 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)
    assert scores["rouge1"] == pytest.approx((1 + one_of_two) / 2)
    assert scores["rouge2"] == pytest.approx(0.5)


def test_bleu_equals_sacrebleu_corpus_bleu():
    sacrebleu = pytest.importorskip("sacrebleu")
    assert (
        score_texts(["bleu"], TEXTS, REFERENCES)["bleu"]
        == sacrebleu.corpus_bleu(TEXTS, [REFERENCES]).score
    )
    assert score_texts(["bleu"], REFERENCES[:1], REFERENCES[:1])["bleu"] == pytest.approx(100)


def test_metrics_of_no_texts_are_nan():
    assert math.isnan(score_texts(["exact_match"], [], [])["exact_match"])


@pytest.mark.parametrize(
    ("metric", "module"), [("rouge", "rouge_score.rouge_scorer"), ("bleu", "sacrebleu")]
)
def test_missing_package_names_the_extra(metric: str, module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(PrepError) as raised:
        check_metrics([metric])
    assert raised.value.hint == "`pip install 'prepcli[metrics]'`"


def test_unknown_metric_is_an_error():
    with pytest.raises(UsageError, match="unknown metric `meteor`"):
        score_texts(["meteor"], TEXTS, REFERENCES)
    assert set(METRICS) == {"rouge", "bleu", "exact_match"}


# Tests of the memory and results of the KV cache: rings of slots for sliding windows, and prefill in tiles.

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
@pytest.mark.parametrize("name", slow_except(CONFIGS, ("gemma2",)))
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


def test_cache_of_mistral_does_not_grow_with_length():
    tiny, _ = random_params("mistral")

    def cache_nbytes(length: int) -> int:
        cache = jax.eval_shape(
            lambda: decode.init_kv_cache(tiny.model, (2, length), ForwardConfig())
        )
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    assert cache_nbytes(100_000) == cache_nbytes(100) < cache_nbytes(4) * 2


@pytest.mark.parametrize("name", slow_except(("gpt_neo", "gemma3_text", "t5"), ("gpt_neo",)))
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
