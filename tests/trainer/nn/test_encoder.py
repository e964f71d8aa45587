"""Tests of encoder-decoder models: source masks, two stacks of different depth, and their parameter trees."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.commands.testing.tiny_model import (
    UNSCANNED,
    TinyTransformer,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import Tree, param_leaves
from prepcli.models.parameters import parameter_rows
from prepcli.models.registry import FAMILIES
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import LLAMA, T5, T5_GATED
from trainer.nn import transformer
from trainer.nn.initialization import init_params

FAMILY = FAMILIES["t5"]


def compile_logits(tiny: TinyTransformer) -> Callable[[Tree, Mapping[str, np.ndarray]], np.ndarray]:
    """Return a function that computes the logits of a batch, compiled once for each shape of a batch."""

    @jax.jit
    def compute(params: Tree, batch: Mapping[str, jax.Array]) -> jax.Array:
        encoder_output = transformer.encode(
            params, batch["source"], tiny.model, UNSCANNED, batch["present"]
        )
        return transformer.compute_logits(
            params, batch["tokens"], tiny.model, UNSCANNED, encoder_output
        )

    return lambda params, batch: np.asarray(
        compute(params, {name: batch[name] for name in ("tokens", "source", "present")})
    )


def test_source_padding_does_not_change_logits():
    tiny = tiny_transformer(T5)
    params, batch = (
        tiny.params_from_tensors(random_tensors(T5)),
        random_batch(29, 2, 7, has_source=True),
    )
    compute_logits = compile_logits(tiny)
    logits = compute_logits(params, batch)
    changed_padding = np.where(batch["present"], batch["source"], 28 - batch["source"]).astype(
        np.int32
    )
    np.testing.assert_array_equal(
        logits, compute_logits(params, batch | {"source": changed_padding})
    )
    length = int(batch["present"][1].sum())
    assert length < 12
    short = {
        "tokens": batch["tokens"][1:],
        **{name: batch[name][1:, :length] for name in ("source", "present")},
    }
    np.testing.assert_allclose(compute_logits(params, short)[0], logits[1], atol=5e-6)


def test_logits_depend_on_all_of_source_and_earlier_targets():
    tiny = tiny_transformer(T5_GATED)
    params, batch = (
        tiny.params_from_tensors(random_tensors(T5_GATED)),
        random_batch(29, 1, 7, has_source=True),
    )
    batch["present"][:] = True
    compute_logits = compile_logits(tiny)
    logits = compute_logits(params, batch)

    def change_of_logits(name: str, index: int) -> np.ndarray:
        tokens = batch[name].copy()
        tokens[0, index] = (tokens[0, index] + 1) % 29
        return abs(compute_logits(params, batch | {name: tokens}) - logits).max(-1)

    assert (change_of_logits("source", 11) > 1e-4).all()
    assert (change_of_logits("source", 0) > 1e-4).all()
    change = change_of_logits("tokens", 4)
    assert not change[:, :4].any()
    assert (change[:, 4:] > 1e-4).all()


def test_encode_without_mask_equals_full_mask():
    tiny = tiny_transformer(T5)
    params, batch = (
        tiny.params_from_tensors(random_tensors(T5)),
        random_batch(29, 2, 7, has_source=True),
    )
    source = jnp.asarray(batch["source"])

    @jax.jit
    def encode(source_mask: jax.Array | None) -> Any:
        return transformer.encode(params, source, tiny.model, UNSCANNED, source_mask).states

    np.testing.assert_array_equal(encode(None), encode(jnp.ones(source.shape, bool)))


def test_encoder_output_is_required_only_with_encoder():
    tiny, decoder_only = tiny_transformer(T5), tiny_transformer(LLAMA)
    params, tokens = tiny.params_from_tensors(random_tensors(T5)), jnp.zeros((1, 3), jnp.int32)
    with pytest.raises(ValueError, match="t5 has an encoder, but encoder_output is missing"):
        transformer.compute_logits(params, tokens, tiny.model, UNSCANNED)
    encoder_output = jax.eval_shape(
        lambda: transformer.encode(params, tokens, tiny.model, UNSCANNED)
    )
    llama_params = decoder_only.params_from_tensors(random_tensors(LLAMA))
    with pytest.raises(ValueError, match="llama has no encoder, but encoder_output is passed"):
        transformer.compute_logits(
            llama_params, tokens, decoder_only.model, UNSCANNED, encoder_output
        )
    with pytest.raises(PrepError, match="llama has no encoder"):
        transformer.encode(params, tokens, decoder_only.model, UNSCANNED)


# By default the test of this name in test_transformer compares a decoder.
@pytest.mark.slow
@pytest.mark.parametrize(("scan", "scan_axis"), slow_except(((False, 0), (True, 1)), ((False, 0),)))
def test_init_does_not_depend_on_how_layers_are_stored(scan: bool, scan_axis: int):
    config = T5 | {"num_layers": 1, "num_decoder_layers": 2}
    variants = tiny_transformer(config), tiny_transformer(config, scan, scan_axis)
    tensors, others = (tiny.tensors_from_params(init_params(tiny.model, 7)) for tiny in variants)
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, others[name])
    q = {
        stack: tensors[f"{stack}.block.0.layer.0.SelfAttention.q.weight"]
        for stack in ("encoder", "decoder")
    }
    assert not np.array_equal(q["encoder"], q["decoder"])


@pytest.mark.parametrize("axis", [0, 1])
def test_stacked_leaves_have_depth_of_their_stack(axis: int):
    leaves = param_leaves(FAMILY, T5, True, scan=True, scan_axis=axis)
    for path, leaf in leaves.items():
        assert leaf.stack_axis == (min(axis, len(leaf.shape) - 1) if ".layers." in path else None)
        if leaf.stack_axis is not None:
            assert leaf.shape[leaf.stack_axis] == (2 if path.startswith("encoder.") else 3)
            assert leaf.dims[leaf.stack_axis] == (
                ("encoder_layers" if path.startswith("encoder.") else "layers"),
            )


def test_unstacked_leaves_are_numbered_per_stack():
    leaves = param_leaves(FAMILY, T5_GATED, False, scan=False)
    numbers = {path.split(".", 3)[2] for path in leaves if path.startswith("decoder.layers.")}
    assert numbers == {"0", "1", "2"}
    leaf = leaves["encoder.layers.1.attn.q.weight"]
    assert (leaf.layer_index, leaf.path_pattern) == (
        1,
        "encoder.layers.{encoder_layers}.attn.q.weight",
    )
    assert leaf.shape == (3, 6, 16)
    assert leaves["decoder.layers.2.cross.o.weight"].shape == (16, 3, 6)
    assert {path for path, leaf in leaves.items() if leaf.role == "embedding"} == {
        "embed.tokens",
        "encoder.relative_positions.weight",
        "decoder.relative_positions.weight",
    }


@pytest.mark.parametrize(
    ("changes", "tensor", "is_gated"),
    [
        ({}, "wi", False),
        ({"feed_forward_proj": "gated-gelu"}, "wi_1", True),
        ({"feed_forward_proj": "gated-gelu", "is_gated_act": False}, "wi", False),
        ({"is_gated_act": True}, "wi_1", True),
    ],
)
def test_config_selects_rows_of_gated_mlp(changes: dict[str, Any], tensor: str, is_gated: bool):
    rows = parameter_rows(FAMILY, T5 | changes)
    assert ("encoder.layers.mlp.gate.weight" in rows) == is_gated
    name, _ = next(bind_row(rows["decoder.layers.mlp.up.weight"], FAMILY.sizes(T5)).tensors())
    assert name == f"decoder.block.0.layer.2.DenseReluDense.{tensor}.weight"
    flax_parameters = FAMILY.layouts["hf-flax"].parameters
    paths = {path for path, parameter in flax_parameters.items() if parameter.resolve(T5 | changes)}
    assert ("encoder.block.{encoder_layers}.layer.1.DenseReluDense.wi.kernel" in paths) != is_gated
    assert (
        "encoder.block.{encoder_layers}.layer.1.DenseReluDense.wi_0.kernel" in paths
    ) == is_gated


def test_lm_head_input_scale_is_applied_in_float32():
    """The scale 1 / sqrt(24), rounded to bfloat16, would change all logits."""
    config = T5 | {"d_model": 24, "num_layers": 1, "num_decoder_layers": 1}
    tiny = tiny_transformer(config)
    forward_config = dataclasses.replace(UNSCANNED, dtype="bfloat16")
    batch = {
        name: jnp.asarray(ids) for name, ids in random_batch(29, 2, 7, has_source=True).items()
    }
    params = tiny.params_from_tensors(random_tensors(config))

    def scaled_states(scale: float) -> np.ndarray:
        arch_config = dataclasses.replace(tiny.model.arch_config, lm_head_input_scale=scale)
        model = dataclasses.replace(tiny.model, arch_config=arch_config)

        # results of operations in bfloat16 are rounded, also within a fusion
        @partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
        def compute() -> jax.Array:
            encoder_output = transformer.encode(params, batch["source"], model, forward_config)
            return transformer.hidden_states(
                params, batch["tokens"], model, forward_config, encoder_output
            )

        return np.asarray(compute())

    expected = scaled_states(1.0).astype(np.float32) * np.float32(24**-0.5)
    assert tiny.model.arch_config.lm_head_input_scale == 24**-0.5
    assert (scaled_states(24**-0.5) == expected.astype(jnp.bfloat16)).all()
