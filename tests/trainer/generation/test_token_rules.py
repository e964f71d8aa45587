"""Probabilities after the rules of a model and the filters of sampling are those of transformers."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

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
from trainer.generation.sampling import DecodedTokens, Sampling, apply_token_rules, warp_logits


def probabilities(name: str) -> np.ndarray:
    """Return the probabilities of a case, in rows that begin in different slots."""
    fields = CASES[name]
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
    exponentials = np.exp(scores - scores.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("name", CASES)
def test_probabilities_are_those_of_transformers(name: str):
    expected = np.array(json.loads(FILE.read_text())[name])
    np.testing.assert_allclose(probabilities(name), expected, atol=1e-6)


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
        is_changed = not np.allclose(probabilities(name), plain, atol=1e-4)
        assert is_changed == (name not in unchanged), name
