"""Hidden states after each layer: those of the whole model at the end, and those of transformers in between."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import (
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.models.param_tree import Tree
from tests.helpers.tiny_configs import GOLDEN, LLAMA
from trainer.nn import transformer
from trainer.nn.model_spec import ForwardConfig

TOKENS = np.random.default_rng(0).integers(0, 29, (1, 11))
# One family per kind of layers: learned positions, windows, experts, dense layers before experts, a width of its own
# for the embedding.
FAMILIES = ["llama", "gpt_neo", "gemma2", "qwen3_moe", "deepseek_v3", "opt-350m"]


def states_of(config: dict[str, Any], scan: bool, axis: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the states by layer, and the input of the LM head that the compiled model computes."""
    tiny = tiny_transformer(config, scan, axis)
    params = tiny.params_from_tensors(random_tensors(config))
    options = ForwardConfig(scan_layers=scan)
    tokens = jnp.asarray(TOKENS, jnp.int32)

    # `prep verify --logits` computes the layers without jit. Here it would compile each operation by itself.
    @jax.jit
    def compute_states(params: Tree) -> tuple[list[Array], Array]:
        states = [*transformer.hidden_states_by_layer(params, tokens, tiny.model, options)]
        states[-1] = transformer.lm_head_input(params, states[-1], tiny.model, options)
        return states, transformer.hidden_states(params, tokens, tiny.model, options)

    states, expected = compute_states(params)
    return [np.asarray(state) for state in states], np.asarray(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_last_hidden_states_are_those_of_the_model(family: str):
    states, expected = states_of(GOLDEN[family], scan=True, axis=0)
    assert relative_error(states[-1], expected) < 1e-5


@pytest.mark.parametrize(("scan", "axis"), [(False, 0), (True, 1)])
def test_hidden_states_do_not_depend_on_how_layers_are_stored(scan: bool, axis: int):
    states, _ = states_of(LLAMA, scan=True, axis=0)
    others, _ = states_of(LLAMA, scan, axis)
    assert len(states) == LLAMA["num_hidden_layers"] + 1
    for state, other in zip(states, others, strict=True):
        assert relative_error(other, state) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt_neo", "gemma2", "deepseek_v3"])
def test_hidden_states_match_transformers(family: str):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from prepcli.commands.testing.tiny_model import torch_model

    config = GOLDEN[family]
    model = torch_model(config, random_tensors(config))
    with torch.no_grad():
        output = model(torch.tensor(TOKENS), use_cache=False, output_hidden_states=True)
    states, _ = states_of(config, scan=True, axis=0)
    for state, expected in zip(states, output.hidden_states, strict=True):
        assert relative_error(state, expected.numpy()) < 2e-5
