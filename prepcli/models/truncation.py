"""The layers of a file that a model runs without: multi-token prediction, and all layers but the first ones.

A file has the tensors that predict further tokens under one of two kinds of names. Config fields state their number:

    layers.61.eh_proj.weight    a layer after the last one (DeepSeek-V3, GLM-4.5)
    mtp.fc.weight               a module (`mtp` in Qwen3-Next, `mtp_block` in ERNIE 4.5, `mtp_layers` in MiMo)

The first layers alone bring up a mesh or a program before the whole model is loaded. No I/O, no jax.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from prepcli.algebra.axis_map import INPUT_LAYERS, LAYER_ATOMS, LAYERS, bind_row
from prepcli.core.errors import Option, PrepError, text
from prepcli.core.formatting import parse_decimal
from prepcli.core.json_values import HFConfig, JsonObject, JsonValue
from prepcli.models.parameters import MAX_LAYERS, Family, parameter_rows, read_count
from prepcli.models.verbatim import split_numbers

# Number of layers after the last one. transformers 5 reads the second name too.
PREDICTION_LAYER_FIELDS = ("num_nextn_predict_layers", "num_mtp_layers")
# Fields with a number of layers or modules. 0 states that the files have none. The others are those of Qwen3.5 and
# MiniMax-M2.
PREDICTION_FIELDS = (*PREDICTION_LAYER_FIELDS, "mtp_num_hidden_layers", "num_mtp_modules")
# Rules under which versions of prep up to 0.1.0 recorded the tensors that they dropped. They kept the fields. Only the
# command that dropped them recorded it, so that an export of its output has no record.
UNRECORDED_RULE = (
    "multi-token prediction, which an earlier version of prep left out without a record"
)
EARLIER_RULES = frozenset(
    {
        "layer of multi-token prediction, which the model does not run",
        "module of multi-token prediction, which the model does not run",
        UNRECORDED_RULE,
    }
)
_MODULE = re.compile(r"mtp(_\w+)?\.")
# An embedding or a head of its own: `layers.61.embed_tokens.weight` and `layers.61.shared_head.head.weight` of
# DeepSeek-V3 and GLM-4.5, `layers.45.transformer.shared_head.output.weight` of Step-3.5, `mtp.embed_tokens.weight` of
# LongCat. A quantised one has further parameters, e.g. `shared_head.head.qweight`.
_VOCABULARY = re.compile(r"(.*\.)?(embed_tokens|lm_head|shared_head\.(head|output))\.\w+")
_LAYER = re.compile(r"layers\.([0-9]{1,9})\.")


def prediction_names(family: Family, config: HFConfig, names: Iterable[str]) -> set[str]:
    """Return the names that belong to multi-token prediction.

    The names are without the family's prefix. The family is not the verbatim one.

    Raises:
        PrepError: The config has an invalid number of layers.
    """
    count = family.default_prediction_layers
    for field in PREDICTION_LAYER_FIELDS:
        if config.get(field) is not None:
            count = read_count(config, field, count, MAX_LAYERS)
            break
    first = family.sizes(config)[LAYERS]
    layers = range(first, first + count)
    selected: set[str] = set()
    for name in names:
        layer = _LAYER.match(name)
        if _MODULE.match(name) or (layer and int(layer[1]) in layers):
            selected.add(name)
    return selected


def is_prediction_vocabulary(name: str) -> bool:
    """Return whether a tensor of multi-token prediction belongs to an embedding or a head.

    >>> is_prediction_vocabulary("layers.61.shared_head.head.weight")
    True
    >>> is_prediction_vocabulary("layers.61.shared_head.norm.weight")
    False
    """
    return _VOCABULARY.fullmatch(name) is not None


def without_prediction(config: HFConfig) -> JsonObject:
    """Return the config of a model without its multi-token prediction.

    >>> without_prediction({"num_hidden_layers": 61, "num_nextn_predict_layers": 1})
    {'num_hidden_layers': 61, 'num_nextn_predict_layers': 0}
    """
    return {
        key: 0 if key in PREDICTION_FIELDS and value else value for key, value in config.items()
    }


# The first layers of a model

# Number of layers in the config of some model type.
LAYER_FIELDS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "num_encoder_layers", "num_decoder_layers",
    "encoder_layers", "decoder_layers",
)  # fmt: skip
# Fields with an entry per layer: a list, or a text with a character per layer. Other lists may have
# the same length:
# "time_step_limit": [0.0, 1.0] also has two entries in a model with two layers.
PER_LAYER_FIELDS = frozenset({
    "layer_types", "mlp_layer_types", "layers_block_type", "hybrid_override_pattern", "attention_layers", "attn_layers",
    "attn_type_list", "block_configs", "indexer_types", "kv_sharing_modes", "kv_source_layers", "no_rope_layers",
    "layer_rope_theta", "moe_layer_freq", "moe_topk", "num_experts", "num_shared_expert", "layers_num_experts",
    "swiglu_limits", "swiglu_limits_shared", "activation_sparsity_pattern", "intermediate_size", "ffn_multipliers",
    "num_query_heads", "num_kv_heads",
})  # fmt: skip
# End of the names of other such lists, e.g. num_attention_heads_per_layer.
PER_LAYER_SUFFIX = "_per_layer"
# Number of the last layers that attend to the keys and values of earlier ones.
REUSING_LAYERS_FIELD = "num_kv_shared_layers"
# Settings of some layers, e.g. {"3": {...}}.
LAYER_SECTIONS_FIELD = "per_layer_config"
# Lists of the numbers of the layers with some property.
LAYER_NUMBER_FIELDS = frozenset({
    "mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices", "hybrid_layer_ids",
    "cross_attention_layers", "rope_scaling_layers",
})  # fmt: skip
# Sections of a config with the layers of the language model. They may be nested: thinker_config.text_config.
LAYER_SECTIONS = (
    "text_config", "llm_config", "language_config", "thinker_config", "vlm_config", "encoder", "decoder",
)  # fmt: skip
# Sections of a config with the layers of another tower, and words in the names of the tower's tensors.
TOWER_WORDS = {"vision_config": ("vision", "visual"), "audio_config": ("audio", "speech")}
# Number of layers in the config of some vision towers.
DEPTH_FIELD = "depth"
# GPT-Neo: [[pattern of layer types, repeats], ...].
PATTERN_FIELD = "attention_types"


def truncate_config(
    config: HFConfig, layers: int, *, removes_prediction: bool = False
) -> JsonObject:
    """Return the config of a model with the first layers only.

    Lists with one entry per layer get shorter as well. Other lists stay, also with as many entries as layers. With
    `removes_prediction`, the layers for multi-token prediction are removed as well.

    >>> truncate_config({"num_hidden_layers": 3, "layer_types": ["a", "b", "a"]}, 2)
    {'num_hidden_layers': 2, 'layer_types': ['a', 'b']}
    """
    truncated = dict(config)
    for field, value in config.items():
        if field in LAYER_SECTIONS and isinstance(value, Mapping):
            truncated[field] = truncate_config(value, layers, removes_prediction=removes_prediction)
        elif field in LAYER_FIELDS and _is_count(value):
            truncated[field] = min(value, layers)
        elif field in PREDICTION_FIELDS and value and removes_prediction:
            truncated[field] = 0
        elif field == PATTERN_FIELD and is_layer_pattern(value):
            truncated[field] = [[_first_entries(value, layers), 1]]
        elif field in LAYER_NUMBER_FIELDS and _are_layer_numbers(value):
            truncated[field] = [number for number in value if number < layers]
        elif field == REUSING_LAYERS_FIELD and _is_count(value):
            truncated[field] = max(0, value - _num_removed(config, layers))
        elif field == LAYER_SECTIONS_FIELD and isinstance(value, Mapping):
            truncated[field] = _first_sections(value, layers)
        elif _has_entry_per_layer(field) and isinstance(value, list | str):
            truncated[field] = value[:layers]
    return truncated


def prediction_tensors(family: Family, config: HFConfig, names: Iterable[str]) -> set[str]:
    """Return the names of the tensors of layers for multi-token prediction.

    These layers follow the last layer of the model. For example, layer 61 of DeepSeek-V3 follows layers 0 to 60. The
    names are without the family's prefix.
    """
    if family.is_verbatim:
        return _later_numbers(config, names, max(layer_counts(config)))
    return prediction_names(family, config, names)


def _num_removed(config: HFConfig, layers: int) -> int:
    """Return the number of layers after the first ones."""
    counts = [value for field in LAYER_FIELDS if _is_count(value := config.get(field))]
    return max(0, max(counts, default=layers) - layers)


def tensors_of_all_layers(family: Family, config: HFConfig) -> dict[str, int]:
    """Return the tensors with the values of all layers, by name, and the number of the dim that has them in order.

    For example, the columns of `embed_tokens_per_layer.weight` of Gemma 4, those of layer 0 first: dim 1.
    """
    sizes = family.sizes(config)
    dims: dict[str, int] = {}
    for row in parameter_rows(family, config).values():
        axis_map = bind_row(row, sizes)
        for axis, dim in enumerate(axis_map.source_dims):
            if dim.factors and dim.factors[0].atom == INPUT_LAYERS:
                dims |= {name: axis for name, _ in axis_map.tensors()}
    return dims


def missing_tensors(family: Family, config: HFConfig, truncated: HFConfig) -> list[str]:
    """Return the names of tensors that a model of the first layers has, and the whole model does not have.

    For example, the last layer of GPT-NeoX Japanese has a bias. With fewer layers, another layer needs one.
    `truncated` is the config of the first layers.
    """
    stored = set(_tensor_names(family, config))
    return [name for name in _tensor_names(family, truncated) if name not in stored]


def _tensor_names(family: Family, config: HFConfig) -> Iterator[str]:
    """Yield the names of all tensors of a config, without the family's prefix."""
    sizes = family.sizes(config)
    for row in parameter_rows(family, config).values():
        for name, _ in bind_row(row, sizes).tensors():
            yield name


def layer_counts(config: HFConfig) -> set[int]:
    """Return the numbers of layers that a config and its sections have."""
    counts: set[int] = set()
    for section in _text_sections(config):
        for field in LAYER_FIELDS:
            value = section.get(field)
            if _is_count(value):
                counts.add(value)
    return counts


def _text_sections(config: HFConfig) -> Iterator[HFConfig]:
    """Yield a config and its sections with layers of the language model."""
    yield config
    for field in LAYER_SECTIONS:
        section = config.get(field)
        if isinstance(section, Mapping):
            yield from _text_sections(section)


def later_layers(family: Family, config: HFConfig, names: Iterable[str], layers: int) -> set[str]:
    """Return the names of the tensors of later layers.

    The names are without the family's prefix.

    Raises:
        PrepError: The config of a verbatim checkpoint does not have the number of layers.
    """
    if family.is_verbatim:
        return _later_numbers(config, names, layers)
    sizes = family.sizes(config)
    numbers = family.layer_numbers(config)
    later: set[str] = set()
    for row in parameter_rows(family, config).values():
        for name, indices in bind_row(row, sizes).tensors():
            for atom, index in indices.items():
                # Index 0 of `sparse_layers` is layer 3 of a model with 3 dense layers first.
                layer = numbers[atom][index] if atom in numbers else index
                if atom in LAYER_ATOMS and layer >= layers:
                    later.add(name)
    return later


def _later_numbers(config: HFConfig, names: Iterable[str], layers: int) -> set[str]:
    """Return the names whose first number is a layer to remove.

    For example, `h.3.w` with 2 layers to keep. A number counts as a layer if the names with the same text before it
    have at least the numbers 0 to N - 1, where N is a number of layers in the config.
    """
    counts = layer_counts(config)
    if not counts:
        what = text("{} needs the number of layers", Option("layers", layers))
        hint = text("{}: a folder with the model's config.json", Option("config", "FOLDER"))
        raise PrepError(what, f"no config has one of {', '.join(LAYER_FIELDS)}", hint)
    names_by_run: dict[str, dict[int, list[str]]] = {}
    for name in names:
        pieces, numbers = split_numbers(name)
        if numbers:
            run = names_by_run.setdefault(pieces[0], {})
            run.setdefault(numbers[0], []).append(name)
    tower_words: set[str] = set()
    tower_counts: set[int] = set()
    for section in _text_sections(config):
        for field, words in TOWER_WORDS.items():
            tower = section.get(field)
            if not isinstance(tower, Mapping):
                continue
            tower_words.update(words)
            tower_counts |= layer_counts(tower)
            depth = tower.get(DEPTH_FIELD)
            if _is_count(depth):
                tower_counts.add(depth)
    tower_counts -= counts
    later: set[str] = set()
    for start, run in names_by_run.items():
        # There may be more numbers: a layer for speculative decoding follows the others in DeepSeek-V3.
        if not any(_has_layers(run, count) for count in counts):
            continue
        if len(run) in tower_counts or any(word in start for word in tower_words):
            continue
        for number, members in run.items():
            if number >= layers:
                later.update(members)
    return later


def _has_layers(numbers: Collection[int], count: int) -> bool:
    """Return whether the numbers of a series of layer names include 0 to `count` - 1."""
    # The config is untrusted: the length bounds the loop.
    return len(numbers) >= count and all(number in numbers for number in range(count))


def _has_entry_per_layer(field: str) -> bool:
    """Return whether a list of this name has one entry per layer."""
    return field in PER_LAYER_FIELDS or field.endswith(PER_LAYER_SUFFIX)


def _are_layer_numbers(value: JsonValue) -> TypeGuard[list[int]]:
    """Return whether a value is a list of integers."""
    return isinstance(value, list) and all(type(number) is int for number in value)


def is_layer_pattern(value: JsonValue) -> TypeGuard[list[tuple[list[JsonValue], int]]]:
    """Return whether a value is a list of pairs of a list and a count."""
    if not isinstance(value, list):
        return False
    pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
    return len(pairs) == len(value) and all(
        isinstance(pattern, list) and _is_count(repeats) for pattern, repeats in pairs
    )


def _first_entries(patterns: Sequence[tuple[list[JsonValue], int]], layers: int) -> list[JsonValue]:
    """Return the entries of the first layers, e.g. [[["global", "local"], 2]] and 3 layers -> 3 entries."""
    entries: list[JsonValue] = []
    for pattern, repeats in patterns:
        # The config is untrusted: a count may be larger than the number of layers.
        entries += pattern * min(repeats, layers)
    return entries[:layers]


def _first_sections(sections: HFConfig, layers: int) -> JsonObject:
    """Return the sections without those of later layers, e.g. {"0": ..., "5": ...} and 3 layers -> {"0": ...}."""
    first: JsonObject = {}
    for key, section in sections.items():
        number = parse_decimal(key)
        if number is None or number < layers:
            first[key] = section
    return first


def _is_count(value: JsonValue) -> TypeGuard[int]:
    return type(value) is int and value > 0
