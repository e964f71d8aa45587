"""mT5: T5 v1.1 for 101 languages, with a head of its own and outputs that are not scaled."""

from __future__ import annotations

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import t5
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import HFConfig

# Atom -> config field and the default of MT5Config.
FIELDS = t5.FIELDS | {
    "vocab": ("vocab_size", 250112), "mlp": ("d_ff", 1024), "heads": ("num_heads", 6),
    "encoder_layers": ("num_layers", 8),
}  # fmt: skip
FEED_FORWARD = "gated-gelu"


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of MT5Config."""
    return t5.read_sizes(config, FIELDS)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    return t5.encoder_decoder_arch(
        config, sizes(config), lm_head_input_scale=1.0, feed_forward=FEED_FORWARD
    )


def is_gated(config: HFConfig) -> bool:
    """Return whether the MLP is gated."""
    return t5.is_gated(config, FEED_FORWARD)


PARAMETERS = t5.build_parameters(is_gated)
FAMILY = t5.build_family(
    name="mt5",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    layouts=hf_flax_layout(PARAMETERS, prefix="", norm_name="weight", allows_tied_head=True),
    # Transformers sets `tie_word_embeddings` for every model. Only the file shows whether it is true.
    stored_head_unties=lambda config: True,
    untied_fields=lambda config: {},
)
