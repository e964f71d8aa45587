"""Meshes of 8 CPU devices: the same numbers as on one, parameters and activations where the rules say."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers.tiny_transformers import (
    TinyTransformer,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from trainer.distributed.sharding import (
    ShardingContext,
    catch_out_of_memory,
    jax_partition_spec,
    make_sharding_context,
    param_nbytes_per_device,
    sharding_without_devices,
)
from trainer.models.errors import USAGE, PrepError
from trainer.models.mesh import DEFAULT_RULES, merge_rules, parse_mesh, partition_spec
from trainer.models.param_tree import Tree, flatten_tree, unflatten_tree
from trainer.nn import transformer as models
from trainer.nn.transformer import ForwardConfig

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_neo": {
        "model_type": "gpt_neo", "vocab_size": 64, "true_vocab_size": 61, "hidden_size": 32, "num_layers": 2,
        "num_heads": 4, "window_size": 5, "max_position_embeddings": 16, "attention_types": [[["global", "local"], 1]],
    },
    "llama": {
        "model_type": "llama", "vocab_size": 64, "true_vocab_size": 61, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16,
    },
}  # fmt: skip
MESHES = ["8,1,1", "1,8,1", "1,2,4", "2,2,2"]
ROWS, LENGTH = 8, 16


def mean(params: Tree, batch: Any, made: TinyTransformer, how: ForwardConfig) -> jax.Array:
    sums = models.loss_sums(params, batch, made.model, how)
    return sums.loss / sums.weight


def shard_params(made: TinyTransformer, params: Tree, on: ShardingContext) -> Tree:
    return unflatten_tree(
        {
            path: jax.device_put(leaf, on.param_sharding(made.model.leaves[path]))
            for path, leaf in flatten_tree(params).items()
        }
    )


@cache
def alone(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients on one device."""
    return computed(name, ShardingContext())


def computed(name: str, on: ShardingContext) -> tuple[float, dict[str, np.ndarray]]:
    config = CONFIGS[name]
    made = tiny_transformer(config)
    params = made.params_from_tensors(random_tensors(config))
    batch: Any = random_batch(61, ROWS, LENGTH)
    if on.mesh is not None:
        params = shard_params(made, params, on)
        batch = {
            key: jax.device_put(value, on.activation_sharding(value.shape, "batch", "seq"))
            for key, value in batch.items()
        }
    how = ForwardConfig(head_chunk_size=4, remat_policy="nothing_saveable", sharding=on)
    run = jax.jit(jax.value_and_grad(lambda p, b: mean(p, b, made, how)))
    loss, gradients = run(params, batch)
    return float(loss), made.tensors_from_params(gradients)


@pytest.mark.parametrize(
    ("name", "mesh"), [*(("llama", mesh) for mesh in MESHES), *(("gpt_neo", m) for m in MESHES[1:])]
)
def test_any_mesh_computes_what_one_device_does(name: str, mesh: str):
    """1,2,4 has LLaMA's two heads of keys and values on four devices: those stay whole."""
    loss, gradients = computed(name, make_sharding_context(parse_mesh(mesh)))
    wanted_loss, wanted = alone(name)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert {tensor: relative_error(gradients[tensor], each) for tensor, each in wanted.items()} == pytest.approx(
        dict.fromkeys(wanted, 0), abs=1e-5
    )


def compiled_text(mesh: str) -> tuple[str, str]:
    """Lowered and compiled text of a LLaMA's loss and gradients."""
    made, on = tiny_transformer(CONFIGS["llama"]), make_sharding_context(parse_mesh(mesh))
    params = unflatten_tree(
        {
            p: jax.ShapeDtypeStruct(f.shape, jnp.float32, sharding=on.param_sharding(f))
            for p, f in made.model.leaves.items()
        }
    )
    where = on.activation_sharding((ROWS, LENGTH), "batch", "seq")
    batch = {
        key: jax.ShapeDtypeStruct((ROWS, LENGTH), kind, sharding=where)
        for key, kind in {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}.items()
    }
    how = ForwardConfig(remat_policy="nothing_saveable", head_chunk_size=4, sharding=on)
    lowered = jax.jit(jax.value_and_grad(lambda p, b: mean(p, b, made, how))).lower(params, batch)
    return lowered.as_text(), lowered.compile().as_text() or ""


def test_what_is_kept_of_each_layer_is_split_along_tokens():
    """On 1,2,4 a device has 4 of 8 rows and 4 of 16 tokens of the two layers' inputs; never all tokens of them."""
    lowered, compiled = compiled_text("1,2,4")
    assert '[{"fsdp"}, {"mp"}, {}]' in lowered  # the residual stream
    assert '[{"fsdp"}, {}, {"mp"}, {}]' in lowered  # queries
    assert '[{"fsdp"}, {}, {"mp"}]' in lowered  # hidden units, logits
    assert "f32[2,4,4,32]" in compiled
    assert "f32[2,4,16,32]" not in compiled
    assert "f32[2,8,4,32]" not in compiled
    assert "all-gather" in compiled


def test_a_device_never_has_the_rows_or_logits_of_all():
    _, compiled = compiled_text("1,2,4")
    assert "f32[4,4,16]" in compiled  # rows, chunk, vocabulary of a device
    assert "f32[4,4,64]" not in compiled
    assert "f32[8,16,32]" not in compiled


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_lie_as_the_rules_say(mesh: str, name: str):
    made, on = tiny_transformer(CONFIGS[name]), make_sharding_context(parse_mesh(mesh))
    assert on.mesh is not None
    params = shard_params(made, made.params_from_tensors(random_tensors(CONFIGS[name])), on)
    held = dict.fromkeys(jax.devices(), 0)
    for path, leaf in flatten_tree(params).items():
        known = made.model.leaves[path]
        asked = partition_spec(known.dims, known.shape, on.mesh, DEFAULT_RULES)
        assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, jax_partition_spec(asked)), leaf.ndim)
        for part in leaf.addressable_shards:
            assert part.data.size == leaf.size // np.prod(asked.shards_per_dim)
            held[part.device] += part.data.nbytes
    assert {*held.values()} == {param_nbytes_per_device(made.model.leaves, on)}


def test_partitions_are_spelled_as_jax_does():
    on = sharding_without_devices(parse_mesh("2,2,2"))
    leaves = tiny_transformer(CONFIGS["llama"]).model.leaves
    wanted = {
        "embed.tokens": PartitionSpec("mp", "fsdp"),
        "layers.attn.q.weight": PartitionSpec(None, "mp", None, "fsdp"),
        "layers.attn.o.weight": PartitionSpec(None, "fsdp", "mp", None),
        "layers.mlp.up.weight": PartitionSpec(None, "mp", "fsdp"),
    }
    for path, partitions in wanted.items():
        found = on.param_spec(leaves[path])
        assert found
        assert jax_partition_spec(found) == partitions
    tokens = make_sharding_context(parse_mesh("2,2,2")).activation_sharding((8, 16), "batch", "seq")
    assert tokens
    assert tokens.spec == PartitionSpec(("dp", "fsdp"), None)


def test_key_and_value_heads_that_do_not_divide_stay_whole():
    found = sharding_without_devices(parse_mesh("1,2,4")).param_spec(
        tiny_transformer(CONFIGS["llama"]).model.leaves["layers.attn.k.weight"]
    )
    assert found
    assert found.shards_per_dim == (1, 1, 1, 2)
    assert [fallback.dim for fallback in found.fallbacks] == ["kv_heads"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"vocab_size": 61}, "vocabulary 61"),
        ({"intermediate_size": 50}, "mlp 50"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}, "heads 6"),
    ],
)
def test_a_dim_that_the_mesh_does_not_divide_is_named(changes: dict[str, Any], named: str):
    config = {**CONFIGS["llama"], "true_vocab_size": 61, **changes}
    on = sharding_without_devices(parse_mesh("1,2,4"))
    with pytest.raises(PrepError, match=f"{named} cannot be split over mp 4") as caught:
        [on.param_spec(leaf) for leaf in tiny_transformer(config).model.leaves.values()]
    assert caught.value.code == USAGE


def test_a_batch_that_the_mesh_does_not_divide_is_named():
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 2 x fsdp 2"):
        make_sharding_context(parse_mesh("2,2,2")).activation_sharding((6, 16), "batch", "seq")


def test_tokens_that_mp_does_not_divide_stay_whole():
    on = make_sharding_context(parse_mesh("1,2,4"))
    found = [on.activation_sharding((8, length, 32), "batch", "residual_seq", "embed") for length in (16, 15)]
    assert [each and each.spec for each in found] == [
        PartitionSpec("fsdp", "mp", None),
        PartitionSpec("fsdp", None, None),
    ]


def test_another_number_of_devices_is_a_usage_error():
    with pytest.raises(PrepError, match="needs 16 devices, there are 8") as caught:
        make_sharding_context(parse_mesh("1,4,4"))
    assert (caught.value.code, "JAX_NUM_CPU_DEVICES" in caught.value.why) == (USAGE, True)


@pytest.mark.parametrize("mesh", ["1,-1,2", "!1,-1,2"])
def test_an_open_axis_takes_what_is_left(mesh: str):
    on = make_sharding_context(parse_mesh(mesh))
    assert on.device_mesh
    assert dict(on.device_mesh.shape) == {"dp": 1, "fsdp": 4, "mp": 2}
    assert (on.data_parallel_size, on.num_shards("heads", 8), on.num_shards("seq", 8)) == (4, 2, 1)
    if mesh.startswith("!"):
        assert on.device_mesh.devices.flatten().tolist() == jax.devices()


def test_rules_of_a_run_are_kept():
    on = make_sharding_context(parse_mesh("1,4,2"), merge_rules(["heads=none", "embed=none"]))
    found = on.param_spec(tiny_transformer(CONFIGS["llama"]).model.leaves["layers.attn.q.weight"])
    assert found
    assert found.shards_per_dim == (1, 1, 1, 1)
    assert on.num_shards("heads", 4) == 1


def test_without_a_mesh_nothing_is_placed():
    on, x = ShardingContext(), jnp.ones((2, 3))
    assert on.constrain(x, "batch", "seq") is x
    assert (on.data_parallel_size, on.num_shards("heads", 8), on.replicated_sharding()) == (1, 1, None)
    assert on.param_sharding(tiny_transformer(CONFIGS["llama"]).model.leaves["embed.tokens"]) is None


def test_no_devices_and_too_little_memory_are_told(monkeypatch: pytest.MonkeyPatch):
    def none() -> list[Any]:
        raise RuntimeError("Unable to initialize backend 'foo'\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", none)
        with pytest.raises(PrepError, match="jax finds no devices - Unable to initialize backend 'foo' - "):
            make_sharding_context(parse_mesh("1,1,1"))
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.\nand more"
    with (
        pytest.raises(PrepError, match=r"too little memory - RESOURCE_EXHAUSTED: .* 5 bytes. - more"),
        catch_out_of_memory(),
    ):
        raise jax.errors.JaxRuntimeError(full)
    with pytest.raises(PrepError, match="too little memory - the system has no more - more"), catch_out_of_memory():
        raise MemoryError
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), catch_out_of_memory():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
