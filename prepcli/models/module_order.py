"""Order of a model's parameters in a torch optimizer, and their groups in transformers' Trainer. No torch.

An optimizer's state dict numbers the parameters in the order of `model.named_parameters()`. No file of a
checkpoint states it. `module_order.toml` has it by family. `python -m tools.module_order` writes the file from the
classes of transformers.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from prepcli.core.errors import Option, PrepError, text

ORDER_FILE = Path(__file__).with_suffix(".toml")
NUMBER = re.compile(r"\d+")
# Placeholder of a number in a pattern.
ANY_NUMBER = "*"
# Parameters without weight decay in `Trainer.get_decay_parameter_names`: the ones with these words in their names, and
# all parameters of `torch.nn.LayerNorm`. The last line has the names of these modules without such a word.
NOT_DECAYED = re.compile(
    r"bias|layernorm|rmsnorm|(^|\.)norm\.|_norm\."
    r"|\.(ln_[12f]|norm_[12])\.|^transformer\.norm_f\."
)
WITHOUT_STATE_HINT = text(
    "convert the parameters alone, without {}", Option("training_state", True)
)


@dataclass(frozen=True, slots=True)
class OptimizerGroups:
    """Names of a model's parameters in the two groups of transformers' Trainer, each in the order of the modules."""

    decayed: tuple[str, ...]
    not_decayed: tuple[str, ...]

    @property
    def numbered(self) -> tuple[str, ...]:
        """The names by their numbers in the optimizer's state dict."""
        return *self.decayed, *self.not_decayed


def optimizer_groups(family: str, names: Iterable[str]) -> OptimizerGroups:
    """Return the groups of parameters in transformers' Trainer.

    `family` is a `model_type`. The names are spelled as in files of transformers.

    Raises:
        PrepError: The order of the family or of a parameter is unknown.
    """
    decayed: list[str] = []
    not_decayed: list[str] = []
    for name in module_order(family, names):
        group = not_decayed if NOT_DECAYED.search(name) else decayed
        group.append(name)
    return OptimizerGroups(tuple(decayed), tuple(not_decayed))


def module_order(family: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return parameters in the order of `model.named_parameters()`.

    `family` is a `model_type`. The names are spelled as in files of transformers.

    Raises:
        PrepError: The order of the family or of a parameter is unknown.
    """
    patterns = _orders().get(family)
    if patterns is None:
        raise PrepError(
            f"the optimizer state of {family} is not supported in the order of torch",
            "its modules in transformers have other parameters than its files",
            WITHOUT_STATE_HINT,
        )
    names = tuple(names)
    for name in names:
        if number_pattern(name) not in patterns:
            raise PrepError(
                f"the place of {name} in the optimizer of {family} is unknown",
                "the model of transformers with default settings has no such parameter",
                WITHOUT_STATE_HINT,
            )
    return sort_by_modules(names, patterns)


def sort_by_modules(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Sort parameters by module: siblings as in the patterns, layers by number.

    >>> sort_by_modules(["h.1.a", "h.0.b", "h.0.a"], ["h.*.b", "h.*.a"])
    ('h.0.b', 'h.0.a', 'h.1.a')
    """
    ranks: dict[str, int] = {}
    for pattern in patterns:
        parts = pattern.split(".")
        for depth in range(1, len(parts) + 1):
            ranks.setdefault(".".join(parts[:depth]), len(ranks))

    def sort_key(name: str) -> tuple[int, ...]:
        parts = name.split(".")
        pattern = number_pattern(name).split(".")
        key: list[int] = []
        for depth, part in enumerate(parts, 1):
            if pattern[depth - 1] == ANY_NUMBER:
                key.append(int(part))
            else:
                key.append(ranks[".".join(pattern[:depth])])
        return tuple(key)

    return tuple(sorted(names, key=sort_key))


def number_pattern(name: str) -> str:
    """Return a name with `*` in place of its numbers.

    >>> number_pattern("model.layers.12.mlp.w1.weight")
    'model.layers.*.mlp.w1.weight'
    """
    parts = [ANY_NUMBER if NUMBER.fullmatch(part) else part for part in name.split(".")]
    return ".".join(parts)


@cache
def _orders() -> Mapping[str, Sequence[str]]:
    """Return the parameters of each family in order."""
    orders: dict[str, Sequence[str]] = {}
    for families, lines in tomllib.loads(ORDER_FILE.read_text()).items():
        patterns = [name for line in lines.splitlines() for name in expand_braces(line)]
        orders |= dict.fromkeys(families.split(), patterns)
    return orders


def expand_braces(line: str) -> list[str]:
    """Return the names of a line as a shell expands it.

    >>> expand_braces("mlp.{w1,w2}.{weight,bias}")
    ['mlp.w1.weight', 'mlp.w1.bias', 'mlp.w2.weight', 'mlp.w2.bias']
    """
    # The words at odd places are lists.
    choices = [part.split(",") for part in re.split(r"\{(.*?)\}", line)]
    return ["".join(words) for words in itertools.product(*choices)]
