"""Phi-3, 3.5 and 4-mini: LLaMA with queries, keys and values in one matrix, gate and up in another."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ROPE, Traits, only_knows, positive, same_window
from trainer.models.families import _llama_style
from trainer.models.parameters import Config, size
from trainer.models.rope_config import read_rope
from trainer.models.rows import matrix

QKV = "head_dim embed <- self_attn.qkv_proj.weight"
GATE_UP = "mlp embed <- mlp.gate_up_proj.weight"

ROPES = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}  # the last two once were


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Phi3Config's defaults where a field is absent."""
    return {**_llama_style.sizes(config, vocab=32064, embed=3072, mlp=8192), "gate_up": 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, *ROPE, "partial_rotary_factor", "sliding_window", "layer_types")
    found, positions = sizes(config), size(config, "max_position_embeddings", 4096)
    original = size(config, "original_max_position_embeddings", 4096)
    with_original = {**config, "original_max_position_embeddings": original}
    rope = read_rope(with_original, found["head_dim"], positions, partial=True, kinds=ROPES)
    return dataclasses.replace(
        _llama_style.traits(config, found, positions, rope=rope),
        norm_eps=positive(config, "rms_norm_eps", 1e-5),
        windows=same_window(found["layers"], config.get("sliding_window")),
    )


FAMILY = _llama_style.family(
    name="phi3",
    sizes=sizes,
    traits=traits,
    tied=False,
    layer={
        **_llama_style.NORMS,
        **matrix("attn.q", f"heads {QKV}: (>heads head_dim | kv_heads head_dim | kv_heads head_dim) embed"),
        **matrix("attn.k", f"kv_heads {QKV}: (heads head_dim | >kv_heads head_dim | kv_heads head_dim) embed"),
        **matrix("attn.v", f"kv_heads {QKV}: (heads head_dim | kv_heads head_dim | >kv_heads head_dim) embed"),
        **matrix("attn.o", "embed heads head_dim <- self_attn.o_proj.weight: embed (heads head_dim)"),
        **matrix("mlp.gate", f"{GATE_UP}: (gate_up=0 mlp) embed"),
        **matrix("mlp.up", f"{GATE_UP}: (gate_up=1 mlp) embed"),
        **matrix("mlp.down", "embed mlp <- mlp.down_proj.weight: embed mlp"),
    },
)
