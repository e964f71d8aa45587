"""The registry of model families, and errors for configs of unsupported ones."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping

from prepcli.core.errors import Command, PrepError, text
from prepcli.models.architecture import SEMANTIC_FIELDS
from prepcli.models.declaration import RecordedConfig
from prepcli.models.parameters import Family, HFConfig

# Each one is the name of a module of `prepcli.models.families`. Lists of families have this order.
MODEL_TYPES = (
    "gpt2",
    "gpt_neo",
    "gptj",
    "gpt_neox",
    "opt",
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "t5",
    "olmo2",
    "olmo3",
    "smollm3",
    "granite",
    "glm4",
    "glm",
    "starcoder2",
    "stablelm",
    "phi",
    "exaone4",
    "ernie4_5",
    "ministral",
    "ministral3",
    "seed_oss",
    "olmo",
    "cohere",
    "cohere2",
    "helium",
    "arcee",
    "hunyuan_v1_dense",
    "nemotron",
    "falcon",
    "gpt_bigcode",
    "bloom",
    "mpt",
    "biogpt",
    "xglm",
    "mt5",
    "umt5",
    "jais2",
    "cwm",
    "vaultgemma",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "olmoe",
    "flex_olmo",
    "granitemoe",
    "granitemoeshared",
    "exaone",
    "exaone_moe",
    "granite_swa",
    "granitemoe_swa",
    "hunyuan_v1_moe",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "mellum",
    "minimax_m2",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
    "youtu",
    "llama4_text",
    "flint",
    "hy_v3",
    "minicpm3",
    "nanochat",
    "phimoe",
    "lfm2",
    "lfm2_moe",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "mamba2",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "nemotron_h",
    "mamba",
    "jamba",
    "gemma4_text",
    "bitnet",
    "apertus",
    "codegen",
    "gpt_neox_japanese",
    "diffllama",
    "doge",
)
# Model type -> module of `prepcli.models.families` with its declaration, if it is not the name of the type.
_KIN = {
    "gpt": "gpt2 gpt_neo gpt_bigcode opt biogpt xglm bloom mpt",
    "gpt_rotary": "gptj codegen gpt_neox gpt_neox_japanese falcon",
    "t5": "t5 mt5 umt5",
}
KIN: Mapping[str, str] = {name: kin for kin, names in _KIN.items() for name in names.split()}
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

    A family's module is imported when the family is read for the first time: a command needs one or two of them. An
    alias of a model type is contained, and not listed.
    """

    def __getitem__(self, model_type: str) -> Family:
        model_type = MODEL_TYPE_ALIASES.get(model_type, model_type)
        if model_type not in MODEL_TYPES:
            raise KeyError(model_type)
        module = importlib.import_module(
            f"prepcli.models.families.{KIN.get(model_type, model_type)}"
        )
        return module.FAMILIES[model_type] if model_type in KIN else module.FAMILY

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
