"""Parameters in memory: modules of Flax, `save_params`, and `load_params` of checkpoints without a family."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import prepcli as prep
from prepcli.commands.testing.checkpoints import read_checkpoint
from prepcli.core.errors import PrepError
from prepcli.models.param_tree import Tree, flatten_tree
from prepcli.models.registry import FAMILIES
from prepcli.models.verbatim import CANNOT_TRAIN
from tests.helpers.run_cli import MonkeyPatch, run_ok
from tests.helpers.slow_cases import slow_except
from tests.helpers.stored_tensors import StoredTensor, write_safetensors
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


def test_modules_compute_the_logits_and_losses_of_prep(model: Path):
    nnx = pytest.importorskip("flax.nnx")
    module = prep.nnx_model(model, MESH)
    logits = nnx.jit(lambda module, tokens: module(tokens))(module, TOKENS)
    expected = own_logits(prep.load_params(model, MESH), module.computation, TOKENS)
    np.testing.assert_array_equal(logits, expected)
    linen, variables = prep.linen_model(model, MESH)
    np.testing.assert_array_equal(jax.jit(linen.apply)(variables, TOKENS), expected)
    targets = np.asarray(TOKENS) + 1
    weights = np.ones(targets.shape, np.float32)
    weights[0, 0] = 0
    sums = nnx.jit(lambda module, *batch: module.loss_sums(*batch))(
        module, TOKENS, targets, weights
    )
    log_sums = np.logaddexp.reduce(expected.astype(np.float64), axis=-1)
    losses = log_sums - np.take_along_axis(expected, targets[..., None], 2)[..., 0]
    np.testing.assert_allclose(sums.loss, (losses * weights).sum(), rtol=1e-6)
    assert sums.weight == 23
    loss_sums = jax.jit(partial(linen.apply, method="loss_sums"))
    assert loss_sums(variables, TOKENS, targets, weights) == sums


@pytest.mark.parametrize("dtype", slow_except(["float32", "bfloat16"], ["float32"]))
def test_nnx_params_are_the_tree_of_load_params(model: Path, dtype: Any):
    nnx = pytest.importorskip("flax.nnx")
    module = prep.nnx_model(model, MESH, param_dtype=dtype)
    params = prep.load_params(model, MESH, dtype=dtype)
    assert_trees_equal(module.params, params)
    shardings = [leaf.sharding for leaf in jax.tree.leaves(params)]
    assert [leaf.sharding for leaf in jax.tree.leaves(module.params)] == shardings
    assert any(not sharding.is_fully_replicated for sharding in shardings)
    assert module.params["embed"]["tokens"] is nnx.state(module, nnx.Param)["embed"]["tokens"][...]


def test_nnx_update_takes_a_tree_of_prep(model: Path):
    nnx = pytest.importorskip("flax.nnx")
    module, params = prep.nnx_model(GPT_NEO, MESH, seed=3), prep.load_params(model, MESH)
    nnx.update(module, params)
    assert_trees_equal(module.params, params)
    assert module.params["embed"]["tokens"] is params["embed"]["tokens"]


@pytest.mark.slow
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


def test_models_of_a_config_have_random_parameters_by_seed():
    nnx = pytest.importorskip("flax.nnx")
    first, second = prep.nnx_model(GPT_NEO, MESH, seed=1), prep.nnx_model(GPT_NEO, MESH, seed=1)
    assert_trees_equal(first.params, second.params)
    other = prep.nnx_model(GPT_NEO, MESH, seed=2).params["embed"]["tokens"]
    assert not np.array_equal(first.params["embed"]["tokens"], other)
    assert other.shape == (132, 32)  # 131 tokens, padded for mp 2
    logits = nnx.jit(lambda module, tokens: module(tokens))(first, TOKENS)
    assert (np.asarray(logits[..., 131]) < -1e29).all()


@pytest.mark.slow
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


def test_modules_without_flax_name_the_extra(model: Path, monkeypatch: MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("trainer.flax_modules")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(prep.PrepError, match="flax is not installed") as caught:
        prep.nnx_model(model)
    assert caught.value.hint == "`pip install 'prepcli[flax]'`"


# `save_params`: parameters in memory, written as a checkpoint


def test_save_params_of_a_checkpoint_verify_against_it(model: Path, tmp_path: Path):
    params = prep.load_params(model, "2,2,2")
    out = prep.save_params(params, tmp_path / "init", like=model)
    assert prep.verify(out).is_equal  # with its own digests
    assert prep.verify(out, model).ignored_padding_rows == 1
    assert (out / "hf" / "tokenizer_config.json").read_bytes() == (
        model / "tokenizer_config.json"
    ).read_bytes()
    assert [path.name for path in tmp_path.glob("*.partial")] == []


def test_save_params_writes_changed_values(model: Path, tmp_path: Path):
    params = prep.load_params(model)
    params["final_norm"]["scale"] = np.full(32, 3, np.float32)
    out = prep.save_params(params, tmp_path / "init", like=model)
    tensors = read_checkpoint(prep.export(out, tmp_path / "out").path)
    before = read_checkpoint(model)
    assert (tensors.pop("transformer.ln_f.weight") == 3).all()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor, before[name])


def test_save_params_like_a_saved_checkpoint_keeps_the_dtype(tmp_path: Path):
    make_checkpoint(tmp_path / "model", LLAMA)
    first = prep.save_init(tmp_path / "model", tmp_path / "init", mesh="1,4,2", pad_vocab="auto")
    params = prep.load_params(first.path, "1,4,2", dtype="bfloat16")
    out = prep.save_params(params, tmp_path / "saved", like=first.path)
    assert {tensor.dtype for tensor in prep.inspect(out).tensors} == {"bfloat16"}
    again = prep.load_params(out, "1,4,2", dtype="bfloat16")
    np.testing.assert_array_equal(again["head"]["weight"], params["head"]["weight"])
    assert again["head"]["weight"].shape == (132, 32)


@pytest.mark.parametrize(
    ("changes", "removed", "why"),
    [
        ({}, "embed", "the tree has no embed.tokens"),
        ({}, "final_norm", "the tree has no final_norm.bias"),
        ({"head": {"weight": np.ones((131, 32))}}, "", "the model has no head.weight"),
        (
            {"final_norm": {"scale": np.ones(3), "bias": np.ones(32)}},
            "",
            r"final_norm.scale has shape \(3,\), not",
        ),
        (
            {"embed": {"tokens": np.ones((130, 32)), "positions": np.ones((64, 32))}},
            "",
            r"embed.tokens has shape",
        ),
    ],
)
def test_save_params_of_another_model_is_an_error(
    model: Path, tmp_path: Path, changes: Tree, removed: str, why: str
):
    params = {
        name: value
        for name, value in (prep.load_params(model) | changes).items()
        if name != removed
    }
    with pytest.raises(prep.PrepError, match=f"the parameters do not match .*model - {why}"):
        prep.save_params(params, tmp_path / "init", like=model)
    assert not (tmp_path / "init").exists()


def test_save_params_does_not_replace_a_folder(model: Path):
    with pytest.raises(prep.OutputExistsError, match="already exists"):
        prep.save_params(prep.load_params(model), model, like=model)


def test_load_params_keeps_the_stored_dtype(tmp_path: Path):
    make_checkpoint(tmp_path / "model", GPT_NEO, "bfloat16")
    params = prep.load_params(tmp_path / "model", dtype="keep")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}


def test_load_params_refuses_a_dtype_without_support(tmp_path: Path):
    make_checkpoint(tmp_path / "model", GPT_NEO, "float64")
    with pytest.raises(prep.UsageError, match="is stored in float64, and JAX computes in 32 bits"):
        prep.load_params(tmp_path / "model", dtype="keep")


# `load_params` of checkpoints without a family: values, dtypes, shardings and NumPy arrays


VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def stored(values: np.ndarray, code: str) -> StoredTensor:
    return code, values.shape, values.tobytes()


@pytest.fixture
def verbatim_model() -> None:
    """Write a model with stacked layers, integers, 64-bit tensors and fp8 to the working folder."""
    tensors: dict[str, StoredTensor] = {}
    for layer in range(3):
        tensors[f"h.{layer}.w"] = stored((VALUES + layer).astype(ml_dtypes.bfloat16), "BF16")
    tensors["ids"] = stored(np.arange(5, dtype=np.int64) << 40, "I64")
    tensors["packed"] = stored(np.arange(8, dtype=np.uint8), "U8")
    tensors["wide"] = stored(VALUES.astype(np.float64) / 3, "F64")
    tensors["fp8"] = stored(VALUES.astype(ml_dtypes.float8_e4m3fn), "F8_E4M3")
    tensors["none"] = ("F32", (0, 3), b"")
    Path("m").mkdir()
    write_safetensors(Path("m/model.safetensors"), tensors)
    Path("m/config.json").write_text('{"model_type": "unheard_of"}')


@pytest.mark.usefixtures("verbatim_model")
@pytest.mark.parametrize("source", slow_except(["m", "m-init", "unstacked"], ["m-init"]))
def test_leaves_have_names_and_values_of_the_file(source: str):
    if source != "m":
        run_ok(
            "save-init", "./m", "--out", source, *(["--no-scan"] if source == "unstacked" else [])
        )
    tree: dict[str, Any] = prep.load_params(f"./{source}", dtype="keep")
    assert tree.keys() == {"h.*.w", "ids", "packed", "wide", "fp8", "none"}
    expected = np.stack([VALUES, VALUES + 1, VALUES + 2]).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(tree["h.*.w"]), expected)
    assert isinstance(tree["ids"], np.ndarray)
    np.testing.assert_array_equal(tree["ids"], np.arange(5, dtype=np.int64) << 40)
    assert isinstance(tree["wide"], np.ndarray)
    np.testing.assert_array_equal(tree["wide"], VALUES.astype(np.float64) / 3)
    assert tree["packed"].dtype == np.uint8
    assert tree["fp8"].dtype == ml_dtypes.float8_e4m3fn
    assert tree["none"].shape == (0, 3)


@pytest.mark.usefixtures("verbatim_model")
def test_dtype_casts_floating_point_leaves_only():
    tree: dict[str, Any] = prep.load_params("./m", dtype="float32")
    assert tree["h.*.w"].dtype == tree["wide"].dtype == np.float32
    np.testing.assert_array_equal(
        np.asarray(tree["wide"]), (VALUES.astype(np.float64) / 3).astype(np.float32)
    )
    assert (tree["packed"].dtype, tree["ids"].dtype) == (np.uint8, np.int64)


@pytest.mark.usefixtures("verbatim_model")
def test_mesh_splits_leaves_by_size():
    tree: dict[str, Any] = prep.load_params("./m", "2,2,2", dtype="keep")
    shards = tree["h.*.w"].addressable_shards
    assert [shard.data.shape for shard in shards] == [(3, 2, 3)] * 8


@pytest.mark.usefixtures("verbatim_model")
def test_excluded_verbatim_family_raises():
    with pytest.raises(PrepError, match="model_type `unheard_of` is not supported"):
        prep.load_params("./m", verbatim=False)
    run_ok("save-init", "./m")
    with pytest.raises(PrepError, match=CANNOT_TRAIN):
        prep.load_params("./m-init", verbatim=False)
