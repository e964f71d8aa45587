"""The rows of a model's parameters: conditions, stacked layers, and sizes from a config."""

from __future__ import annotations

from typing import Any

import pytest

from prepcli.algebra.axis_map import bind_row
from prepcli.core.errors import PrepError
from prepcli.models.parameters import (
    Family,
    Parameter,
    WeightTying,
    parameter_rows,
    read_count,
    read_size,
)
from prepcli.models.registry import FAMILIES

SIZES = {"layers": 3, "embed": 4, "mlp": 5, "vocab": 7}
FAMILY = Family(
    name="toy",
    prefix="toy.",
    unprefixed=("head",),
    sizes=lambda config: SIZES,
    parameters={
        "embed.tokens": Parameter("vocab embed <- wte: vocab embed"),
        "layers.mlp.up.weight": Parameter("layers mlp embed <- h.{layers}.up: mlp embed"),
        "layers.mlp.up.bias": Parameter("layers mlp <- h.{layers}.bias: mlp", condition="mlp_bias"),
        "layers.gain": Parameter("layers <- h.{layers}.gain:"),
        "decoder.layers.norm": Parameter("layers embed <- d.{layers}.norm: embed"),
    },
    dropped={},
    tying=WeightTying(
        head_leaf="head", head_tensor="head", embedding_tensor="wte", tied_by_default=False
    ),
    arch_config=FAMILIES["llama"].arch_config,
)


def shapes(scan: bool = True, axis: int = 0) -> dict[str, tuple[int, ...]]:
    """Return the shape of each leaf of the family."""
    table_rows = parameter_rows(FAMILY, {"mlp_bias": True}, scan, axis)
    return {path: bind_row(row, SIZES).leaf_shape for path, row in table_rows.items()}


@pytest.mark.parametrize(
    ("config", "exists"), [({}, False), ({"mlp_bias": False}, False), ({"mlp_bias": True}, True)]
)
def test_parameter_exists_under_its_condition(config: dict[str, bool], exists: bool):
    assert ("layers.mlp.up.bias" in parameter_rows(FAMILY, config)) == exists


def test_parameter_rows_stack_layers_on_scan_axis():
    assert shapes()["layers.mlp.up.weight"] == (3, 5, 4)
    assert shapes(axis=1) == {
        "embed.tokens": (7, 4),
        "layers.mlp.up.weight": (5, 3, 4),
        "layers.mlp.up.bias": (5, 3),
        # This leaf has no axis 1, so its layers stay on axis 0.
        "layers.gain": (3,),
        "decoder.layers.norm": (4, 3),
    }


def test_parameter_rows_without_scan_have_layer_paths():
    assert shapes(scan=False) == {
        "embed.tokens": (7, 4),
        "layers.{layers}.mlp.up.weight": (5, 4),
        "layers.{layers}.mlp.up.bias": (5,),
        "layers.{layers}.gain": (),
        "decoder.layers.{layers}.norm": (4,),
    }
    for path, row in parameter_rows(FAMILY, {}, scan=False).items():
        bound = bind_row(row, SIZES)
        paths = [path.format(**indices) for _, indices in bound.tensors()]
        assert len(set(paths)) == len(paths) == (3 if "layers" in path else 1)


def test_read_size_returns_value_default_or_error():
    config = {"n": 3, "null": None, "text": "3", "true": True, "zero": 0, "float": 2.0}
    assert (
        read_size(config, "n", 1),
        read_size(config, "null", 8),
        read_size(config, "absent", 9),
    ) == (3, 8, 9)
    for key in ("text", "true", "zero", "float"):
        with pytest.raises(PrepError, match=f"{key} is "):
            read_size(config, key, 1)


def test_read_count_accepts_zero():
    assert read_count({"n": 0}, "n", 1) == 0
    assert read_count({}, "n", 0) == 0


@pytest.mark.parametrize("value", [None, "3", True, -1, 2.0, 11])
def test_read_count_rejects_other_values(value: Any):
    with pytest.raises(PrepError, match=r"n is .*, it must be an integer from 0 to 10"):
        read_count({"n": value}, "n", 1, maximum=10)


def test_parameter_condition_may_be_a_predicate():
    parameter = Parameter("embed <- b: embed", lambda config: config["size"] == 4)
    assert [parameter.resolve({"size": size}) for size in (3, 4)] == [None, parameter]
