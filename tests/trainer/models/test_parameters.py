"""Tables: which parameters a config has, stacked on which axis, or one by one."""

from __future__ import annotations

import pytest

from trainer.models.axis_map import bind_row
from trainer.models.errors import PrepError
from trainer.models.families.llama import FAMILY as LLAMA
from trainer.models.parameters import Family, Parameter, WeightTying, parameter_rows, read_size

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
    tying=WeightTying("head", "head", "wte", False),
    arch_config=LLAMA.arch_config,
)


def shapes(scan: bool = True, axis: int = 0) -> dict[str, tuple[int, ...]]:
    table = parameter_rows(FAMILY, {"mlp_bias": True}, scan, axis)
    return {path: bind_row(row, SIZES).leaf_shape for path, row in table.items()}


@pytest.mark.parametrize(("config", "there"), [({}, False), ({"mlp_bias": False}, False), ({"mlp_bias": True}, True)])
def test_a_parameter_that_hangs_on_the_config(config: dict[str, bool], there: bool):
    assert ("layers.mlp.up.bias" in parameter_rows(FAMILY, config)) == there


def test_layers_are_stacked_on_the_axis_that_is_asked_for():
    assert shapes()["layers.mlp.up.weight"] == (3, 5, 4)
    assert shapes(axis=1) == {
        "embed.tokens": (7, 4),
        "layers.mlp.up.weight": (5, 3, 4),
        "layers.mlp.up.bias": (5, 3),
        "layers.gain": (3,),  # has no axis 1
        "decoder.layers.norm": (4, 3),
    }


def test_unstacked_every_layer_is_a_leaf_of_its_own_which_its_path_numbers():
    assert shapes(scan=False) == {
        "embed.tokens": (7, 4),
        "layers.{layers}.mlp.up.weight": (5, 4),
        "layers.{layers}.mlp.up.bias": (5,),
        "layers.{layers}.gain": (),
        "decoder.layers.{layers}.norm": (4,),
    }
    for path, row in parameter_rows(FAMILY, {}, scan=False).items():
        bound = bind_row(row, SIZES)
        paths = [path.format(**at) for _, at in bound.tensors()]
        assert len(set(paths)) == len(paths) == (3 if "layers" in path else 1)


def test_a_size_that_a_config_gives():
    config = {"n": 3, "null": None, "text": "3", "true": True, "zero": 0, "float": 2.0}
    assert (read_size(config, "n", 1), read_size(config, "null", 8), read_size(config, "absent", 9)) == (3, 8, 9)
    for key in ("text", "true", "zero", "float"):
        with pytest.raises(PrepError, match=f"{key} is "):
            read_size(config, key, 1)


def test_a_parameter_may_ask_the_config():
    parameter = Parameter("embed <- b: embed", lambda config: config["size"] > 3)
    assert [parameter.resolve({"size": size}) for size in (3, 4)] == [None, parameter]
