"""The functional core apart from its numbers, which test_parity has: first values, what it refuses, what it keeps."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers.tiny_configs import GPT2, GPT_NEO, LLAMA
from tests.helpers.tiny_transformers import (
    UNSCANNED,
    TinyTransformer,
    model_logits,
    random_batch,
    random_tensors,
    tiny_transformer,
)
from trainer.models.errors import USAGE, PrepError
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn import transformer as models
from trainer.nn.transformer import ForwardConfig
from trainer.recipe.tables import Model as Recipe

FORMS: list[tuple[tuple[bool, ...], bool]] = [((), True), ((), False), ((False,), False)]  # stacked, scanned


def first_values(made: TinyTransformer, seed: int) -> Tree:
    return jax.jit(lambda: models.init_params(made.model, seed))()


def test_first_values_do_not_depend_on_the_form():
    forms = [tiny_transformer(GPT_NEO, True, 0), tiny_transformer(GPT_NEO, True, 1), tiny_transformer(GPT_NEO, False)]
    found = [made.tensors_from_params(first_values(made, 7)) for made in forms]
    for tensor, values in found[0].items():
        np.testing.assert_array_equal(values, found[1][tensor])
        np.testing.assert_array_equal(values, found[2][tensor])


def test_first_values_do_not_depend_on_what_else_there_is():
    plain, more = tiny_transformer(LLAMA), tiny_transformer(LLAMA | {"attention_bias": True, "num_hidden_layers": 3})
    few, many = (made.tensors_from_params(first_values(made, 7)) for made in (plain, more))
    for tensor, values in few.items():
        np.testing.assert_array_equal(values, many[tensor])


def test_first_values_are_by_role():
    made = tiny_transformer(LLAMA | {"attention_bias": True, "initializer_range": 0.5, "hidden_size": 32})
    params = flatten_tree(first_values(made, 1))
    other = flatten_tree(first_values(made, 2))
    drawn = []
    for path, leaf in made.model.leaves.items():
        values = np.asarray(params[path])
        assert (values.dtype, values.shape) == (np.float32, leaf.shape)
        if leaf.role in ("scale", "bias"):
            np.testing.assert_array_equal(values, leaf.role == "scale")
        else:
            assert values.std() == pytest.approx(0.5, rel=0.1)
            assert not np.array_equal(values, other[path])
            drawn.append(values.flatten()[:20])
    assert len({values.tobytes() for values in drawn}) == len(drawn)
    q = np.asarray(params["layers.attn.q.weight"])
    assert not np.array_equal(q[0], q[1])


def test_scores_by_depth_do_not_depend_on_the_form():
    config = GPT2 | {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3}
    plain, tensors = tiny_transformer(GPT2 | {"n_layer": 3}), random_tensors(config)
    batch = random_batch(config["vocab_size"], 2, 7)
    forms = [(tiny_transformer(config, *form), ForwardConfig(scan_layers=scan)) for form, scan in FORMS]
    found = [model_logits(made.model, made.params_from_tensors(tensors), batch, how) for made, how in forms]
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], atol=2e-5)
    assert abs(found[0] - model_logits(plain.model, plain.params_from_tensors(tensors), batch)).max() > 1e-2


@pytest.mark.parametrize("true", [0, 30, -1, "29", 2.5])
def test_a_true_vocabulary_is_in_the_padded_one(true: Any):
    with pytest.raises(PrepError, match="true_vocab_size"):
        tiny_transformer(LLAMA | {"true_vocab_size": true})


def test_learned_positions_end():
    made = tiny_transformer(GPT_NEO | {"max_position_embeddings": 5})
    params = first_values(made, 0)
    assert model_logits(made.model, params, {"tokens": np.zeros((1, 5), np.int32)}).shape == (1, 5, 29)
    with pytest.raises(PrepError, match="6 tokens a sequence - the model has 5 positions") as caught:
        models.compute_logits(params, jnp.zeros((1, 6), jnp.int32), made.model, UNSCANNED)
    assert caught.value.code == USAGE


def test_leaves_that_are_apart_cannot_be_scanned():
    made = tiny_transformer(LLAMA, scan=False)
    with pytest.raises(PrepError, match="layers cannot be scanned") as caught:
        models.compute_logits(
            first_values(made, 0), jnp.zeros((1, 2), jnp.int32), made.model, ForwardConfig(scan_layers=True)
        )
    assert caught.value.code == USAGE


def test_a_later_token_changes_nothing_before_it():
    made = tiny_transformer(GPT_NEO)
    params, tokens = made.params_from_tensors(random_tensors(GPT_NEO)), random_batch(29, 1, 7)["tokens"]
    other = tokens.copy()
    other[0, 4] = (other[0, 4] + 1) % 29
    before, after = (model_logits(made.model, params, {"tokens": each}) for each in (tokens, other))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (abs(before - after).max(-1)[0, 4:] > 0).all()


@pytest.mark.parametrize("kinds", [["global"] * 6, ["global", "local"] * 3, ["local", *["global"] * 5]])
def test_a_scan_compiles_each_period_once(kinds: list[str]):
    """One layer for all, two in turn; a pattern that never repeats is not a loop."""
    made = tiny_transformer(GPT_NEO | {"num_layers": 6, "attention_layers": kinds})
    params = jax.eval_shape(lambda: models.init_params(made.model, 0))
    tokens = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    traced = jax.make_jaxpr(lambda p, t: models.hidden_states(p, t, made.model, ForwardConfig()))(params, tokens)
    loops = [equation.params["length"] for equation in traced.jaxpr.eqns if equation.primitive.name == "scan"]
    assert loops == {1: [6], 2: [3], 6: []}[models.window_period(made.model.arch_config.sliding_windows)]


def temporary_nbytes(remat: str) -> int:
    """Of a compiled loss and its gradients, nothing of which is allocated."""
    made = tiny_transformer(LLAMA | {"num_hidden_layers": 8, "hidden_size": 32, "intermediate_size": 256})
    shape = jax.ShapeDtypeStruct
    params = unflatten_tree({path: shape(leaf.shape, jnp.float32) for path, leaf in made.model.leaves.items()})
    kinds = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {key: shape((2, 128), kind) for key, kind in kinds.items()}
    how = ForwardConfig(remat_policy=remat)
    run = jax.jit(jax.value_and_grad(lambda p, b: models.loss_sums(p, b, made.model, how).loss))
    memory: Any = run.lower(params, batch).compile().memory_analysis()
    return memory.temp_size_in_bytes


def test_what_is_not_kept_is_not_in_memory():
    assert temporary_nbytes("nothing_saveable") < temporary_nbytes("none") / 2


def test_master_weights_stay_as_they_are():
    """The dtype of the computation is that of hidden states; gradients are float32 like what they are for."""
    made = tiny_transformer(LLAMA)
    params = made.params_from_tensors(random_tensors(LLAMA))
    tokens = jnp.zeros((1, 3), jnp.int32)
    how = dataclasses.replace(UNSCANNED, dtype="bfloat16")
    assert models.hidden_states(params, tokens, made.model, how).dtype == jnp.bfloat16
    assert models.compute_logits(params, tokens, made.model, how).dtype == jnp.float32


def test_what_is_kept_is_one_of_jaxs_policies():
    with pytest.raises(PrepError, match=r"`model.remat_policy` is 'dots' - known: none, nothing_saveable, ") as caught:
        ForwardConfig(remat_policy="dots")
    assert caught.value.code == USAGE
    assert get_args(Recipe.model_fields["remat_policy"].annotation) == (models.REMAT_NONE, *models.REMAT_POLICIES)
    assert all(hasattr(jax.checkpoint_policies, name) for name in models.REMAT_POLICIES)
