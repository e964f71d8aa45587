"""The text part of a multimodal checkpoint: its family, its config, and its tensors among the others. No I/O, no jax.

A multimodal model has a language model and towers: encoders of images or sounds, and the projections of their output.
The language model is a family under other names. They depend on the version of transformers that wrote the file:

    language_model.model.layers.0.mlp.up_proj.weight    language_model.lm_head.weight    version 4
    model.language_model.layers.0.mlp.up_proj.weight    lm_head.weight                   version 5

The prefixes are therefore found in the names, and a model type needs no code of its own. TEXT_FAMILIES lists the
configs of language models with another `model_type` than their family. OTHER_COMPUTATION lists the multimodal types
with another computation of text.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TypeGuard

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import Command, Option, PrepError, text
from prepcli.core.json_values import JsonObject, JsonValue
from prepcli.models.declaration import split_row
from prepcli.models.parameters import (
    Family,
    HFConfig,
    dropped_patterns,
    parameter_rows,
    read_size,
)
from prepcli.models.registry import FAMILIES, missing_mechanism
from prepcli.models.truncation import prediction_names


def matching_patterns(
    name: str, prefix: str, patterns: Iterable[str], *, wrapper: str = ""
) -> list[str]:
    """Return the patterns that match the whole name of a tensor, with or without the prefix of its family.

    A pattern may also begin with the prefix that a wrapper of the model gave to all names, e.g. `_orig_mod.`.

    >>> matching_patterns("model.layers.1.k_scale", "model.", ["layers.*.k_scale", "model.*", "k_scale"])
    ['layers.*.k_scale', 'model.*']
    """
    names = {wrapper + name, name, name.removeprefix(prefix)}
    return [pattern for pattern in patterns if any(fnmatchcase(each, pattern) for each in names)]


def pattern_of_layers(name: str) -> str:
    """Return a pattern that matches a tensor's name in every layer.

    >>> pattern_of_layers("model.layers.1.k_scale")
    'model.layers.*.k_scale'
    """
    return re.sub(r"\.\d+\.", ".*.", name)


# `model_type` of a text config -> the fields that it has as the config of a family. With M-RoPE, all three positions
# of a text token are equal (Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1), as in the family.
TEXT_FAMILIES: dict[str, JsonObject] = {
    "glm4v_moe_text": {"model_type": "glm4_moe"},
    "glm4v_text": {"model_type": "glm4", "attention_bias": True},
    "glm_ocr_text": {"model_type": "glm4", "attention_bias": False},
    "granite_docling_text": {"model_type": "granite"},
    # It rotates halves of heads, and Ernie 4.5 rotates neighbouring elements.
    "paddleocr_vl_text": {"model_type": "llama"},
    "qwen2_5_omni_text": {"model_type": "qwen2"},
    "qwen2_5_vl": {"model_type": "qwen2"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen2_vl": {"model_type": "qwen2"},
    "qwen2_vl_text": {"model_type": "qwen2"},
    "qwen3_omni_moe_text": {"model_type": "qwen3_moe"},
    # Its router has no field for the sum of the weights.
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
    "qwen3_vl_text": {"model_type": "qwen3"},
}
# Defaults of these text configs that differ from the family's, other than STATED_FIELDS.
_WHOLE_HEADS = {"partial_rotary_factor": 1.0}
TEXT_DEFAULTS: dict[str, HFConfig] = {
    "glm4v_text": _WHOLE_HEADS,
    "glm_ocr_text": _WHOLE_HEADS,
}
# Multimodal types that compute text in another way than their text config says -> the difference.
_UNSCALED_LOGITS = "transformers does not apply the logit_scale of its text config"
OTHER_COMPUTATION = {
    "aya_vision": _UNSCALED_LOGITS,
    "cohere2_vision": _UNSCALED_LOGITS,
    "paligemma": "the tokens of a prompt attend to all of its tokens",
}
# Fields that a text config of TEXT_FAMILIES must state, because its defaults differ from the family's.
STATED_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "rms_norm_eps", "vocab_size",
)  # fmt: skip
# Fields of the whole config that also apply to the text part.
SHARED_FIELDS = (
    "bos_token_id", "dtype", "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype",
)  # fmt: skip
# Keys of the text config in a config.json.
SECTIONS = ("text_config", "llm_config", "language_config")
TIED_FIELD = "tie_word_embeddings"
ROPE_FIELDS = ("rope_parameters", "rope_scaling")
# Fields of a rotary embedding with several positions per token.
MROPE_FIELDS = ("mrope_section", "mrope_interleaved")
MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class TextPart:
    """The language model of a multimodal checkpoint."""

    family: Family  # Its family, with the prefixes of the file.
    config: HFConfig  # Its config, as the family reads it.
    names: frozenset[str]  # Its tensors, by their names in the file.


def read_text_part(
    config: HFConfig, names: Collection[str], drop: Sequence[str] = (), *, wrapper: str = ""
) -> TextPart:
    """Return the text part of a multimodal checkpoint.

    Args:
        config: Content of its config.json.
        names: Names of its tensors in the file, without the prefix of a wrapper.
        drop: Patterns of tensors of the text part that its family need not have.
        wrapper: Prefix that a wrapper gave to all names in the file. Patterns may have it.

    Raises:
        PrepError: It has no text part with a supported family.
    """
    model_type = config.get("model_type")
    if isinstance(model_type, str) and model_type in OTHER_COMPUTATION:
        raise _not_supported(config, OTHER_COMPUTATION[model_type])
    section = text_section(config)
    if section is None:
        raise _not_supported(config, f"its config has none of {', '.join(SECTIONS)}")
    fields = section_fields(config, section)
    family = _text_family(config, fields)
    text_config = _text_config(config, fields)
    prefix = _find_prefix(config, family, names)
    head_prefix = _find_head_prefix(family, prefix, names)
    is_tied = _is_tied(config, fields, head_prefix + family.tying.head_tensor in names)
    text_config[TIED_FIELD] = is_tied
    text_config.setdefault("vocab_size", family.sizes(text_config)["vocab"])
    family = with_prefixes(family, prefix, head_prefix)
    text_names = _text_names(config, family, text_config, names, drop, wrapper=wrapper)
    return TextPart(family, text_config, text_names)


def with_prefixes(family: Family, prefix: str, head_prefix: str) -> Family:
    """Return a family with the names of a multimodal file.

    `head_prefix` is that of the tensors in `family.unprefixed`.
    """
    return dataclasses.replace(family, prefix=prefix, head_prefix=head_prefix, layouts={})


def text_section(config: HFConfig) -> str | None:
    """Return the key of the text config. It is "" for a config with the fields of the text part at the top."""
    for section in SECTIONS:
        if isinstance(config.get(section), Mapping):
            return section
    # Published configs of Qwen2-VL and Qwen2.5-VL have no section.
    is_flat = isinstance(config.get("vision_config"), Mapping)
    if is_flat and str(config.get("model_type")) in TEXT_FAMILIES:
        return ""
    return None


def section_fields(config: HFConfig, section: str) -> JsonObject:
    """Return the fields of the text config in a config.json.

    `section` is the result of `text_section`.
    """
    fields = config.get(section)
    if isinstance(fields, Mapping):
        return dict(fields)
    return {key: value for key, value in config.items() if not key.endswith("_config")}


def with_text_config(config: HFConfig, before: HFConfig, after: HFConfig) -> JsonObject:
    """Return the config.json of a multimodal model after changes of its text config.

    Fields without a change keep their form in `config`. `before` is its text config as `read_text_part` returned it,
    and `after` the text config with changes.

    >>> with_text_config({"text_config": {}}, {"vocab_size": 8}, {"vocab_size": 16})
    {'text_config': {'vocab_size': 16}}
    """
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    removed = before.keys() - after.keys()
    if not changed and not removed:
        return dict(config)
    section = text_section(config) or ""
    updated = dict(config)
    if section:
        fields = section_fields(config, section)
        updated[section] = _changed_fields(fields, changed, removed)
    else:
        updated = _changed_fields(updated, changed, removed)
    for key, value in changed.items():
        # transformers ties by the field of the whole config.
        if key == TIED_FIELD or (key in config and (config[key] == before.get(key))):
            updated[key] = value
    return updated


def uses_mrope(config: HFConfig) -> bool:
    """Return whether the text part of a multimodal model has M-RoPE."""
    section = text_section(config)
    if section is None:
        return False
    fields = section_fields(config, section)
    return any(_has_mrope(fields.get(key)) for key in ROPE_FIELDS)


def _changed_fields(fields: HFConfig, changed: HFConfig, removed: Collection[str]) -> JsonObject:
    """Return fields with changes, and without the removed ones."""
    updated = {key: value for key, value in fields.items() if key not in removed}
    for key, value in changed.items():
        stored = fields.get(key)
        if key in ROPE_FIELDS and _has_mrope(stored) and isinstance(value, Mapping):
            updated[key] = _with_mrope(value, stored)
        else:
            updated[key] = value
    return updated


def _not_supported(config: HFConfig, why: str, hint: str = "") -> PrepError:
    """Return the error for a checkpoint without a supported text part."""
    name = config.get("model_type")
    if not hint:
        hint = text("{} lists the supported model types", Command("models"))
    return PrepError(f"the text part of model_type `{name!s:.60}` is not supported", why, hint)


def _text_family(config: HFConfig, fields: HFConfig) -> Family:
    """Return the family of a text config."""
    text_type = fields.get("model_type")
    name = text_type
    if isinstance(text_type, str) and text_type in TEXT_FAMILIES:
        name = TEXT_FAMILIES[text_type]["model_type"]
        missing = [field for field in STATED_FIELDS if fields.get(field) is None]
        if missing:
            raise _not_supported(config, f"its text config does not state {', '.join(missing)}")
    if not isinstance(name, str) or name not in FAMILIES:
        why = f"its text config has the model_type {text_type!r:.60}, which is not supported"
        if mechanism := missing_mechanism(fields):
            why = f"its text config needs {mechanism}"
        raise _not_supported(config, why)
    return FAMILIES[name]


def _text_config(config: HFConfig, fields: HFConfig) -> JsonObject:
    """Return the text config as the family reads it."""
    shared = {key: config[key] for key in SHARED_FIELDS if config.get(key) is not None}
    text_config = shared | {key: value for key, value in fields.items() if value is not None}
    text_type = str(fields.get("model_type"))
    if text_type in TEXT_FAMILIES:
        defaults = TEXT_DEFAULTS.get(text_type, {})
        text_config = {**defaults, **text_config, **TEXT_FAMILIES[text_type]}
        # Without the key, this text config has width / heads features per head. Some families would instead
        # take a constant, e.g. 128.
        width = read_size(fields, "hidden_size", 0)
        text_config.setdefault("head_dim", width // read_size(fields, "num_attention_heads", 0))
    for key in ROPE_FIELDS:
        rope = text_config.get(key)
        if _has_mrope(rope):
            text_config[key] = _without_mrope(rope)
    return text_config


def _has_mrope(rope: JsonValue) -> TypeGuard[JsonObject]:
    """Return whether a rotary embedding has several positions per token."""
    return isinstance(rope, Mapping) and not rope.keys().isdisjoint(MROPE_FIELDS)


def _without_mrope(rope: HFConfig) -> JsonObject:
    """Return a rotary embedding with one position per token."""
    fields = {key: value for key, value in rope.items() if key not in MROPE_FIELDS}
    for key in ("type", "rope_type"):
        if fields.get(key) == "mrope":
            fields[key] = "default"
    return fields


def _with_mrope(rope: HFConfig, stored: HFConfig) -> JsonObject:
    """Return a changed rotary embedding with the M-RoPE fields of the stored one."""
    fields = dict(rope)
    for key in MROPE_FIELDS:
        if key in stored:
            fields[key] = stored[key]
    for key in ("type", "rope_type"):
        # transformers 4 writes the type "mrope", transformers 5 "default".
        if stored.get(key) == "mrope":
            fields[key] = "mrope"
    return fields


def _find_prefix(config: HFConfig, family: Family, names: Collection[str]) -> str:
    """Return the prefix of the text part's tensors, e.g. `language_model.model.`."""
    embedding = family.tying.embedding_tensor
    layers = _first_tensor_name(family)
    prefixes: list[str] = []
    for name in names:
        prefix = name.removesuffix(embedding)
        is_prefix = name.endswith(embedding) and (not prefix or prefix.endswith("."))
        # An encoder may have an embedding of the same name, but not the first layer of a decoder beside it.
        if is_prefix and prefix + layers in names:
            prefixes.append(prefix)
    if len(prefixes) == 1:
        return prefixes[0]
    count = "no" if not prefixes else f"{len(prefixes)}"
    raise _not_supported(config, f"{count} tensors are named {embedding} beside {layers}")


def _first_tensor_name(family: Family) -> str:
    """Return the name of a tensor of the first layer."""
    for path, parameter in family.parameters.items():
        if path.startswith("layers.") and parameter.condition == "":
            return re.sub(r"\{\w+\}", "0", split_row(parameter.row)[1])
    return ""


def _find_head_prefix(family: Family, prefix: str, names: Collection[str]) -> str:
    """Return the prefix of the head, e.g. `language_model.` of `language_model.lm_head.weight`."""
    candidates = [*_leading_parts(prefix)]
    for candidate in candidates:
        if candidate + family.tying.head_tensor in names:
            return candidate
    # The file has no head (it is tied). The prefix is where the language model would have it.
    outer = prefix.removesuffix(family.prefix)
    return outer if outer in candidates else ""


def _leading_parts(prefix: str) -> Iterator[str]:
    """Yield the leading parts of a prefix, e.g. "", "model." and "model.language_model."."""
    parts = prefix.split(".")[:-1]
    for count in range(len(parts) + 1):
        yield "".join(f"{part}." for part in parts[:count])


def _is_tied(config: HFConfig, fields: HFConfig, has_head: bool) -> bool:
    """Return whether the head is the embedding.

    transformers reads the field of the whole config. Its default depends on the class, so that without the field the
    stored tensors decide.
    """
    stated = config.get(TIED_FIELD)
    if stated is not None:
        return bool(stated)
    return bool(fields.get(TIED_FIELD)) or not has_head


def _text_names(
    config: HFConfig,
    family: Family,
    text_config: HFConfig,
    names: Collection[str],
    drop: Sequence[str],
    *,
    wrapper: str,
) -> frozenset[str]:
    """Return the names of the text part's tensors in the file.

    Raises:
        PrepError: A tensor is missing, or the layers have a tensor outside of the family.
    """
    full_names: dict[str, str] = {}
    for name in names:
        if name.startswith(family.prefix):
            full_names[name.removeprefix(family.prefix)] = name
    for bare in family.unprefixed:
        if family.head_prefix + bare in names:
            full_names[bare] = family.head_prefix + bare
    used = _used_names(config, family, text_config, full_names)
    optional = {family.tying.head_tensor} if text_config[TIED_FIELD] else set[str]()
    if missing := used - full_names.keys() - optional:
        raise _not_supported(config, f"the file has no {_first_names(family.prefix, missing)}")
    roots = {name.partition(".")[0] for name in used}
    ignored = re.compile("|".join(dropped_patterns(family)) or "(?!)")
    text_names = {name for name in full_names if name.partition(".")[0] in roots}
    # They stay beside the text part, like the towers.
    text_names -= prediction_names(family, text_config, text_names)
    unexpected = {
        name
        for name in text_names - used - family.duplicates.keys()
        if not ignored.fullmatch(name)
        and not matching_patterns(full_names[name], family.prefix, drop, wrapper=wrapper)
    }
    if unexpected:
        why = f"{_first_names(family.prefix, unexpected)} is not part of family {family.name}"
        pattern = pattern_of_layers(full_names[min(unexpected)])
        command = Command("save-init", Option("drop", pattern))
        hint = text("{} converts without such tensors", command)
        raise _not_supported(config, why, hint)
    return frozenset(full_names[name] for name in text_names)


def _used_names(
    config: HFConfig, family: Family, text_config: HFConfig, stored: Collection[str]
) -> set[str]:
    """Return the names of all tensors of the family, without prefixes."""
    sizes = family.sizes(text_config)
    used: set[str] = set()
    # The shapes of tensors do not change their names.
    shapes = dict.fromkeys(stored, ())
    for row in parameter_rows(family, text_config, tensors=shapes).values():
        axis_map = bind_row(row, sizes)
        # The config is untrusted: the stored tensors bound the loop.
        count = math.prod(factor.extent for factor in axis_map.stacked_factors)
        if count > len(stored):
            raise _not_supported(config, f"the file has less than {count:,} tensors")
        used.update(name for name, _ in axis_map.tensors())
    return used


def _first_names(prefix: str, names: Collection[str]) -> str:
    """Return the first MAX_LISTED names of a set as text, each with the prefix."""
    listed = ", ".join(prefix + name for name in sorted(names)[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        listed += f" and {len(names) - MAX_LISTED:,} more"
    return listed
