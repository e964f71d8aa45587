"""LLaMA 1, 2, 3, 3.1 and 3.2: rotary embedding, grouped-query attention, gated MLP."""

from __future__ import annotations

from prepcli.models.architecture import ROPE_FIELDS, ArchConfig, reject_unsupported_fields
from prepcli.models.families import _llama_style
from prepcli.models.families._llama_style import TENSOR_PREFIX
from prepcli.models.layouts import EASYLM_LAYOUTS, hf_flax_layout
from prepcli.models.levanter_layouts import levanter_layouts
from prepcli.models.orbax_layouts import maxtext_layouts, tunix_layout
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rope_config import has_llama3_scaling
from prepcli.models.torchtitan_layouts import torchtitan_layout


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of LlamaConfig."""
    axis_sizes = _llama_style.sizes(config)
    # A rotated pair of elements is `half` apart in Hugging Face files and adjacent in EasyLM trees.
    return {**axis_sizes, "two": 2, "half": axis_sizes["head_dim"] // 2}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "mlp_bias")
    return _llama_style.arch_config(config, sizes(config), max_positions=2048)


FAMILY = _llama_style.build_family(
    name="llama",
    sizes=sizes,
    arch_config=arch_config,
    tied_by_default=False,
    layer={
        **_llama_style.PRE_NORMS,
        **_llama_style.attention(bias=if_set("attention_bias"), out_bias=if_set("attention_bias")),
        **_llama_style.gated_mlp(bias=if_set("mlp_bias")),
    },
    dropped={
        **_llama_style.LEGACY_BUFFERS,
        "rope.freqs": "rotary frequencies of Meta's files, computed from the config",
    },
    layouts=lambda parameters: {
        **hf_flax_layout(
            parameters,
            prefix=TENSOR_PREFIX,
            norm_name="weight",
            # The Flax class has no biases in the MLP, whatever the config says.
            condition_overrides={if_set("mlp_bias"): False},
        ),
        **EASYLM_LAYOUTS,
        **tunix_layout(parameters),
        # MaxText rotates adjacent pairs in LLaMA 3.1 and later, which have scaled rotary frequencies.
        **maxtext_layouts(parameters, scales_queries=True, interleaves_heads=has_llama3_scaling),
        **levanter_layouts(parameters),
        **torchtitan_layout(parameters, interleaves_heads=True),
    },
)
