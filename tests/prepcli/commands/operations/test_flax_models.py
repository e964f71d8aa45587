"""The modules of Flax, and the trees of Flax classes, compared with prep's own forward pass and export."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prepcli as prep
from prepcli.models.param_tree import Tree, flatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_checkpoints import ALL_CONFIGS, GPT_NEO, LLAMA, make_checkpoint
from trainer.nn import transformer

MESH = "2,2,2"
TOKENS = jnp.asarray(np.arange(24, dtype=np.int32).reshape(4, 6))
FLAX_CONFIGS = {
    config["model_type"]: config
    for config in ALL_CONFIGS
    if "hf-flax" in FAMILIES[config["model_type"]].layouts
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_checkpoint(tmp_path / "model", GPT_NEO)
    return tmp_path / "model"


def assert_trees_equal(tree: Any, expected: Any) -> None:
    """Fail unless two trees have the same keys, dtypes and bits."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected)):
        assert leaf.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other))


def own_logits(
    params: Tree, computation: Any, tokens: jax.Array, source: jax.Array | None = None
) -> np.ndarray:
    """Return the logits of prep's forward pass."""
    spec, config = computation.model, computation.forward_config

    def compute(params: Tree) -> jax.Array:
        output = None if source is None else transformer.encode(params, source, spec, config)
        return transformer.compute_logits(params, tokens, spec, config, output)

    return np.asarray(jax.jit(compute)(params))


def test_nnx_model_computes_the_logits_of_prep(model: Path):
    nnx = pytest.importorskip("flax.nnx")
    module = prep.nnx_model(model, MESH)
    logits = nnx.jit(lambda module, tokens: module(tokens))(module, TOKENS)
    np.testing.assert_array_equal(
        logits, own_logits(prep.load_params(model, MESH), module.computation, TOKENS)
    )


def test_linen_model_computes_the_logits_of_prep(model: Path):
    pytest.importorskip("flax")
    module, variables = prep.linen_model(model, MESH)
    logits = jax.jit(module.apply)(variables, TOKENS)
    np.testing.assert_array_equal(
        logits, own_logits(prep.load_params(model, MESH), module.computation, TOKENS)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nnx_params_are_the_tree_of_load_params(model: Path, dtype: Any):
    nnx = pytest.importorskip("flax.nnx")
    module, params = (
        prep.nnx_model(model, MESH, param_dtype=dtype),
        prep.load_params(model, MESH, dtype=dtype),
    )
    assert_trees_equal(module.params, params)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
    assert [leaf.sharding for leaf in jax.tree.leaves(module.params)] == shardings
    assert any(not sharding.is_fully_replicated for sharding in shardings)
    assert module.params["embed"]["tokens"] is nnx.state(module, nnx.Param)["embed"]["tokens"][...]


def test_nnx_update_takes_a_tree_of_prep(model: Path):
    nnx = pytest.importorskip("flax.nnx")
    module, params = prep.nnx_model(GPT_NEO, seed=3), prep.load_params(model)
    nnx.update(module, params)
    assert_trees_equal(module.params, params)
    assert module.params["embed"]["tokens"] is params["embed"]["tokens"]


def test_modules_compute_encoder_decoder_logits(tmp_path: Path):
    nnx = pytest.importorskip("flax.nnx")
    make_checkpoint(tmp_path / "t5", FLAX_CONFIGS["t5"])
    params, source = prep.load_params(tmp_path / "t5"), TOKENS + 30
    module = prep.nnx_model(tmp_path / "t5")
    expected = own_logits(params, module.computation, TOKENS, source)
    np.testing.assert_array_equal(
        nnx.jit(lambda m, *tokens: m(*tokens))(module, TOKENS, source), expected
    )
    linen, variables = prep.linen_model(tmp_path / "t5")
    np.testing.assert_array_equal(jax.jit(linen.apply)(variables, TOKENS, source), expected)
    no_padding, padding = jnp.ones_like(source), jnp.ones_like(source).at[:, 3:].set(0)
    batch = (variables, TOKENS, TOKENS, no_padding)
    loss_sums = jax.jit(partial(linen.apply, method="loss_sums"))
    sums: list[Any] = [
        loss_sums(*batch, source=source, source_mask=mask) for mask in (None, no_padding, padding)
    ]
    assert sums[0].loss == sums[1].loss != sums[2].loss


def test_module_loss_sums_equal_sums_over_logits(model: Path):
    nnx = pytest.importorskip("flax.nnx")
    module, (linen, variables) = prep.nnx_model(model), prep.linen_model(model)
    targets, weights = TOKENS + 1, jnp.ones(TOKENS.shape).at[0, 0].set(0)
    logits = nnx.jit(lambda module, tokens: module(tokens))(module, TOKENS)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)[..., 0]
    sums = nnx.jit(lambda module, *batch: module.loss_sums(*batch))(
        module, TOKENS, targets, weights
    )
    np.testing.assert_allclose(sums.loss, (losses * weights).sum(), rtol=1e-6)
    assert sums.weight == 23
    loss_sums = jax.jit(partial(linen.apply, method="loss_sums"))
    assert loss_sums(variables, TOKENS, targets, weights) == sums


def test_models_of_a_config_have_random_parameters_by_seed():
    nnx = pytest.importorskip("flax.nnx")
    first, second = prep.nnx_model(GPT_NEO, MESH, seed=1), prep.nnx_model(GPT_NEO, MESH, seed=1)
    assert_trees_equal(first.params, second.params)
    other = prep.nnx_model(GPT_NEO, MESH, seed=2).params["embed"]["tokens"]
    assert not np.array_equal(first.params["embed"]["tokens"], other)
    assert other.shape == (132, 32)  # 131 tokens, padded for mp 2
    logits = nnx.jit(lambda module, tokens: module(tokens))(first, TOKENS)
    assert (np.asarray(logits[..., 131]) < -1e29).all()


def test_linen_init_makes_the_tree_of_prep():
    pytest.importorskip("flax")
    module, variables = prep.linen_model(LLAMA)
    initial = jax.jit(module.init)(jax.random.key(0), TOKENS)
    assert jax.tree.structure(initial) == jax.tree.structure(variables)
    assert flatten_tree(initial["params"])["layers.mlp.up.weight"].std() > 0
    assert (initial["params"]["final_norm"]["scale"] == 1).all()


@pytest.mark.parametrize("name", slow_except(FLAX_CONFIGS, ("gpt2",)))
def test_hf_flax_trees_equal_an_export(tmp_path: Path, name: str):
    """GPT-2 is compared because its trees fuse queries, keys and values."""
    serialization = pytest.importorskip("flax.serialization")
    model = tmp_path / "model"
    make_checkpoint(model, FLAX_CONFIGS[name])
    prep.export(model, tmp_path / "flax", layout="hf-flax")
    exported = serialization.msgpack_restore(
        (tmp_path / "flax" / "flax_model.msgpack").read_bytes()
    )
    params = prep.load_params(model, "2,2,2")  # pads 131 tokens
    assert_trees_equal(prep.to_hf_flax(params, model), exported)
    config = FLAX_CONFIGS[name] | {"vocab_size": 132, "true_vocab_size": 131}
    assert_trees_equal(prep.from_hf_flax(exported, config), params)


def test_hf_flax_trees_keep_bfloat16(model: Path):
    params = prep.load_params(model, dtype="bfloat16")
    assert_trees_equal(prep.from_hf_flax(prep.to_hf_flax(params, model), model), params)


def test_hf_flax_trees_of_another_model_are_errors(model: Path):
    params = prep.load_params(model)
    with pytest.raises(
        prep.PrepError, match=r"prep's tree does not fit the config - it lacks .* and \d+ more"
    ):
        prep.to_hf_flax({"embed": params["embed"]}, model)
    with pytest.raises(
        prep.PrepError, match=r"the Flax tree does not fit the config - it has unknown x"
    ):
        prep.from_hf_flax({**prep.to_hf_flax(params, model), "x": jnp.ones(2)}, model)
    with pytest.raises(prep.PrepError, match="has shape"):
        prep.to_hf_flax(params, GPT_NEO | {"intermediate_size": 40})
    with pytest.raises(prep.PrepError, match="gpt_neox has no layout hf-flax"):
        prep.to_hf_flax(params, {"model_type": "gpt_neox"})


def test_from_hf_flax_refuses_another_head_if_tied(model: Path):
    tree = prep.to_hf_flax(prep.load_params(model), model)
    embedding = tree["transformer"]["wte"]["embedding"]
    tree["lm_head"] = {"kernel": 2 * embedding.T}
    with pytest.raises(prep.PrepError, match="differs from") as caught:
        prep.from_hf_flax(tree, model)
    assert caught.value.hint == "set `tie_word_embeddings` to false in the config"


def test_modules_reject_unusable_arguments(model: Path):
    options: dict[str, Any] = {"dropout": 0.1}
    pytest.importorskip("flax")
    with pytest.raises(prep.UsageError, match='sp:2"` splits tokens over sp'):
        prep.nnx_model(model, "fsdp:4,sp:2")
    with pytest.raises(prep.UsageError, match="`seed=1` has no effect"):
        prep.linen_model(model, seed=1)
    with pytest.raises(
        prep.UsageError, match=r'`attention_kernel="cudnn"` cannot compute .* not on cpu'
    ):
        prep.nnx_model(model, attention_kernel="cudnn")
    with pytest.raises(prep.UsageError, match="unknown option `dropout`"):
        prep.nnx_model(model, **options)


def test_modules_without_flax_name_the_extra(model: Path, monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("trainer.flax_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(prep.PrepError, match="flax is not installed") as caught:
        prep.nnx_model(model)
    assert caught.value.hint == "`pip install 'prepcli[flax]'`"
