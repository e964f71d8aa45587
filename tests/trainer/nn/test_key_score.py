"""Scores of keys from their values, compared with their equation in NumPy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.commands.testing.tiny_model import model_logits, tiny_transformer
from prepcli.core.errors import PrepError
from prepcli.models.registry import FAMILIES
from tests.helpers.later_configs import LATER_FAMILIES
from trainer.nn.attention import append_key_scores
from trainer.nn.attention_mask import KV, AttentionMask
from trainer.nn.context import LayerContext

DOGE = LATER_FAMILIES["doge"]


def test_products_include_the_scores_of_keys():
    arch_config = FAMILIES["doge"].arch_config(DOGE)
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 9, 8)).astype(np.float32)
    keys = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    values = rng.standard_normal((2, 5, 3, 8)).astype(np.float32)
    projection = rng.standard_normal((3, 3, 8)).astype(np.float32)
    bias = rng.standard_normal(3).astype(np.float32)
    rate = np.array([0.5, -0.3, 0.0], np.float32)
    weights = {
        "score_step": {"weight": jnp.asarray(projection), "bias": jnp.asarray(bias)},
        "score_rate": {"weight": jnp.asarray(rate)},
    }
    kv = KV(jnp.asarray(keys), jnp.asarray(values))
    context = LayerContext(arch_config, AttentionMask())
    longer_q, longer_kv = append_key_scores(jnp.asarray(q), kv, weights, context)
    steps = np.log1p(np.exp(np.einsum("bskv,jkv->bsj", values, projection) + bias))
    scores = np.exp(rate * steps)
    for head in range(9):
        group = head // 3
        products = np.einsum("bte,bse->bts", q[:, :, head], keys[:, :, group])
        expected = arch_config.attn_scale * products + scores[:, None, :, group]
        actual = np.einsum("bte,bse->bts", longer_q[:, :, head], longer_kv.keys[:, :, group])
        np.testing.assert_allclose(arch_config.attn_scale * actual, expected, rtol=1e-5, atol=1e-5)


def test_sequences_longer_than_the_positions_are_refused():
    tiny = tiny_transformer(DOGE | {"max_position_embeddings": 8})
    batch = {"tokens": np.zeros((1, 9), np.int32)}
    with pytest.raises(PrepError) as caught:
        model_logits(tiny.model, {}, batch)
    assert caught.value.why == "the model has 8 positions"
