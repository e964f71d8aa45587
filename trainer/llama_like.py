"""What LLaMA's many relatives share: sizes, rows of the table, buffers of old files. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.errors import PrepError
from trainer.rope import read_rope
from trainer.table import Config, Parameter, Tie, When, linear, size
from trainer.traits import ALL_BEFORE, Traits, activation, positive, sliding_windows

PREFIX = "model."
UNPREFIXED = ("lm_head.weight",)
OLD_BUFFERS = {"layers.{i}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed from the config"}
Rows = dict[str, Parameter]


def tie(default: bool) -> Tie:
    """The head and the embedding."""
    return Tie(leaf="head.weight", tensor="lm_head.weight", embedding="embed_tokens.weight", default=default)


def sizes(
    config: Config,
    vocab: int = 32000,
    embed: int = 4096,
    mlp: int = 11008,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int | None = None,
    head_dim: int | None = None,
) -> dict[str, int]:
    """Atom -> extent, with a class's defaults where a field is absent: as many kv_heads as heads, and as large heads as
    these make of the embedding, where the class has no number either, or the config says null."""
    embed, heads = size(config, "hidden_size", embed), size(config, "num_attention_heads", heads)
    kv_default = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    dim_default = embed // heads if head_dim is None or "head_dim" in config else head_dim
    return {
        "vocab": size(config, "vocab_size", vocab),
        "layers": size(config, "num_hidden_layers", layers),
        "embed": embed,
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", kv_default),
        "head_dim": size(config, "head_dim", dim_default),
        "mlp": size(config, "intermediate_size", mlp),
    }


def traits(config: Config, found: Mapping[str, int], positions: int, theta: float = 10_000.0) -> Traits:
    """LLaMA's, for these sizes; `positions` and `theta` where the config does not say."""
    positions = size(config, "max_position_embeddings", positions)
    return Traits(
        norm="rms",
        norm_eps=positive(config, "rms_norm_eps", 1e-6),
        activation=activation(config, "hidden_act", "silu"),
        gated=True,
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=read_rope(config, found["head_dim"], positions, theta),
        positions=positions,
        init_std=positive(config, "initializer_range", 0.02),
    )


def upper_windows(config: Config, layers: int) -> tuple[int, ...]:
    """Qwen's windows: of the layers from `max_window_layers` on, where `use_sliding_window` is on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise PrepError("config.json makes no sense", f"max_window_layers is {first!r:.60}, not a number of layers")
    return sliding_windows(config, layers, window, lambda layer: layer >= first)


def experts_per_token(config: Config, experts: int, default: int) -> int:
    """How many experts a token has; PrepError for more than there are."""
    found = size(config, "num_experts_per_tok", default)
    if found > experts:
        raise PrepError("config.json makes no sense", f"num_experts_per_tok is {found}, there are {experts} experts")
    return found


EMBEDDING: Rows = {"embed.tokens": Parameter("vocab embed <- embed_tokens.weight: vocab embed")}
END: Rows = {
    "final_norm.scale": Parameter("embed <- norm.weight: embed"),
    "head.weight": Parameter("vocab embed <- lm_head.weight: vocab embed"),
}
HEAD_NORMS: Rows = {
    "layers.attn.q_norm.scale": Parameter("layers head_dim <- layers.{layers}.self_attn.q_norm.weight: head_dim"),
    "layers.attn.k_norm.scale": Parameter("layers head_dim <- layers.{layers}.self_attn.k_norm.weight: head_dim"),
}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def norms(names: Mapping[str, str]) -> Rows:
    """The norms of a layer: ours -> the tensor's name."""
    return {
        f"layers.{ours}.scale": Parameter(f"layers embed <- layers.{{layers}}.{name}.weight: embed")
        for ours, name in names.items()
    }


NORMS = norms({"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"})


def attention(bias: When | None = None, out_bias: When | None = None) -> Rows:
    """Queries, keys, values and what is made of them; `bias`: when the first three have one, None: never."""
    found = {}
    for ours, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")):
        name = f"layers.{{layers}}.self_attn.{ours}_proj.weight"
        row = f"layers {heads} head_dim embed <- {name}: ({heads} head_dim) embed"
        found |= _matrix(f"layers.attn.{ours}", row, bias)
    row = "layers embed heads head_dim <- layers.{layers}.self_attn.o_proj.weight: embed (heads head_dim)"
    return found | _matrix("layers.attn.o", row, out_bias)


def gated(bias: When | None = None) -> Rows:
    """A gated feed-forward part; `bias`: when its matrices have one, None: never."""
    mlp = "layers.{layers}.mlp"
    return {
        **_matrix("layers.mlp.gate", f"layers mlp embed <- {mlp}.gate_proj.weight: mlp embed", bias),
        **_matrix("layers.mlp.up", f"layers mlp embed <- {mlp}.up_proj.weight: mlp embed", bias),
        **_matrix("layers.mlp.down", f"layers embed mlp <- {mlp}.down_proj.weight: embed mlp", bias),
    }


def _matrix(path: str, row: str, bias: When | None) -> Rows:
    return {f"{path}.weight": Parameter(row)} if bias is None else linear(path, row, bias)


def experts(gate: str, up: str, down: str, router: str) -> Rows:
    """A feed-forward part of many experts, each with tensors of these names, or fused for all as transformers 5 has
    them in memory: gate and up one after the other."""
    fused = "layers.{layers}.mlp.experts"
    own_router, fused_router = (
        f"layers experts embed <- layers.{{layers}}.{name}: experts embed" for name in (router, "mlp.gate.weight")
    )
    return {
        "layers.mlp.router.weight": Parameter(own_router, other="" if own_router == fused_router else fused_router),
        "layers.mlp.gate.weight": Parameter(
            f"layers experts mlp embed <- layers.{{layers}}.{gate}: mlp embed",
            other=f"layers experts mlp embed <- {fused}.gate_up_proj: experts (gate_up=0 mlp) embed",
        ),
        "layers.mlp.up.weight": Parameter(
            f"layers experts mlp embed <- layers.{{layers}}.{up}: mlp embed",
            other=f"layers experts mlp embed <- {fused}.gate_up_proj: experts (gate_up=1 mlp) embed",
        ),
        "layers.mlp.down.weight": Parameter(
            f"layers experts embed mlp <- layers.{{layers}}.{down}: embed mlp",
            other=f"layers experts embed mlp <- {fused}.down_proj: experts embed mlp",
        ),
    }
