"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary positions, grouped key and value heads, a gated feed-forward."""

from __future__ import annotations

from trainer.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from trainer.models.families import _llama_style
from trainer.models.families._llama_style import TENSOR_PREFIX
from trainer.models.layouts import EASYLM_LAYOUT, hf_flax_layout
from trainer.models.parameters import HFConfig


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; LlamaConfig's defaults where a field is absent."""
    found = _llama_style.sizes(config)
    # dims of a head that are turned together: HF has them `half` apart, EasyLM side by side
    return {**found, "two": 2, "half": found["head_dim"] // 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return _llama_style.arch_config(config, sizes(config), max_positions=2048)


FAMILY = _llama_style.build_family(
    name="llama",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias="attention_bias", out_bias="attention_bias"),
        **_llama_style.gated_mlp(bias="mlp_bias"),
    },
    dropped={
        **_llama_style.LEGACY_BUFFERS,
        "rope.freqs": "rotary frequencies of Meta's files, computed from the config",
    },
    layouts=lambda table: {
        **hf_flax_layout(table, TENSOR_PREFIX, "weight", condition_overrides={"mlp_bias": False}),
        "easylm": EASYLM_LAYOUT,
    },
)
