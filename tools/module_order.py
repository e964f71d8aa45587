"""Write prepcli/models/module_order.toml from the classes of transformers: `python -m tools.module_order`.

It needs torch and transformers. It skips a family if the modules have other parameters than the files, e.g. joined
experts, or if no order of siblings gives the order of its parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from prepcli.commands.testing.tiny_model import to_file_tensors, torch_class
from prepcli.models.module_order import ORDER_FILE, number_pattern, sort_by_modules
from prepcli.models.registry import MODEL_TYPES

HEAD = """\
# Parameters of each family in the order of `model.named_parameters()` of transformers {version}, and whether the
# Trainer of transformers applies weight decay to them. Written by `python -m tools.module_order`.
"""
BIAS_FIELD = re.compile(r".*(bias|qk_norm|qk_layernorm)$")
MAX_LAYERS = 12


def main() -> None:
    """Write the file."""
    import transformers

    lines = [HEAD.format(version=transformers.__version__)]
    for family in MODEL_TYPES:
        try:
            order = family_order(family)
        except (ValueError, AttributeError, KeyError, ImportError, TypeError) as error:
            print(f"skip {family}: {error}", file=sys.stderr)
            continue
        lines.append(f"[{family}]\n")
        for pattern, is_decayed in order.items():
            lines.append(f'"{pattern}" = {str(is_decayed).lower()}\n')
        lines.append("\n")
    ORDER_FILE.write_text("".join(lines).rstrip("\n") + "\n")


def family_order(family: str) -> Mapping[str, bool]:
    """Return the parameters of a family in order, and whether each one decays.

    Raises:
        ValueError: The modules do not have the parameters of the files, or their order is not one of siblings.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    fields = default.to_dict()
    changes: list[dict[str, Any]] = [{}, {"tie_word_embeddings": False}]
    biases = {name: True for name, value in fields.items() if _is_option(name, value)}
    changes.append({"tie_word_embeddings": False, **biases})
    order: dict[str, bool] = {}
    all_names: list[list[str]] = []
    for change in changes:
        names, decayed = _model_parameters(family, change)
        all_names.append(names)
        for name in names:
            order.setdefault(number_pattern(name), name in decayed)
    patterns = _merge([[number_pattern(name) for name in names] for names in all_names])
    for names in all_names:
        if list(sort_by_modules(names, patterns)) != names:
            raise ValueError("the order of siblings differs between layers or settings")
    return {pattern: order[pattern] for pattern in patterns}


def _is_option(name: str, value: object) -> bool:
    """Return whether a field adds biases or norms to a model."""
    return value is False and BIAS_FIELD.match(name) is not None


def _merge(orders: list[list[str]]) -> list[str]:
    """Return all patterns. A pattern of a later order comes after its predecessor there."""
    merged: list[str] = []
    for order in orders:
        place = 0
        for pattern in order:
            if pattern in merged:
                place = max(place, merged.index(pattern) + 1)
            else:
                merged.insert(place, pattern)
                place += 1
    return merged


def _model_parameters(family: str, change: Mapping[str, Any]) -> tuple[list[str], set[str]]:
    """Return the parameters of a model with default sizes, and the ones with weight decay in Trainer."""
    import torch
    from torch import nn
    from transformers import AutoConfig, Trainer

    config = AutoConfig.for_model(family, **change)
    for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), MAX_LAYERS))
    with torch.device("meta"):
        model: nn.Module = torch_class(config).from_config(config)
    named = dict(model.named_parameters())
    if set(to_file_tensors(model, named)) != set(named):
        raise ValueError("its files have other tensors than its modules have parameters")
    decayed = Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    return list(named), set(decayed)


if __name__ == "__main__":
    main()
