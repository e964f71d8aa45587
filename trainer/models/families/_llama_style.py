"""What LLaMA's many relatives share: sizes, rows of the table, buffers of old files. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.models import rows
from trainer.models.architecture import FULL_ATTENTION, ArchConfig, read_activation, read_positive, read_sliding_windows
from trainer.models.errors import PrepError
from trainer.models.parameters import MAX_LAYERS, Condition, Family, HFConfig, TreeLayout, read_size
from trainer.models.rope_config import Rope, read_rope
from trainer.models.rows import Parameters, embedding, linear, matrix, rms_norm, stack

TENSOR_PREFIX = "model."
LEGACY_BUFFERS = {"layers.{i}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed from the config"}


def build_family(
    name: str,
    sizes: Callable[[HFConfig], dict[str, int]],
    arch_config: Callable[[HFConfig], ArchConfig],
    layer: Parameters,
    tied_by_default: bool,
    layouts: Callable[[Parameters], Mapping[str, TreeLayout]] = lambda table: {},
    dropped: Mapping[str, str] = LEGACY_BUFFERS,
) -> Family:
    """A family whose files are named as LLaMA's are; `layer`: the rows of one."""
    table = {
        **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
        **stack("layers", "layers.{layers}", layer),
        **rms_norm("final_norm", "embed <- norm.weight: embed"),
        **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
    }
    return rows.build_family(name, TENSOR_PREFIX, sizes, arch_config, table, tied_by_default, dropped, layouts(table))


def sizes(
    config: HFConfig,
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
    embed, heads = read_size(config, "hidden_size", embed), read_size(config, "num_attention_heads", heads)
    if embed < heads and config.get("head_dim") is None:
        raise PrepError("config.json makes no sense", f"hidden_size {embed} makes no {heads} num_attention_heads")
    kv_default = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    dim_default = embed // heads if head_dim is None or "head_dim" in config else head_dim
    return {
        "vocab": read_size(config, "vocab_size", vocab),
        "layers": read_size(config, "num_hidden_layers", layers, MAX_LAYERS),
        "embed": embed,
        "heads": heads,
        "kv_heads": read_size(config, "num_key_value_heads", kv_default),
        "head_dim": read_size(config, "head_dim", dim_default),
        "mlp": read_size(config, "intermediate_size", mlp),
    }


def arch_config(
    config: HFConfig,
    axis_sizes: Mapping[str, int],
    max_positions: int,
    rope_theta: float = 10_000.0,
    rope: Rope | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> ArchConfig:
    """LLaMA's, for these sizes; `positions`, `theta` and the last of `act`, after the field that has the activation,
    where the config does not say. `rope`: read already. PrepError where heads do not share keys and values evenly."""
    heads, kv_heads = axis_sizes["heads"], axis_sizes["kv_heads"]
    if heads % kv_heads:
        why = f"num_key_value_heads is {kv_heads}, it has to divide num_attention_heads, which is {heads}"
        raise PrepError("config.json makes no sense", why)
    max_positions = read_size(config, "max_position_embeddings", max_positions)
    return ArchConfig(
        norm="rms",
        norm_eps=read_positive(config, "rms_norm_eps", 1e-6),
        activation=read_activation(config, *activation),
        has_gated_mlp=True,
        attn_scale=axis_sizes["head_dim"] ** -0.5,
        sliding_windows=(FULL_ATTENTION,) * axis_sizes["layers"],
        rope=rope or read_rope(config, axis_sizes["head_dim"], max_positions, rope_theta),
        max_positions=max_positions,
        init_std=read_positive(config, "initializer_range", 0.02),
    )


def read_upper_layer_windows(config: HFConfig, layers: int) -> tuple[int, ...]:
    """Qwen's windows: of the layers from `max_window_layers` on, where `use_sliding_window` is on."""
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or first < 0:
        raise PrepError("config.json makes no sense", f"max_window_layers is {first!r:.60}, not a number of layers")
    return read_sliding_windows(config, layers, window, lambda layer: layer >= first)


def read_experts_per_token(config: HFConfig, experts: int, default: int) -> int:
    """How many experts a token has; PrepError for more than there are."""
    found = read_size(config, "num_experts_per_tok", default)
    if found > experts:
        raise PrepError("config.json makes no sense", f"num_experts_per_tok is {found}, there are {experts} experts")
    return found


def rms_norms(**names: str) -> Parameters:
    """The norms of a layer: ours -> the module's name."""
    return {
        path: p for ours, name in names.items() for path, p in rms_norm(ours, f"embed <- {name}.weight: embed").items()
    }


PRE_NORMS = rms_norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
SANDWICH_NORMS = rms_norms(
    attn_norm="input_layernorm",
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
QK_NORMS = {
    **rms_norm("attn.q_norm", "head_dim <- self_attn.q_norm.weight: head_dim"),
    **rms_norm("attn.k_norm", "head_dim <- self_attn.k_norm.weight: head_dim"),
}


def attention(bias: Condition | None = None, out_bias: Condition | None = None) -> Parameters:
    """Queries, keys, values and what is made of them; `bias`: when the first three have one, None: never."""
    return rows.attention("self_attn.{}_proj", "o", "kv_heads", bias, out_bias)


def gated_mlp(bias: Condition | None = None) -> Parameters:
    """A gated feed-forward part; `bias`: when its matrices have one, None: never."""
    return {
        **linear("mlp.gate", "mlp embed <- mlp.gate_proj.weight: mlp embed", bias),
        **linear("mlp.up", "mlp embed <- mlp.up_proj.weight: mlp embed", bias),
        **linear("mlp.down", "embed mlp <- mlp.down_proj.weight: embed mlp", bias),
    }


def experts(gate: str, up: str, down: str, router: str) -> Parameters:
    """A feed-forward part of many experts, each with tensors of these names, or fused for all as transformers 5 has
    them in memory: gate and up one after the other."""
    own_router, fused_router = (f"experts embed <- {name}: experts embed" for name in (router, "mlp.gate.weight"))
    fused = "experts mlp embed <- mlp.experts.gate_up_proj: experts (gate_up={} mlp) embed"
    return {
        **matrix("mlp.router", own_router, alternate="" if own_router == fused_router else fused_router),
        **matrix("mlp.gate", f"experts mlp embed <- {gate}: mlp embed", alternate=fused.format(0)),
        **matrix("mlp.up", f"experts mlp embed <- {up}: mlp embed", alternate=fused.format(1)),
        **matrix(
            "mlp.down",
            f"experts embed mlp <- {down}: embed mlp",
            alternate="experts embed mlp <- mlp.experts.down_proj: experts embed mlp",
        ),
    }
