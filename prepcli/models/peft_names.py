"""Names of adapters in the files of PEFT: ends of module names, patterns, and modules around the text model. No I/O."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from prepcli.models.declaration import split_row
from prepcli.models.lora import (
    WEIGHT,
    adapted_projections,
    expert_projections,
    module_settings,
    select_targets,
)
from prepcli.models.lora_config import LoraConfig
from prepcli.models.parameters import Family, HFConfig, active_parameters

# Modules around the text model in classes of transformers. They depend on the class and on the version:
# `model.layers.0`, `language_model.model.layers.0`, `model.language_model.layers.0`, `model.text_model.layers.0`.
WRAPPER_MODULES = frozenset(("model", "language_model", "text_model"))


def split_wrappers(name: str, family: Family) -> tuple[str, str]:
    """Split a name into the modules around the text model and the rest.

    The parts of the family's prefix are wrappers, too.

    Returns:
        The wrappers with their dots, and the rest, e.g. `model.language_model.` and `layers.0.self_attn.q_proj`. Names
        of towers keep their first module, e.g. `model.` and `vision_tower.encoder.layers.0`.
    """
    wrappers = WRAPPER_MODULES.union(family.prefix.split("."))
    parts = name.split(".")
    count = 0
    while count < len(parts) - 1 and parts[count] in wrappers:
        count += 1
    return "".join(f"{part}." for part in parts[:count]), ".".join(parts[count:])


def module_suffixes(family: Family, config: HFConfig, lora: LoraConfig) -> list[str]:
    """Return the shortest ends of module names that select only the adapted modules, as PEFT matches them."""
    adapted = {_module_pattern(p.module) for p in select_targets(family, config, lora.targets)}
    others: set[str] = set()
    for _, parameter in active_parameters(family.parameters, config):
        others.add(_module_pattern(split_row(parameter.row)[1].removesuffix(WEIGHT)))
    others -= adapted
    return sorted({_shortest_suffix(module, others) for module in adapted})


@dataclass(frozen=True, slots=True)
class PeftPatterns:
    """The settings of adapters with names of PEFT."""

    target_parameters: list[str]  # Ends of the names of adapted parameters of experts.
    # Regular expression of modules -> their rank, if it is not the rank of the adapter.
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]  # The same for alpha.


def peft_patterns(family: Family, config: HFConfig, lora: LoraConfig) -> PeftPatterns:
    """Return the settings of adapters with names of PEFT. See `module_suffixes` for the targets."""
    patterns = PeftPatterns([], {}, {})
    settings = module_settings(family, config, lora)
    # PEFT has the name of the parameter for experts, and of the module for a projection.
    experts = {p.tensor for p in expert_projections(family, config)}
    names: dict[str, str] = {}
    for name in settings:
        names[name] = name if name in experts else name.removesuffix(WEIGHT)
    for tensor, module in settings.items():
        name = names[tensor]
        others = {_module_pattern(other) for other in names.values() if other != name}
        suffix = _shortest_suffix(_module_pattern(name), others)
        if suffix == _module_pattern(name):
            # The end of another module, or a name with numbers: e.g. `layers\\.\\d+\\.q`.
            suffix = re.sub(r"\\{\w+\\}", r"\\d+", re.escape(name))
        if module.rank != lora.rank:
            patterns.rank_pattern[suffix] = module.rank
        if module.alpha != lora.alpha:
            patterns.alpha_pattern[suffix] = module.alpha
    for projection in adapted_projections(family, config, lora):
        name = ".".join(_module_pattern(projection.tensor).split(".")[1:])
        if projection.has_experts and name not in patterns.target_parameters:
            patterns.target_parameters.append(name)
    return patterns


def _module_pattern(module: str) -> str:
    """Return a module's name without the numbers of layers and experts."""
    return ".".join(part for part in module.split(".") if not part.startswith("{"))


def _shortest_suffix(module: str, others: Collection[str]) -> str:
    """Return the shortest end of a module's name that no other module shares."""
    parts = module.split(".")
    for count in range(1, len(parts)):
        suffix = ".".join(parts[-count:])
        # PEFT adapts a module if its name equals a target or ends with a dot and the target. For T5,
        # `q` would also select EncDecAttention, so that `attn.q` becomes SelfAttention.q.
        if not any(f".{other}".endswith(f".{suffix}") for other in others):
            return suffix
    return module
