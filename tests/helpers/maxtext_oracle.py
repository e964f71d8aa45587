"""Restore an exported checkpoint with MaxText, save it again with MaxText, and save the logits of the model.

It runs in the environment of MaxText, which needs Python 3.12 and other versions of jax than prep's tests:
`python maxtext_oracle.py MODEL/config.json OUT/0/items LAYOUT LOGITS.npy SAVED`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

# By name, because pyright runs in an environment without MaxText.
pyconfig = importlib.import_module("maxtext.configs.pyconfig")
maxtext_utils = importlib.import_module("maxtext.utils.maxtext_utils")
model_creation_utils = importlib.import_module("maxtext.utils.model_creation_utils")
checkpointing = importlib.import_module("maxtext.common.checkpointing")
train_state_nnx = importlib.import_module("maxtext.common.train_state_nnx")

BLOCKS = {"llama": "llama2", "mistral": "mistral", "mixtral": "mixtral", "qwen2": "qwen2"}
NUM_TOKENS = 12
SAVED_STEP = 5


def settings(config: dict[str, Any], item: str, layout: str) -> dict[str, object]:
    """Return the settings of MaxText for a model, in float32 and with plain kernels."""
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    model_type = config["model_type"]
    values: dict[str, object] = {
        "decoder_block": BLOCKS.get(model_type, model_type),
        "base_emb_dim": config["hidden_size"],
        "base_num_query_heads": heads,
        "base_num_kv_heads": config["num_key_value_heads"],
        "base_mlp_dim": config["intermediate_size"],
        "base_moe_mlp_dim": config["intermediate_size"],
        "base_num_decoder_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "mlp_activations": '["silu","linear"]',
        "vocab_size": config["vocab_size"],
        "logits_via_embedding": config.get("tie_word_embeddings", False),
        "normalize_embedding_logits": False,
        "normalization_layer_epsilon": config["rms_norm_eps"],
        "rope_max_timescale": int(rope.get("rope_theta", 10_000)),
        "scan_layers": layout == "maxtext",
        "load_parameters_path": item,
        "weight_dtype": "float32",
        "dtype": "float32",
        "matmul_precision": "highest",
        "per_device_batch_size": 1,
        "max_target_length": 16,
        "attention": "dot_product",
        "run_name": "oracle",
        "base_output_directory": str(Path(item).parent),
        "checkpoint_storage_use_zarr3": False,
        "skip_jax_distributed_system": True,
        "hardware": "cpu",
        "tokenizer_type": "huggingface",
        "enable_dropout": False,
    }
    if rope.get("rope_type") == "llama3":
        values["rope_type"] = "llama3.1"
    if model_type in ("qwen3", "qwen3_moe"):
        values["use_qk_norm"] = True
    if model_type == "qwen2":
        values["attention_bias"] = True
    if model_type.startswith("gemma"):
        values |= gemma_settings(config)
    if model_type == "mixtral":
        values |= {"num_experts": config["num_local_experts"], "num_experts_per_tok": 2}
        values |= {"megablox": False, "sparse_matmul": False}
    if model_type == "qwen3_moe":
        # transformers 5 writes one name for all families.
        values |= {"num_experts": config["num_local_experts"], "num_experts_per_tok": 2}
        values |= {"megablox": False, "sparse_matmul": False, "norm_topk_prob": True}
        values["base_mlp_dim"] = config["moe_intermediate_size"]
        values["base_moe_mlp_dim"] = config["moe_intermediate_size"]
    return values


def gemma_settings(config: dict[str, Any]) -> dict[str, object]:
    """Return the settings of a Gemma 2 or 3."""
    values: dict[str, object] = {
        "mlp_activations": '["gelu","linear"]',
        "logits_via_embedding": True,
        "normalize_embedding_logits": True,
        "sliding_window_size": config["sliding_window"],
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
    }
    if config["model_type"] == "gemma2":
        # A layer of MaxText has two layers of the model.
        values["base_num_decoder_layers"] = config["num_hidden_layers"] // 2
        values["attn_logits_soft_cap"] = config["attn_logit_softcapping"]
        values["final_logits_soft_cap"] = config["final_logit_softcapping"]
        return values
    # MaxText takes the scale of the scores from the name of the model.
    values |= {"model_name": "gemma3-4b", "override_model_config": True, "decoder_block": "gemma3"}
    rope = config["rope_parameters"]
    values["rope_max_timescale"] = int(rope["full_attention"]["rope_theta"])
    values["local_rope_max_timescale"] = int(rope["sliding_attention"]["rope_theta"])
    values["rope_linear_scaling_factor"] = 1.0
    return values


def save_training_state(model: Any, config: Any, folder: str) -> None:
    """Save a model and a new optimizer with the checkpointer of MaxText's training."""
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    state = train_state_nnx.TrainStateNNX(model, optimizer)
    manager = checkpointing.create_orbax_checkpoint_manager(
        folder, enable_checkpointing=True, use_async=False, save_interval_steps=1
    )
    assert checkpointing.save_checkpoint(manager, SAVED_STEP, state, config, force=True)
    manager.close()


def main(config_path: str, item: str, layout: str, out: str, saved: str) -> None:
    """Write the logits of the tokens 1, 2, 3, ..., and the training state to the folder `saved`."""
    config = json.loads(Path(config_path).read_text())
    base = str(Path(str(pyconfig.__file__)).parent / "base.yml")
    words = [f"{key}={value}" for key, value in settings(config, item, layout).items()]
    maxtext_config = pyconfig.initialize(["oracle", base, *words])
    mesh = jax.sharding.Mesh(
        maxtext_utils.create_device_mesh(maxtext_config), maxtext_config.mesh_axes
    )
    model = model_creation_utils.from_pretrained(maxtext_config, mesh=mesh)
    if isinstance(model, tuple):
        model = model[0]
    with mesh:
        logits = model(
            decoder_input_tokens=jnp.arange(1, NUM_TOKENS + 1)[None],
            decoder_positions=jnp.arange(NUM_TOKENS)[None],
            decoder_segment_ids=jnp.ones((1, NUM_TOKENS), jnp.int32),
            enable_dropout=False,
        )
    np.save(out, np.asarray(logits, np.float32))
    save_training_state(model, maxtext_config, saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
