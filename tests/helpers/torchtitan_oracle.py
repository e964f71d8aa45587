"""Restore an exported checkpoint with torchtitan, save it again with torch, and save the logits of the model.

It runs in the environment of torchtitan: `python torchtitan_oracle.py MODEL/config.json OUT SAVED LOGITS.npy`.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

# By name, because pyright runs in an environment without torchtitan.
models = {
    name: importlib.import_module(f"torchtitan.models.{name}")
    for name in ("llama3", "qwen3", "deepseek_v3", "gpt_oss")
}
attention = importlib.import_module("torchtitan.models.common.attention")
common = importlib.import_module("torchtitan.models.common")
rope = importlib.import_module("torchtitan.models.common.rope")

NUM_TOKENS = 12
MODEL_CLASSES = {
    "llama": "Llama3Model",
    "qwen3": "Qwen3Model",
    "qwen3_moe": "Qwen3Model",
    "deepseek_v3": "DeepSeekV3Model",
    "gpt_oss": "GptOssModel",
}
# Module of a model type with another name.
MODULES = {"llama": "llama3", "qwen3_moe": "qwen3"}


def make_layers(config: dict[str, Any], module: Any) -> Any:
    """Return the configs of the layers in torchtitan for a model of transformers."""
    model_type = config["model_type"]
    width = config["hidden_size"]
    heads = config["num_attention_heads"]
    sizes = {"n_layers": config["num_hidden_layers"], "dim": width, "attn_backend": "varlen"}
    head_dim = config.get("head_dim") or width // heads
    parameters = config["rope_parameters"]
    rope_sizes = {"dim": head_dim, "max_seq_len": 64, "theta": parameters["rope_theta"]}
    if model_type == "deepseek_v3":
        return deepseek_layers(config, module, sizes, rope.ComplexRoPE.Config(**rope_sizes))
    if model_type != "gpt_oss":
        # A GPT-OSS of torchtitan has 64 heads of queries, and 8 of keys.
        sizes |= {"n_heads": heads, "n_kv_heads": config["num_key_value_heads"]}
    if model_type == "llama":
        sizes["hidden_dim"] = config["intermediate_size"]
        return module._build_llama3_layers(**sizes, rope=rope.ComplexRoPE.Config(**rope_sizes))
    if model_type == "qwen3":
        sizes |= {"hidden_dim": config["intermediate_size"], "head_dim": head_dim}
        return module._build_qwen3_layers(**sizes, rope=rope.CosSinRoPE.Config(**rope_sizes))
    experts = {
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "moe_comm_backend": "standard",
    }
    if model_type == "qwen3_moe":
        sizes |= {"moe_hidden_dim": config["moe_intermediate_size"], "head_dim": head_dim}
        rope_config = rope.CosSinRoPE.Config(**rope_sizes)
        return module._build_qwen3_moe_layers(**sizes, **experts, rope=rope_config)
    yarn = {
        "scaling": "yarn",
        "rope_factor": parameters["factor"],
        "beta_fast": parameters["beta_fast"],
        "beta_slow": parameters["beta_slow"],
        "truncate": parameters["truncate"],
        "original_seq_len": parameters["original_max_position_embeddings"],
    }
    return module._build_gptoss_layers(
        **sizes,
        **experts,
        hidden_dim=config["intermediate_size"],
        load_balance_coeff=1e-3,
        rope=rope.CosSinRoPE.Config(**rope_sizes, **yarn),
    )


def deepseek_layers(
    config: dict[str, Any], module: Any, sizes: dict[str, Any], rope_config: Any
) -> Any:
    """Return the configs of the layers of a DeepSeek-V3."""
    layers = module._build_dsv3_layers(
        **sizes,
        n_heads=config["num_attention_heads"],
        n_dense_layers=config["first_k_dense_replace"],
        q_lora_rank=config["q_lora_rank"] or 0,
        kv_lora_rank=config["kv_lora_rank"],
        qk_nope_head_dim=config["qk_nope_head_dim"],
        qk_rope_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        mscale=1.0,
        dense_hidden_dim=config["intermediate_size"],
        moe_hidden_dim=config["moe_intermediate_size"],
        num_experts=config.get("n_routed_experts") or config["num_local_experts"],
        num_shared_experts=config["n_shared_experts"],
        router_top_k=config["num_experts_per_tok"],
        router_score_func="sigmoid",
        router_num_expert_groups=config["n_group"],
        router_num_limited_groups=config["topk_group"],
        router_route_scale=config["routed_scaling_factor"],
        router_route_norm=config["norm_topk_prob"],
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        rope=rope_config,
    )
    for layer in layers:
        # The norms of the latents in transformers have a fixed epsilon.
        layer.attention.q_norm.eps = 1e-6
        layer.attention.kv_norm.eps = 1e-6
    return layers


class PlainAttention(attention.ScaledDotProductAttention):
    """Causal attention on the CPU, with the sinks of GPT-OSS."""

    @dataclass(kw_only=True, slots=True)
    class Config(attention.ScaledDotProductAttention.Config):
        """The config that builds this class."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
        **_: object,
    ) -> torch.Tensor:
        """Attend to earlier tokens. q, k and v: [batch, length, heads, width]."""
        if enable_gqa:
            groups = q.shape[2] // k.shape[2]
            k = k.repeat_interleave(groups, dim=2)
            v = v.repeat_interleave(groups, dim=2)
        scores = torch.einsum("blnh,bmnh->bnlm", q, k) * (scale or q.shape[-1] ** -0.5)
        length = q.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
        out = torch.einsum("bnlm,bmnh->blnh", scores.softmax(-1), v)
        if out_transform is None:
            return out
        # The normaliser [batch, heads, length] as [batch, length, heads]
        return out_transform(out, scores.logsumexp(-1).transpose(1, 2))


def compute_experts_in_float32() -> None:
    """Replace the products of experts, which torchtitan computes in bfloat16."""

    def grouped_product(a: torch.Tensor, b: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(a.shape[0], b.shape[-1])
        start = 0
        for expert, stop in enumerate(offs.tolist()):
            out[start:stop] = a[start:stop] @ b[expert]
            start = stop
        return out

    # By name, because the types of torch have a cast there, and the product is private.
    for module, name, function in (
        (torch.Tensor, "bfloat16", lambda tensor: tensor),
        (torch, "_grouped_mm", grouped_product),
    ):
        setattr(module, name, function)


def make_config(config: dict[str, Any]) -> Any:
    """Return the config of torchtitan for a model of transformers."""
    width = config["hidden_size"]
    model_type: str = config["model_type"]
    module = models[MODULES.get(model_type, model_type)]
    layers = make_layers(config, module)
    model_class = getattr(module, MODEL_CLASSES[model_type])
    eps = config["rms_norm_eps"]
    for layer in layers:
        layer.attention_norm.eps = eps
        layer.ffn_norm.eps = eps
        # The attention for GPUs needs a compiled kernel.
        layer.attention.inner_attention = PlainAttention.Config()
    vocab = config["vocab_size"]
    zeros = {"weight": torch.nn.init.zeros_}
    tying: dict[str, bool] = {}
    if "enable_weight_tying" in model_class.Config.__dataclass_fields__:
        tying["enable_weight_tying"] = config["tie_word_embeddings"]
    return model_class.Config(
        dim=width,
        vocab_size=vocab,
        **tying,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=vocab, embedding_dim=width, param_init=zeros
        ),
        norm=common.RMSNorm.Config(normalized_shape=width, eps=eps, param_init=zeros),
        lm_head=common.Linear.Config(in_features=width, out_features=vocab, param_init=zeros),
        layers=layers,
    )


def main(config_path: str, exported: str, saved: str, out: str) -> None:
    """Restore the model, save it to the folder `saved`, and write the logits of the tokens 1, 2, 3, ..."""
    compute_experts_in_float32()
    config = json.loads(Path(config_path).read_text())
    model = make_config(config).build()
    state = model.state_dict()
    load(state, checkpoint_id=exported)
    model.load_state_dict(state)
    save(model.state_dict(), checkpoint_id=saved)
    with torch.no_grad():
        logits = model(torch.arange(1, NUM_TOKENS + 1)[None])
    np.save(out, logits.float().numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
