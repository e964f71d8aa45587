"""Phi-3, 3.5 and 4-mini: LLaMA with queries, keys and values in one matrix, gate and up in another."""

from __future__ import annotations

import dataclasses

from trainer import llama_like
from trainer.errors import PrepError
from trainer.rope import read_rope
from trainer.table import Config, Family, Parameter, size
from trainer.traits import Traits, only_knows, positive, sliding_windows

QKV = "layers.{layers}.self_attn.qkv_proj.weight"
GATE_UP = "layers.{layers}.mlp.gate_up_proj.weight"


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; Phi3Config's defaults where a field is absent."""
    return {**llama_like.sizes(config, vocab=32064, embed=3072, mlp=8192), "gate_up": 2}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "partial_rotary_factor", "sliding_window")
    found = sizes(config)
    plain = {**config, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": None}
    base = llama_like.traits(plain, found, positions=4096)
    rope = read_rope(_with_long_rope(config), found["head_dim"], base.positions, partial=True)
    if rope.kind not in ("default", "longrope"):
        raise PrepError(f"rope type `{rope.kind}` is not known", "Phi-3 has default and longrope")
    return dataclasses.replace(
        base,
        norm_eps=positive(config, "rms_norm_eps", 1e-5),
        windows=sliding_windows(config, found["layers"], config.get("sliding_window"), lambda layer: True),
        rope=rope,
    )


def _with_long_rope(config: Config) -> Config:
    """In the older names of its scaling that it still has: `su` and `yarn`."""
    original = size(config, "original_max_position_embeddings", 4096)
    found = config.get("rope_scaling") or config.get("rope_parameters")
    kind = found.get("rope_type", found.get("type")) if isinstance(found, dict) else None
    if isinstance(found, dict) and kind in ("su", "yarn"):
        found = {**found, "rope_type": "longrope"}
    return {**config, "rope_scaling": found, "original_max_position_embeddings": original}


FAMILY = Family(
    name="phi3",
    prefix=llama_like.PREFIX,
    unprefixed=llama_like.UNPREFIXED,
    sizes=sizes,
    table={
        **llama_like.EMBEDDING,
        **llama_like.NORMS,
        "layers.attn.q.weight": Parameter(
            f"layers heads head_dim embed <- {QKV}: (>heads head_dim | kv_heads head_dim | kv_heads head_dim) embed"
        ),
        "layers.attn.k.weight": Parameter(
            f"layers kv_heads head_dim embed <- {QKV}: (heads head_dim | >kv_heads head_dim | kv_heads head_dim) embed"
        ),
        "layers.attn.v.weight": Parameter(
            f"layers kv_heads head_dim embed <- {QKV}: (heads head_dim | kv_heads head_dim | >kv_heads head_dim) embed"
        ),
        "layers.attn.o.weight": llama_like.attention()["layers.attn.o.weight"],
        "layers.mlp.gate.weight": Parameter(f"layers mlp embed <- {GATE_UP}: (gate_up=0 mlp) embed"),
        "layers.mlp.up.weight": Parameter(f"layers mlp embed <- {GATE_UP}: (gate_up=1 mlp) embed"),
        "layers.mlp.down.weight": llama_like.gated()["layers.mlp.down.weight"],
        **llama_like.END,
    },
    dropped=llama_like.OLD_BUFFERS,
    tie=llama_like.tie(default=False),
    traits=traits,
)
