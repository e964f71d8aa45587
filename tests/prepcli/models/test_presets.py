"""Published configs."""

from __future__ import annotations

import math

import pytest

from prepcli.core.errors import UsageError
from prepcli.models.param_tree import param_leaves
from prepcli.models.presets import PRESETS, find_preset
from prepcli.models.registry import family_of
from prepcli.sources.aliases import ALIASES_BY_NAME
from trainer.planning.model_shapes import model_of_config

# Number of parameters of models without an alias.
OTHER_PARAMETERS = {"open-llama-3b": 3_426_473_600, "gemma-3-4b-it": 3_880_263_168}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_the_published_number_of_parameters(name: str):
    config = PRESETS[name]
    leaves = param_leaves(family_of(config), config, model_of_config(config).is_tied)
    alias = ALIASES_BY_NAME.get(name)
    expected = alias.parameters if alias else OTHER_PARAMETERS[name]
    assert sum(math.prod(leaf.shape) for leaf in leaves.values()) == expected


def test_unknown_preset_suggests_a_name():
    with pytest.raises(UsageError) as raised:
        find_preset("llama-7B")
    assert raised.value.hint == "did you mean `llama-7b`?"
