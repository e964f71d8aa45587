"""Model families, one file each."""

from __future__ import annotations

import difflib

from trainer.errors import PrepError
from trainer.families import (
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_neo,
    gpt_neox,
    gptj,
    llama,
    mistral,
    mixtral,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
)
from trainer.table import Config, Family

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, llama, mistral, mixtral),
    *(qwen2, qwen3, qwen3_moe, gemma, gemma2, gemma3, phi3),
)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _MODULES}


def family_of(config: Config) -> Family:
    """The family that a config.json names; PrepError lists those that are known and guesses which is nearest."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    why = "known: " + ", ".join(FAMILIES)
    raise PrepError(f"no family for model_type `{name}`", why, _nearest(config))


def _nearest(config: Config) -> str:
    """The family whose name is most like what a config calls its model or its classes."""
    classes = config.get("architectures")
    said = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    words = [word.lower().removesuffix("forcausallm")[:60] for word in said if isinstance(word, str)]
    bare = {name.replace("_", ""): name for name in FAMILIES}
    for word in words:
        if near := difflib.get_close_matches(word.replace("_", ""), bare, n=1, cutoff=0.7):
            return f"the nearest is {bare[near[0]]}; a family is one file in trainer/families"
    return "a family is one file in trainer/families"
