"""Scale the config of a published model down to a tiny one that makes the same choices. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family, parameter_rows, read_size
from prepcli.models.registry import family_of, fields_read
from prepcli.models.truncation import (
    PATTERN_FIELD,
    PER_LAYER_FIELDS,
    REUSING_LAYERS_FIELD,
    is_layer_pattern,
)

T = TypeVar("T")
Sizes = Mapping[str, int]

# A config with at most this many elements is used as it is.
MAX_TINY_ELEMENTS = 300_000
# A scaled config has at most this many elements.
MAX_SCALED_ELEMENTS = 1_000_000
EXPERTS = 5
# Size of a head if the hidden size is heads * head_dim.
HEAD_DIM = 16
# Size of a head if it is independent of the hidden size.
OTHER_HEAD_DIM = 24
# Enough for the longest check.
CHECKED_POSITIONS = 320
# Few enough for a check with more tokens than the positions of a scaled rotation.
POSITIONS = 64
ORIGINAL_POSITIONS = 32
WINDOW = 5
WORD_EMBED = 10
# Elements of latent attention. The size of `kv_dim` here is the part of the keys.
LATENT_SIZES = {"kv_rank": 9, "q_rank": 11, "rope_dim": 4, "kv_dim": 6, "value_dim": 5}
# Sizes of axes that do not depend on others.
TINY_SIZES = {
    **{"vocab": 29, "layer_vocab": 31, "layer_input": 6, "mixer_state": 6},
    **dict.fromkeys(("mlp", "dense_mlp", "shared_mlp"), 20),
    **LATENT_SIZES,
}

# Config fields with the size of each axis.
SIZE_FIELDS = {
    "vocab": ("vocab_size",),
    "embed": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "mlp": (
        *("moe_intermediate_size", "intermediate_size", "block_ff_dim"),
        *("n_inner", "ffn_dim", "d_ff"),
    ),
    "dense_mlp": ("intermediate_size",),
    "shared_mlp": (
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
        "moe_shared_expert_intermediate_size",
    ),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "kv_rank": ("kv_lora_rank",),
    "q_rank": ("q_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "kv_dim": ("qk_nope_head_dim",),
    "value_dim": ("v_head_dim",),
    "full_head_dim": ("global_head_dim",),
    "full_kv_heads": ("num_global_key_value_heads",),
    "layer_vocab": ("vocab_size_per_layer_input",),
    "layer_input": ("hidden_size_per_layer_input",),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx"),
}
# The same for the axes of recurrent mixers. Mamba-2 without attention has other fields in `heads` and `head_dim`.
MIXER_FIELDS = {
    "mixer_groups": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "mixer_heads": ("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"),
    "mixer_state": ("linear_key_head_dim", "mamba_d_state", "state_size", "ssm_state_size"),
    "mixer_head_dim": ("linear_value_head_dim", "mamba_d_head", "mamba_head_dim"),
    "mixer_width": ("mamba_d_ssm",),
}
# The fields of these axes are set even if the config omits them.
REQUIRED_AXES = ("vocab", "embed", "heads", "layers")
WINDOW_FIELDS = ("sliding_window", "window_size", "attention_chunk_size")
# Other fields that select layers -> value for two layers with one of each kind.
LAYER_SELECTIONS: JsonObject = {
    "sliding_window_pattern": 2,
    "max_window_layers": 1,
    "mlp_only_layers": [0],
}
# Fields with the layers of attention beside those of recurrent mixers -> value for two layers with one of each.
ATTENTION_PLACES: JsonObject = {
    "full_attention_interval": 2,
    "attn_layer_indices": [1],
    "full_attn_idxs": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
# Numbers of first layers with a dense MLP, in configs of DeepSeek and of LFM2-MoE.
NUM_DENSE_FIELDS = ("first_k_dense_replace", "num_dense_layers")
# Some defaults suit only large models. The first of these changes accepted by the family replaces them.
DEFAULT_CHANGES: tuple[JsonObject, ...] = (
    {},
    {PATTERN_FIELD: [[["global", "local"], 1]]},
    {"rotary_dim": HEAD_DIM // 4},
    # By default, a Qwen-MoE model of few layers would have only dense ones.
    {"mlp_only_layers": [0]},
)
ROPE_FIELDS = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
# Lists of LongRoPE with one entry per pair of rotated dims.
FACTOR_LISTS = ("short_factor", "long_factor")
DROPPED_FIELDS = ("auto_map", "dtype", "quantization_config", "torch_dtype")


def scale_down(config: HFConfig, num_heads: int = 3) -> JsonObject:
    """Return the config of a tiny model with the choices of a published one.

    Sizes shrink. Flags, activations, rotations and the order of the kinds of layers stay. The sizes of an
    already tiny config do not change.

    Args:
        config: Fields of config.json.
        num_heads: Number of heads. With grouped-query attention (1 < kv_heads < heads) it is the number of key and
            value heads, and there are three times as many query heads.

    Raises:
        PrepError: The family is not supported, or the config is invalid, or a size has no known field.
    """
    family = family_of(config)
    # transformers does not have all aliases of model types.
    tiny: JsonObject = {**config, "model_type": family.name}
    # Raises for faults that scaling down would hide.
    arch_config = family.arch_config(tiny)
    if _num_elements(family, tiny) > MAX_TINY_ELEMENTS:
        tiny = _with_tiny_sizes(family, tiny, arch_config, num_heads)
    if arch_config.encoder is None:
        # torch computes no gradient for the embedding of a padding token, and the checks use every token. An absent
        # field would have the default of the config class, e.g. 0 in Gemma4TextConfig. The decoder of an
        # encoder-decoder starts with the padding token.
        tiny["pad_token_id"] = None
    if family.arch_config(tiny).has_limited_positions:
        # The longest check is longer than a tiny table of positions.
        fields = [name for name in SIZE_FIELDS["positions"] if tiny.get(name) is not None]
        read = [name for name in SIZE_FIELDS["positions"] if name in fields_read(family)]
        tiny |= dict.fromkeys(fields or read[:1], CHECKED_POSITIONS)
    return tiny


def _num_elements(family: Family, config: HFConfig) -> int:
    sizes = family.sizes(config)
    rows = parameter_rows(family, config).values()
    return sum(math.prod(bind_row(row, sizes).leaf_shape) for row in rows)


def _with_tiny_sizes(
    family: Family, config: JsonObject, arch_config: ArchConfig, num_heads: int
) -> JsonObject:
    original = _original_sizes(family, config)
    kinds = _layer_kinds(config)
    num_layers = max([2, *map(len, kinds.values())])
    if arch_config.reusing_layers:
        # Each kind once with keys and values of its own, and once without.
        num_layers *= 2
    wanted = _tiny_sizes(arch_config, original, num_heads, num_layers)
    if "mixer_heads" in wanted and "heads" not in family.sizes(config):
        wanted |= {"heads": wanted["mixer_heads"], "head_dim": wanted["mixer_head_dim"]}
    tiny = {key: value for key, value in config.items() if key not in DROPPED_FIELDS}
    tiny |= _size_fields(family, config, wanted)
    tiny |= _layer_fields(family, config, arch_config, kinds, num_layers)
    tiny |= {name: 0 for name in config if name.endswith("_token_id")}
    tiny |= _feature_fields(config, original, wanted)
    tiny = _with_valid_defaults(family.sizes, tiny)
    tiny = _replace_large_defaults(family, tiny, original, wanted)
    tiny = _with_valid_defaults(family.arch_config, tiny)
    if (num_elements := _num_elements(family, tiny)) > MAX_SCALED_ELEMENTS:
        why = f"{num_elements:,} elements remain: {family.sizes(tiny)}"
        hint = "write a config with small sizes by hand"
        raise usage_error("this config cannot be scaled down", why, hint)
    return tiny


def _read(read: Callable[[HFConfig], T], config: HFConfig) -> T | None:
    """Return the sizes or the architecture of a config. None if the family rejects the config."""
    try:
        return read(config)
    except PrepError:
        return None


def _with_valid_defaults(read: Callable[[HFConfig], object], config: JsonObject) -> JsonObject:
    """Return the config with the first of DEFAULT_CHANGES that the family accepts."""
    changed = [config | changes for changes in DEFAULT_CHANGES]
    return next((fields for fields in changed if _read(read, fields) is not None), config)


def _original_sizes(family: Family, config: HFConfig) -> dict[str, int]:
    """Return the size of each axis, with the heads of a recurrent mixer in place of absent attention heads."""
    sizes = {**family.sizes(config)}
    if "mixer_groups" in sizes:
        sizes["mixer_heads"] = sizes["mixer_groups"] * sizes["group_heads"]
        sizes = {"heads": sizes["mixer_heads"], "head_dim": sizes["mixer_head_dim"]} | sizes
    elif "mixer_channels" in sizes:
        # The channels of Mamba are a multiple of the width.
        sizes = {"heads": sizes["embed"], "head_dim": 1} | sizes
    return {"head_dim": sizes["embed"] // sizes["heads"]} | sizes


def _tiny_sizes(
    arch_config: ArchConfig, original: Sizes, num_heads: int, num_layers: int
) -> dict[str, int]:
    """Return the size of each axis of `SIZE_FIELDS`, and of `MIXER_FIELDS` in a model with recurrent mixers."""
    heads = original["heads"]
    kv_heads = original.get("kv_heads", heads)
    # Heads may be in equal shards or in pairs.
    num_heads = math.lcm(num_heads, original.get("head_shards", 1), arch_config.values_per_head)
    tiny_heads = num_heads * 3 if 1 < kv_heads < heads else num_heads
    head_dim = OTHER_HEAD_DIM
    if "rope_dim" in original:
        # transformers writes the rotated elements of latent attention as `head_dim`.
        head_dim = LATENT_SIZES["rope_dim"]
    elif heads * original["head_dim"] == original["embed"]:
        head_dim = HEAD_DIM
    positions = POSITIONS
    if all(rope.rope_type == "default" for rope in arch_config.ropes):
        # The table of plain rotations of GPT-J and CodeGen in transformers has a row per position.
        positions = CHECKED_POSITIONS
    tiny_sizes = {
        **TINY_SIZES,
        "embed": tiny_heads * HEAD_DIM,
        "heads": tiny_heads,
        "layers": num_layers,
        "kv_heads": 1 if kv_heads == 1 else num_heads,
        "head_dim": head_dim,
        "experts": _num_experts(arch_config),
        "full_head_dim": 2 * head_dim,
        "full_kv_heads": 1 if original.get("full_kv_heads") == 1 else num_heads,
        "positions": positions,
    }
    if "mixer_groups" in original:
        tiny_sizes |= _tiny_mixer_sizes(original, num_heads, tiny_sizes["embed"])
    return tiny_sizes


def _num_experts(arch_config: ArchConfig) -> int:
    """Return a small number of experts that the router can divide into groups and select from."""
    router = arch_config.router
    top_k = arch_config.experts_per_token
    if router.num_groups == 1:
        return max(EXPERTS, top_k)
    return router.num_groups * max(2, math.ceil(top_k / router.groups_per_token))


def _tiny_mixer_sizes(original: Sizes, num_heads: int, tiny_embed: int) -> dict[str, int]:
    """Return the size of each axis of `MIXER_FIELDS`.

    The heads of a mixer keep their share of the width, e.g. Mamba-2 with an expansion of 2: 2 x embed.
    """
    groups = 1 if original["mixer_groups"] == 1 else num_heads
    heads = groups
    if original["group_heads"] > 1:
        heads = num_heads if groups == 1 else 2 * groups
    width = original["mixer_heads"] * original["mixer_head_dim"]
    head_dim = max(1, width * tiny_embed // (original["embed"] * heads))
    return {
        "mixer_groups": groups,
        "mixer_heads": heads,
        "mixer_head_dim": head_dim,
        "mixer_width": heads * head_dim,
    }


def _size_fields(family: Family, config: HFConfig, wanted: Sizes) -> JsonObject:
    """Return the size fields set by the config, and the ones with a default from a large model."""
    read = fields_read(family)
    fields: JsonObject = {}
    for axis, names in SIZE_FIELDS.items():
        present = [name for name in names if config.get(name)]
        if axis in REQUIRED_AXES and not present:
            present = [name for name in names if name in read][:1]
        fields |= dict.fromkeys(present, wanted[axis])
    if "mixer_groups" in wanted:
        for axis, names in MIXER_FIELDS.items():
            fields |= dict.fromkeys([name for name in names if name in read], wanted[axis])
    return fields


def _replace_large_defaults(
    family: Family, config: JsonObject, original: Sizes, wanted: Sizes
) -> JsonObject:
    """Set absent size fields to the tiny size if the default of the family is a constant, e.g. 8 KV heads.

    Defaults derived from other fields are small already.
    """
    read = fields_read(family)
    for axis, names in SIZE_FIELDS.items():
        if axis in REQUIRED_AXES or axis == "positions":
            continue
        sizes = _read(family.sizes, config)
        if sizes is not None and _is_small(axis, sizes, original, wanted):
            continue
        for name in names:
            # A null `q_lora_rank` means queries without a latent.
            is_set = config.get(name) is not None or (axis == "q_rank" and name in config)
            if is_set or name not in read:
                continue
            changed = config | {name: wanted[axis]}
            # Families read fields of others to reject them. If the sizes do not agree, another field has to change.
            if sizes is None or _read(family.sizes, changed) not in (None, sizes):
                config = changed
                break
    return config


def _is_small(axis: str, sizes: Sizes, original: Sizes, wanted: Sizes) -> bool:
    """Return whether the size of an axis is small, or has shrunk with the fields that it derives from."""
    size = sizes.get(axis, 0)
    if axis == "kv_heads" and size and sizes["heads"] % size:
        return False
    return size <= wanted[axis] or size < original[axis]


def _layer_kinds(config: HFConfig) -> dict[str, list[JsonValue]]:
    """Return the distinct kinds of layers by each field that lists them, in the order of the layers."""
    listed: dict[str, list[JsonValue]] = {}
    for name, value in config.items():
        if name in PER_LAYER_FIELDS and isinstance(value, list | str):
            listed[name] = [*value]
    pattern = config.get(PATTERN_FIELD)
    if not listed and is_layer_pattern(pattern):
        # E.g. [[["global", "local"], 6]] of GPT-Neo: the kinds, and how often they repeat.
        listed[PATTERN_FIELD] = [kind for repeated, _ in pattern for kind in repeated]
    kinds: dict[str, list[JsonValue]] = {name: [] for name in listed}
    for name, values in listed.items():
        # A kind is a text, but a family does not check the fields that it ignores.
        for value in values:
            if value not in kinds[name]:
                kinds[name].append(value)
    return kinds


def _layer_fields(
    family: Family,
    config: HFConfig,
    arch_config: ArchConfig,
    kinds: Mapping[str, list[JsonValue]],
    num_layers: int,
) -> JsonObject:
    """Return the fields that list or select layers, so that every kind occurs."""
    fields: JsonObject = {}
    for name, values in kinds.items():
        listed = (values * num_layers)[:num_layers]
        if name == PATTERN_FIELD:
            fields[name] = [[listed, 1]]
        elif isinstance(config[name], str):
            fields[name] = "".join(map(str, listed))
        else:
            fields[name] = listed
    fields |= {name: value for name, value in LAYER_SELECTIONS.items() if config.get(name)}
    read = fields_read(family)
    if arch_config.mixer_layers and arch_config.attention_layers:
        fields |= {name: value for name, value in ATTENTION_PLACES.items() if name in read}
    if arch_config.reusing_layers:
        fields[REUSING_LAYERS_FIELD] = num_layers // 2
    for name in NUM_DENSE_FIELDS if arch_config.dense_layers else ():
        # A family rejects the field of another one.
        dense = _read(family.arch_config, {**config, name: 1})
        if name in read and dense is not None and dense.dense_layers == (0,):
            return fields | {name: 1}
    return fields


def _feature_fields(config: HFConfig, original: Sizes, wanted: Sizes) -> JsonObject:
    """Return the fields that depend on other sizes: windows, rotations, and projected embeddings."""
    fields: JsonObject = {name: WINDOW for name in WINDOW_FIELDS if config.get(name)}
    if config.get("rotary_dim"):
        rotary_dim = read_size(config, "rotary_dim", 0)
        fields["rotary_dim"] = rotary_dim * wanted["head_dim"] // original["head_dim"]
    if word_embed := config.get("word_embed_proj_dim"):
        is_embed = word_embed == original["embed"]
        fields["word_embed_proj_dim"] = wanted["embed"] if is_embed else WORD_EMBED
    rope = {name: config[name] for name in ROPE_FIELDS if config.get(name)}
    return fields | _scale_rope(rope, original["head_dim"], wanted["head_dim"])


def _scale_rope(fields: HFConfig, head_dim: int, tiny_head_dim: int) -> JsonObject:
    """Return the fields of a rotation, nested or not, for another size of the heads."""
    scaled: JsonObject = {**fields}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            scaled[name] = _scale_rope(value, head_dim, tiny_head_dim)
        elif name in FACTOR_LISTS and isinstance(value, list):
            scaled[name] = value[: len(value) * tiny_head_dim // head_dim]
        elif name == "original_max_position_embeddings":
            scaled[name] = ORIGINAL_POSITIONS
    return scaled
