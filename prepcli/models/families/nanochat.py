"""nanochat: norms without parameters, also of embeddings, queries and keys, and squared ReLU."""

from __future__ import annotations

import dataclasses

from prepcli.models import rows
from prepcli.models.architecture import (
    ROPE_FIELDS,
    ArchConfig,
    read_softcap,
    reject_unsupported_fields,
)
from prepcli.models.families import _llama_style
from prepcli.models.parameters import HFConfig, if_set
from prepcli.models.rows import embedding, matrix, stack

HAS_BIAS = if_set("attention_bias")


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of NanoChatConfig."""
    return _llama_style.sizes(config, vocab=50304, embed=768, mlp=8192, layers=12, heads=6)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config, *ROPE_FIELDS, "attention_bias", "final_logit_softcapping")
    plain = _llama_style.arch_config(
        config, sizes(config), max_positions=2048, activation=("hidden_act", "relu2")
    )
    assert plain.rope is not None
    return dataclasses.replace(
        plain,
        norm="rms_plain",
        rope=dataclasses.replace(plain.rope, is_reversed=True),
        has_gated_mlp=False,
        has_plain_embed_norm=True,
        has_plain_qk_norm=True,
        rotates_before_qk_norm=True,
        final_logit_softcap=read_softcap(config, "final_logit_softcapping", 15.0),
    )


LAYER = {
    **_llama_style.attention(bias=HAS_BIAS, out_bias=HAS_BIAS),
    **matrix("mlp.up", "mlp embed <- mlp.fc1.weight: mlp embed"),
    **matrix("mlp.down", "embed mlp <- mlp.fc2.weight: embed mlp"),
}
FAMILY = rows.build_family(
    name="nanochat",
    prefix=_llama_style.TENSOR_PREFIX,
    sizes=sizes,
    arch_config=arch_config,
    parameters={
        **embedding("tokens", "vocab embed <- embed_tokens.weight: vocab embed"),
        **stack("layers", "layers.{layers}", LAYER),
        **_llama_style.HEAD,
    },
    tied_by_default=False,
    dropped=_llama_style.LEGACY_BUFFERS,
)
