"""Tests of the arrays that rematerialization policies save; numeric results are in test_execution_options."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import print_saved_residuals

from prepcli.commands.testing.tiny_model import TinyTransformer, tiny_transformer
from prepcli.models.activation_memory import ACTIVATION_NAMES, RematPolicy
from prepcli.models.mesh import parse_mesh
from prepcli.models.param_tree import Tree, unflatten_tree
from tests.helpers.jaxprs import walk_equations
from tests.helpers.tiny_configs import LLAMA
from trainer.distributed.sharding import make_sharding_context
from trainer.nn import transformer
from trainer.nn.model_spec import AttentionOptions, ForwardConfig

TILES = AttentionOptions("blockwise", 4, 4)
ATTENTION = ("q", "k", "v", "attention_output")
SHAPE = (2, 8)


def loss_of(tiny: TinyTransformer, forward_config: ForwardConfig) -> tuple[Any, tuple[Tree, Tree]]:
    """Return the loss as a function of its parameters, with the shapes of its arguments."""
    params = unflatten_tree(
        {
            path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32)
            for path, leaf in tiny.model.leaves.items()
        }
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    batch: Tree = {name: jax.ShapeDtypeStruct(SHAPE, dtype) for name, dtype in dtypes.items()}

    def loss(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        return transformer.loss_sums(params, batch, tiny.model, forward_config).loss

    return loss, (params, batch)


def gradient_equations(**options: Any) -> list[Any]:
    """Return the equations of the traced gradient of a LLaMA's loss."""
    loss, arguments = loss_of(tiny_transformer(LLAMA), ForwardConfig(**options))
    return list(walk_equations(jax.make_jaxpr(jax.grad(loss))(*arguments).jaxpr))


def num_saved_activations(
    policy: RematPolicy, kernel: str, capsys: pytest.CaptureFixture[str]
) -> int:
    """Return the number of activations [B, T, ...] that the gradient of a LLaMA's loss saves."""
    options = AttentionOptions(kernel, 4, 4)
    forward_config = ForwardConfig(
        remat_policy=policy, scan_layers=False, attention_options=options
    )
    loss, arguments = loss_of(tiny_transformer(LLAMA), forward_config)
    print_saved_residuals(loss, *arguments)
    rows, length = SHAPE
    return len(re.findall(rf"^f32\[{rows},{length},", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("kernel", ["reference", "blockwise"])
def test_named_activations_are_saved(kernel: str, capsys: pytest.CaptureFixture[str]):
    """`mlp_output` is not saved: the backward pass of a layer without output norms does not read it."""
    arrays_per_layer = dict.fromkeys(ACTIVATION_NAMES, 1) | {"mlp_hidden": 2, "mlp_output": 0}
    # Blockwise attention saves the normalizers too.
    arrays_per_layer["attention_output"] = 2 if kernel == "blockwise" else 1
    num_without = num_saved_activations("nothing_saveable", kernel, capsys)
    for name, num_arrays in arrays_per_layer.items():
        num_saved = num_saved_activations((name,), kernel, capsys) - num_without
        assert num_saved == num_arrays * LLAMA["num_hidden_layers"], name


def test_saved_attention_is_not_computed_again():
    """Each pass over the tiles has one `lax.cond`, which skips tiles without visible keys."""
    options: dict[str, Any] = {"scan_layers": False, "attention_options": TILES}
    none, nothing, attention = (
        sum(
            equation.primitive.name == "cond"
            for equation in gradient_equations(remat_policy=policy, **options)
        )
        for policy in ("none", "nothing_saveable", ATTENTION)
    )
    assert attention == none
    assert nothing == none + LLAMA["num_hidden_layers"]


def test_saved_ring_attention_is_not_communicated_again():
    sharding = make_sharding_context(parse_mesh("dp:2,sp:4"))
    options: dict[str, Any] = {
        "scan_layers": False,
        "attention_options": TILES,
        "sharding": sharding,
    }
    none, nothing, attention = (
        sum(
            equation.primitive.name == "ppermute"
            for equation in gradient_equations(remat_policy=policy, **options)
        )
        for policy in ("none", "nothing_saveable", ATTENTION)
    )
    assert attention == none < nothing


@pytest.mark.parametrize("scan_layers", [True, False])
def test_offload_moves_the_inputs_of_layers_to_host_memory(scan_layers: bool):
    options: dict[str, Any] = {
        "remat_policy": ATTENTION,
        "scan_layers": scan_layers,
        "attention_options": TILES,
    }
    assert host_moves(**options) == 0
    assert host_moves(offload="residuals", **options) == (
        1 if scan_layers else LLAMA["num_hidden_layers"]
    )


def host_moves(**options: Any) -> int:
    """Return the number of moves to host memory in the gradient of a LLaMA's loss."""
    moves = [
        equation
        for equation in gradient_equations(**options)
        if equation.primitive.name == "device_put"
    ]
    return sum("host" in str(move.params["devices"]).lower() for move in moves)
