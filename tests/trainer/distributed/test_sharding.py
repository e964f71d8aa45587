"""Meshes of 8 CPU devices: the same numbers as on one, parameters and activations where the rules say."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tests.helpers.decoders import Decoder, apart, batch_of, decoder, filled
from trainer.distributed.sharding import Shards, abstract, device_nbytes, enough_memory, partition, shards
from trainer.models.errors import USAGE, PrepError
from trainer.models.mesh import DEFAULT_RULES, parse, spec, with_rules
from trainer.models.tree import Tree, flat, nested
from trainer.nn import transformer as models
from trainer.nn.transformer import Compute

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


def mean(params: Tree, batch: Any, made: Decoder, how: Compute) -> jax.Array:
    sums = models.loss_sums(params, batch, made.model, how)
    return sums.loss / sums.weight


def placed(made: Decoder, params: Tree, on: Shards) -> Tree:
    return nested({path: jax.device_put(leaf, on.of(made.model.leaves[path])) for path, leaf in flat(params).items()})


@cache
def alone(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients on one device."""
    return computed(name, Shards())


def computed(name: str, on: Shards) -> tuple[float, dict[str, np.ndarray]]:
    config = CONFIGS[name]
    made = decoder(config)
    params = made.params(filled(config))
    batch: Any = batch_of(61, ROWS, LENGTH)
    if on.mesh is not None:
        params = placed(made, params, on)
        batch = {key: jax.device_put(value, on.activation(value.shape, "batch", "seq")) for key, value in batch.items()}
    how = Compute(head_chunk=4, remat="nothing_saveable", shards=on)
    run = jax.jit(jax.value_and_grad(lambda p, b: mean(p, b, made, how)))
    loss, gradients = run(params, batch)
    return float(loss), made.tensors(gradients)


@pytest.mark.parametrize(
    ("name", "mesh"), [*(("llama", mesh) for mesh in MESHES), *(("gpt_neo", m) for m in MESHES[1:])]
)
def test_any_mesh_computes_what_one_device_does(name: str, mesh: str):
    """1,2,4 has LLaMA's two heads of keys and values on four devices: those stay whole."""
    loss, gradients = computed(name, shards(parse(mesh)))
    wanted_loss, wanted = alone(name)
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    assert {tensor: apart(gradients[tensor], each) for tensor, each in wanted.items()} == pytest.approx(
        dict.fromkeys(wanted, 0), abs=1e-5
    )


def compiled_text(mesh: str) -> tuple[str, str]:
    """Lowered and compiled text of a LLaMA's loss and gradients."""
    made, on = decoder(CONFIGS["llama"]), shards(parse(mesh))
    params = nested(
        {p: jax.ShapeDtypeStruct(f.shape, jnp.float32, sharding=on.of(f)) for p, f in made.model.leaves.items()}
    )
    where = on.activation((ROWS, LENGTH), "batch", "seq")
    batch = {
        key: jax.ShapeDtypeStruct((ROWS, LENGTH), kind, sharding=where)
        for key, kind in {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}.items()
    }
    how = Compute(remat="nothing_saveable", head_chunk=4, shards=on)
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
    made, on = decoder(CONFIGS[name]), shards(parse(mesh))
    assert on.mesh is not None
    params = placed(made, made.params(filled(CONFIGS[name])), on)
    held = dict.fromkeys(jax.devices(), 0)
    for path, leaf in flat(params).items():
        known = made.model.leaves[path]
        asked = spec(known.dims, known.shape, on.mesh, DEFAULT_RULES)
        assert leaf.sharding.is_equivalent_to(NamedSharding(leaf.sharding.mesh, partition(asked)), leaf.ndim)
        for part in leaf.addressable_shards:
            assert part.data.size == leaf.size // np.prod(asked.parts)
            held[part.device] += part.data.nbytes
    assert {*held.values()} == {device_nbytes(made.model.leaves, on)}


def test_partitions_are_spelled_as_jax_does():
    on = abstract(parse("2,2,2"))
    leaves = decoder(CONFIGS["llama"]).model.leaves
    wanted = {
        "embed.tokens": PartitionSpec("mp", "fsdp"),
        "layers.attn.q.weight": PartitionSpec(None, "mp", None, "fsdp"),
        "layers.attn.o.weight": PartitionSpec(None, "fsdp", "mp", None),
        "layers.mlp.up.weight": PartitionSpec(None, "mp", "fsdp"),
    }
    for path, partitions in wanted.items():
        found = on.spec_of(leaves[path])
        assert found
        assert partition(found) == partitions
    tokens = shards(parse("2,2,2")).activation((8, 16), "batch", "seq")
    assert tokens
    assert tokens.spec == PartitionSpec(("dp", "fsdp"), None)


def test_key_and_value_heads_that_do_not_divide_stay_whole():
    found = abstract(parse("1,2,4")).spec_of(decoder(CONFIGS["llama"]).model.leaves["layers.attn.k.weight"])
    assert found
    assert found.parts == (1, 1, 1, 2)
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
    on = abstract(parse("1,2,4"))
    with pytest.raises(PrepError, match=f"{named} cannot be split over mp 4") as caught:
        [on.spec_of(leaf) for leaf in decoder(config).model.leaves.values()]
    assert caught.value.code == USAGE


def test_a_batch_that_the_mesh_does_not_divide_is_named():
    with pytest.raises(PrepError, match="batch 6 cannot be split over dp 2 x fsdp 2"):
        shards(parse("2,2,2")).activation((6, 16), "batch", "seq")


def test_tokens_that_mp_does_not_divide_stay_whole():
    on = shards(parse("1,2,4"))
    found = [on.activation((8, length, 32), "batch", "residual_seq", "embed") for length in (16, 15)]
    assert [each and each.spec for each in found] == [
        PartitionSpec("fsdp", "mp", None),
        PartitionSpec("fsdp", None, None),
    ]


def test_another_number_of_devices_is_a_usage_error():
    with pytest.raises(PrepError, match="needs 16 devices, there are 8") as caught:
        shards(parse("1,4,4"))
    assert (caught.value.code, "JAX_NUM_CPU_DEVICES" in caught.value.why) == (USAGE, True)


@pytest.mark.parametrize("mesh", ["1,-1,2", "!1,-1,2"])
def test_an_open_axis_takes_what_is_left(mesh: str):
    on = shards(parse(mesh))
    assert on.devices
    assert dict(on.devices.shape) == {"dp": 1, "fsdp": 4, "mp": 2}
    assert (on.replicas, on.parts("heads", 8), on.parts("seq", 8)) == (4, 2, 1)
    if mesh.startswith("!"):
        assert on.devices.devices.flatten().tolist() == jax.devices()


def test_rules_of_a_run_are_kept():
    on = shards(parse("1,4,2"), with_rules(["heads=none", "embed=none"]))
    found = on.spec_of(decoder(CONFIGS["llama"]).model.leaves["layers.attn.q.weight"])
    assert found
    assert found.parts == (1, 1, 1, 1)
    assert on.parts("heads", 4) == 1


def test_without_a_mesh_nothing_is_placed():
    on, x = Shards(), jnp.ones((2, 3))
    assert on.constrain(x, "batch", "seq") is x
    assert (on.replicas, on.parts("heads", 8), on.replicated()) == (1, 1, None)
    assert on.of(decoder(CONFIGS["llama"]).model.leaves["embed.tokens"]) is None


def test_no_devices_and_too_little_memory_are_told(monkeypatch: pytest.MonkeyPatch):
    def none() -> list[Any]:
        raise RuntimeError("Unable to initialize backend 'foo'\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "devices", none)
        with pytest.raises(PrepError, match="jax finds no devices - Unable to initialize backend 'foo' - "):
            shards(parse("1,1,1"))
    full = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 bytes.\nand more"
    with pytest.raises(PrepError, match=r"too little memory - RESOURCE_EXHAUSTED: .* 5 bytes. - more"), enough_memory():
        raise jax.errors.JaxRuntimeError(full)
    with pytest.raises(PrepError, match="too little memory - the system has no more - more"), enough_memory():
        raise MemoryError
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), enough_memory():
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")
