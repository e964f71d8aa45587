"""UMT5: mT5 with a relative position bias in each layer."""

from __future__ import annotations

from prepcli.models.architecture import ArchConfig
from prepcli.models.families import mt5, t5
from prepcli.models.parameters import HFConfig


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported.

    Without `scale_decoder_outputs`, which newer files have, `tie_word_embeddings` says whether the
    decoder's output is scaled.
    """
    axis_sizes = mt5.sizes(config)
    is_tied = config.get("tie_word_embeddings") is not False
    scales = config.get("scale_decoder_outputs", is_tied)
    return t5.encoder_decoder_arch(
        config,
        axis_sizes,
        lm_head_input_scale=axis_sizes["embed"] ** -0.5 if scales else 1.0,
        feed_forward=mt5.FEED_FORWARD,
    )


FAMILY = t5.build_family(
    name="umt5",
    sizes=mt5.sizes,
    arch_config=arch_config,
    parameters=t5.build_parameters(mt5.is_gated, has_bias_per_layer=True),
    layouts={},
    stored_head_unties=lambda config: True,
    untied_fields=lambda config: {},
)
