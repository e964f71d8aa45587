"""Model families, one file each."""

from __future__ import annotations

import difflib
from typing import Any

from trainer.models.architecture import SEMANTIC_FIELDS
from trainer.models.errors import PrepError
from trainer.models.families import (
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
    t5,
)
from trainer.models.parameters import Family, HFConfig
from trainer.models.unsupported import missing_mechanism

_FAMILY_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, llama, mistral, mixtral),
    *(qwen2, qwen3, qwen3_moe, gemma, gemma2, gemma3, phi3, t5),
)
ADD_FAMILY_HINT = "to add a family takes one file and an hour: docs/add-a-family.md"
NEW_LAYER_HINT = "a family file cannot add that: it takes a new layer in the trainer; `prep inspect` shows the tensors"
MIN_SHARED_FIELDS = 5  # fields in common, from which on two configs are alike
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _FAMILY_MODULES}


def family_of(config: HFConfig) -> Family:
    """The family that a config.json names; PrepError lists those that are known and guesses which is nearest."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    known = "known: " + ", ".join(FAMILIES)
    what = f"no family for model_type `{name}`"
    if mechanism := missing_mechanism(config):
        raise PrepError(what, f"it needs {mechanism}; prep does not support that; {known}", NEW_LAYER_HINT)
    raise PrepError(what, known, _nearest_family_hint(config))


def _nearest_family_hint(config: HFConfig) -> str:
    """The family whose name is most like what a config calls its model or its classes, else the one that reads most of
    its fields; and where it is said how to add another."""
    classes = config.get("architectures")
    said = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    words = [word.lower().partition("forc")[0][:60] for word in said if isinstance(word, str)]
    bare = {name.replace("_", ""): name for name in FAMILIES}
    near = [bare[name] for word in words for name in difflib.get_close_matches(word.replace("_", ""), bare, 1, 0.7)]
    shared = {name: len(_fields_read(family) & config.keys()) for name, family in FAMILIES.items()}
    most = max(shared, key=lambda name: shared[name])
    near += [most] if shared[most] >= MIN_SHARED_FIELDS else []
    return (f"the nearest is {near[0]}; " if near else "") + ADD_FAMILY_HINT


def _fields_read(family: Family) -> set[str]:
    """Fields of a config that a family asks for, apart from those that every family looks at."""
    asked = _RecordingConfig()
    family.arch_config(asked)
    return asked.fields - SEMANTIC_FIELDS.keys()


class _RecordingConfig(dict[str, Any]):
    """A config that says nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.fields.add(key)
        return default
