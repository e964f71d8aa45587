"""Model families, one file each."""

from __future__ import annotations

import difflib
from typing import Any

from trainer.models.architecture import CHANGES
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
from trainer.models.parameters import Config, Family
from trainer.models.unsupported import missing_mechanism

_MODULES = (
    *(gpt2, gpt_neo, gptj, gpt_neox, opt, llama, mistral, mixtral),
    *(qwen2, qwen3, qwen3_moe, gemma, gemma2, gemma3, phi3, t5),
)
GUIDE = "to add a family takes one file and an hour: docs/add-a-family.md"
NO_GUIDE = "a family file cannot add that: it takes a new layer in the trainer; `prep inspect` shows the tensors"
ALIKE = 5  # fields in common, from which on two configs are alike
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _MODULES}


def family_of(config: Config) -> Family:
    """The family that a config.json names; PrepError lists those that are known and guesses which is nearest."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    known = "known: " + ", ".join(FAMILIES)
    what = f"no family for model_type `{name}`"
    if mechanism := missing_mechanism(config):
        raise PrepError(what, f"it needs {mechanism}; prep does not support that; {known}", NO_GUIDE)
    raise PrepError(what, known, _nearest(config))


def _nearest(config: Config) -> str:
    """The family whose name is most like what a config calls its model or its classes, else the one that reads most of
    its fields; and where it is said how to add another."""
    classes = config.get("architectures")
    said = [config.get("model_type"), *(classes if isinstance(classes, list) else ())]
    words = [word.lower().partition("forc")[0][:60] for word in said if isinstance(word, str)]
    bare = {name.replace("_", ""): name for name in FAMILIES}
    near = [bare[name] for word in words for name in difflib.get_close_matches(word.replace("_", ""), bare, 1, 0.7)]
    shared = {name: len(_fields_read(family) & config.keys()) for name, family in FAMILIES.items()}
    most = max(shared, key=lambda name: shared[name])
    near += [most] if shared[most] >= ALIKE else []
    return (f"the nearest is {near[0]}; " if near else "") + GUIDE


def _fields_read(family: Family) -> set[str]:
    """Fields of a config that a family asks for, apart from those that every family looks at."""
    asked = _Asked()
    family.traits(asked)
    return asked.fields - CHANGES.keys()


class _Asked(dict[str, Any]):
    """A config that says nothing, and remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.fields.add(key)
        return default
