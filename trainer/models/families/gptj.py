"""GPT-J: attention and feed-forward side by side under one norm, rotary positions of neighbours, a head with a bias."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ArchConfig, reject_unsupported_fields
from trainer.models.families import _gpt_style
from trainer.models.layouts import hf_flax_layout
from trainer.models.parameters import HFConfig, read_size
from trainer.models.rope_config import Rope, check_rotary_dim
from trainer.models.rows import attention, build_family, embedding, layer_norm, linear, stack


def sizes(config: HFConfig) -> dict[str, int]:
    """Atom -> extent; GPTJConfig's defaults where a field is absent."""
    return _gpt_style.sizes(config, vocab=50400, positions=2048, embed=4096, layers=28, heads=16)


def arch_config(config: HFConfig) -> ArchConfig:
    """What its layers compute; PrepError where the config asks for something else."""
    reject_unsupported_fields(config)
    found = sizes(config)
    rotary_dim = check_rotary_dim(read_size(config, "rotary_dim", 64), found["head_dim"], "rotary_dim")
    return dataclasses.replace(
        _gpt_style.arch_config(config, found),
        block_type="parallel_one_norm",
        rope=Rope(rotary_dim, 10_000.0, found["positions"]),
        rotary_pairs="neighbours",
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
LEGACY_BUFFERS, LAYOUTS = _gpt_style.mask_buffers("h.{i}.attn"), hf_flax_layout(PARAMETERS, "transformer.")
FAMILY = build_family(
    "gptj",
    "transformer.",
    sizes,
    arch_config,
    PARAMETERS,
    tied_by_default=False,
    dropped=LEGACY_BUFFERS,
    layouts=LAYOUTS,
)
