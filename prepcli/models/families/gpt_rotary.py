"""GPT-J, GPT-NeoX and their kin: layers of GPT-2 with a rotary embedding. No I/O, no jax."""

from __future__ import annotations

from functools import partial

from prepcli.algebra.axis_map import BIASED_LAYERS, UNBIASED_LAYERS
from prepcli.core.errors import invalid_config_error, unsupported_config_error
from prepcli.models.declaration import (
    Choices,
    LayerGroup,
    Parameters,
    Sizes,
    attention,
    by_name,
    changed,
    grouped_qkv,
    linear,
    matrix,
    plain_mlp,
    positive,
    unless_false,
)
from prepcli.models.families.gpt import (
    ROTARY_BUFFER,
    attention_output,
    check_n_embed,
    embeddings,
    gpt_like,
    mask_buffers,
    norm,
    outputs,
    pdrop,
    qkv_by_head,
)
from prepcli.models.layer_config import DropoutFields
from prepcli.models.parameters import ALWAYS, NEVER, HFConfig, Parameter, if_set, read_size
from prepcli.models.rope_config import Rope, check_rotary_dim, read_rope

# --- GPT-J and CodeGen

# The published models of CodeGen were trained on four devices. The fused tensor has the heads of a device together.
SHARDS = 4
GPTJ_OUTPUTS = {
    **norm("final_norm", "ln_f"),
    **linear("head", "vocab embed <- lm_head.weight: vocab embed"),
}


def _gptj_rope(config: HFConfig, sizes: Sizes) -> Rope:
    size = check_rotary_dim(read_size(config, "rotary_dim", 64), sizes["head_dim"], "rotary_dim")
    # GPTJConfig and CodeGenConfig have no field for the base of the frequencies.
    return Rope(size, 10_000.0, sizes["positions"])


GPTJ: Choices = {
    "block_type": "parallel_one_norm", "rope": _gptj_rope, "rotary_pairs": "interleaved",
}  # fmt: skip


def _codegen_attention() -> Parameters:
    """Return the parameters of attention. Each shard of the fused tensor has queries, then values, then keys."""
    # With 8 heads of 2 elements, rows 0 to 3 are the queries of heads 0 and 1, 4 to 7 their values, 8 to 11 their
    # keys, and row 12 begins the queries of head 2.
    heads = "(head_shards shard_heads) head_dim"
    parameters: Parameters = {}
    for projection, number in (("q", 0), ("k", 2), ("v", 1)):
        dims = f"(head_shards qkv={number} shard_heads head_dim) embed"
        row = f"{heads} embed <- attn.qkv_proj.weight: {dims}"
        parameters |= matrix(f"attn.{projection}", row)
    dims = "embed (head_shards shard_heads head_dim)"
    return parameters | matrix("attn.o", f"embed {heads} <- attn.out_proj.weight: {dims}")


def _codegen_sizes(config: HFConfig, sizes: Sizes) -> dict[str, int]:
    # The code of CodeGen2 reads this field, and has eight shards in some models. CodeGenConfig does not have it.
    if config.get("head_dim") is not None:
        what = "`head_dim` is not supported for this family"
        why = "CodeGen2 has it, and some of its models have eight shards of heads"
        raise unsupported_config_error(what, why)
    heads = sizes["heads"]
    if heads % SHARDS:
        raise invalid_config_error(f"n_head is {heads}, it must be a multiple of {SHARDS}")
    return {"head_shards": SHARDS, "shard_heads": heads // SHARDS}


def _check_rotary_dim(config: HFConfig, sizes: Sizes) -> None:
    if config.get("rotary_dim", 64) is None:
        raise invalid_config_error("rotary_dim is null, it must be a number of elements of a head")


# --- GPT-NeoX and GPT-NeoX Japanese

HAS_BIAS = unless_false("attention_bias")
NEOX_MLP = plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", ALWAYS)
NEOX_BUFFERS = {
    **mask_buffers("layers.{i}.attention"),
    "layers.{i}.attention.rotary_emb.inv_freq": ROTARY_BUFFER,
}
JAPANESE_ATTENTION = {
    **qkv_by_head("attention.query_key_value", NEVER),
    **attention_output("attention.dense", NEVER),
}
JAPANESE_BIAS = {"attn.o.bias": Parameter("embed <- attention.dense_bias: embed")}


def _neox_rope(config: HFConfig, sizes: Sizes, *, default_share: float) -> Rope:
    """Read the rotary embedding. `default_share` of a head rotates without `rotary_pct`."""
    # The fields of these families override the ones of others, which transformers 4.57 writes as well.
    share = config.get("rotary_pct", default_share)
    theta = config.get("rotary_emb_base", 1e4)
    config = changed(config, partial_rotary_factor=share, rope_theta=theta)
    positions = sizes["positions"]
    return read_rope(config, sizes["head_dim"], max_positions=positions, allow_partial=True)


def _unbiased_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    return tuple(range(layers - 1))


def _biased_layers(config: HFConfig, layers: int) -> tuple[int, ...]:
    return (layers - 1,)


def _shape_groups(config: HFConfig, sizes: Sizes) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the groups of layers without and with a bias. A model of one layer has no groups."""
    layers = sizes["layers"]
    if layers == 1:
        return ()
    unbiased = _unbiased_layers(config, layers)
    return ((UNBIASED_LAYERS, unbiased), (BIASED_LAYERS, _biased_layers(config, layers)))


# --- Falcon

IS_PARALLEL = unless_false("parallel_attn")


def _check_heads_and_norms(config: HFConfig, sizes: Sizes) -> None:
    if config.get("new_decoder_architecture") or not config.get("multi_query", True):
        what = "this form of queries, keys and values is not supported"
        why = "only models with one key and value head are supported, such as Falcon 7B"
        raise unsupported_config_error(what, why)
    if IS_PARALLEL(config) and config.get("num_ln_in_parallel_attn") not in (None, 1):
        what = "`num_ln_in_parallel_attn` is not supported for this family"
        why = "models with one head of keys and values have one norm before attention and MLP"
        raise unsupported_config_error(what, why)


FAMILIES = by_name(
    gpt_like(
        "gptj",
        "GPT-J: parallel blocks with one norm, interleaved rotary embedding, and a head with a bias.",
        defaults={"vocab": 50400, "positions": 2048, "embed": 4096, "layers": 28, "heads": 16},
        before=embeddings("wte"),
        layer={
            **norm("attn_norm", "ln_1"),
            **attention("attn.{}_proj", out_name="out"),
            **plain_mlp("mlp.fc_in", "mlp.fc_out", ALWAYS),
        },
        after=GPTJ_OUTPUTS,
        choices=GPTJ,
        tied=False,
        dropped=mask_buffers("h.{i}.attn"),
        dropout_fields=pdrop(0.0),
    ),
    gpt_like(
        "codegen",
        "CodeGen: GPT-J without a bias in attention, and with queries, values and keys fused in four shards of heads.",
        defaults={"vocab": 50400, "positions": 2048, "embed": 4096, "layers": 28, "heads": 16},
        more_sizes=_codegen_sizes,
        before=embeddings("wte"),
        layer={
            **norm("attn_norm", "ln_1"),
            **_codegen_attention(),
            **plain_mlp("mlp.fc_in", "mlp.fc_out", ALWAYS),
        },
        after=GPTJ_OUTPUTS,
        choices=GPTJ,
        check=_check_rotary_dim,
        tied=False,
        dropped={"h.{i}.attn.causal_mask": "causal mask"},
        dropout_fields=pdrop(0.0),
    ),
    # The head is `embed_out` in files of transformers 4 and `lm_head` in those of transformers 5.
    gpt_like(
        "gpt_neox",
        "GPT-NeoX and Pythia: parallel or sequential blocks, partial rotary embedding, QKV fused per head.",
        defaults={"vocab": 50432, "positions": 2048, "embed": 6144, "layers": 44, "heads": 64, "mlp": 24576},
        fields={"mlp": "intermediate_size"},
        activation=("hidden_act", "gelu"),
        prefix="gpt_neox.",
        before=embeddings("embed_in"),
        layers="layers.{layers}",
        layer={
            **norm("attn_norm", "input_layernorm"),
            **qkv_by_head("attention.query_key_value", HAS_BIAS),
            **attention_output("attention.dense", HAS_BIAS),
            **norm("mlp_norm", "post_attention_layernorm"),
            **NEOX_MLP,
        },
        after=outputs("final_layer_norm", "embed_out", "lm_head"),
        choices={
            "norm_eps": positive("layer_norm_eps", 1e-5),
            "block_type": lambda config, _: "parallel" if config.get("use_parallel_residual", True) else "pre",
            "rope": partial(_neox_rope, default_share=0.25),
        },
        tied=False,
        dropped=NEOX_BUFFERS,
        dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0), embedding=("hidden_dropout", 0.0)),
    ),
    gpt_like(
        "gpt_neox_japanese",
        "GPT-NeoX Japanese: sequential GPT-NeoX without biases, but for one after the attention of the last layer.",
        defaults={"vocab": 32000, "positions": 2048, "embed": 2560, "layers": 32, "heads": 32},
        fields={},
        more_sizes=lambda config, sizes: {"mlp": sizes["embed"] * read_size(config, "intermediate_multiple_size", 4)},
        activation=("hidden_act", "gelu"),
        prefix="gpt_neox_japanese.",
        before=embeddings("embed_in"),
        layers="layers.{layers}",
        layer={
            **norm("attn_norm", "input_layernorm"),
            **norm("mlp_norm", "post_attention_layernorm"),
            **plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", NEVER),
        },
        groups={
            UNBIASED_LAYERS: LayerGroup(JAPANESE_ATTENTION, _unbiased_layers, may_be_all=False),
            BIASED_LAYERS: LayerGroup(JAPANESE_ATTENTION | JAPANESE_BIAS, _biased_layers),
        },
        after=outputs("final_layer_norm", "embed_out"),
        choices={
            "norm_eps": positive("layer_norm_eps", 1e-5),
            "rope": partial(_neox_rope, default_share=1.0),
            "shape_groups": _shape_groups,
        },
        dropped=NEOX_BUFFERS,
        dropout_fields=DropoutFields(attention=("attention_dropout", 0.1), residual=("hidden_dropout", 0.0)),
    ),
    gpt_like(
        "falcon",
        "Falcon 7B: one head of keys and values, and attention and MLP of one normalized input.",
        defaults={"vocab": 65024, "positions": 2048, "embed": 4544, "layers": 32, "heads": 71},
        fields={"embed": "n_embed", "mlp": "ffn_hidden_size"},
        more_sizes=lambda config, sizes: {**check_n_embed(config, sizes), "kv_heads": 1},
        activation=("activation", "gelu"),
        before=embeddings("word_embeddings"),
        layer={
            **norm("attn_norm", "input_layernorm"),
            **grouped_qkv("self_attention.query_key_value", if_set("bias")),
            **attention_output("self_attention.dense", if_set("bias")),
            **norm("mlp_norm", "post_attention_layernorm", lambda config: not IS_PARALLEL(config)),
            **plain_mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", if_set("bias")),
        },
        choices={
            "block_type": lambda config, _: "parallel_one_norm" if IS_PARALLEL(config) else "pre",
            "rope": lambda config, sizes: read_rope(config, sizes["head_dim"], max_positions=sizes["positions"]),
        },
        check=_check_heads_and_norms,
        dropped={"h.{i}.self_attention.rotary_emb.inv_freq": ROTARY_BUFFER},
        dropout_fields=DropoutFields(residual=("hidden_dropout", 0.0)),
    ),
)  # fmt: skip
