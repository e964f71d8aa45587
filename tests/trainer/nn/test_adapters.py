"""Adapters in the forward pass: their product with the weights merged, and the random masks of their inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.models.layer_config import DropoutConfig
from prepcli.models.lora import LORA_A, LORA_B, expert_projections
from prepcli.models.lora_config import LoraConfig
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, GPT2, LLAMA
from tests.helpers.tiny_configs import GOLDEN
from trainer.nn import transformer
from trainer.nn.context import AdapterDropout
from trainer.nn.dropout import derive_key, step_dropout
from trainer.nn.initialization import init_params
from trainer.nn.model_spec import ForwardConfig, ModelSpec, build_model

CONFIGS = {config["model_type"]: config for config in (*GOLDEN.values(), *ALL_CONFIGS)}
TOKENS = jnp.asarray(np.arange(24, dtype=np.int32).reshape(2, 12) * 5 % 31)
ROWS = jnp.arange(2, dtype=jnp.uint32)


def make_model(config: dict[str, Any], lora: LoraConfig) -> tuple[ModelSpec, dict[str, Any]]:
    """Return a model with adapters, and random parameters by path."""
    family = FAMILIES[config["model_type"]]
    base = build_model(family, config, family.is_tied(config))
    model = build_model(family, config, base.is_tied, lora=lora)
    assert model.adapters is not None
    leaves = flatten_tree(init_params(base, 0))
    random = np.random.default_rng(0)
    for path, leaf in leaves.items():
        # Other leaves would have no gradient behind a factor of zero, e.g. the rates of scores of Doge.
        if not np.asarray(leaf).any():
            leaves[path] = jnp.asarray(random.normal(0, 0.1, leaf.shape), leaf.dtype)
    for path, leaf in model.adapters.matrices.items():
        leaves[path] = jnp.asarray(random.normal(0, 0.2, leaf.shape), jnp.float32)
    return model, leaves


def merge(model: ModelSpec, leaves: dict[str, Any]) -> Tree:
    """Return the parameters with the products of adapters added to the weights."""
    adapters = model.adapters
    assert adapters is not None
    merged = {path: leaf for path, leaf in leaves.items() if path not in adapters.matrices}
    for path in adapters.matrices:
        name = path.removesuffix(LORA_B)
        if path == name:
            continue
        a_path = adapters.shared.get(f"{name}{LORA_A}", f"{name}{LORA_A}")
        weight = np.asarray(merged[f"{name}weight"])
        leaf = adapters.leaves[a_path]
        stacks = 2 if ("experts",) in leaf.dims else 1
        a = np.asarray(leaves[a_path])
        rank = a.shape[stacks]
        a = a.reshape(*a.shape[: stacks + 1], -1)
        b = np.asarray(leaves[path])
        b = b.reshape(*b.shape[:stacks], -1, rank)
        product = adapters.scalings[a_path] * (b @ a)
        merged[f"{name}weight"] = jnp.asarray(weight + product.reshape(weight.shape))
    return unflatten_tree(merged)


def run(params: Tree, model: ModelSpec) -> jax.Array:
    """Compute the logits of two rows."""
    tokens = TOKENS % model.true_vocab_size
    source = None
    if model.arch_config.encoder is not None:
        source = transformer.encode(params, tokens, model, ForwardConfig())
    return transformer.compute_logits(params, tokens, model, ForwardConfig(), source)


def outputs(params: Tree, model: ModelSpec) -> np.ndarray:
    """Return the logits of two rows."""
    return np.asarray(jax.jit(lambda params: run(params, model))(params))


@pytest.mark.parametrize("name", slow_except(list(CONFIGS), ["mixtral"]))
def test_adapters_equal_merged_weights_in_every_family(name: str):
    config = CONFIGS[name]
    family = FAMILIES[name]
    has_experts = any(expert_projections(family, config))
    lora = LoraConfig(
        2,
        3.0,
        ("all-linear",),
        target_parameters=("*",) if has_experts else (),
    )
    if name == "gpt2":
        lora = replace(lora, rank_pattern={"attn.q": 3})
    model, leaves = make_model(config, lora)
    adapted = outputs(unflatten_tree(leaves), model)
    base = build_model(family, config, model.is_tied)
    np.testing.assert_allclose(adapted, outputs(merge(model, leaves), base), atol=2e-4, rtol=1e-4)
    gradients = flatten_tree(
        jax.jit(jax.grad(lambda p: jnp.sin(run(p, model)).sum()))(unflatten_tree(leaves))
    )
    unused = [path for path in model.saved_leaves if not np.abs(gradients[path]).max() > 0]
    assert not unused


DROPOUT = DropoutConfig(adapters=0.25)


def test_adapter_dropout_keeps_the_mean_of_its_input():
    keys = step_dropout(DROPOUT, seed=0, step=jnp.int32(3), row_ids=ROWS).key
    dropout = AdapterDropout(derive_key(keys, jnp.arange(2 * 512).reshape(2, 512)), 0.25)
    x = dropout.apply(jnp.ones((2, 512, 8, 16)))
    assert set(np.unique(x)) == {0.0, np.float32(1 / 0.75)}
    # 131,072 elements: the standard deviation of the fraction is 0.0012.
    assert abs(float((x == 0).mean()) - 0.25) < 0.006


def test_modules_have_masks_of_their_own():
    lora = LoraConfig(2, 4.0, ("all-linear",))
    adapters = build_model(FAMILIES["llama"], LLAMA, is_tied=False, lora=lora).adapters
    fused = build_model(FAMILIES["gpt2"], GPT2, is_tied=True, lora=lora).adapters
    assert adapters is not None
    assert fused is not None
    assert len({*adapters.dropout_sites.values()}) == len(adapters.dropout_sites) == 7
    sites = fused.dropout_sites
    assert sites["attn.q"] == sites["attn.k"] == sites["attn.v"] != sites["attn.o"]
