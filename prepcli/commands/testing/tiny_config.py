"""Scale the config of a published model down to a tiny one that makes the same choices. The functions are pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError, usage_error
from prepcli.core.json_types import HFConfig, JsonObject, JsonValue
from prepcli.models.architecture import ArchConfig
from prepcli.models.parameters import Family, parameter_rows, read_size
from prepcli.models.registry import family_of, fields_read
from prepcli.models.truncation import is_layer_pattern

# A config with at most this many elements is used as it is.
MAX_TINY_ELEMENTS = 300_000
# A scaled config has at most this many elements.
MAX_SCALED_ELEMENTS = 1_000_000
VOCAB = 29
MLP = 20
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
LAYER_INPUT = 6
# Last layers that attend to the keys and values of earlier layers.
REUSING_FIELD = "num_kv_shared_layers"

# Config fields with the size of each axis.
SIZE_FIELDS = {
    "vocab": ("vocab_size",),
    "embed": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim", "d_kv"),
    "mlp": (
        "moe_intermediate_size",
        "intermediate_size",
        "block_ff_dim",
        "n_inner",
        "ffn_dim",
        "d_ff",
    ),
    "dense_mlp": ("intermediate_size",),
    "shared_mlp": (
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
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
MIXER_STATE = 6
# Fields with the layers of attention beside those of recurrent mixers -> value for two layers with one of each.
ATTENTION_PLACES: JsonObject = {
    "full_attention_interval": 2,
    "attn_layer_indices": [1],
    "full_attn_idxs": [1],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
# Elements of latent attention. The size of `kv_dim` here is the part of the keys.
LATENT_SIZES = {"kv_rank": 9, "q_rank": 11, "rope_dim": 4, "kv_dim": 6, "value_dim": 5}
# Axes whose field has a default independent of other fields, e.g. 8 KV heads.
CONSTANT_AXES = (
    *("kv_heads", "head_dim", "mlp", "dense_mlp", "shared_mlp", "experts"),
    *("full_head_dim", "layer_vocab", "layer_input"),
    *LATENT_SIZES,
)
# The fields of these axes are set even if the config omits them.
REQUIRED_AXES = (
    "vocab",
    "embed",
    "heads",
    "layers",
)
WINDOW_FIELDS = ("sliding_window", "window_size", "attention_chunk_size")
# Lists with one entry per layer, and a text with a character per layer.
LAYER_LISTS = (
    *("layer_types", "layers_block_type", "attention_layers", "mlp_layer_types"),
    "hybrid_override_pattern",
)
# Numbers of first layers with a dense MLP, in configs of DeepSeek and of LFM2-MoE.
NUM_DENSE_FIELDS = ("first_k_dense_replace", "num_dense_layers")
# Kinds of layers as a repeated pattern, in configs of GPT-Neo.
LAYER_PATTERN = "attention_types"
# Some defaults suit only large models. The first of these changes accepted by the family replaces them.
DEFAULT_CHANGES: tuple[JsonObject, ...] = (
    {},
    {LAYER_PATTERN: [[["global", "local"], 1]]},
    {"rotary_dim": HEAD_DIM // 4},
    {"num_experts_per_tok": 2},
)
# By default, a Qwen-MoE model of few layers would have only dense ones. This field leaves one.
ONE_DENSE_LAYER: JsonObject = {"mlp_only_layers": [0]}
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
    config = {**config, "model_type": family.name}
    # Raises for faults that scaling down would hide.
    family.arch_config(config)
    if _num_elements(family, config) <= MAX_TINY_ELEMENTS:
        return _with_enough_positions(family, _without_padding(family, config))
    original = _original_sizes(family, config)
    kinds = _layer_kinds(config)
    num_layers = max([2, *map(len, kinds.values())])
    has_reusing_layers = bool(family.arch_config(config).reusing_layers)
    if has_reusing_layers:
        # Each kind once with keys and values of its own, and once without.
        num_layers *= 2
    wanted = _tiny_sizes(family, config, original, num_heads, num_layers)
    tiny = {key: value for key, value in config.items() if key not in DROPPED_FIELDS}
    tiny |= _size_fields(family, config, wanted) | _layer_fields(config, kinds, wanted["layers"])
    tiny |= _mixer_fields(family, config, wanted) | _num_dense_fields(family, config)
    if has_reusing_layers:
        tiny[REUSING_FIELD] = num_layers // 2
    tiny |= {name: 0 for name in config if name.endswith("_token_id")}
    tiny |= _feature_fields(config, original, wanted)
    if _has_only_dense_layers(family, tiny):
        tiny |= ONE_DENSE_LAYER
    tiny = _with_valid_defaults(family, _replace_large_defaults(family, tiny, original, wanted))
    if (num_elements := _num_elements(family, tiny)) > MAX_SCALED_ELEMENTS:
        why = f"{num_elements:,} elements remain: {family.sizes(tiny)}"
        raise usage_error(
            "this config cannot be scaled down", why, "write a config with small sizes by hand"
        )
    return _with_enough_positions(family, _without_padding(family, tiny))


def _original_sizes(family: Family, config: HFConfig) -> dict[str, int]:
    """Return the size of each axis, with the heads of a recurrent mixer in place of absent attention heads.

    Raises:
        PrepError: The model has neither.
    """
    sizes = {**family.sizes(config)}
    if "mixer_groups" in sizes:
        sizes["mixer_heads"] = sizes["mixer_groups"] * sizes["group_heads"]
        sizes = {"heads": sizes["mixer_heads"], "head_dim": sizes["mixer_head_dim"]} | sizes
    elif "mixer_channels" in sizes:
        # The channels of Mamba are a multiple of the width.
        sizes = {"heads": sizes["embed"], "head_dim": 1} | sizes
    if "heads" not in sizes:
        why = f"{family.name} has no attention heads to scale by"
        raise usage_error(
            "this config cannot be scaled down", why, "write a config with small sizes by hand"
        )
    return {"head_dim": sizes["embed"] // sizes["heads"]} | sizes


def _num_elements(family: Family, config: HFConfig) -> int:
    sizes = family.sizes(config)
    return sum(
        math.prod(bind_row(row, sizes).leaf_shape)
        for row in parameter_rows(family, config).values()
    )


def _with_enough_positions(family: Family, config: JsonObject) -> JsonObject:
    """Increase the number of limited positions to the length of the longest check.

    Other models are unchanged.
    """
    if not family.arch_config(config).has_limited_positions:
        return config
    fields = [name for name in SIZE_FIELDS["positions"] if config.get(name) is not None]
    name = next(name for name in SIZE_FIELDS["positions"] if name in fields_read(family))
    return config | dict.fromkeys(fields or [name], CHECKED_POSITIONS)


def _tiny_sizes(
    family: Family,
    config: HFConfig,
    original: Mapping[str, int],
    num_heads: int,
    num_layers: int,
) -> dict[str, int]:
    """Return the size of each axis of `SIZE_FIELDS`."""
    heads = original["heads"]
    kv_heads = original.get("kv_heads", original["heads"])
    is_grouped = 1 < kv_heads < heads
    # Heads may be in equal shards or in pairs.
    num_heads = math.lcm(
        num_heads, original.get("head_shards", 1), family.arch_config(config).values_per_head
    )
    tiny_heads = num_heads * 3 if is_grouped else num_heads
    fills_embed = original["heads"] * original["head_dim"] == original["embed"]
    head_dim = HEAD_DIM if fills_embed else OTHER_HEAD_DIM
    if "rope_dim" in original:
        # transformers writes the rotated elements of latent attention as `head_dim`.
        head_dim = LATENT_SIZES["rope_dim"]
    tiny_sizes = {
        **LATENT_SIZES,
        "vocab": VOCAB,
        "embed": tiny_heads * HEAD_DIM,
        "heads": tiny_heads,
        "layers": num_layers,
        "kv_heads": 1 if kv_heads == 1 else num_heads,
        "head_dim": head_dim,
        "mlp": MLP,
        "dense_mlp": MLP,
        "shared_mlp": MLP,
        "experts": _num_experts(family.arch_config(config)),
        "full_head_dim": 2 * head_dim,
        "full_kv_heads": 1 if original.get("full_kv_heads") == 1 else num_heads,
        "layer_vocab": VOCAB + 2,
        "layer_input": LAYER_INPUT,
        "positions": _num_positions(family.arch_config(config)),
    }
    if "mixer_groups" in original:
        tiny_sizes |= _tiny_mixer_sizes(original, num_heads, tiny_sizes["embed"])
    if "mixer_heads" in tiny_sizes and "heads" not in family.sizes(config):
        tiny_sizes["heads"] = tiny_sizes["mixer_heads"]
        tiny_sizes["head_dim"] = tiny_sizes["mixer_head_dim"]
    return tiny_sizes


def _num_positions(arch_config: ArchConfig) -> int:
    """Return a number of positions for a tiny model."""
    # The table of plain rotations of GPT-J and CodeGen in transformers has a row per position.
    if all(rope.rope_type == "default" for rope in arch_config.ropes):
        return CHECKED_POSITIONS
    return POSITIONS


def _tiny_mixer_sizes(
    original: Mapping[str, int], num_heads: int, tiny_embed: int
) -> dict[str, int]:
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
        "mixer_state": MIXER_STATE,
        "mixer_head_dim": head_dim,
        "mixer_width": heads * head_dim,
    }


def _num_experts(arch_config: ArchConfig) -> int:
    """Return a small number of experts that the router can divide into groups and select from."""
    router = arch_config.router
    top_k = arch_config.experts_per_token
    if router.num_groups == 1:
        return max(EXPERTS, top_k)
    return router.num_groups * max(2, math.ceil(top_k / router.groups_per_token))


def _has_only_dense_layers(family: Family, config: HFConfig) -> bool:
    """Return whether the sizes of a config are invalid without ONE_DENSE_LAYER, and valid with it."""
    try:
        family.sizes(config)
    except PrepError:
        pass
    else:
        return False
    try:
        family.sizes({**config, **ONE_DENSE_LAYER})
    except PrepError:
        return False
    return True


def _num_dense_fields(family: Family, config: HFConfig) -> JsonObject:
    """Return one dense layer by a field of NUM_DENSE_FIELDS, if the model has dense layers by this field."""
    if not family.arch_config(config).dense_layers:
        return {}
    for name in NUM_DENSE_FIELDS:
        if name in fields_read(family) and _has_one_dense_layer(family, {**config, name: 1}):
            return {name: 1}
    return {}


def _has_one_dense_layer(family: Family, config: HFConfig) -> bool:
    try:
        return family.arch_config(config).dense_layers == (0,)
    # The family rejects the field of another one.
    except PrepError:
        return False


def _mixer_fields(family: Family, config: HFConfig, wanted: Mapping[str, int]) -> JsonObject:
    """Return the fields of recurrent mixers, also the absent ones: their defaults suit only large models."""
    arch_config = family.arch_config(config)
    fields: JsonObject = {}
    for axis, names in MIXER_FIELDS.items():
        if axis in wanted:
            fields |= dict.fromkeys(names, wanted[axis])
    if arch_config.mixer_layers and arch_config.attention_layers:
        fields |= ATTENTION_PLACES
    read = fields_read(family)
    return {name: value for name, value in fields.items() if name in read}


def _size_fields(family: Family, config: HFConfig, wanted: Mapping[str, int]) -> JsonObject:
    """Return the size fields set by the config, and the ones with a default from a large model."""
    fields: JsonObject = {}
    for axis, names in SIZE_FIELDS.items():
        for name in names:
            if config.get(name):
                fields[name] = wanted[axis]
    # Without these fields, the size is the default of the family, i.e. the size of a large model.
    for axis in REQUIRED_AXES:
        if fields.keys().isdisjoint(SIZE_FIELDS[axis]):
            read = [name for name in SIZE_FIELDS[axis] if name in fields_read(family)]
            fields |= dict.fromkeys(read[:1], wanted[axis])
    return fields


def _replace_large_defaults(
    family: Family, config: JsonObject, original: Mapping[str, int], wanted: Mapping[str, int]
) -> JsonObject:
    """Set absent size fields to the tiny size if the default of the family is a constant, e.g. 8 KV heads.

    Defaults derived from other fields are small already.
    """
    for axis in CONSTANT_AXES:
        # A null `q_lora_rank` means queries without a latent.
        if axis == "q_rank" and "q_lora_rank" in config:
            continue
        absent = [
            name
            for name in SIZE_FIELDS[axis]
            if config.get(name) is None and _sets_size(family, config, axis, name, wanted[axis])
        ]
        if absent and not _has_shrunk(family, config, axis, original, wanted):
            config = config | {absent[0]: wanted[axis]}
    return config


def _sets_size(family: Family, config: HFConfig, axis: str, name: str, value: int) -> bool:
    """Return whether a field changes the size of an axis. Families read fields of others to reject them."""
    changed = _axis_size(family, {**config, name: value}, axis)
    unchanged = _axis_size(family, config, axis)
    # Another field has to change first.
    if changed is None and unchanged is None:
        return name in fields_read(family)
    return changed is not None and changed != unchanged


def _axis_size(family: Family, config: HFConfig, axis: str) -> int | None:
    """Return the size of an axis. None if the family lacks it or the sizes do not agree."""
    try:
        return family.sizes(config).get(axis)
    except PrepError:
        return None


def _has_shrunk(
    family: Family,
    config: HFConfig,
    axis: str,
    original: Mapping[str, int],
    wanted: Mapping[str, int],
) -> bool:
    try:
        sizes = family.sizes(config)
    # The default does not agree with the sizes that were set.
    except PrepError:
        return False
    size = sizes.get(axis, 0)
    if axis == "kv_heads" and size and sizes["heads"] % size:
        return False
    return size <= wanted[axis] or size < original[axis]


def _layer_kinds(config: HFConfig) -> dict[str, list[JsonValue]]:
    """Return the distinct kinds of layers by each field that lists them, in the order of the layers."""
    kinds: dict[str, list[JsonValue]] = {}
    for name in LAYER_LISTS:
        listed = config.get(name)
        if isinstance(listed, list | str):
            kinds[name] = _distinct_values(listed)
    # E.g. [[["global", "local"], 6]] of GPT-Neo: the kinds, and how often they repeat.
    pattern = config.get(LAYER_PATTERN)
    if kinds or not is_layer_pattern(pattern):
        return kinds
    all_kinds: list[JsonValue] = []
    for repeated, _ in pattern:
        all_kinds += repeated
    return {LAYER_PATTERN: _distinct_values(all_kinds)}


def _distinct_values(values: Sequence[JsonValue]) -> list[JsonValue]:
    """Return the values without repetition, in order."""
    distinct: list[JsonValue] = []
    for value in values:
        if value not in distinct:
            distinct.append(value)
    return distinct


def _with_valid_defaults(family: Family, config: JsonObject) -> JsonObject:
    """Return the config with the first of DEFAULT_CHANGES that the family accepts."""
    for changes in DEFAULT_CHANGES:
        try:
            family.arch_config(config | changes)
        except PrepError:
            continue
        return config | changes
    return config


def _layer_fields(
    config: HFConfig, kinds: Mapping[str, list[JsonValue]], num_layers: int
) -> JsonObject:
    """Return the fields that list the layers, so that every kind occurs."""
    fields: JsonObject = {}
    for name, values in kinds.items():
        listed = (values * num_layers)[:num_layers]
        if name == LAYER_PATTERN:
            fields[name] = [[listed, 1]]
        elif isinstance(config[name], str):
            fields[name] = "".join(map(str, listed))
        else:
            fields[name] = listed
    if config.get("sliding_window_pattern"):
        fields["sliding_window_pattern"] = 2
    if config.get("max_window_layers"):
        fields["max_window_layers"] = 1
    if config.get("mlp_only_layers"):
        fields["mlp_only_layers"] = [0]
    return fields


def _without_padding(family: Family, config: HFConfig) -> JsonObject:
    """Return a config without a padding token. An encoder-decoder keeps it, because its decoder starts with it.

    torch computes no gradient for the embedding of a padding token, and the checks use every token.
    """
    if family.arch_config(config).encoder is not None:
        return {**config}
    # An absent field would have the default of the config class, e.g. 0 in Gemma4TextConfig.
    return {**config, "pad_token_id": None}


def _feature_fields(
    config: HFConfig, original: Mapping[str, int], wanted: Mapping[str, int]
) -> JsonObject:
    """Return the fields that depend on other sizes: windows, rotations, and projected embeddings."""
    fields: JsonObject = {name: WINDOW for name in WINDOW_FIELDS if config.get(name)}
    if config.get("rotary_dim"):
        rotary_dim = read_size(config, "rotary_dim", 0)
        fields["rotary_dim"] = rotary_dim * wanted["head_dim"] // original["head_dim"]
    if word_embed := config.get("word_embed_proj_dim"):
        fields["word_embed_proj_dim"] = (
            wanted["embed"] if word_embed == original["embed"] else WORD_EMBED
        )
    rope_fields = ("rope_scaling", "rope_parameters", "original_max_position_embeddings")
    rope = {name: config[name] for name in rope_fields if config.get(name)}
    return fields | _scale_rope(rope, original["head_dim"], wanted["head_dim"])


def _scale_rope(fields: HFConfig, head_dim: int, tiny_head_dim: int) -> JsonObject:
    """Return the fields of a rotation, nested or not, for another size of the heads."""
    scaled: JsonObject = {}
    for name, value in fields.items():
        if isinstance(value, Mapping):
            scaled[name] = _scale_rope(value, head_dim, tiny_head_dim)
        elif name in FACTOR_LISTS and isinstance(value, list):
            scaled[name] = value[: len(value) * tiny_head_dim // head_dim]
        else:
            scaled[name] = (
                ORIGINAL_POSITIONS if name == "original_max_position_embeddings" else value
            )
    return scaled
