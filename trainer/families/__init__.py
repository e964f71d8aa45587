"""Model families, one file each."""

from __future__ import annotations

from trainer.errors import PrepError
from trainer.families import gpt_neo, llama
from trainer.table import Config, Family

FAMILIES = {module.FAMILY.name: module.FAMILY for module in (gpt_neo, llama)}


def family_of(config: Config) -> Family:
    """The family that a config.json names; PrepError lists those that are known."""
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    known = "known: " + ", ".join(FAMILIES)
    raise PrepError(f"no family for model_type `{name}`", known, "a family is one file in trainer/families")
