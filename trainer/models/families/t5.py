"""T5, T5 v1.1 and Flan-T5: an encoder and a decoder, with a bias of scores by distance instead of positions."""

from __future__ import annotations

import dataclasses

from trainer.models.architecture import ALL_BEFORE, FARTHEST, Distances, Traits, activation, only_knows, positive
from trainer.models.errors import PrepError
from trainer.models.layouts import hf_flax
from trainer.models.parameters import MOST_LAYERS, Config, Family, Tie, size
from trainer.models.rows import Rows, attention, embedding, matrix, rms_norm, stack

ALIASES = {  # of fields, which win over them; the decoder has as many layers as `num_layers` says by its own name
    "embed": "hidden_size", "heads": "num_attention_heads", "head_dim": "head_dim",
    "encoder_layers": "num_hidden_layers",
}  # fmt: skip


def sizes(config: Config) -> dict[str, int]:
    """Atom -> extent; T5Config's defaults where a field is absent."""
    fields = {
        "vocab": ("vocab_size", 32128), "embed": ("d_model", 512), "mlp": ("d_ff", 2048), "heads": ("num_heads", 8),
        "head_dim": ("d_kv", 64), "encoder_layers": ("num_layers", 6),
        "buckets": ("relative_attention_num_buckets", 32),
    }  # fmt: skip
    own = {atom: size(config, field, default) for atom, (field, default) in fields.items()}
    found = {atom: size(config, ALIASES.get(atom, ""), default) for atom, default in own.items()}
    size(found, "encoder_layers", 1, MOST_LAYERS)
    return found | {"layers": size(config, "num_decoder_layers", own["encoder_layers"], MOST_LAYERS)}


def traits(config: Config) -> Traits:
    """What its layers compute; PrepError where the config asks for something else."""
    only_knows(config, "is_encoder_decoder")
    if not config.get("is_encoder_decoder", True):
        raise PrepError("`is_encoder_decoder` is false", "config.json says it; prep knows T5 with both of its halves")
    found, key = sizes(config), "dense_act_fn" if config.get("dense_act_fn") else "feed_forward_proj"
    near = Distances(found["buckets"], size(config, "relative_attention_max_distance", 128, FARTHEST), both_ways=False)
    common = Traits(
        norm="rms",
        norm_eps=positive(config, "layer_norm_epsilon", 1e-6),
        activation=activation({key: _projection(config)[1]}, key, ""),
        gated=_is_gated(config),
        score_scale=1.0,
        windows=(ALL_BEFORE,) * found["layers"],
        rope=None,
        distances=near,
        positions=0,
        init_std=positive(config, "initializer_factor", 1.0) * found["embed"] ** -0.5,
    )
    windows, both_ways = (ALL_BEFORE,) * found["encoder_layers"], dataclasses.replace(near, both_ways=True)
    encoder = dataclasses.replace(common, windows=windows, distances=both_ways)
    return dataclasses.replace(common, encoder=encoder, head_scale=found["embed"] ** -0.5 if _scales(config) else 1.0)


def _projection(config: Config) -> tuple[bool, str]:
    """Whether the feed-forward part has a gate, unless another field says it, and its activation, where one may win."""
    text = str(config.get("feed_forward_proj", "relu"))
    gate, _, name = text.rpartition("-")
    if gate not in ("", "gated"):
        raise PrepError("config.json makes no sense", f"feed_forward_proj is {text!r:.60}, not `ACT` or `gated-ACT`")
    return bool(gate), config.get("dense_act_fn") or ("gelu_new" if text == "gated-gelu" else name)


def _is_gated(config: Config) -> bool:
    return bool(config.get("is_gated_act", _projection(config)[0]))


def _scales(config: Config) -> bool:
    """Whether hidden states are scaled before the head: where that is the embedding, unless the config says."""
    return bool(config.get("scale_decoder_outputs", config.get("tie_word_embeddings") is not False))


def _head_by_file(config: Config) -> bool:
    """Whether the file alone says if the head is the embedding: transformers 5 writes of each T5 that it is tied, and
    a null says nothing."""
    return not _scales(config) or config.get("tie_word_embeddings", True) is None


def _look(ours: str, number: int, theirs: str) -> Rows:
    """Attention, part `number` of a layer, after its norm."""
    rows = attention(f"{number}.{theirs}.{{}}", "o")
    return {
        **rms_norm(f"{ours}_norm", f"embed <- {number}.layer_norm.weight: embed"),
        **{path.replace("attn.", f"{ours}."): row for path, row in rows.items()},
    }


def _half(half: str, layers: str, *looks: Rows) -> Rows:
    """The encoder or the decoder; all of its layers use the bias of the first."""
    last, bias = len(looks), f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    gate, up, both = (f"mlp embed <- {last}.DenseReluDense.{name}.weight: mlp embed" for name in ("wi_0", "wi_1", "wi"))
    feed = {
        **rms_norm("mlp_norm", f"embed <- {last}.layer_norm.weight: embed"),
        **matrix("mlp.gate", gate, when=_is_gated),
        **matrix("mlp.up", up, when=_is_gated, otherwise=both),
        **matrix("mlp.down", f"embed mlp <- {last}.DenseReluDense.wo.weight: embed mlp"),
    }
    layer = {path: row for part in (*looks, feed) for path, row in part.items()}
    return {
        **stack(f"{half}.layers", f"{half}.block.{{{layers}}}.layer", layer),
        **matrix(f"{half}.relative_positions", f"buckets heads <- {bias}: buckets heads"),
        **rms_norm(f"{half}.final_norm", f"embed <- {half}.final_layer_norm.weight: embed"),
    }


SELF, CROSS = _look("attn", 0, "SelfAttention"), _look("cross", 1, "EncDecAttention")
TABLE = {
    **embedding("tokens", "vocab embed <- shared.weight: vocab embed"),
    **_half("encoder", "encoder_layers", SELF),
    **_half("decoder", "layers", SELF, CROSS),
    **matrix("head", "vocab embed <- lm_head.weight: vocab embed"),
}
FAMILY = Family(
    name="t5",
    prefix="",
    unprefixed=(),
    sizes=sizes,
    table=TABLE,
    dropped={"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": "bias that nothing uses"},
    tie=Tie(
        leaf="head.weight",
        tensor="lm_head.weight",
        embedding="shared.weight",
        default=True,
        own=_head_by_file,
        untied=lambda config: {"scale_decoder_outputs": _scales(config)},
    ),
    traits=traits,
    layouts=hf_flax(TABLE, prefix="", norm="weight", ties=True, unread=("scale_decoder_outputs",)),
    copies={f"{half}.embed_tokens.weight": "shared.weight" for half in ("encoder", "decoder")},
)
