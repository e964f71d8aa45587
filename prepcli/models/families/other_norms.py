"""Families with LLaMA's names of tensors, and other norms or other residual connections. No I/O, no jax."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import (
    LAYER_TYPES,
    NO_CLIP,
    is_in_window_pattern,
    read_positive,
    read_sliding_windows,
    read_softcap,
)
from prepcli.models.declaration import (
    Choices,
    Parameters,
    Sizes,
    by_name,
    layer_norm,
    linear,
    matrix,
    plain_mlp,
    positive,
    rms_norm,
    separate_qkv,
    unless_false,
)
from prepcli.models.families._llama_style import (
    ALL_HEADS_QK_NORMS,
    BIASED_ATTENTION,
    FINAL_LAYER_NORM,
    FUSED_GATED_MLP,
    OUTPUT_NORMS,
    PRE_LAYER_NORMS,
    QK_NORMS,
    attention,
    full_layers,
    gated_mlp,
    heads_that_fill_width,
    layer_rope,
    llama_like,
    partial_rope,
    pattern_windows,
    rms_norms,
    uniform_window,
    windows,
)
from prepcli.models.layer_config import DropoutFields
from prepcli.models.parameters import ALWAYS, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, read_rope

# --- OLMo 2 and 3

OUTPUT_NORM_CHOICES: Choices = {"block_type": "output_norm", "qk_norm_axes": "all_heads"}
OLMO2_LAYER: Parameters = {
    **OUTPUT_NORMS,
    **BIASED_ATTENTION,
    **ALL_HEADS_QK_NORMS,
    **gated_mlp(),
}
OLMO3_THETA = 500_000.0


# --- Windows and layers without rotation of EXAONE 4 and Cohere 2


def _exaone4_windows(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    layers = sizes["layers"]
    return read_sliding_windows(
        config,
        layers,
        config.get("sliding_window", 4096),
        lambda layer: _has_exaone4_window(config, layer, layers),
    )


def _has_exaone4_window(config: HFConfig, layer: int, layers: int) -> bool:
    """Return whether a layer has a sliding window, by a pattern of letters or a number.

    The letters L (local) and G (global) repeat, and the last layer is always global: Exaone4Config, and
    `check_is_sliding` of the code that was published with the models.
    """
    pattern = config.get("sliding_window_pattern")
    if not isinstance(pattern, str):
        return is_in_window_pattern(config, layer, default=4)
    if not pattern or set(pattern) - set("LG"):
        why = f"sliding_window_pattern is {pattern!r:.60}, it must be letters L and G"
        raise invalid_config_error(why)
    return layer != layers - 1 and pattern[layer % len(pattern)] == "L"


def _exaone4_unrotated(config: HFConfig, sizes: Sizes) -> tuple[int, ...]:
    # A model without any window rotates in all layers.
    has_windows = config.get("sliding_window", 4096) is not None
    return full_layers(_exaone4_windows)(config, sizes) if has_windows else ()


EXAONE4_WINDOWS: Choices = {
    "sliding_windows": _exaone4_windows,
    "layers_without_rope": _exaone4_unrotated,
}


# --- Cohere: attention and MLP of one norm

# Layer norms without a bias have the rows of RMS norms.
COHERE_NORM = rms_norm("attn_norm", "embed <- input_layernorm.weight: embed")
# One norm for each head of a layer.
COHERE_QK_NORMS: Parameters = {
    f"attn.{projection}_norm.scale": Parameter(
        f"{heads} head_dim <- self_attn.{projection}_norm.weight: {heads} head_dim",
        condition=if_set("use_qk_norm"),
    )
    for projection, heads in (("q", "heads"), ("k", "kv_heads"))
}
COHERE_SIZES = {"vocab": 256_000, "embed": 8192, "mlp": 22528, "layers": 40, "heads": 64}
COHERE2_WINDOWS = pattern_windows(4096, 4)
COHERE_CHOICES: Choices = {
    "norm": "layer",
    "block_type": "parallel_one_norm",
    "rotary_pairs": "interleaved",
    "lm_head_input_scale": positive("logit_scale", 0.0625),
}

# --- GLM: sandwich norms and partial rotation

HAS_QKV_BIAS = unless_false("attention_bias")
GLM_SIZES = {"vocab": 151_552, "mlp": 13696, "layers": 40, "kv_heads": 2, "head_dim": 128}
GLM_NORMS = rms_norms(
    attn_norm="input_layernorm",
    attn_post_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)

# --- StableLM and Phi

# One layer norm without bias for each head of a layer.
STABLELM_QK_NORMS: Parameters = {
    f"attn.{projection}_norm.scale": Parameter(
        f"{heads} head_dim <- self_attn.{projection}_layernorm.norms.{{{heads}}}.weight: head_dim",
        condition=if_set("qk_layernorm"),
    )
    for projection, heads in (("q", "heads"), ("k", "kv_heads"))
}
HAS_QK_NORMS = if_set("qk_layernorm")


def _has_two_norms(config: HFConfig) -> bool:
    return not config.get("use_parallel_residual")


STABLELM_LAYER: Parameters = {
    **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
    **attention(bias=if_set("use_qkv_bias")),
    **STABLELM_QK_NORMS,
    **layer_norm("mlp_norm", "embed <- post_attention_layernorm.weight: embed", _has_two_norms),
    **gated_mlp(),
}
PHI_LAYER: Parameters = {
    **layer_norm("attn_norm", "embed <- input_layernorm.weight: embed"),
    **separate_qkv("self_attn.{}_proj", kv_heads="kv_heads", bias=ALWAYS),
    **linear("attn.o", "embed heads head_dim <- self_attn.dense.weight: embed (heads head_dim)"),
    **layer_norm("attn.q_norm", "head_dim <- self_attn.q_layernorm.weight: head_dim", HAS_QK_NORMS),
    **layer_norm("attn.k_norm", "head_dim <- self_attn.k_layernorm.weight: head_dim", HAS_QK_NORMS),
    **linear("mlp.up", "mlp embed <- mlp.fc1.weight: mlp embed"),
    **linear("mlp.down", "embed mlp <- mlp.fc2.weight: embed mlp"),
}


# --- Single families


def _read_clip(config: HFConfig, sizes: Sizes) -> float:
    return NO_CLIP if config.get("clip_qkv") is None else read_positive(config, "clip_qkv", NO_CLIP)


def _read_reversed_rope(config: HFConfig, sizes: Sizes) -> Rope:
    max_positions = read_size(config, "max_position_embeddings", 2048)
    rope = read_rope(config, sizes["head_dim"], max_positions=max_positions)
    return dataclasses.replace(rope, is_reversed=True)


FAMILIES = by_name(
    llama_like(
        "olmo",
        "OLMo 1: LLaMA with layer norms without parameters, and optional bounds of queries, keys and values.",
        layer={**BIASED_ATTENTION, **gated_mlp()},
        defaults={"vocab": 50304},
        # OlmoLayerNorm of transformers has this epsilon. No config field sets it.
        choices={"norm": "layer", "norm_eps": 1e-5, "qkv_clip": _read_clip},
        final_norm={},
    ),
    llama_like(
        "olmo2",
        "OLMo 2: LLaMA with norms after attention and MLP, and norms over the queries and keys of all heads.",
        layer=OLMO2_LAYER,
        defaults={"vocab": 50304},
        norm_eps=1e-5,
        choices=OUTPUT_NORM_CHOICES,
    ),
    llama_like(
        "olmo3",
        "OLMo 3: OLMo 2 with a sliding window in three of four layers, and a rotary embedding per layer type.",
        layer=OLMO2_LAYER,
        defaults={"vocab": 50304},
        rope=layer_rope(LAYER_TYPES[0], 2048, OLMO3_THETA, "rope_theta"),
        norm_eps=1e-5,
        choices={
            **OUTPUT_NORM_CHOICES,
            "sliding_windows": windows(4096, lambda layer: (layer + 1) % 4 != 0),
            "local_rope": layer_rope(LAYER_TYPES[1], 2048, OLMO3_THETA),
        },
    ),
    llama_like(
        "exaone4",
        "EXAONE 4: LLaMA with norms after attention and MLP, QK norms, and rotation in sliding layers only.",
        layer={**OUTPUT_NORMS, **attention(), **QK_NORMS, **gated_mlp()},
        defaults={"vocab": 102_400, "mlp": 16384, "kv_heads": 32},
        norm_eps=1e-5,
        choices={**EXAONE4_WINDOWS, "block_type": "output_norm"},
        ignores=("sliding_window_pattern",),
    ),
    llama_like(
        "cohere",
        "Cohere Command R: attention and MLP of one normalized input, rotated neighbouring elements, scaled logits.",
        layer={**COHERE_NORM, **BIASED_ATTENTION, **COHERE_QK_NORMS, **gated_mlp()},
        defaults=COHERE_SIZES,
        positions=8192,
        rope_theta=500_000.0,
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices=COHERE_CHOICES,
        tied=True,
    ),
    llama_like(
        "cohere2",
        "Cohere Command R7B and A: Cohere 1 with sliding windows in three of four layers, and no rotation in "
        "the others.",
        layer={**COHERE_NORM, **BIASED_ATTENTION, **gated_mlp()},
        defaults=COHERE_SIZES,
        positions=8192,
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices={
            **COHERE_CHOICES,
            "sliding_windows": COHERE2_WINDOWS,
            "layers_without_rope": full_layers(COHERE2_WINDOWS),
        },
        ignores=("sliding_window_pattern",),
        tied=True,
    ),
    llama_like(
        "glm",
        "GLM-4 of 2024 (`glm`): LLaMA that rotates neighbouring elements in half of each head, with gate and up fused.",
        layer={
            **rms_norms(attn_norm="input_layernorm", mlp_norm="post_attention_layernorm"),
            **attention(bias=HAS_QKV_BIAS),
            **FUSED_GATED_MLP,
        },
        defaults=GLM_SIZES,
        more_sizes=lambda config, sizes: {"gate_up": 2},
        positions=131_072,
        rope=partial_rope(0.5, 131_072),
        norm_eps=1.5625e-7,
        choices={"rotary_pairs": "interleaved"},
    ),
    llama_like(
        "glm4",
        "GLM-4 of 2025 (`glm4`): GLM with norms before and after each sublayer.",
        layer={**GLM_NORMS, **attention(bias=HAS_QKV_BIAS), **FUSED_GATED_MLP},
        defaults=GLM_SIZES,
        more_sizes=lambda config, sizes: {"gate_up": 2},
        positions=131_072,
        rope=partial_rope(0.5, 131_072),
        norm_eps=1.5625e-7,
        choices={"rotary_pairs": "interleaved", "block_type": "sandwich"},
    ),
    llama_like(
        "nemotron",
        "Nemotron: rotation of half of each head, layer norms that scale by 1 + weight, squared ReLU.",
        layer={**PRE_LAYER_NORMS, **BIASED_ATTENTION, **plain_mlp(bias=if_set("mlp_bias"))},
        defaults={"vocab": 256_000, "embed": 6144, "mlp": 24576, "heads": 48},
        positions=4096,
        rope=partial_rope(0.5, 4096),
        activation="relu2",
        norm_eps=1e-5,
        norm_eps_field="norm_eps",
        init_std=0.0134,
        choices={
            "norm": "layer_offset",
            "has_gated_mlp": False,
        },
        final_norm=FINAL_LAYER_NORM,
    ),
    llama_like(
        "stablelm",
        "StableLM: LLaMA with layer norms and a rotated quarter of each head. Some have QK norms and parallel blocks.",
        layer=STABLELM_LAYER,
        defaults={"vocab": 50304, "embed": 2560, "mlp": 6912, "kv_heads": 32},
        more_sizes=heads_that_fill_width,
        positions=4096,
        rope=partial_rope(0.25, 4096),
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices={
            "norm": "layer",
            "block_type": lambda config, sizes: (
                "pre" if _has_two_norms(config) else "parallel_one_norm"
            ),
        },
        final_norm=FINAL_LAYER_NORM,
    ),
    llama_like(
        "starcoder2",
        "StarCoder2: LLaMA's attention between layer norms, an MLP of two matrices, and biases on all matrices.",
        layer={
            **PRE_LAYER_NORMS,
            **attention(bias=unless_false("use_bias"), out_bias=unless_false("use_bias")),
            **linear("mlp.up", "mlp embed <- mlp.c_fc.weight: mlp embed", unless_false("use_bias")),
            **linear(
                "mlp.down", "embed mlp <- mlp.c_proj.weight: embed mlp", unless_false("use_bias")
            ),
        },
        defaults={
            "vocab": 49152,
            "embed": 3072,
            "mlp": 12288,
            "layers": 30,
            "heads": 24,
            "kv_heads": 2,
        },
        positions=4096,
        activation="gelu_pytorch_tanh",
        norm_eps=1e-5,
        norm_eps_field="norm_epsilon",
        init_std=0.018042,
        choices={
            "norm": "layer",
            "has_gated_mlp": False,
            **uniform_window(None),
        },
        ignores=("layer_types",),
        tied=True,
        final_norm=FINAL_LAYER_NORM,
        dropout_fields=DropoutFields(
            residual=("residual_dropout", 0.0), embedding=("embedding_dropout", 0.0)
        ),
    ),
    llama_like(
        "phi",
        "Phi-1, 1.5 and 2: attention and MLP of one normalized input, a rotated half of each head, biases everywhere.",
        layer=PHI_LAYER,
        defaults={"vocab": 51200, "embed": 2048, "mlp": 8192, "layers": 24},
        rope=partial_rope(0.5, 2048),
        activation="gelu_new",
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices={"norm": "layer", "has_gated_mlp": False, "block_type": "parallel_one_norm"},
        final_norm=layer_norm("final_norm", "embed <- final_layernorm.weight: embed"),
        head=linear("head", "vocab embed <- lm_head.weight: vocab embed"),
        dropout_fields=DropoutFields(residual=("resid_pdrop", 0.0), embedding=("embd_pdrop", 0.0)),
    ),
    llama_like(
        "jais2",
        "Jais 2: LLaMA's attention with layer norms, squared ReLU, and biases on all matrices.",
        layer={
            **PRE_LAYER_NORMS,
            **attention(
                bias=unless_false("attention_bias"), out_bias=unless_false("attention_bias")
            ),
            **plain_mlp(bias=unless_false("mlp_bias")),
        },
        defaults={"vocab": 150_272, "embed": 3328, "mlp": 26624, "heads": 26},
        positions=8192,
        activation="relu2",
        norm_eps=1e-5,
        norm_eps_field="layer_norm_eps",
        choices={"norm": "layer", "has_gated_mlp": False},
        final_norm=FINAL_LAYER_NORM,
    ),
    llama_like(
        "nanochat",
        "nanochat: norms without parameters, also of embeddings, queries and keys, and squared ReLU.",
        layer={
            **BIASED_ATTENTION,
            **matrix("mlp.up", "mlp embed <- mlp.fc1.weight: mlp embed"),
            **matrix("mlp.down", "embed mlp <- mlp.fc2.weight: embed mlp"),
        },
        defaults={"vocab": 50304, "embed": 768, "mlp": 8192, "layers": 12, "heads": 6},
        rope=_read_reversed_rope,
        activation="relu2",
        choices={
            "norm": "rms_plain",
            "has_gated_mlp": False,
            "has_plain_embed_norm": True,
            "has_plain_qk_norm": True,
            "rotates_before_qk_norm": True,
            "final_logit_softcap": lambda config, sizes: read_softcap(
                config, "final_logit_softcapping", 15.0
            ),
        },
        final_norm={},
    ),
)
