"""The registry of model families, and errors for configs of unsupported ones."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial

from prepcli.core.errors import Command, PrepError, text
from prepcli.core.json_values import HFConfig
from prepcli.models.architecture import SEMANTIC_FIELDS
from prepcli.models.declaration import RecordedConfig
from prepcli.models.parameters import Family, TreeLayout

# Mechanism without support in the trainer -> values of `model_type` that need it, and config fields that need it if
# they are true and not empty. An error names the first one that a config needs.
MECHANISMS: Mapping[str, tuple[str, str]] = {
    "an image, video or audio encoder": (
        "aria blip-2 chameleon clip fuyu idefics idefics2 idefics3 instructblip internvl kosmos-2 llava llava_next "
        "llava_onevision mllama paligemma pixtral qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_vl qwen3_vl smolvlm "
        "speech_to_text siglip video_llava vipllava vit wav2vec2 whisper",
        "vision_config audio_config vision_tower",
    ),
    "state-space layers other than those of the supported families": (
        "zamba zamba2",
        "state_size ssm_cfg ssm_state_size mamba_d_state mamba_d_conv",
    ),
    "recurrent layers": (
        "recurrent_gemma rwkv xlstm",
        "lru_width",
    ),
    "linear attention other than the gated delta net of the supported families": (
        "kimi_linear minimax minimax_m1",
        "linear_num_value_heads linear_attn_config linear_conv_kernel_dim",
    ),
    "sparse attention with an indexer": (
        "deepseek_v32 glm_moe_dsa",
        "index_topk",
    ),
    "a sparse MoE whose router or experts differ from those of the supported families": (
        "arctic dbrx jetmoe longcat_flash nllb-moe switch_transformers",
        "ffn_config",
    ),
    "an encoder without a decoder": (
        "albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm eurobert fnet funnel "
        "ibert layoutlm longformer megatron-bert mobilebert modernbert mpnet nomic_bert nystromformer rembert roberta "
        "roberta-prelayernorm roformer squeezebert xlm-roberta xlm-roberta-xl xmod yoso",
        "type_vocab_size",
    ),
    "cross attention other than T5's": (
        "bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart mvp pegasus pegasus_x plbart "
        "prophetnet seamless_m4t",
        "",
    ),
}


def missing_mechanism(config: HFConfig) -> str:
    """Return the name of an unsupported mechanism in a config, or "" if none is known."""
    # All names come before all fields: a name is certain, a field is a guess for unlisted models.
    for mechanism, (model_types, _) in MECHANISMS.items():
        if config.get("model_type") in model_types.split():
            return mechanism
    for mechanism, (_, fields) in MECHANISMS.items():
        if any(config.get(field) for field in fields.split()):
            return mechanism
    return ""


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
    "granite": "llama_extended",
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
    "dots1": "deepseek",
    "ernie4_5_moe": "moe_with_dense_layers",
    "glm4_moe": "deepseek",
    "glm4_moe_lite": "deepseek",
    "olmoe": "moe",
    "flex_olmo": "moe",
    "granitemoe": "moe",
    "granitemoeshared": "moe",
    "exaone": "llama_extended",
    "exaone_moe": "deepseek",
    "granite_swa": "llama_extended",
    "granitemoe_swa": "moe",
    "hunyuan_v1_moe": "moe",
    "hyperclovax": "llama_extended",
    "internlm3": "llama",
    "iquestcoder": "llama",
    "mellum": "moe_with_dense_layers",
    "minimax_m2": "moe",
    "sarvam_mla": "deepseek",
    "sarvam_moe": "deepseek",
    "solar_open": "deepseek",
    "youtu": "deepseek",
    "llama4_text": "moe_with_dense_layers",
    "flint": "moe_with_dense_layers",
    "hy_v3": "deepseek",
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


class LazyLayouts(Mapping[str, TreeLayout]):
    """The trees of other libraries. They are made at their first use: most commands need none."""

    def __init__(self, make: Callable[[], Mapping[str, TreeLayout]]) -> None:
        """Make the trees with `make`."""
        self._make = make

    @cached_property
    def _layouts(self) -> Mapping[str, TreeLayout]:
        return self._make()

    def __getitem__(self, name: str) -> TreeLayout:
        """Return a tree by name."""
        return self._layouts[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names."""
        return iter(self._layouts)

    def __len__(self) -> int:
        """Return the number of trees."""
        return len(self._layouts)


def _foreign_trees(family: Family) -> dict[str, TreeLayout]:
    # Most commands need no trees.
    from prepcli.models import layouts, orbax_layouts

    trees: dict[str, TreeLayout] = {}
    # Messages list the trees in this order, and those of one table as its maker returns them.
    for makers in (
        layouts.FLAX_TREES,
        orbax_layouts.ORBAX_TREES,
        layouts.LEVANTER_TREES,
        layouts.TORCHTITAN_TREES,
    ):
        if family.name in makers:
            trees |= makers[family.name](family)
    return trees


class Families(Mapping[str, Family]):
    """The supported families by model type.

    The module of a family is imported when the family is read for the first time: a command needs one or two of them.
    An alias of a model type is contained, and not listed.
    """

    def __getitem__(self, model_type: str) -> Family:
        model_type = MODEL_TYPE_ALIASES.get(model_type, model_type)
        if model_type not in MODEL_TYPES:
            raise KeyError(model_type)
        return _declared_family(model_type)

    def __contains__(self, model_type: object) -> bool:
        return model_type in MODEL_TYPES or model_type in MODEL_TYPE_ALIASES

    def __iter__(self) -> Iterator[str]:
        return iter(MODEL_TYPES)

    def __len__(self) -> int:
        return len(MODEL_TYPES)


FAMILIES = Families()


@cache
def _declared_family(model_type: str) -> Family:
    """Return a family with its trees of other libraries."""
    kin = importlib.import_module(f"prepcli.models.families.{MODEL_TYPES[model_type]}")
    family: Family = kin.FAMILIES[model_type]
    return dataclasses.replace(family, layouts=LazyLayouts(partial(_foreign_trees, family)))


def family_of(config: HFConfig) -> Family:
    """Return the family of a config.json.

    Raises:
        PrepError: The family is not supported. The error suggests a similar one.
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
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
