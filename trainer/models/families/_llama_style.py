"""What LLaMA's many relatives share: sizes, rows of the table, buffers of old files. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer.models import rows
from trainer.models.architecture import ALL_BEFORE, Traits, activation, positive, sliding_windows
from trainer.models.errors import PrepError
from trainer.models.parameters import MOST_LAYERS, Config, Family, Layout, When, size
from trainer.models.rope_config import Rope, read_rope
from trainer.models.rows import Rows, embedding, linear, matrix, rms_norm, stack

PREFIX = "model."
OLD_BUFFERS = {"layers.{i}.self_attn.rotary_emb.inv_freq": "rotary frequencies, computed from the config"}


def family(
    name: str,
    sizes: Callable[[Config], dict[str, int]],
    traits: Callable[[Config], Traits],
    layer: Rows,
    tied: bool,
    layouts: Callable[[Rows], Mapping[str, Layout]] = lambda table: {},
    dropped: Mapping[str, str] = OLD_BUFFERS,
) -> Family:
    """A family whose files are named as LLaMA's are; `layer`: the rows of one."""
    table = {
        **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
        **stack("layers", "layers.{layers}", layer),
        **rms_norm("final_norm", "embed <- norm.weight: embed"),
        **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
    }
    return rows.family(name, PREFIX, sizes, traits, table, tied, dropped, layouts(table))


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
    if embed < heads and config.get("head_dim") is None:
        raise PrepError("config.json makes no sense", f"hidden_size {embed} makes no {heads} num_attention_heads")
    kv_default = heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    dim_default = embed // heads if head_dim is None or "head_dim" in config else head_dim
    return {
        "vocab": size(config, "vocab_size", vocab),
        "layers": size(config, "num_hidden_layers", layers, MOST_LAYERS),
        "embed": embed,
        "heads": heads,
        "kv_heads": size(config, "num_key_value_heads", kv_default),
        "head_dim": size(config, "head_dim", dim_default),
        "mlp": size(config, "intermediate_size", mlp),
    }


def traits(
    config: Config,
    found: Mapping[str, int],
    positions: int,
    theta: float = 10_000.0,
    rope: Rope | None = None,
    act: tuple[str, str] = ("hidden_act", "silu"),
) -> Traits:
    """LLaMA's, for these sizes; `positions`, `theta` and the last of `act`, after the field that has the activation,
    where the config does not say. `rope`: read already. PrepError where heads do not share keys and values evenly."""
    heads, kv_heads = found["heads"], found["kv_heads"]
    if heads % kv_heads:
        why = f"num_key_value_heads is {kv_heads}, it has to divide num_attention_heads, which is {heads}"
        raise PrepError("config.json makes no sense", why)
    positions = size(config, "max_position_embeddings", positions)
    return Traits(
        norm="rms",
        norm_eps=positive(config, "rms_norm_eps", 1e-6),
        activation=activation(config, *act),
        gated=True,
        score_scale=found["head_dim"] ** -0.5,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=rope or read_rope(config, found["head_dim"], positions, theta),
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


def norms(**names: str) -> Rows:
    """The norms of a layer: ours -> the module's name."""
    return {
        path: p for ours, name in names.items() for path, p in rms_norm(ours, f"embed <- {name}.weight: embed").items()
    }


NORMS = norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm")
SANDWICH_NORMS = norms(
    attn_norm="input_layernorm",
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
HEAD_NORMS = {
    **rms_norm("attn.q_norm", "head_dim <- self_attn.q_norm.weight: head_dim"),
    **rms_norm("attn.k_norm", "head_dim <- self_attn.k_norm.weight: head_dim"),
}


def attention(bias: When | None = None, out_bias: When | None = None) -> Rows:
    """Queries, keys, values and what is made of them; `bias`: when the first three have one, None: never."""
    return rows.attention("self_attn.{}_proj", "o", "kv_heads", bias, out_bias)


def gated(bias: When | None = None) -> Rows:
    """A gated feed-forward part; `bias`: when its matrices have one, None: never."""
    return {
        **linear("mlp.gate", "mlp embed <- mlp.gate_proj.weight: mlp embed", bias),
        **linear("mlp.up", "mlp embed <- mlp.up_proj.weight: mlp embed", bias),
        **linear("mlp.down", "embed mlp <- mlp.down_proj.weight: embed mlp", bias),
    }


def experts(gate: str, up: str, down: str, router: str) -> Rows:
    """A feed-forward part of many experts, each with tensors of these names, or fused for all as transformers 5 has
    them in memory: gate and up one after the other."""
    own_router, fused_router = (f"experts embed <- {name}: experts embed" for name in (router, "mlp.gate.weight"))
    fused = "experts mlp embed <- mlp.experts.gate_up_proj: experts (gate_up={} mlp) embed"
    return {
        **matrix("mlp.router", own_router, other="" if own_router == fused_router else fused_router),
        **matrix("mlp.gate", f"experts mlp embed <- {gate}: mlp embed", other=fused.format(0)),
        **matrix("mlp.up", f"experts mlp embed <- {up}: mlp embed", other=fused.format(1)),
        **matrix(
            "mlp.down",
            f"experts embed mlp <- {down}: embed mlp",
            other="experts embed mlp <- mlp.experts.down_proj: experts embed mlp",
        ),
    }
