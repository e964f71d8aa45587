"""Tests of sharding on 8 CPU devices: results of one device, and arrays where the rules place them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from prepcli.commands.testing.tiny_model import (
    TinyTransformer,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.core.errors import USAGE, PrepError
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, flatten_tree, unflatten_tree
from prepcli.models.rules import PRESETS, merge_rules
from tests.helpers.slow_cases import slow_except
from trainer.distributed.sharding import (
    ShardingContext,
    catch_out_of_memory,
    jax_partition_spec,
    make_sharding_context,
)
from trainer.nn import transformer
from trainer.nn.model_spec import AttentionOptions, ForwardConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "model_type": "gpt_neo", "vocab_size": 64, "true_vocab_size": 61, "hidden_size": 32, "num_layers": 2,
        "num_heads": 4, "window_size": 5, "max_position_embeddings": 16, "attention_types": [[["global", "local"], 1]],
    },
    "llama": {
        "model_type": "llama", "vocab_size": 64, "true_vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    },
    "mixtral": {
        "model_type": "mixtral", "vocab_size": 64, "true_vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
}  # fmt: skip
MESHES = ["8,1,1", "1,8,1", "1,2,4", "2,2,2"]
ROWS, LENGTH = 8, 16


def mean_loss(
    params: Tree, batch: Any, tiny: TinyTransformer, forward_config: ForwardConfig
) -> jax.Array:
    """Compute the weighted mean loss."""
    sums = transformer.loss_sums(params, batch, tiny.model, forward_config)
    return sums.loss / sums.weight


def shard_params(tiny: TinyTransformer, params: Tree, sharding: ShardingContext) -> Tree:
    """Place parameters on the mesh."""
    leaves = tiny.model.leaves
    return unflatten_tree(
        {
            path: jax.device_put(leaf, sharding.param_sharding(leaves[path]))
            for path, leaf in flatten_tree(params).items()
        }
    )


@cache
def one_device_results(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Compute loss and gradients on one device."""
    return loss_and_gradients(name, ShardingContext())


def loss_and_gradients(
    name: str, sharding: ShardingContext, **options: Any
) -> tuple[float, dict[str, np.ndarray]]:
    """Compute the mean loss and the gradient of each tensor on a mesh."""
    config = CONFIGS[name]
    tiny = tiny_transformer(config)
    params = tiny.params_from_tensors(random_tensors(config))
    batch: Any = random_batch(61, ROWS, LENGTH)
    if sharding.mesh is not None:
        params = shard_params(tiny, params, sharding)
        batch = {
            key: jax.device_put(array, sharding.activation_sharding(array.shape, "batch", "seq"))
            for key, array in batch.items()
        }
    forward_config = ForwardConfig(
        head_chunk_size=4, remat_policy="nothing_saveable", sharding=sharding, **options
    )
    run = jax.jit(jax.value_and_grad(lambda p, b: mean_loss(p, b, tiny, forward_config)))
    loss, gradients = run(params, batch)
    return float(loss), tiny.tensors_from_params(gradients)


@pytest.mark.parametrize(
    ("name", "mesh"),
    slow_except(
        [
            *(("llama", mesh) for mesh in MESHES),
            *((name, mesh) for name in ("gpt_neo", "mixtral") for mesh in MESHES[1:]),
        ],
        # test_step covers gpt_neo, and the tests of rules and of chunked layers below cover llama.
        (("mixtral", "2,2,2"),),
    ),
)
def test_loss_and_gradients_do_not_depend_on_mesh(name: str, mesh: str):
    """On mesh 1,2,4 the two key and value heads of LLaMA are not split over the four devices of mp."""
    check_equals_one_device(name, mesh)


def test_chunked_layers_on_a_mesh_match_dense_ones_on_one_device():
    attention_options = AttentionOptions("blockwise", 4, 8)
    check_equals_one_device("llama", "1,2,4", attention_options=attention_options, ffn_chunk_size=4)


RULES = {
    "mp": ("vocab=fsdp|none", "heads=mp|none", "mlp=mp", "embed=none"),
    "dp": ("heads=dp", "kv_heads=dp", "mlp=dp+fsdp", "embed=mp", "norm=fsdp"),
    "inner": (
        "heads=none",
        "kv_heads=none",
        "head_dim=mp",
        "layers=fsdp|none",
        "mlp=none",
        "vocab=mp+fsdp",
        "embed=none",
    ),
    "leaves": (
        r"re:^layers\.attn\.(q|k|v)\.weight$=none,fsdp,mp",
        r"re:^(embed\.tokens|head\.weight)$=fsdp,mp|none",
        "re:norm=none",
        r"re:^layers\.mlp\.router=none",
        "embed=dp",
    ),
    "activations": (
        "act:batch=dp",
        "act:seq=fsdp|none",
        "act:embed=mp",
        "act:heads=none",
        "act:vocab=mp+fsdp",
    ),
    "whole batch": ("act:batch=none", "act:residual_seq=dp+fsdp|none", "act:mlp=fsdp|none"),
    "changed preset": ("flaxlm:2,2", "kv_heads=none", "re:^final_norm=none", "act:embed=none"),
    **{name: (name,) for name in PRESETS},
}


@pytest.mark.parametrize(
    ("rules", "name", "mesh"),
    slow_except(
        [
            (rules, name, mesh)
            for rules in RULES
            for name in CONFIGS
            for mesh in ("1,2,4", "2,2,2", "dp:2,fsdp:4")
        ],
        [("activations", "llama", "2,2,2")],
    ),
)
def test_loss_and_gradients_do_not_depend_on_rules(rules: str, name: str, mesh: str):
    check_equals_one_device(name, mesh, RULES[rules])


def test_batch_keeps_its_axes_with_rules_that_use_them():
    sharding = ShardingContext(
        parse_mesh("2,2,2"), merge_rules(("heads=fsdp|mp", "mlp=dp+mp", "vocab=dp"))
    )
    shapes = {"heads": (8, 16, 4, 8), "mlp": (8, 16, 64), "vocab": (8, 16, 64)}
    dims = {
        name: ("batch", "seq", name, "head_dim")[: len(shape)] for name, shape in shapes.items()
    }
    axes = {name: sharding.activation_axes(shape, *dims[name]) for name, shape in shapes.items()}
    assert {name: dim_axes[:3] for name, dim_axes in axes.items()} == {
        "heads": (("dp", "fsdp"), (), ("mp",)),
        "mlp": (("dp", "fsdp"), (), ("mp",)),
        "vocab": (("dp", "fsdp"), (), ()),
    }
    assert [sharding.num_shards(name, 64) for name in shapes] == [2, 2, 1]


def check_equals_one_device(
    name: str, mesh: str, rules: Sequence[str] = (), **options: Any
) -> None:
    """Compare loss and gradients on a mesh with those of one device."""
    sharding = make_sharding_context(parse_mesh(mesh), merge_rules(rules))
    loss, gradients = loss_and_gradients(name, sharding, **options)
    expected_loss, expected = one_device_results(name)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    errors = {
        tensor: relative_error(gradients[tensor], gradient) for tensor, gradient in expected.items()
    }
    assert errors == pytest.approx(dict.fromkeys(expected, 0), abs=1e-5)


@pytest.fixture(scope="module")
def lowered_and_compiled() -> tuple[str, str]:
    """Return the lowered and the compiled text of a LLaMA's loss and gradients on mesh 1,2,4."""
    tiny, sharding = tiny_transformer(CONFIGS["llama"]), make_sharding_context(parse_mesh("1,2,4"))
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(
                leaf.shape, jnp.float32, sharding=sharding.param_sharding(leaf)
            )
            for path, leaf in tiny.model.leaves.items()
        }
    )
    batch_sharding = sharding.activation_sharding((ROWS, LENGTH), "batch", "seq")
    batch = {
        key: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype, sharding=batch_sharding)
        for key, dtype in {
            "tokens": jnp.int32,
            "targets": jnp.int32,
            "weights": jnp.float32,
        }.items()
    }
    forward_config = ForwardConfig(
        remat_policy="nothing_saveable", head_chunk_size=4, sharding=sharding
    )
    lowered = jax.jit(jax.value_and_grad(lambda p, b: mean_loss(p, b, tiny, forward_config))).lower(
        params, batch
    )
    return lowered.as_text(), lowered.compile().as_text() or ""


def test_saved_layer_inputs_are_split_along_tokens(lowered_and_compiled: tuple[str, str]):
    """On mesh 1,2,4 a device saves 4 of 8 rows and 4 of 16 tokens of the inputs of both layers."""
    lowered, compiled = lowered_and_compiled
    # The sharding of the residual stream, of queries, and of hidden units and logits.
    assert '[{"fsdp"}, {"mp"}, {}]' in lowered
    assert '[{"fsdp"}, {}, {"mp"}, {}]' in lowered
    assert '[{"fsdp"}, {}, {"mp"}]' in lowered
    assert "f32[2,4,4,32]" in compiled
    assert "f32[2,4,16,32]" not in compiled
    assert "f32[2,8,4,32]" not in compiled
    assert "all-gather" in compiled


def test_devices_hold_their_rows_and_logits_only(lowered_and_compiled: tuple[str, str]):
    _, compiled = lowered_and_compiled
    # The axes are the rows, the tokens of a chunk, and the vocabulary of one device.
    assert "f32[4,4,16]" in compiled
    assert "f32[4,4,64]" not in compiled
    assert "f32[8,16,32]" not in compiled


def test_jax_partition_spec_names_mesh_axes():
    sharding = ShardingContext(parse_mesh("2,2,2"))
    leaves = tiny_transformer(CONFIGS["llama"]).model.leaves
    expected = {
        "embed.tokens": PartitionSpec("mp", "fsdp"),
        "layers.attn.q.weight": PartitionSpec(None, "mp", None, "fsdp"),
        "layers.attn.o.weight": PartitionSpec(None, "fsdp", "mp", None),
        "layers.mlp.up.weight": PartitionSpec(None, "mp", "fsdp"),
    }
    for path, jax_spec in expected.items():
        spec = sharding.param_spec(leaves[path])
        assert spec
        assert jax_partition_spec(spec) == jax_spec
    token_sharding = make_sharding_context(parse_mesh("2,2,2")).activation_sharding(
        (8, 16), "batch", "seq"
    )
    assert token_sharding
    assert token_sharding.spec == PartitionSpec(("dp", "fsdp"), None)


def test_indivisible_kv_heads_are_not_split():
    sharding = ShardingContext(parse_mesh("1,2,4"))
    spec = sharding.param_spec(
        tiny_transformer(CONFIGS["llama"]).model.leaves["layers.attn.k.weight"]
    )
    assert spec
    assert spec.shards_per_dim == (1, 1, 1, 2)
    assert [fallback.dim for fallback in spec.fallbacks] == ["kv_heads"]


@pytest.mark.parametrize(
    ("changes", "dim"),
    [
        ({"vocab_size": 61}, "vocabulary 61"),
        ({"intermediate_size": 50}, "mlp 50"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}, "heads 6"),
    ],
)
def test_indivisible_param_dim_is_rejected(changes: dict[str, Any], dim: str):
    config = {**CONFIGS["llama"], "true_vocab_size": 61, **changes}
    sharding = ShardingContext(parse_mesh("1,2,4"))
    with pytest.raises(PrepError, match=f"{dim} cannot be split over mp 4") as caught:
        [sharding.param_spec(leaf) for leaf in tiny_transformer(config).model.leaves.values()]
    assert caught.value.code == USAGE


def test_indivisible_batch_is_rejected():
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 2 x fsdp 2"):
        make_sharding_context(parse_mesh("2,2,2")).activation_sharding((6, 16), "batch", "seq")


def test_indivisible_residual_tokens_are_not_split():
    sharding = make_sharding_context(parse_mesh("1,2,4"))
    shardings = [
        sharding.activation_sharding((8, length, 32), "batch", "residual_seq", "embed")
        for length in (16, 15)
    ]
    assert [named and named.spec for named in shardings] == [
        PartitionSpec("fsdp", "mp", None),
        PartitionSpec("fsdp", None, None),
    ]


@pytest.mark.parametrize("mesh", ["1,-1,2", "!1,-1,2"])
def test_open_axis_takes_remaining_devices(mesh: str):
    sharding = make_sharding_context(parse_mesh(mesh))
    assert sharding.device_mesh
    assert dict(sharding.device_mesh.shape) == {"dp": 1, "fsdp": 4, "mp": 2}
    assert (
        sharding.data_parallel_size,
        sharding.num_shards("heads", 8),
        sharding.num_shards("seq", 8),
    ) == (4, 2, 1)
    if mesh.startswith("!"):
        assert sharding.device_mesh.devices.flatten().tolist() == jax.devices()


@pytest.mark.parametrize("mesh", ["1,-1,2", "!1,-1,2"])
def test_mesh_takes_the_given_devices(mesh: str):
    devices = jax.devices()[4:]
    sharding = make_sharding_context(parse_mesh(mesh), devices=devices)
    assert sharding.device_mesh
    assert dict(sharding.device_mesh.shape) == {"dp": 1, "fsdp": 2, "mp": 2}
    assert {*sharding.device_mesh.devices.flatten()} == {*devices}


def test_custom_rules_replace_default_rules():
    sharding = make_sharding_context(parse_mesh("1,4,2"), merge_rules(["heads=none", "embed=none"]))
    spec = sharding.param_spec(
        tiny_transformer(CONFIGS["llama"]).model.leaves["layers.attn.q.weight"]
    )
    assert spec
    assert spec.shards_per_dim == (1, 1, 1, 1)
    assert sharding.num_shards("heads", 4) == 1


def test_context_without_mesh_places_nothing():
    sharding, x = ShardingContext(), jnp.ones((2, 3))
    assert sharding.constrain(x, "batch", "seq") is x
    assert (sharding.data_parallel_size, sharding.num_shards("heads", 8)) == (1, 1)
    assert sharding.replicated_sharding() is None
    assert (
        sharding.param_sharding(tiny_transformer(CONFIGS["llama"]).model.leaves["embed.tokens"])
        is None
    )


def test_catch_out_of_memory_converts_only_memory_errors():
    text = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.\nand more"
    message = r"out of device memory - RESOURCE_EXHAUSTED: .* 5 bytes. - more"
    with pytest.raises(PrepError, match=message), catch_out_of_memory():
        raise jax.errors.JaxRuntimeError(text)
    message = "out of host memory - the system has no free memory - more"
    with pytest.raises(PrepError, match=message), catch_out_of_memory():
        raise MemoryError
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), catch_out_of_memory():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
