"""Unsupported mechanisms, and the architectures that need them. No I/O, no jax."""

from __future__ import annotations

from dataclasses import dataclass

from prepcli.core.json_values import HFConfig


@dataclass(frozen=True, slots=True)
class Mechanism:
    """A mechanism without support in the trainer, and the configs of models that need it.

    Attributes:
        name: The mechanism, as an error calls it.
        model_types: Values of `model_type` that need it.
        fields: Config fields that need it if their value is true and not empty.
    """

    name: str
    model_types: frozenset[str]
    fields: tuple[str, ...] = ()


def _mechanism(name: str, model_types: str, *fields: str) -> Mechanism:
    return Mechanism(name, frozenset(model_types.split()), fields)


# An error names the first one that a config needs.
MECHANISMS = (
    _mechanism(
        "an image, video or audio encoder",
        "aria blip-2 chameleon clip fuyu idefics idefics2 idefics3 instructblip internvl kosmos-2 llava llava_next "
        "llava_onevision mllama paligemma pixtral qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_vl qwen3_vl smolvlm "
        "speech_to_text siglip video_llava vipllava vit wav2vec2 whisper",
        *("vision_config", "audio_config", "vision_tower"),
    ),
    _mechanism(
        "state-space layers other than those of the supported families",
        "zamba zamba2",
        *("state_size", "ssm_cfg", "ssm_state_size", "mamba_d_state", "mamba_d_conv"),
    ),
    _mechanism("recurrent layers", "recurrent_gemma rwkv xlstm", "lru_width"),
    _mechanism(
        "linear attention other than the gated delta net of the supported families",
        "kimi_linear minimax minimax_m1",
        *("linear_num_value_heads", "linear_attn_config", "linear_conv_kernel_dim"),
    ),
    _mechanism("sparse attention with an indexer", "deepseek_v32 glm_moe_dsa", "index_topk"),
    _mechanism(
        "a sparse MoE whose router or experts differ from those of the supported families",
        "arctic dbrx jetmoe longcat_flash nllb-moe switch_transformers",
        "ffn_config",
    ),
    _mechanism(
        "an encoder without a decoder",
        "albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert fnet funnel "
        "ibert layoutlm longformer megatron-bert mobilebert modernbert mpnet nomic_bert nystromformer rembert roberta "
        "roberta-prelayernorm roformer squeezebert xlm-roberta xlm-roberta-xl xmod yoso",
        "type_vocab_size",
    ),
    _mechanism(
        "cross attention other than T5's",
        "bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart mvp pegasus pegasus_x plbart "
        "prophetnet seamless_m4t",
    ),
)


def missing_mechanism(config: HFConfig) -> str:
    """Return the name of an unsupported mechanism in a config, or "" if none is known."""
    model_type = config.get("model_type")
    # All names come before all fields: a name is certain, a field is a guess for unlisted models.
    if isinstance(model_type, str):
        for mechanism in MECHANISMS:
            if model_type in mechanism.model_types:
                return mechanism.name
    for mechanism in MECHANISMS:
        if any(config.get(field) for field in mechanism.fields):
            return mechanism.name
    return ""
