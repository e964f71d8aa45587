"""Tests of models on a mesh that splits tokens: equal losses and gradients, and no array of all tokens on a device."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from prepcli.commands.testing.tiny_model import (
    loss_and_gradients,
    random_batch,
    random_tensors,
    relative_error,
    tiny_transformer,
)
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import unflatten_tree
from prepcli.models.registry import FAMILIES
from tests.helpers.meshes import error_of
from tests.helpers.slow_cases import slow_except
from tests.helpers.tiny_configs import GOLDEN
from trainer.distributed.sharding import make_sharding_context, zigzag_order
from trainer.nn.model_spec import AttentionOptions, ForwardConfig, build_model
from trainer.nn.transformer import loss_sums

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


@pytest.mark.parametrize(
    ("name", "options"),
    slow_except(
        [(name, options) for name in CONFIGS for options in OPTIONS],
        # This model has experts too.
        [("deepseek_v3", "whole")],
    ),
)
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


@pytest.mark.slow
def test_memory_falls_with_the_number_of_token_shards():
    analyses: Any = [
        compile_step(mesh, rows=rows, length=8192).memory_analysis()
        for mesh, rows in (("dp:4,sp:2", 4), ("dp:2,sp:4", 2))
    ]
    two, four = (analysis.temp_size_in_bytes for analysis in analyses)
    assert 0.45 < four / two < 0.6


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
