"""Encoder and decoder: what is seen of a source, two stacks of different depth, and what the tree says of both."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.tiny_configs import LLAMA, T5, T5_GATED
from tests.helpers.tiny_transformers import UNSCANNED, model_logits, random_batch, random_tensors, tiny_transformer
from trainer.models.axis_map import bind_row
from trainer.models.errors import PrepError
from trainer.models.param_tree import param_leaves
from trainer.models.parameters import parameter_rows
from trainer.models.registry import FAMILIES
from trainer.nn import transformer as models

FAMILY = FAMILIES["t5"]


def test_padding_of_a_source_is_nothing():
    made = tiny_transformer(T5)
    params, batch = made.params_from_tensors(random_tensors(T5)), random_batch(29, 2, 7, has_source=True)
    plain = model_logits(made.model, params, batch)
    other = np.where(batch["present"], batch["source"], 28 - batch["source"]).astype(np.int32)
    np.testing.assert_array_equal(plain, model_logits(made.model, params, batch | {"source": other}))
    length = int(batch["present"][1].sum())
    assert length < 12
    short = {"tokens": batch["tokens"][1:], **{name: batch[name][1:, :length] for name in ("source", "present")}}
    np.testing.assert_allclose(model_logits(made.model, params, short)[0], plain[1], atol=5e-6)


def test_all_of_a_source_is_seen_and_of_a_target_what_was_before():
    made = tiny_transformer(T5_GATED)
    params, batch = made.params_from_tensors(random_tensors(T5_GATED)), random_batch(29, 1, 7, has_source=True)
    batch["present"][:] = True

    def changed(name: str, at: int) -> np.ndarray:
        tokens = batch[name].copy()
        tokens[0, at] = (tokens[0, at] + 1) % 29
        return abs(
            model_logits(made.model, params, batch | {name: tokens}) - model_logits(made.model, params, batch)
        ).max(-1)

    assert (changed("source", 11) > 1e-4).all()
    assert (changed("source", 0) > 1e-4).all()
    found = changed("tokens", 4)
    assert not found[:, :4].any()
    assert (found[:, 4:] > 1e-4).all()


def test_without_a_mask_all_is_there():
    made = tiny_transformer(T5)
    params, batch = made.params_from_tensors(random_tensors(T5)), random_batch(29, 2, 7, has_source=True)
    source = jnp.asarray(batch["source"])
    memory = models.encode(params, source, made.model, UNSCANNED)
    whole = models.encode(params, source, made.model, UNSCANNED, jnp.ones(source.shape, bool))
    np.testing.assert_array_equal(memory.states, whole.states)


def test_a_memory_goes_with_an_encoder():
    made, plain = tiny_transformer(T5), tiny_transformer(LLAMA)
    params, tokens = made.params_from_tensors(random_tensors(T5)), jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="an encoder with a memory"):
        models.compute_logits(params, tokens, made.model, UNSCANNED)
    memory = models.encode(params, tokens, made.model, UNSCANNED)
    with pytest.raises(ValueError, match="a memory goes with an encoder"):
        models.compute_logits(plain.params_from_tensors(random_tensors(LLAMA)), tokens, plain.model, UNSCANNED, memory)
    with pytest.raises(PrepError, match="llama has no encoder"):
        models.encode(params, tokens, plain.model, UNSCANNED)


def test_first_values_do_not_depend_on_the_form():
    forms = [tiny_transformer(T5, True, 0), tiny_transformer(T5, True, 1), tiny_transformer(T5, False)]
    found = [made.tensors_from_params(jax.jit(lambda made=made: models.init_params(made.model, 7))()) for made in forms]
    for tensor, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][tensor])
        np.testing.assert_array_equal(values, found[2][tensor])
    q = {half: found[0][f"{half}.block.0.layer.0.SelfAttention.q.weight"] for half in ("encoder", "decoder")}
    assert not np.array_equal(q["encoder"], q["decoder"])


@pytest.mark.parametrize("axis", [0, 1])
def test_each_stack_has_its_own_depth(axis: int):
    found = param_leaves(FAMILY, T5, True, True, axis)
    for path, leaf in found.items():
        assert leaf.stack_axis == (min(axis, len(leaf.shape) - 1) if ".layers." in path else None)
        if leaf.stack_axis is not None:
            assert leaf.shape[leaf.stack_axis] == (2 if path.startswith("encoder.") else 3)
            assert leaf.dims[leaf.stack_axis] == (("encoder_layers" if path.startswith("encoder.") else "layers"),)


def test_layers_apart_are_numbered_in_each_stack():
    found = param_leaves(FAMILY, T5_GATED, False, False)
    names = {path.split(".", 3)[2] for path in found if path.startswith("decoder.layers.")}
    assert names == {"0", "1", "2"}
    leaf = found["encoder.layers.1.attn.q.weight"]
    assert (leaf.layer_index, leaf.path_pattern, leaf.shape) == (
        1,
        "encoder.layers.{encoder_layers}.attn.q.weight",
        (3, 6, 16),
    )
    assert found["decoder.layers.2.cross.o.weight"].shape == (16, 3, 6)
    assert {path for path, leaf in found.items() if leaf.role == "embedding"} == {
        "embed.tokens", "encoder.relative_positions.weight", "decoder.relative_positions.weight"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "tensor", "gated"),
    [
        ({}, "wi", False),
        ({"feed_forward_proj": "gated-gelu"}, "wi_1", True),
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "wi", False),
        ({"is_gated_act": True}, "wi_1", True),
    ],
)
def test_the_row_of_a_leaf_may_hang_on_the_config(changes: dict[str, Any], tensor: str, gated: bool):
    table = parameter_rows(FAMILY, T5 | changes)
    assert ("encoder.layers.mlp.gate.weight" in table) == gated
    name, _ = next(bind_row(table["decoder.layers.mlp.up.weight"], FAMILY.sizes(T5)).tensors())
    assert name == f"decoder.block.0.layer.2.DenseReluDense.{tensor}.weight"
    flax = FAMILY.layouts["hf-flax"].table
    there = {path for path, parameter in flax.items() if parameter.of(T5 | changes)}
    assert ("encoder.block.{encoder_layers}.layer.1.DenseReluDense.wi.kernel" in there) != gated
    assert ("encoder.block.{encoder_layers}.layer.1.DenseReluDense.wi_0.kernel" in there) == gated


def test_the_scale_of_the_head_is_not_rounded_before_it_is_applied():
    """1 / sqrt(24) as bfloat16 would be another scale of all logits."""
    config = T5 | {"d_model": 24}
    made = tiny_transformer(config)
    how = dataclasses.replace(UNSCANNED, dtype="bfloat16")
    batch = {name: jnp.asarray(ids) for name, ids in random_batch(29, 2, 7, has_source=True).items()}
    params = made.params_from_tensors(random_tensors(config))

    def hidden(scale: float) -> np.ndarray:
        model = dataclasses.replace(
            made.model, arch_config=dataclasses.replace(made.model.arch_config, lm_head_input_scale=scale)
        )
        memory = models.encode(params, batch["source"], model, how)
        return np.asarray(models.hidden_states(params, batch["tokens"], model, how, memory))

    wanted = hidden(1.0).astype(np.float32) * np.float32(24**-0.5)
    assert made.model.arch_config.lm_head_input_scale == 24**-0.5
    assert (hidden(24**-0.5) == wanted.astype(jnp.bfloat16)).all()
