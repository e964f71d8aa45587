"""Tests of rematerialization policies: names, conflicts, and the activations that they save."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.core.errors import USAGE, PrepError
from prepcli.models.activation_memory import (
    ACTIVATION_NAMES,
    REMAT_NONE,
    REMAT_POLICIES,
    check_remat,
    saved_activations,
)

KNOWN = "known: q, k, v, attention_output, o, mlp_hidden, mlp_output"
ERRORS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "misspelled activation": (
        ("q", "atention_output"),
        {},
        f"unknown activation 'atention_output' in `model.remat_policy` - {KNOWN} - did you mean `attention_output`?",
    ),
    "input of the layer": (
        ("layer_input",),
        {},
        f"unknown activation 'layer_input' in `model.remat_policy` - {KNOWN}",
    ),
    "hidden units of chunks": (
        ("q", "mlp_hidden"),
        {"ffn_chunk_size": 1024},
        '`model.remat_policy` is ["q", "mlp_hidden"], and `model.ffn_chunk_size` 1024 - '
        "mlp_hidden exists for one chunk of tokens at a time - `model.ffn_chunk_size = -1`",
    ),
    "offload without rematerialization": (
        "none",
        {"offload": "residuals"},
        '`model.offload` is "residuals", and `model.remat_policy` "none" - '
        'it goes with nothing_saveable or a list of activations - `model.remat_policy = "nothing_saveable"`',
    ),
    "offload with saved products": (
        "dots_saveable",
        {"offload": "residuals"},
        '`model.offload` is "residuals", and `model.remat_policy` "dots_saveable" - '
        'it goes with nothing_saveable or a list of activations - `model.remat_policy = "nothing_saveable"`',
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_check_remat_rejects_conflicts(name: str):
    policy, options, message = ERRORS[name]
    with pytest.raises(PrepError) as caught:
        check_remat(policy, **options)
    assert (str(caught.value), caught.value.code) == (message, USAGE)


@pytest.mark.parametrize("policy", [REMAT_NONE, *REMAT_POLICIES, ACTIVATION_NAMES])
def test_check_remat_accepts_known_policies(policy: str | tuple[str, ...]):
    check_remat(policy)


@pytest.mark.parametrize("policy", ["nothing_saveable", ("q", "k", "v", "attention_output")])
def test_check_remat_accepts_offload(policy: str | tuple[str, ...]):
    check_remat(policy, "residuals", ffn_chunk_size=512)


def test_saved_activations_follow_the_policy():
    assert saved_activations(("q", "o"), has_experts=False) == {"q", "o"}
    assert saved_activations("nothing_saveable", has_experts=False) == frozenset()
    assert saved_activations("dots_saveable", has_experts=False) == {*ACTIVATION_NAMES}
    weights = saved_activations("dots_with_no_batch_dims_saveable", has_experts=True)
    assert weights == {"q", "k", "v", "o"}
