"""Parameters with an alternate row: the row whose tensors exist is used."""

from __future__ import annotations

import dataclasses

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import Parameter, parameter_rows
from prepcli.models.registry import FAMILIES

LLAMA = FAMILIES["llama"]
SPLIT = "layers experts mlp embed <- layers.{layers}.experts.{experts}.w1.weight: mlp embed"
FUSED = "layers experts mlp embed <- layers.{layers}.experts.gate_up: experts (gate=0 mlp) embed"
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 6,
}


def sizes(_: object) -> dict[str, int]:
    return LLAMA.sizes(CONFIG) | {"experts": 3, "gate": 2}


FAMILY = dataclasses.replace(
    LLAMA, sizes=sizes, parameters={"layers.mlp.gate.weight": Parameter(SPLIT, alternate=FUSED)}
)


def tensors_of(text: str) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a row."""
    (row,) = parameter_rows(
        dataclasses.replace(FAMILY, parameters={"w": Parameter(text)}), CONFIG
    ).values()
    axis_map = bind_row(row, sizes(None))
    return {name: axis_map.source_shape for name, _ in axis_map.tensors()}


@pytest.mark.parametrize("form", [SPLIT, FUSED])
def test_parameter_rows_use_form_whose_tensors_exist(form: str):
    assert (
        parameter_rows(FAMILY, CONFIG, tensors=tensors_of(form))["layers.mlp.gate.weight"].text
        == form
    )


def test_parameter_rows_use_first_form_by_default():
    assert parameter_rows(FAMILY, CONFIG)["layers.mlp.gate.weight"].text == SPLIT


def test_parameter_rows_reject_both_forms():
    with pytest.raises(PrepError, match="two forms"):
        parameter_rows(FAMILY, CONFIG, tensors=tensors_of(SPLIT) | tensors_of(FUSED))
