"""The optimizer state as shapes: it has the bytes of the state that training allocates."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from prepcli.core.errors import PrepError
from tests.helpers import runs
from tests.helpers.optimizers import KEYS, make_optimizer
from trainer.planning.step_inputs import check_patterns, state_leaves
from trainer.recipe.optimizer_tables import OPTIMIZER_TABLES
from trainer.training.step import state_shapes

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"moment_dtype": "bfloat16", "ema": 0.9, "freeze": ("embed.tokens", "re:attn")},
    {"momentum": 0.0},
)


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("keys", VARIANTS)
def test_state_leaves_have_the_bytes_of_the_state(name: str, keys: dict[str, Any]):
    table = OPTIMIZER_TABLES[name]
    if not keys.keys() <= table.model_fields.keys():
        pytest.skip("the optimizer has no momentum to turn off")
    values = {"type": name, **KEYS[name], **keys}
    setup = runs.make_setup(runs.MIXTRAL, optimizer=make_optimizer(name, **keys))
    leaves = [leaf for leaf in jax.tree.leaves(state_shapes(setup)["opt_state"]) if leaf.size > 3]
    planned = state_leaves(table.model_validate(values), setup.model.leaves)
    assert sorted(leaf.nbytes for leaf in planned) == sorted(
        leaf.size * leaf.dtype.itemsize for leaf in leaves
    )


def test_check_patterns_rejects_patterns_without_leaves():
    leaves = runs.make_setup().model.leaves
    table = OPTIMIZER_TABLES["adamw"]
    check_patterns(table.model_validate({"lr": 1, "freeze": ("embed", "layers.attn.q")}), leaves)
    with pytest.raises(
        PrepError, match=r"`embed\.token` of `optimizer\.freeze` matches no leaf"
    ) as caught:
        check_patterns(table.model_validate({"lr": 1, "freeze": ("embed.token",)}), leaves)
    assert caught.value.hint == "did you mean `embed.tokens`?"
    with pytest.raises(PrepError, match=r"`re:xyz` of `optimizer\.decay_exclude` matches no leaf"):
        check_patterns(table.model_validate({"lr": 1, "decay_exclude": ("re:xyz",)}), leaves)
    with pytest.raises(PrepError, match=r"`optimizer\.freeze` matches all parameters"):
        check_patterns(table.model_validate({"lr": 1, "freeze": ("re:.",)}), leaves)
