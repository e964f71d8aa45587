"""Write prepcli/models/module_order.toml from the classes of transformers: `python -m tools.module_order`.

It needs torch and transformers. It skips a family if the modules have other parameters than the files, e.g. joined
experts, or if no order of siblings gives the order of its parameters.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from prepcli.commands.testing.tiny_model import to_file_tensors, torch_class
from prepcli.models.module_order import NOT_DECAYED, ORDER_FILE, number_pattern, sort_by_modules
from prepcli.models.registry import MODEL_TYPES

HEAD = """\
# Parameters of the families of each list in the order of `model.named_parameters()` of transformers {version}, with
# braces as a shell expands them. Written by `python -m tools.module_order`.
"""
BIAS_FIELD = re.compile(r".*(bias|qk_norm|qk_layernorm)$")
MAX_LAYERS = 12


def main() -> None:
    """Write the file."""
    import transformers

    families = defaultdict[tuple[str, ...], list[str]](list)
    for family in MODEL_TYPES:
        try:
            families[family_order(family)].append(family)
        except (ValueError, AttributeError, KeyError, ImportError, TypeError) as error:
            print(f"skip {family}: {error}", file=sys.stderr)
    parts = [HEAD.format(version=transformers.__version__)]
    for order, names in families.items():
        lines = "\n".join(join_siblings(order))
        parts.append(f'"{" ".join(names)}" = """\n{lines}\n"""\n')
    ORDER_FILE.write_text("".join(parts))


def join_siblings(order: Sequence[str]) -> Iterator[str]:
    """Yield a line for adjacent parameters of one module, and of modules with equal parameters.

    >>> [*join_siblings(["mlp.w1.weight", "mlp.w1.bias", "mlp.w2.weight", "mlp.w2.bias", "norm.scale"])]
    ['mlp.{w1,w2}.{weight,bias}', 'norm.scale']
    """
    modules: list[tuple[str, str, str]] = []
    for path, names in groupby((name.rpartition(".") for name in order), lambda parts: parts[0]):
        parent, _, module = path.rpartition(".")
        modules.append((parent, module, _braces([name for *_, name in names])))
    for (parent, parameters), siblings in groupby(modules, lambda parts: (parts[0], parts[2])):
        names = _braces([module for _, module, _ in siblings])
        yield ".".join(filter(None, [parent, names, parameters]))


def _braces(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{{{','.join(names)}}}"


def family_order(family: str) -> tuple[str, ...]:
    """Return the parameters of a family in order.

    Raises:
        ValueError: The modules do not have the parameters of the files, their order is not one of siblings, or Trainer
            decays other parameters than `NOT_DECAYED` says.
    """
    from transformers import AutoConfig

    default = AutoConfig.for_model(family)
    fields = default.to_dict()
    changes: list[dict[str, Any]] = [{}, {"tie_word_embeddings": False}]
    biases = {name: True for name, value in fields.items() if _is_option(name, value)}
    changes.append({"tie_word_embeddings": False, **biases})
    all_names: list[list[str]] = []
    for change in changes:
        names, decayed = _model_parameters(family, change)
        all_names.append(names)
        wrong = [name for name in names if (name in decayed) == bool(NOT_DECAYED.search(name))]
        if wrong:
            raise ValueError(f"NOT_DECAYED is wrong for {wrong[0]}")
    patterns = _merge([[number_pattern(name) for name in names] for names in all_names])
    for names in all_names:
        if list(sort_by_modules(names, patterns)) != names:
            raise ValueError("the order of siblings differs between layers or settings")
    return tuple(patterns)


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
