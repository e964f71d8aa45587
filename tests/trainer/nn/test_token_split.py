"""Tokens split over devices, and packed rows."""

from __future__ import annotations

import dataclasses
import math
import re
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from prepcli.commands.testing.tiny_model import (
    TinyTransformer,
    loss_and_gradients,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.models.architecture import FULL_ATTENTION, NO_SOFTCAP
from prepcli.models.layer_config import DropoutConfig, RelativePositionBias
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.meshes import error_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from tests.trainer.nn.kernels.test_blockwise import (
    Draw,
    as_jax,
    draw_problem,
    exact_attention,
    float32_inputs,
    scale_of,
    split_over,
)
from tests.trainer.nn.test_attention import make_arch
from trainer.data.packing import document_dataset
from trainer.data.store import MappedTokens
from trainer.distributed.sharding import ShardingContext, make_sharding_context, zigzag_order
from trainer.nn import transformer
from trainer.nn.attention_mask import KV, AttentionMask, ScoreBias, Segments
from trainer.nn.dropout import Stack, step_dropout
from trainer.nn.kernels.blockwise import Labels, has_visible, tile_config
from trainer.nn.kernels.ring import ring_attention
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model
from trainer.nn.transformer import loss_sums

# Tests of models on a mesh that splits tokens: equal losses and gradients, and no array of all tokens on a device.

MESH, LENGTH, SOURCE_LENGTH = "fsdp:2,mp:2,sp:2", 40, 32

TILES = AttentionOptions("blockwise", 4, 8)

# Configs with vocabularies and heads that mp divides.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-biases": GOLDEN["llama-biases"] | {"vocab_size": 32},
    "gpt_neo": GOLDEN["gpt_neo"] | {"vocab_size": 32},
    "gemma2": GOLDEN["gemma2"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 1},
    "mixtral": GOLDEN["mixtral"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    "t5": GOLDEN["t5"] | {"vocab_size": 32, "num_heads": 4},
    # ALiBi, and norms over the queries and keys of all heads, which mp splits.
    "bloom": GOLDEN["bloom"] | {"vocab_size": 32, "num_attention_heads": 4},
    "olmo2": GOLDEN["olmo2"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    # Latents, experts in groups and shared ones, and a dense layer.
    "deepseek_v3": GOLDEN["deepseek_v3"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}
    | {"moe_intermediate_size": 6},
    # Sinks, and biases of experts.
    "gpt_oss": GOLDEN["gpt_oss"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    # Chunks of positions, factors of queries without rotation, and scores on the input of experts.
    "llama4_text": GOLDEN["llama4_text"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"intermediate_size": 6},
    "qwen2_moe": GOLDEN["qwen2_moe"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"moe_intermediate_size": 6},
    "smollm3": GOLDEN["smollm3"]
    | {"vocab_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
}

OPTIONS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunked": {"ffn_chunk_size": 7, "head_chunk_size": 3, "remat_policy": "nothing_saveable"},
}

# Queries, keys and values [T, 256] are wider than the residual stream [T, 64].
LLAMA = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 128,
    "vocab_size": 256,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_gradients_match_one_device(name: str, options: str):
    config, sharding = CONFIGS[name], make_sharding_context(parse_mesh(MESH))
    tiny = tiny_transformer(config)
    params = tiny.params_from_tensors(random_tensors(config))
    batch = random_batch(
        config["vocab_size"], 4, LENGTH, 1, tiny.model.arch_config.encoder is not None
    )
    batch |= {
        name: array[:, :SOURCE_LENGTH]
        for name, array in batch.items()
        if name in ("source", "present")
    }
    expected_loss, expected = loss_and_gradients(tiny.model, params, batch, ForwardConfig())
    ordered = {
        name: array[:, zigzag_order(array.shape[1], sharding)] for name, array in batch.items()
    }
    forward_config = ForwardConfig(sharding=sharding, attention_options=TILES, **OPTIONS[options])
    loss, gradients = loss_and_gradients(tiny.model, params, ordered, forward_config)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    errors = jax.tree.map(relative_error, *map(jax.device_get, (gradients, expected)))
    assert max(jax.tree.leaves(errors)) < 1e-5


def compile_step(mesh: str, rows: int, length: int) -> jax.stages.Compiled:
    """Compile loss and gradients of a small model, without arrays."""
    sharding = make_sharding_context(parse_mesh(mesh))
    model = build_model(FAMILIES["llama"], LLAMA, is_tied=False)
    forward_config = ForwardConfig(
        sharding=sharding,
        attention_options=AttentionOptions("blockwise", 64, 64),
        ffn_chunk_size=64,
        head_chunk_size=64,
        remat_policy="nothing_saveable",
    )
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(
                leaf.shape, jnp.float32, sharding=sharding.param_sharding(leaf)
            )
            for path, leaf in model.leaves.items()
        }
    )
    batch_sharding = sharding.activation_sharding((rows, length), "batch", "seq")
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch = {
        name: jax.ShapeDtypeStruct((rows, length), dtype, sharding=batch_sharding)
        for name, dtype in dtypes.items()
    }
    step = jax.jit(
        jax.grad(lambda params, batch: loss_sums(params, batch, model, forward_config).loss)
    )
    return step.lower(params, batch).compile()


def test_compiler_passes_keys_and_gathers_no_tokens_over_sp():
    length = 1024
    text = compile_step(MESH, rows=2, length=length).as_text() or ""
    passed = {*re.findall(r"= f32\[([\d,]+)\]\S* collective-permute", text)}
    assert passed == {f"1,{length // 2},2,64"}, (
        "keys, values and their gradients of one shard of tokens and heads"
    )
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather", text)
    largest = max(math.prod(map(int, shape.split(","))) for shape in gathered)
    assert largest == length // 2 * 64, "the residual stream of a device, which mp splits"


@pytest.mark.parametrize("kernel", ["reference"])
def test_forward_config_rejects_kernels_that_need_whole_rows(kernel: str):
    sharding = make_sharding_context(parse_mesh(MESH))
    error = error_of(
        partial(ForwardConfig, sharding=sharding, attention_options=AttentionOptions(kernel))
    )
    assert error.what == "attention kernel `reference` cannot compute this model's attention"
    assert (error.why, error.hint) == (
        "it does not support sequences split over devices",
        '`model.attention_kernel = "auto"`',
    )


# Tests of models on packed documents: loss, gradients and logits are those of each document alone.

LENGTHS, SEQ_LENGTH = (5, 12, 3, 9, 1, 16, 7), 16

KERNELS = {"reference": AttentionOptions(), "blockwise": AttentionOptions("blockwise", 4, 8)}

# Configs with vocabularies and heads that mp divides.
PACKED_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GOLDEN["llama"] | {"vocab_size": 32},
    "gpt_neo": GOLDEN["gpt_neo"] | {"vocab_size": 32},
    "opt": GOLDEN["opt"] | {"vocab_size": 32, "num_attention_heads": 4},
    "gemma3_text": GOLDEN["gemma3_text"] | {"vocab_size": 32, "num_attention_heads": 4},
    "mixtral": GOLDEN["mixtral"] | {"vocab_size": 32, "num_attention_heads": 4},
    "lfm2": GOLDEN["lfm2"] | {"vocab_size": 32, "num_attention_heads": 4},
    "qwen3_5_text": GOLDEN["qwen3_5_text"] | {"vocab_size": 32, "num_attention_heads": 4},
    "mamba2": GOLDEN["mamba2"] | {"vocab_size": 32},
    "mamba": GOLDEN["mamba"] | {"vocab_size": 32},
    "falcon_h1": GOLDEN["falcon_h1"] | {"vocab_size": 32, "num_attention_heads": 4},
}

# Models with states that need whole rows, so that no mesh splits their tokens.
RECURRENT = ("lfm2", "qwen3_5_text", "mamba2", "mamba", "falcon_h1")


def make_batch(packing: str, vocab: int = 29) -> dict[str, np.ndarray]:
    """Return all documents in rows of a packing."""
    ids = np.random.default_rng(1).integers(0, vocab, sum(LENGTHS)).astype("<u2")
    ends = np.cumsum(LENGTHS).astype("<u8")
    dataset = document_dataset(MappedTokens(ids, ends, "x", SEQ_LENGTH), packing)
    return dataset.get_batch(range(dataset.n_rows))


def make_model(config: dict[str, Any]) -> tuple[TinyTransformer, Tree]:
    """Return a tiny model with random parameters."""
    tiny = tiny_transformer(config)
    return tiny, tiny.params_from_tensors(random_tensors(config))


CASES = [(name, kernel) for name in PACKED_CONFIGS for kernel in KERNELS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_loss_and_gradients_match_padded_documents(name: str, kernel: str):
    tiny, params = make_model(PACKED_CONFIGS[name])
    forward_config = ForwardConfig(attention_options=KERNELS[kernel])
    packed, padded = make_batch("documents"), make_batch("none")
    assert len(packed["tokens"]) < len(padded["tokens"])
    loss, gradients = loss_and_gradients(tiny.model, params, packed, forward_config)
    expected_loss, expected = loss_and_gradients(tiny.model, params, padded, forward_config)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (
        max(jax.tree.leaves(jax.tree.map(relative_error, *jax.device_get((gradients, expected)))))
        < 1e-5
    )


@pytest.mark.parametrize(
    "name", slow_except([n for n in PACKED_CONFIGS if n not in RECURRENT], ["llama"])
)
def test_loss_and_gradients_of_split_tokens_match_one_device(name: str):
    tiny, params = make_model(PACKED_CONFIGS[name])
    sharding = make_sharding_context(parse_mesh("fsdp:2,mp:2,sp:2"))
    batch = make_batch("documents")
    ordered = {n: array[:, zigzag_order(SEQ_LENGTH, sharding)] for n, array in batch.items()}
    forward_config = ForwardConfig(sharding=sharding, attention_options=KERNELS["blockwise"])
    loss, gradients = loss_and_gradients(tiny.model, params, ordered, forward_config)
    expected_loss, expected = loss_and_gradients(tiny.model, params, batch, ForwardConfig())
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert (
        max(jax.tree.leaves(jax.tree.map(relative_error, *jax.device_get((gradients, expected)))))
        < 1e-5
    )


@pytest.mark.parametrize(
    "name", slow_except(["llama", "gpt_neo", "opt", *RECURRENT], ["qwen3_5_text"])
)
def test_logits_match_transformers_on_each_document(name: str):
    pytest.importorskip("transformers")
    from prepcli.commands.testing.tiny_model import torch_logits, torch_model

    config = GOLDEN[name]
    tiny, params = make_model(config)
    packed, padded = (
        {n: jnp.asarray(array) for n, array in make_batch(packing).items()}
        for packing in ("documents", "none")
    )
    forward_config = ForwardConfig(attention_options=KERNELS["blockwise"])

    @jax.jit
    def compute_logits(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        segments = Segments(batch["segment_ids"], batch["positions"])
        x = transformer.hidden_states(
            params, batch["tokens"], tiny.model, forward_config, segments=segments
        )
        return transformer.logits_from_hidden(params, x, tiny.model, forward_config)

    logits = np.asarray(compute_logits(params, packed))
    expected = torch_logits(
        torch_model(config, random_tensors(config)), jax.device_get(padded), LENGTHS
    )
    found = 0
    for row, ids in enumerate(np.asarray(packed["segment_ids"])):
        for segment in range(1, ids.max() + 1):
            document = np.asarray(packed["tokens"])[row, ids == segment]
            (number,) = [
                i
                for i, n in enumerate(LENGTHS)
                if padded["tokens"][i, :n].tolist() == document.tolist()
            ]
            assert (
                abs(logits[row, ids == segment] - expected[number, : LENGTHS[number]]).max() <= 2e-5
            )
            found += 1
    assert found == len(LENGTHS)


def test_forgetful_masking_keeps_the_first_key_of_each_document():
    batch = make_batch("documents")
    row_ids = jnp.arange(len(batch["tokens"]), dtype=jnp.uint32)
    dropout = step_dropout(
        DropoutConfig(fcm_ratio=(0.9, 0.9)), seed=1, step=jnp.int32(0), row_ids=row_ids
    )
    positions, segment_positions = jnp.arange(SEQ_LENGTH), jnp.asarray(batch["positions"])
    visible = dropout.for_stack(Stack.DECODER).remembered_keys(positions, segment_positions)
    assert visible is not None
    is_first = batch["positions"] == 0
    assert np.asarray(visible)[is_first].all()
    assert np.asarray(visible)[~is_first].mean() < 0.4


# Tests of ring attention: exact for any order of the tokens, balanced, and without a copy of all keys.


def make_draw(window: int, *, has_segments: bool, group: int) -> Draw:
    """Return a causal problem of 24 tokens."""
    rng = np.random.default_rng(0)
    positions, shape = np.arange(24), (2, 24, 2, 4)
    q, k, v, output_gradient = (
        rng.standard_normal((*shape[:2], heads, shape[3])).astype(np.float32)
        for heads in (2 * group, 2, 2, 2 * group)
    )
    mask = {
        "q_positions": positions,
        "kv_positions": positions,
        "window": window,
        "is_causal": True,
    }
    if has_segments:
        mask |= dict.fromkeys(
            ("q_segment_ids", "kv_segment_ids"), np.sort(rng.integers(0, 3, shape[:2]), axis=1)
        )
    options = AttentionOptions("blockwise", 2, 5)
    return Draw(
        q,
        k,
        v,
        output_gradient,
        mask,
        None,
        RelativePositionBias(8, 16, False),
        NO_SOFTCAP,
        options,
    )


def run_ring(
    draw: Draw, sharding: ShardingContext, *, is_balanced: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return output and gradients of tokens in the order of positions; the kernel gets them in another order."""
    num_queries, num_keys = draw.q.shape[1], draw.k.shape[1]
    q_order, kv_order = (
        zigzag_order(n, sharding) if is_balanced else np.arange(n, dtype=np.int32)
        for n in (num_queries, num_keys)
    )
    arch_config = dataclasses.replace(
        make_arch(), attn_logit_softcap=draw.softcap, attn_scale=scale_of(draw)
    )
    orders = {"q": q_order, "k": kv_order, "v": kv_order}
    labels = {
        name: as_jax(value[..., q_order if name.startswith("q_") else kv_order])
        if isinstance(value, np.ndarray)
        else value
        for name, value in draw.mask.items()
    }

    def attend(inputs: dict[str, Array]) -> Array:
        table = inputs.get("bias_table")
        mask = AttentionMask(
            **labels, bias=None if table is None else ScoreBias(table, draw.bias_config)
        )
        kv = KV(inputs["k"], inputs["v"])
        return ring_attention(inputs["q"], kv, arch_config, mask, draw.options, sharding=sharding)

    @jax.jit
    def output_and_gradients(
        inputs: dict[str, Array], output_gradient: Array
    ) -> tuple[Array, dict[str, Array]]:
        output, pullback = jax.vjp(attend, inputs)
        return output, pullback(output_gradient)[0]

    inputs = {
        name: x[:, orders[name]] if name in orders else x
        for name, x in float32_inputs(draw).items()
    }
    output, gradients = output_and_gradients(inputs, jnp.asarray(draw.output_gradient[:, q_order]))
    inverse = {name: np.argsort(order) for name, order in orders.items()}
    by_position = {
        name: np.asarray(x)[:, inverse[name]] if name in inverse else np.asarray(x)
        for name, x in gradients.items()
    }
    return np.asarray(output)[:, inverse["q"]], by_position


def check_ring(draw: Draw, num_devices: int, *, is_balanced: bool) -> None:
    """Compare output and gradients with float64.

    Merging the results of n shards adds at most n (2 |log-sum-exp| + 4) roundings to the relative error, for at most 4
    shards and 24 keys fewer than the 3 S + 12 roundings of the bound of a single device.
    """
    output, gradients = run_ring(draw, split_over(num_devices), is_balanced=is_balanced)
    expected_output, expected, bounds = exact_attention(draw)
    for name, actual in {"output": output, **gradients}.items():
        reference = expected_output if name == "output" else expected[name]
        assert (abs(actual.astype(np.float64) - reference) <= 2 * bounds[name] + 1e-30).all(), name


RING_CASES = list(product((1, 2, 4), (True, False), (FULL_ATTENTION, 5), (False, True), (1, 3)))
FAST = [(4, True, 5, True, 3)]


@pytest.mark.parametrize(
    ("num_devices", "is_balanced", "window", "has_segments", "group"),
    slow_except(RING_CASES, FAST),
)
def test_output_and_gradients_match_float64(
    num_devices: int, is_balanced: bool, window: int, has_segments: bool, group: int
):
    check_ring(
        make_draw(window, has_segments=has_segments, group=group),
        num_devices,
        is_balanced=is_balanced,
    )


@pytest.mark.slow
def test_many_masks_biases_and_softcaps_match_float64():
    for seed in range(40):
        for num_devices in (2, 4):
            check_ring(
                draw_problem(seed, length_multiple=8), num_devices, is_balanced=seed % 2 == 0
            )
        jax.clear_caches()


def live_tiles(num_devices: int, *, is_balanced: bool) -> np.ndarray:
    """Count the tiles that each device computes in each step of the ring, [devices, steps], of 1,024 tokens."""
    length, tile = 1024, 16
    order = zigzag_order(length, split_over(num_devices)) if is_balanced else np.arange(length)
    config = tile_config(make_arch(), AttentionMask(), q_size=tile, kv_size=tile)
    tiles = Labels(
        jnp.asarray(order).reshape(-1, 1, tile), valid=jnp.ones((length // tile, 1, tile), bool)
    )
    by_key = jax.vmap(lambda q, kv: has_visible(config, q, kv), in_axes=(None, 0))
    is_live = np.asarray(jax.vmap(by_key, in_axes=(0, None))(tiles, tiles))
    by_shard = is_live.reshape(num_devices, -1, num_devices, length // tile // num_devices).sum(
        (1, 3)
    )
    return np.stack([np.roll(row[::-1], device + 1) for device, row in enumerate(by_shard)])


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_devices_compute_equally_many_tiles_in_each_step(num_devices: int):
    tiles, contiguous = (
        live_tiles(num_devices, is_balanced=is_balanced) for is_balanced in (True, False)
    )
    assert tiles.sum() == contiguous.sum() == 64 * 65 // 2, "tiles on and below the diagonal"
    slowest = tiles.max(0).sum()
    assert slowest <= 1.05 * tiles.sum() / num_devices
    assert contiguous.max(0).sum() > 1.3 * slowest
