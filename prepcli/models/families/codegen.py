"""CodeGen: GPT-J without a bias in attention, and with queries, values and keys fused in four shards of heads."""

from __future__ import annotations

import dataclasses

from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.architecture import ArchConfig, reject_unsupported_fields
from prepcli.models.dropout_config import DropoutFields
from prepcli.models.families import _gpt_style
from prepcli.models.parameters import HFConfig, read_size
from prepcli.models.rope_config import Rope, check_rotary_dim
from prepcli.models.rows import (
    Parameters,
    build_family,
    embedding,
    layer_norm,
    linear,
    matrix,
    stack,
)

# The published models were trained on four devices. The fused tensor has the heads of one device together.
SHARDS = 4


def sizes(config: HFConfig) -> dict[str, int]:
    """Return the extent of each atom (named axis). Absent fields have the defaults of CodeGenConfig.

    Raises:
        PrepError: A size is invalid, or the heads are not in four shards.
    """
    # The code of CodeGen2 reads this field, and has eight shards in some models. CodeGenConfig does not have it.
    if config.get("head_dim") is not None:
        what = "`head_dim` is not supported for this family"
        why = "CodeGen2 has it, and some of its models have eight shards of heads"
        raise unsupported_config_error(what, why)
    axis_sizes = _gpt_style.sizes(
        config, vocab=50400, positions=2048, embed=4096, layers=28, heads=16
    )
    heads = axis_sizes["heads"]
    if heads % SHARDS:
        raise invalid_config_error(f"n_head is {heads}, it must be a multiple of {SHARDS}")
    return {**axis_sizes, "head_shards": SHARDS, "shard_heads": heads // SHARDS}


def arch_config(config: HFConfig) -> ArchConfig:
    """Return the architecture. Raise PrepError if the config is invalid or not supported."""
    reject_unsupported_fields(config)
    axis_sizes = sizes(config)
    if config.get("rotary_dim", 64) is None:
        raise invalid_config_error("rotary_dim is null, it must be a number of elements of a head")
    rotary_dim = check_rotary_dim(
        read_size(config, "rotary_dim", 64), axis_sizes["head_dim"], "rotary_dim"
    )
    return dataclasses.replace(
        _gpt_style.arch_config(config, axis_sizes),
        block_type="parallel_one_norm",
        # CodeGenConfig has no field for the base of the frequencies.
        rope=Rope(rotary_dim, 10_000.0, axis_sizes["positions"]),
        rotary_pairs="interleaved",
    )


def _attention() -> Parameters:
    """Return the parameters of attention. Each shard of the fused tensor has queries, then values, then keys."""
    # With 8 heads of 2 elements, rows 0 to 3 are the queries of heads 0 and 1, 4 to 7 their values, 8 to 11 their
    # keys, and row 12 begins the queries of head 2.
    parameters: Parameters = {}
    for projection, number in (("q", 0), ("k", 2), ("v", 1)):
        rows = f"(head_shards qkv={number} shard_heads head_dim) embed"
        parameters |= matrix(
            f"attn.{projection}",
            f"(head_shards shard_heads) head_dim embed <- attn.qkv_proj.weight: {rows}",
        )
    columns = "embed (head_shards shard_heads head_dim)"
    return parameters | matrix(
        "attn.o",
        f"embed (head_shards shard_heads) head_dim <- attn.out_proj.weight: {columns}",
    )


PARAMETERS = {
    **embedding("tokens", "vocab embed <- wte.weight: vocab embed"),
    **stack("layers", "h.{layers}", {
        **layer_norm("attn_norm", "embed <- ln_1.weight: embed"),
        **_attention(),
        **linear("mlp.up", "mlp embed <- mlp.fc_in.weight: mlp embed"),
        **linear("mlp.down", "embed mlp <- mlp.fc_out.weight: embed mlp"),
    }),
    **layer_norm("final_norm", "embed <- ln_f.weight: embed"),
    **linear("head", "vocab embed <- lm_head.weight: vocab embed"),
}  # fmt: skip
FAMILY = build_family(
    name="codegen",
    prefix="transformer.",
    sizes=sizes,
    arch_config=arch_config,
    parameters=PARAMETERS,
    tied_by_default=False,
    dropped={"h.{i}.attn.causal_mask": "causal mask"},
    dropout_fields=DropoutFields(
        attention=("attn_pdrop", 0.0), residual=("resid_pdrop", 0.0), embedding=("embd_pdrop", 0.0)
    ),
)
