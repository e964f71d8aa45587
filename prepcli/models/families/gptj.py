"""GPT-J: parallel blocks with one norm, interleaved rotary embedding, and a head with a bias."""

from __future__ import annotations

import dataclasses

from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.layouts import hf_flax_layout
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rope_config import Rope, check_rotary_dim
from prepcli.models.rows import attention, build_family, embedding, layer_norm, linear, stack


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of GPTJConfig."""
    return _gpt_style.sizes(config, vocab=50400, positions=2048, embed=4096, layers=28, heads=16)


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    axis_sizes = sizes(config)
    rotary_dim = check_rotary_dim(
        read_size(config, "rotary_dim", 64), axis_sizes["head_dim"], "rotary_dim"
    )
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes),
        block_type="parallel_one_norm",
        # GPTJConfig has no field for the base of the frequencies.
        rope=Rope(rotary_dim, 10_000.0, axis_sizes["positions"]),
        rotary_pairs="interleaved",
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **attention("attn.{}_proj", out_name="out"),
        **linear("mlp.up", "mlp embed <- mlp.fc_in.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.fc_out.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **linear("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
LEGACY_BUFFERS = _gpt_style.mask_buffers("h.{i}.attn")
LAYOUTS = hf_flax_layout(PARAMETERS, prefix="transformer.")
FAMILY = build_family(
    name="gptj",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=False,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
    dropout_fields=DropoutFields(
        attention=("attn_pdrop", 0.0), residual=("resid_pdrop", 0.0), embedding=("embd_pdrop", 0.0)
    ),
)
