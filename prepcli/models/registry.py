"""The registry of model families, and errors for configs of unsupported ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping

from prepcli.core.errors import Command, PrepError, text
from prepcli.models.architecture import SEMANTIC_FIELDS
from prepcli.models.declaration import RecordedConfig
from prepcli.models.parameters import Family, HFConfig

# Model type -> module of `prepcli.models.families` that declares it. Lists of families have this order.
MODEL_TYPES: Mapping[str, str] = {
    "gpt2": "gpt",
    "gpt_neo": "gpt",
    "gptj": "gpt_rotary",
    "gpt_neox": "gpt_rotary",
    "opt": "gpt",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "moe",
    "qwen2": "llama",
    "qwen2_moe": "moe_with_dense_layers",
    "qwen3": "llama",
    "qwen3_moe": "moe_with_dense_layers",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "phi3": "llama_extended",
    "t5": "t5",
    "olmo2": "other_norms",
    "olmo3": "other_norms",
    "smollm3": "llama",
    "granite": "granite",
    "glm4": "other_norms",
    "glm": "other_norms",
    "starcoder2": "other_norms",
    "stablelm": "other_norms",
    "phi": "other_norms",
    "exaone4": "other_norms",
    "ernie4_5": "llama",
    "ministral": "llama",
    "ministral3": "llama",
    "seed_oss": "llama",
    "olmo": "other_norms",
    "cohere": "other_norms",
    "cohere2": "other_norms",
    "helium": "llama",
    "arcee": "llama",
    "hunyuan_v1_dense": "llama_extended",
    "nemotron": "other_norms",
    "falcon": "gpt_rotary",
    "gpt_bigcode": "gpt",
    "bloom": "gpt",
    "mpt": "gpt",
    "biogpt": "gpt",
    "xglm": "gpt",
    "mt5": "t5",
    "umt5": "t5",
    "jais2": "other_norms",
    "cwm": "llama",
    "vaultgemma": "gemma",
    "gpt_oss": "moe",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "dots1": "deepseek_experts",
    "ernie4_5_moe": "moe_with_dense_layers",
    "glm4_moe": "deepseek_experts",
    "glm4_moe_lite": "deepseek",
    "olmoe": "moe",
    "flex_olmo": "moe",
    "granitemoe": "moe",
    "granitemoeshared": "moe",
    "exaone": "llama_extended",
    "exaone_moe": "deepseek_experts",
    "granite_swa": "granite",
    "granitemoe_swa": "moe",
    "hunyuan_v1_moe": "moe",
    "hyperclovax": "granite",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "mellum": "moe_with_dense_layers",
    "minimax_m2": "moe",
    "sarvam_mla": "deepseek",
    "sarvam_moe": "deepseek_experts",
    "solar_open": "deepseek_experts",
    "youtu": "deepseek",
    "llama4_text": "moe_with_dense_layers",
    "flint": "moe_with_dense_layers",
    "hy_v3": "deepseek_experts",
    "minicpm3": "deepseek",
    "nanochat": "other_norms",
    "phimoe": "moe",
    "lfm2": "hybrid",
    "lfm2_moe": "hybrid",
    "qwen3_next": "hybrid",
    "qwen3_5_text": "hybrid",
    "qwen3_5_moe_text": "hybrid",
    "mamba2": "mamba",
    "bamba": "mamba_hybrid",
    "granitemoehybrid": "mamba_hybrid",
    "falcon_h1": "mamba_hybrid",
    "nemotron_h": "mamba",
    "mamba": "mamba",
    "jamba": "mamba_hybrid",
    "gemma4_text": "gemma",
    "bitnet": "llama_extended",
    "apertus": "llama_extended",
    "codegen": "gpt_rotary",
    "gpt_neox_japanese": "gpt_rotary",
    "diffllama": "llama_extended",
    "doge": "llama_extended",
    "persimmon": "persimmon",
    "falcon_mamba": "mamba",
}
# Types of published config.json with the layers, the tensors and the fields of a family.
MODEL_TYPE_ALIASES: Mapping[str, str] = {
    # Its code is that of DeepSeek-V3. Every size differs, and its config states all of them.
    "kimi_k2": "deepseek_v3",
}
ADD_FAMILY_HINT = text(
    "{} explains how to add a family in one file", Command("docs", "add-a-family")
)
NEW_LAYER_HINT = text(
    "a family file cannot add it: the trainer needs a new layer; {} shows the tensors",
    Command("inspect"),
)
# Number of shared config fields that makes two families similar.
MIN_SHARED_FIELDS = 5


class Families(Mapping[str, Family]):
    """The supported families by model type.

    The module of a family is imported when the family is read for the first time: a command needs one or two of them.
    An alias of a model type is contained, and not listed.
    """

    def __getitem__(self, model_type: str) -> Family:
        model_type = MODEL_TYPE_ALIASES.get(model_type, model_type)
        if model_type not in MODEL_TYPES:
            raise KeyError(model_type)
        kin = importlib.import_module(f"prepcli.models.families.{MODEL_TYPES[model_type]}")
        return kin.FAMILIES[model_type]

    def __contains__(self, model_type: object) -> bool:
        return model_type in MODEL_TYPES or model_type in MODEL_TYPE_ALIASES

    def __iter__(self) -> Iterator[str]:
        return iter(MODEL_TYPES)

    def __len__(self) -> int:
        return len(MODEL_TYPES)


FAMILIES = Families()


def family_of(config: HFConfig) -> Family:
    """Return the family of a config.json.

    Args:
        config: Content of the config.json.

    Returns:
        The family that its `model_type` names.

    Raises:
        PrepError: The family is not supported. The error suggests a similar one.
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    # Only this error needs the table of unsupported models.
    from prepcli.models.unsupported import missing_mechanism

    what = f"model_type `{name}` is not supported"
    if mechanism := missing_mechanism(config):
        why = f"it needs {mechanism}, which prep does not support"
        raise PrepError(what, why, NEW_LAYER_HINT)
    why = text("{} lists the {} supported ones", Command("docs", "families"), len(FAMILIES))
    raise PrepError(what, why, _nearest_family_hint(config))


def _nearest_family_hint(config: HFConfig) -> str:
    """Return a hint with the most similar family: by the name of the model or its classes, or by its config fields."""
    classes = config.get("architectures")
    names = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    # The part of a class name before its task: LlamaForCausalLM and T5ForConditionalGeneration give
    # llama and t5.
    words = [name.lower().partition("forc")[0][:60] for name in names if isinstance(name, str)]
    families = {name.replace("_", ""): name for name in FAMILIES}
    similar: list[str] = []
    for word in words:
        matches = difflib.get_close_matches(word.replace("_", ""), families, n=1, cutoff=0.7)
        similar += [families[match] for match in matches]
    fields = config.keys() - SEMANTIC_FIELDS.keys()
    shared_fields = {name: len(fields_read(family) & fields) for name, family in FAMILIES.items()}
    most_shared = max(shared_fields, key=lambda name: shared_fields[name])
    if shared_fields[most_shared] >= MIN_SHARED_FIELDS:
        similar.append(most_shared)
    return (f"the most similar family is {similar[0]}; " if similar else "") + ADD_FAMILY_HINT


def fields_read(family: Family) -> set[str]:
    """Return the config fields that a family reads."""
    # An empty config gives each field its default, so no family can fail on a value.
    config = RecordedConfig({})
    family.arch_config(config)
    return config.fields
