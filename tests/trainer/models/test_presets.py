"""Published configs against the parameter counts of the aliases."""

from __future__ import annotations

import math

import pytest

from prepcli.sources.aliases import ALIASES_BY_NAME
from trainer.models.param_tree import param_leaves
from trainer.models.presets import PRESETS, preset_name
from trainer.models.registry import family_of


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_their_aliases(name: str):
    family, alias = family_of(PRESETS[name]), ALIASES_BY_NAME[name]
    leaves = param_leaves(family, PRESETS[name], family.is_tied(PRESETS[name]))
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == alias.parameters
    assert (family.name, family.sizes(PRESETS[name])["vocab"]) == (alias.family, alias.vocab)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("llama-7b", "llama-7b"),
        ("runs/llama-7b-init", "llama-7b"),
        ("gpt-neo-1.3B-padded-init", "gpt-neo-1.3B"),
        ("my-model-init", None),
        ("-init", None),
        ("", None),
    ],
)
def test_preset_name_ignores_folders_and_suffixes(path: str, name: str | None):
    assert preset_name(path) == name
